"""The variants that `python -m jaxdl.bench cluster` compares: every gradient exchange, and none; some agreements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdl.exchange import Dense, ExchangeConfig, Quantized, TopK, kinds
from jaxdl.exchange.agreement import Agreement, Elastic, EveryStep, Gossip, Periodic

_ENDLESS = 10**9


@dataclass(frozen=True)
class Variant:
    """One way for the replicas on the cluster to agree."""

    config: ExchangeConfig | None
    """None: no exchange."""
    is_flat: bool = False
    """Whether every device is a replica, rather than every host."""
    agreement: Agreement = field(default_factory=EveryStep)
    has_stages: bool = False
    """Whether the hosts are the stages of a pipeline, rather than replicas."""

    @property
    def mesh(self) -> str:
        """Which mesh it has: what is a replica, or that hosts are stages. Variants with one mesh share a plan."""
        return "stages" if self.has_stages else "devices" if self.is_flat else "hosts"

    @property
    def merges(self) -> bool:
        """Whether replicas agree by merges that have programs of their own."""
        return self.config is not None and self.agreement.keeps_replicas

    def label(self) -> str:
        """Of an agreement and its exchange, unless that is the dense one."""
        assert self.config is not None
        return self.agreement.label + ("" if self.config == Dense() else f", {self.config.label}")


FLOOR, FLAT_FLOOR = "no exchange", "no exchange, flat"
FLAT, BASELINE = "dense, flat", "dense"
PIPELINE = "pipeline"
"""Hosts are stages, which send activations and their gradients in place of an exchange."""
LOCAL = "local step"
"""A step in which nothing at all crosses `replica`: what is left of a step between merges."""

_AGREEMENTS = [
    Variant(Dense(), agreement=Periodic(every_steps=32)),
    Variant(Quantized(bits=4), agreement=Periodic(every_steps=32)),
    Variant(Dense(), agreement=Periodic(every_steps=32, fragments=2, overlap_steps=2)),
    Variant(Dense(), agreement=Elastic()),
    Variant(Dense(), agreement=Gossip()),
]
_SINGLE: Mapping[str, Variant] = {
    FLOOR: Variant(None),
    FLAT_FLOOR: Variant(None, is_flat=True),
    LOCAL: Variant(None, agreement=Periodic()),
    PIPELINE: Variant(None, has_stages=True),
    FLAT: Variant(Dense(), is_flat=True),
    BASELINE: Variant(Dense()),
    "dense bfloat16": Variant(Dense(wire_dtype="bfloat16")),
    "quantized 8 bits, 1 MiB buckets": Variant(Quantized(bits=8, bucket_mib=1.0)),
    "topk exact": Variant(TopK(method="exact")),
    "topk mstopk": Variant(TopK(method="mstopk")),
    "topk threshold": Variant(TopK(method="threshold")),
    "topk block": Variant(TopK(method="block")),
    "topk threshold, all-to-all": Variant(TopK(method="threshold", algorithm="all_to_all")),
} | {config.label: Variant(config) for config in (kind() for kind in kinds().values() if kind not in (Dense, TopK))}
VARIANTS: Mapping[str, Variant] = {**_SINGLE, **{variant.label(): variant for variant in _AGREEMENTS}}
"""By the names of the table. Each is compared with its own floor; the flat floor and the local step have no row."""
AGREEMENTS = tuple(name for name, variant in VARIANTS.items() if variant.merges)
EXCHANGES = tuple(name for name, variant in VARIANTS.items() if variant.config is not None and not variant.merges)


def floor_of(name: str) -> str:
    """The variant that is equal to this one but for what the replicas exchange."""
    if VARIANTS[name].agreement.keeps_replicas:
        return LOCAL
    return FLAT_FLOOR if VARIANTS[name].is_flat else FLOOR


def merges_of_round(agreement: Agreement, num_replicas: int) -> list[tuple[int, int]]:
    """The merges of a round in their order: (number, during how many local steps its messages are sent)."""
    merges = []
    for step in range(1, agreement.round_steps(num_replicas) + 1):
        merges += [(number, 0) for number in agreement.due(step, _ENDLESS, num_replicas)]
        beside = agreement.steps_beside(step, _ENDLESS)
        merges += [beside] if beside else []
    return merges
