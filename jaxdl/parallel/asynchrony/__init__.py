"""Replicas that agree without waiting: learners, each a run of its own, and a syncer that merges what they learnt."""

from jaxdl.parallel.asynchrony.centre import Centre
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.simulator import Round, Simulation, Stay, Worker, steady

__all__ = ["Centre", "Outer", "Policy", "Round", "Simulation", "Stay", "Worker", "steady"]
