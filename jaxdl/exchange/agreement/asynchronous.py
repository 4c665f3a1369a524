"""Replicas that do not wait for each other: each is a run of its own, and a syncer merges what they learn."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxdl.core.config import Config, ConfigError
from jaxdl.exchange.agreement.config import Agreement, Merges, Metrics
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Gradients, Machine


class Asynchronous(Agreement, kind="async"):
    """Asynchronous local SGD: this run is one learner of several, started by `python -m jaxdl.launch async`.

    After some steps of its own a learner sends the syncer how its parameters have changed, and goes on from the anchor
    that comes back. When the syncer merges, and how, is said where it is started. A learner is one replica; its mesh
    may have more devices along other axes.
    """

    needs_syncer: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """`async`."""
        return "async"

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """Nothing: the syncer merges."""
        del step, total_steps, num_replicas
        return ()

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """Never asked for."""
        raise AssertionError("the syncer merges")

    def merges(self, exchange: ExchangeConfig, gradients: Gradients, machine: Machine) -> list[Cost]:
        """None: a learner does not wait for others. What it sends to the syncer is set where that is started."""
        del exchange, gradients, machine
        return []

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del exchange, total_steps
        if num_replicas > 1:
            raise ConfigError(
                f"--mesh.replica {num_replicas}: with --agreement async each learner is one replica. Set it to 1; the "
                "other axes may have more devices."
            )
