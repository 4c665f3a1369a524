"""The dense exchange: every gradient, whole."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxdl.config import Kind
from jaxdl.exchange.base import (
    Exchange,
    ExchangeMetrics,
    ExchangeState,
    GradientLayout,
    by_name,
    check_local,
    like,
    shares_of,
)
from jaxdl.exchange.buckets import make_buckets
from jaxdl.exchange.compressed import Bucketed, measured, message_costs, send_dense


class Dense(Bucketed):
    """Sums whole gradients by one all-reduce a bucket: the baseline that compression must beat."""

    kind: Annotated[Literal["dense"], Kind] = "dense"
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What travels, and what the sum is made in. The 16-bit ones halve the bytes and round every partial sum; float16
    becomes infinite above 65,504 and zero below 6e-8, bfloat16 has the range of float32."""

    def build(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange; it keeps no state."""
        layout = layout or GradientLayout()

        def update(
            grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
        ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
            del key  # Nothing here is random.
            leaves = by_name(grads)
            check_local(leaves, axis)
            shapes = {name: leaf.shape for name, leaf in leaves.items()}
            shares = shares_of(leaves, axis)
            names = self.ordered(list(leaves), layout)
            messages = [
                send_dense(bucket, shares, layout=layout, axis=axis, dtype=jnp.dtype(self.wire_dtype))
                for bucket in make_buckets(names, shapes, layout, max_elements=self.bucket_elements)
            ]
            total = {name: x for message in messages for name, x in message.total.items()}
            metrics = measured(message_costs(messages, axis, layout), shares, {}, layout=layout, axis=axis)
            return like(grads, total), state, metrics

        return Exchange(init=lambda grads: {}, update=update)
