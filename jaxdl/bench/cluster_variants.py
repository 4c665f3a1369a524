"""The variants that `python -m jaxdl.bench cluster` compares: every gradient exchange, and none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.collectives.primitive import Result, define
from jaxdl.exchange import Dense, ExchangeConfig, Quantized, TopK, kinds
from jaxdl.exchange.base import ExchangeMetrics, ExchangeState

_own_p = define(
    "jaxdl_own",
    lambda x, *, axes: (x,),
    lambda x, *, axes: [Result(x.shape, x.dtype, same=True)],
    core_ndims=(0,),
)


@dataclass(frozen=True)
class Variant:
    """One way of averaging gradients on the cluster."""

    config: ExchangeConfig | None
    """None: no exchange."""
    is_flat: bool = False
    """Whether every device is a replica, rather than every host."""


FLOOR, FLAT_FLOOR = "no exchange", "no exchange, flat"
FLAT, BASELINE = "dense, flat", "dense"

VARIANTS: Mapping[str, Variant] = {
    FLOOR: Variant(None),
    FLAT_FLOOR: Variant(None, is_flat=True),
    FLAT: Variant(Dense(), is_flat=True),
    BASELINE: Variant(Dense()),
    "dense bfloat16": Variant(Dense(wire_dtype="bfloat16")),
    "quantized 8 bits, 1 MiB buckets": Variant(Quantized(bits=8, bucket_mib=1.0)),
    "topk exact": Variant(TopK(method="exact")),
    "topk mstopk": Variant(TopK(method="mstopk")),
    "topk threshold": Variant(TopK(method="threshold")),
    "topk block": Variant(TopK(method="block")),
    "topk threshold, all-to-all": Variant(TopK(method="threshold", algorithm="all_to_all")),
} | {one.label: Variant(one) for one in (kind() for kind in kinds().values() if kind not in (Dense, TopK))}
"""By the names of the table. Each is compared with the floor of its own mesh; the flat floor has no row."""


def floor_of(name: str) -> str:
    """The variant that is equal to this one but for the exchange."""
    return FLAT_FLOOR if VARIANTS[name].is_flat else FLOOR


class NoExchange:
    """Every replica uses its own gradients as the mean and sends nothing: the cost of a free exchange.

    The replicas drift apart, so it cannot train anything and no config builds it.
    """

    def init(self, grads: Any) -> ExchangeState:
        """Nothing."""
        del grads
        return {}

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """See `Exchange.update`."""
        del key
        zero, one = jnp.float32(0), jnp.float32(1)
        metrics = {f"bytes_sent/{axis}": zero, "compression": one, "density": one}
        # Typed as equal on all replicas, which is false: a correct conversion would communicate.
        own = jax.tree.map(lambda g: _own_p.bind(g, axes=(axis,))[0], grads)
        return own, state, metrics | {"residual_norm": zero, "residual_ratio": zero}
