"""The dense exchange: every gradient, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdl.exchange.base import (
    ExchangeMetrics,
    ExchangeState,
    GradientLayout,
    check_local,
    like,
    nonempty,
    shares_of,
)
from jaxdl.exchange.buckets import in_turn
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Figures, Gradients, Machine, all_reduce_cost
from jaxdl.exchange.message import Context, Message, Sent, last_of, measured, message_costs, send_dense

WireDtype = Literal["float32", "bfloat16", "float16"]
"""From exact to rough: float16 overflows where bfloat16 only rounds."""


class Dense(ExchangeConfig, kind="dense"):
    """Sums whole gradients by one all-reduce a bucket: the baseline that compression must beat."""

    wire_dtype: WireDtype = "float32"
    """The dtype that is sent. 16-bit ones halve the bytes and round every partial sum (bfloat16 on CPUs: only the sum);
    float16 becomes infinite above 65,504 and zero below 6e-8, bfloat16 has the range of float32."""

    compresses: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """`dense float32`."""
        return f"dense {self.wire_dtype}"

    @property
    def distortion(self) -> tuple[float, float]:
        """The least: sums are rounded at most."""
        return 0, get_args(WireDtype).index(self.wire_dtype)

    @property
    def sum_dtype(self) -> DTypeLike | None:
        """`wire_dtype`, unless gradients wait for a step; a kind derived from this one may do anything."""
        return None if self.delay_steps or type(self) is not Dense else jnp.dtype(self.wire_dtype)

    @property
    def figures(self) -> Figures:
        """The all-reduce in this dtype."""
        return Figures(collectives=(f"all_reduce/{self.wire_dtype}",))

    @classmethod
    def variants(cls) -> list[ExchangeConfig]:
        """One for each dtype."""
        return [cls(wire_dtype=name) for name in get_args(WireDtype)]

    @classmethod
    def candidates(cls, densities: Sequence[float], num_replicas: int) -> dict[str, list[ExchangeConfig]]:
        """The 16-bit ones by their dtypes; float32 can always be chosen."""
        return {name: [cls(wire_dtype=name)] for name in get_args(WireDtype)[1:]}

    def cost(self, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one `update` after all warm-ups."""
        dense, _ = self.buckets(gradients.shapes, gradients.layout)
        return sum((all_reduce_cost(bucket, gradients, machine, self.wire_dtype) for bucket in dense), Cost())

    def undelayed(self, layout: GradientLayout) -> DenseExchange:
        """The exchange of gradients in the step that computes them."""
        return DenseExchange(self, layout)


@dataclass(frozen=True)
class DenseExchange:
    """The exchange; it keeps no state."""

    options: Dense
    layout: GradientLayout

    def init(self, grads: Any) -> ExchangeState:
        """Nothing."""
        return {}

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """(mean gradients, new state, metrics), inside a manual `shard_map`."""
        leaves, context = nonempty(grads), Context(axis, key, self.layout)
        check_local(leaves, axis)
        shares = shares_of(leaves, axis)
        buckets, _ = self.options.buckets({name: x.shape for name, x in leaves.items()}, self.layout)
        messages: list[Sent] = []
        for number in in_turn(buckets, self.options.ordered(list(leaves), self.layout), self.layout):
            message = Message(buckets[number], shares, last=last_of(messages, buckets[number], self.layout))
            messages.append(send_dense(message, context, dtype=jnp.dtype(self.options.wire_dtype)))
        total = {name: x for message in messages for name, x in message.total.items()}
        metrics = measured(message_costs(messages, context), shares, {}, context)
        return like(grads, total), state, metrics
