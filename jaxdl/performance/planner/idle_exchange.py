"""An exchange that sends nothing, so that a step can be timed without one. No config builds it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.exchange.base import ExchangeMetrics, ExchangeState
from jaxdl.parallel.collectives.primitive import Result, define

_own_p = define(
    "jaxdl_own",
    lambda x, *, axes: (x,),
    lambda x, *, axes: [Result(x.shape, x.dtype, same=True)],
    core_ndims=(0,),
)


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
        local_grads = jax.tree.map(lambda g: _own_p.bind(g, axes=(axis,))[0], grads)
        return local_grads, state, metrics | {"residual_norm": zero, "residual_ratio": zero}
