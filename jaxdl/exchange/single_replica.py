"""The exchange of a single replica, which sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    ExchangeMetrics,
    ExchangeState,
    GradientLayout,
    like,
    nonempty,
    residual_norms,
    rounding_of,
    shares_of,
    with_momentum,
)

RESIDUAL_PART = 1 / 8
"""The part of its residual that a single replica adds to the gradient in a step: half of it is applied after 6 steps,
99 % after 35. A residual can be several times larger than a gradient; added at once, most of it would be clipped.

A power of two: the product is exact, so the sum is rounded alike wherever XLA computes it."""


@dataclass(frozen=True)
class SingleReplica:
    """The exchange of a single replica: its gradients already are the mean. No communication.

    Its state is that of `several`, the exchange of the same run with several replicas, so that a run can go through one
    replica and back. The residual is that part of earlier mean gradients which has not been applied. In each step
    `RESIDUAL_PART` of it is added to the gradient and leaves the residual; the rounding of 16-bit gradients enters it.
    Clipping and the optimizer see the sum as one gradient: where its norm is above `clip_norm`, some of the residual is
    lost as some of the gradient is. Steps count for the warm-ups of `several` as they would there, and the state of
    shards does not change.
    """

    several: Exchange
    momentum_factor: float | None
    """With momentum correction the state has the momentum that the optimizer does not have, and it is returned."""
    layout: GradientLayout
    """How gradients are sharded, for the norms among the metrics."""

    def init(self, grads: Any) -> ExchangeState:
        """That of `several`."""
        return self.several.init(grads)

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """See `Exchange.update`."""
        leaves, kept = nonempty(grads), dict(state.get(PER_REPLICA, {}))
        mean = shares = shares_of(leaves, axis)
        zero, one = jnp.float32(0), jnp.float32(1)
        metrics = {f"bytes_sent/{axis}": zero, "compression": one, "density": one}
        metrics |= {"residual_norm": zero, "residual_ratio": zero}
        if self.momentum_factor is not None:
            mean = kept["momentum"] = with_momentum(kept["momentum"], mean, self.momentum_factor)
        if "residual" in kept:
            part = {name: RESIDUAL_PART * x for name, x in kept["residual"].items()}
            mean = mean | {name: mean[name] + x for name, x in part.items()}
            kept["residual"] = {
                name: x - part[name] + rounding_of(mean[name], leaves[name].dtype)
                for name, x in kept["residual"].items()
            }
            metrics |= residual_norms(shares, kept["residual"], layout=self.layout, axis=axis)
        new = {PER_REPLICA: kept, "common": {name: count + 1 for name, count in state.get("common", {}).items()}}
        # The sum over one device changes the type only: from here on the gradients are those of all replicas.
        return (
            lax.psum(like(grads, mean), axis),
            state | {where: entries for where, entries in new.items() if where in state},
            metrics,
        )
