"""Gossip: after each step a replica averages its parameters with those of one or two others; none waits for all."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.exchange.agreement.config import Agreement, Merges, Metrics
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import ADD_RESIDUAL, JOIN, PERMUTE, SPLIT, Cost, Gradients, Machine


class Gossip(Agreement, kind="gossip"):
    """Decentralized parallel SGD (Lian et al., arXiv 1705.09056): whole parameters are sent, in one or two messages.

    Each replica sends to its neighbours alone, so a merge takes one hop of the network where an all-reduce takes
    2 (n - 1): it wins on latency, not on bytes. The replicas differ; their mean is evaluated and exported. A replica
    whose numbers are not finite sends nothing, and takes the average of its neighbours (by the weights of push-sum:
    Assran et al., arXiv 1811.10792).
    """

    uses_exchange: ClassVar[bool] = False
    has_anchor: ClassVar[bool] = False

    graph: Literal["one_peer_exponential", "exponential", "ring"] = "one_peer_exponential"
    """Who sends to whom. `one_peer_exponential`: at step t to the replica 2^(t mod log2 n) further on; for n a power of
    two, log2 n steps give the exact mean (Ying et al., arXiv 2110.13363). `exponential`: to all of those at each step.
    `ring`: to both neighbours."""
    every_steps: int = pydantic.Field(default=1, ge=1)
    """Number of steps from one merge to the next."""

    @property
    def label(self) -> str:
        """`gossip ring`."""
        return f"gossip {self.graph}" + (f", every {self.every_steps}" if self.every_steps > 1 else "")

    def due(self, step: int, total_steps: int, num_replicas: int) -> tuple[int, ...]:
        """The number of the graph in which replicas send after this step; single replicas do not."""
        del total_steps
        if num_replicas == 1 or step % self.every_steps:
            return ()
        return ((step // self.every_steps - 1) % len(self.graphs(num_replicas)),)

    def graphs(self, num_replicas: int) -> list[list[int]]:
        """The graphs that follow each other, in turn: how far before it those replicas are from which one receives."""
        distances = [2**power for power in range(math.ceil(math.log2(num_replicas)))]
        if self.graph == "ring":
            return [sorted({1, num_replicas - 1})]
        return [distances] if self.graph == "exponential" else [[distance] for distance in distances]

    def merge(self, merges: Merges, state: Any, number: int, num_replicas: int) -> tuple[Any, Metrics]:
        """Equal parts of the own parameters and of each that is received."""
        hops = self.graphs(num_replicas)[number]
        return merges.by_messages(state, hops, [1 / (len(hops) + 1)] * len(hops))

    def round_steps(self, num_replicas: int) -> int:
        """After how many steps the merges repeat."""
        return self.every_steps * len(self.graphs(num_replicas))

    def merges(self, exchange: ExchangeConfig, gradients: Gradients, machine: Machine) -> list[Cost]:
        """One message to each neighbour: the parameters of a device, and a weight."""
        del exchange
        size = gradients.num_elements + 1
        latency, wire = machine.slow.of(PERMUTE).seconds(1, 4 * size)
        compute = machine.passes_sec(size, JOIN + SPLIT + ADD_RESIDUAL)
        message_cost = Cost(latency_sec=latency, wire_sec=wire, compute_sec=compute, sent_bytes=4 * size)
        return [message_cost * len(hops) for hops in self.graphs(gradients.num_replicas)]

    def remarks(self, total_steps: int, num_replicas: int) -> tuple[str, ...]:
        """That one replica has no neighbours."""
        del total_steps
        if num_replicas > 1:
            return ()
        return (f"agreement {self.label}: this mesh has one replica, which has no neighbours: nothing is sent.",)

    def check(self, exchange: Config, num_replicas: int, total_steps: int) -> None:
        """Raises ConfigError for an exchange, a number of replicas or a length of run that it does not work with."""
        del num_replicas, total_steps
        kind = getattr(exchange, "kind", "")
        if exchange != type(exchange)() or kind != "dense":
            raise ConfigError(
                f"--exchange {kind}: with --agreement gossip replicas send each other whole parameters, and the "
                "exchange is not used. Remove its options, or choose --agreement periodic."
            )
