"""The dense exchange: every gradient, whole, in float32."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.config import Config, Kind
from jaxdl.exchange.base import Exchange, ExchangeMetrics


class Dense(Config):
    """Averages whole gradients in float32 by one all-reduce over `replica`: the baseline that compression must beat."""

    kind: Annotated[Literal["dense"], Kind] = "dense"

    def build(self) -> Exchange:
        """The exchange; it keeps no state."""
        return Exchange(init=lambda grads: {}, update=_update)


def _update(grads: Any, state: Any, *, axis: str, key: jax.Array) -> tuple[Any, Any, ExchangeMetrics]:
    del key  # Nothing here is random.
    mean = lax.pmean(grads, axis)
    num_replicas = lax.axis_size(axis)
    # A ring all-reduce sends each element 2 (n-1)/n times: once reduced, once gathered.
    payload_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(grads))
    sent = 2 * (num_replicas - 1) / num_replicas * payload_bytes
    return mean, state, {"bytes_sent": jnp.float32(sent), "residual_norm": jnp.float32(0)}
