"""The exchange of a single replica, and the momentum that an exchange keeps where the optimizer has none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    ExchangeMetrics,
    ExchangeState,
    like,
    nonempty,
    rounding_of,
    shares_of,
)


def grown(momentum: dict[str, jax.Array], shares: dict[str, jax.Array], factor: float) -> dict[str, jax.Array]:
    """Momentum after a step with these shares."""
    return {name: factor * momentum[name] + x for name, x in shares.items()}


def alone(several: Exchange | None = None, momentum_correction: float | None = None) -> Exchange:
    """The exchange of a single replica: its gradients are the mean already, and nothing is sent.

    It has the state of `several`, the exchange of the same run with several replicas, so that a run can go through one
    replica and back. A residual is added to the next gradient, whole: it is that part of earlier mean gradients which
    has not been applied, and no entry of it is larger than those that an exchange sends in every step. From then on it
    is zero (but for the rounding of 16-bit gradients). Steps count for the warm-ups of `several` as they would there,
    and what belongs to shards stays as it is. With `momentum_correction` the state has the momentum that the optimizer
    does not have, and the momentum is what is returned.
    """

    def init(grads: Any) -> ExchangeState:
        return several.init(grads) if several else {}

    def update(
        grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        del key
        leaves, kept = nonempty(grads), dict(state.get(PER_REPLICA, {}))
        mean = shares_of(leaves, axis)
        if momentum_correction is not None:
            mean = kept["momentum"] = grown(kept["momentum"], mean, momentum_correction)
        if "residual" in kept:
            mean = mean | {name: mean[name] + x for name, x in kept["residual"].items()}
            kept["residual"] = {name: rounding_of(mean[name], leaves[name].dtype) for name in kept["residual"]}
        new = {PER_REPLICA: kept, "common": {name: count + 1 for name, count in state.get("common", {}).items()}}
        zero, one = jnp.float32(0), jnp.float32(1)
        metrics = {f"bytes_sent/{axis}": zero, "compression": one, "density": one}
        # The sum over one device changes the type alone: from here on the gradients are those of all replicas.
        return (
            lax.psum(like(grads, mean), axis),
            state | {where: entries for where, entries in new.items() if where in state},
            metrics | {"residual_norm": zero, "residual_ratio": zero},
        )

    return Exchange(init, update)
