"""The exchange of a single replica, and the momentum that an exchange keeps where the optimizer has none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.exchange.base import PER_REPLICA, Exchange, ExchangeMetrics, ExchangeState, by_name, like, shares_of


def grown(momentum: dict[str, jax.Array], shares: dict[str, jax.Array], factor: float) -> dict[str, jax.Array]:
    """Momentum after a step with these shares."""
    return {name: factor * momentum[name] + x for name, x in shares.items()}


def alone(momentum_correction: float | None = None) -> Exchange:
    """The exchange of a single replica: its gradients are the mean already; nothing is sent, nothing is owed.

    With `momentum_correction` it keeps the momentum that the optimizer does not have, and returns that.
    """

    def init(grads: Any) -> ExchangeState:
        if momentum_correction is None:
            return {}
        zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in by_name(grads).items()}
        return {PER_REPLICA: {"momentum": zeros}}

    def update(
        grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        del key
        if momentum_correction is not None:
            shares = shares_of(by_name(grads), axis)
            momentum = grown(state[PER_REPLICA]["momentum"], shares, momentum_correction)
            state = {PER_REPLICA: {"momentum": momentum}}
            grads = like(grads, momentum)
        zero, one = jnp.float32(0), jnp.float32(1)
        metrics = {f"bytes_sent/{axis}": zero, "compression": one, "density": one}
        # The sum over one device changes the type alone: from here on the gradients are those of all replicas.
        return lax.psum(grads, axis), state, metrics | {"residual_norm": zero, "residual_ratio": zero}

    return Exchange(init, update)
