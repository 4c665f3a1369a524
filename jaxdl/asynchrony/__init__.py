"""Replicas that agree without waiting: learners, each a run of its own, and a syncer that merges what they learnt."""

from jaxdl.asynchrony.centre import Centre
from jaxdl.asynchrony.outer import Outer
from jaxdl.asynchrony.policy import Policy
from jaxdl.asynchrony.simulator import Round, Simulation, Stay, Worker, steady

__all__ = ["Centre", "Outer", "Policy", "Round", "Simulation", "Stay", "Worker", "steady"]
