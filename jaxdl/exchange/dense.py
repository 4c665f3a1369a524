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
    check_local,
    like,
    nonempty,
    shares_of,
)
from jaxdl.exchange.buckets import in_turn, make_buckets
from jaxdl.exchange.compressed import Bucketed, Sent, measured, message_costs, send_dense
from jaxdl.exchange.delayed import delayed


class Dense(Bucketed):
    """Sums whole gradients by one all-reduce a bucket: the baseline that compression must beat."""

    kind: Annotated[Literal["dense"], Kind] = "dense"
    wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What travels. The 16-bit ones halve the bytes and round the sum (on GPUs every partial sum); float16 becomes
    infinite above 65,504 and zero below 6e-8, bfloat16 has the range of float32."""

    def build(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange; it keeps no state, but what is delayed."""
        layout = layout or GradientLayout()

        def update(
            grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
        ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
            del key  # Nothing here is random.
            leaves = nonempty(grads)
            check_local(leaves, axis)
            shapes = {name: leaf.shape for name, leaf in leaves.items()}
            shares = shares_of(leaves, axis)
            names = self.ordered(list(leaves), layout)
            buckets = make_buckets(names, shapes, layout, max_elements=self.bucket_elements)
            messages: list[Sent] = []
            for number in in_turn(buckets, names):
                last, dtype = messages[-1].last if messages else None, jnp.dtype(self.wire_dtype)
                messages.append(send_dense(buckets[number], shares, layout=layout, axis=axis, dtype=dtype, last=last))
            total = {name: x for message in messages for name, x in message.total.items()}
            metrics = measured(message_costs(messages, axis, layout), shares, {}, layout=layout, axis=axis)
            return like(grads, total), state, metrics

        return delayed(Exchange(init=lambda grads: {}, update=update), self.delay_steps)
