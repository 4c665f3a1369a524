"""Exchanges made of another one: with gradients one step late, and for a single replica, which sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    ExchangeState,
    GradientLayout,
    SummedLater,
    Updated,
    check_local,
    like,
    nonempty,
    own_update,
    residual_squares,
    rounding_of,
    shares_of,
    with_momentum,
)

PENDING = "pending"
"""The entry of the state with what each replica hands to the next exchange: its gradients over the number of
replicas. Their sum over replicas is the mean, so a new number of replicas can split it again."""
RESIDUAL_PART = 1 / 8
"""The part of its residual that a single replica adds to the gradient in a step: half of it is applied after 6 steps,
99 % after 35. A residual can be several times larger than a gradient; added at once, most of it would be clipped.

A power of two: the product is exact, so the sum is rounded alike wherever XLA computes it."""


@dataclass(frozen=True)
class Delayed(SummedLater):
    """An exchange with its gradients one step late, so that a whole step hides it.

    The exchange of step t sends the gradients of step t-1, which are available when the step begins. (The delayed
    update of Pipe-SGD, Li et al., NeurIPS 2018, with one step of staleness.)

    The first mean is zero, since nothing is pending yet, and the last gradients of a run are never applied. For an
    optimizer a gradient of zero is a step of weight decay alone. (LAMB makes its steps as long as the weights,
    whatever the gradient: give it a warm-up, whose first learning rate is small.) A step that is skipped keeps all of
    the state: what was pending is exchanged and applied in the next one, what is skipped is never pending.

    Pending gradients of 16 bits are not numbers of 16 bits any more when another number of replicas has split them.
    Their rounding error goes into the residual where there is one; without error feedback it is lost.
    """

    exchange: Exchange
    layout: GradientLayout
    """That of the exchange."""

    def init(self, grads: Any) -> ExchangeState:
        """The exchange's, and pending gradients of zero."""
        state = self.exchange.init(grads)
        pending = {name: jnp.zeros(x.shape, jnp.float32) for name, x in nonempty(grads).items()}
        return state | {PER_REPLICA: state.get(PER_REPLICA, {}) | {PENDING: pending}}

    def update_own(self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array) -> Updated:
        """(mean gradients, new state, metrics), with this device's parts of squared norms among the metrics."""
        leaves = nonempty(grads)
        check_local(leaves, axis)
        of_replica = dict(state[PER_REPLICA])
        pending = of_replica.pop(PENDING)
        num_replicas = lax.axis_size(axis)
        local = {name: x * num_replicas for name, x in pending.items()}
        before = like(grads, local)
        if "residual" in of_replica:
            of_replica["residual"] = {
                name: x + rounding_of(local[name], leaves[name].dtype) / num_replicas
                for name, x in of_replica["residual"].items()
            }
        other_parts = {where: entries for where, entries in state.items() if where != PER_REPLICA}
        inner_state = other_parts | ({PER_REPLICA: of_replica} if of_replica else {})
        mean, new, metrics = own_update(self.exchange)(before, inner_state, axis=axis, key=key)
        kept = new.get(PER_REPLICA, {}) | {PENDING: shares_of(leaves, axis)}
        return mean, new | {PER_REPLICA: kept}, metrics


@dataclass(frozen=True)
class SingleReplica(SummedLater):
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

    def update_own(self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array) -> Updated:
        """(mean gradients, new state, metrics), with this device's parts of squared norms among the metrics."""
        leaves, kept = nonempty(grads), dict(state.get(PER_REPLICA, {}))
        mean = shares = shares_of(leaves, axis)
        zero, one = jnp.float32(0), jnp.float32(1)
        metrics = {f"bytes_sent/{axis}": zero, "compression": one, "density": one}
        if self.momentum_factor is not None:
            mean = kept["momentum"] = with_momentum(kept["momentum"], mean, self.momentum_factor)
        if "residual" in kept:
            part = {name: RESIDUAL_PART * x for name, x in kept["residual"].items()}
            mean = mean | {name: mean[name] + x for name, x in part.items()}
            kept["residual"] = {
                name: x - part[name] + rounding_of(mean[name], leaves[name].dtype)
                for name, x in kept["residual"].items()
            }
        metrics |= residual_squares(shares, kept.get("residual", {}), layout=self.layout, axis=axis)
        new = {PER_REPLICA: kept, "common": {name: count + 1 for name, count in state.get("common", {}).items()}}
        # The sum over one device changes the type only: from here on the gradients are those of all replicas.
        return (
            lax.psum(like(grads, mean), axis),
            state | {where: entries for where, entries in new.items() if where in state},
            metrics,
        )
