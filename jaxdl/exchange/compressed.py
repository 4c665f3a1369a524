"""What all compressed exchanges share: options, what stays dense, warm-up, residuals, metrics.

The *share* of a replica is its own gradient over the number of replicas; the mean gradient is the sum of shares. A
compressed exchange sends part of share and residual and keeps the rest, the new residual, for later (error feedback,
Seide et al. 2014; Karimireddy et al. 2019): sum of shares + residuals before = mean + residuals after. Where gradients
have 16 bits, so has the mean; its rounding error is added to the residual.
"""

from __future__ import annotations

import abc
import fnmatch
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from jaxdl.core.config import ConfigError
from jaxdl.exchange.base import (
    PER_REPLICA,
    PIECE,
    ExchangeState,
    GradientLayout,
    Leaves,
    SummedLater,
    Updated,
    check_local,
    like,
    nonempty,
    rounding_of,
    shares_of,
    with_momentum,
)
from jaxdl.exchange.buckets import Bucket, in_turn, make_buckets
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Gradients, Machine, all_reduce_cost
from jaxdl.exchange.message import (
    Carried,
    Context,
    Message,
    Sent,
    Sums,
    joined,
    last_of,
    measured,
    message_costs,
    send_dense,
)
from jaxdl.parallel.collectives.primitive import alike


class Compressed(ExchangeConfig, kind=None):
    """Options of every compressed exchange."""

    error_feedback: bool = True
    """Keep what was not sent, also by a second compression on the way, and add it to the next gradient."""
    dense_warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Exchange whole gradients in float32 for this many steps at first."""
    min_elements: int = pydantic.Field(default=2048, ge=0)
    """Gradients with fewer elements (whole, over all devices) stay dense."""
    dense_names: tuple[str, ...] = ()
    """Patterns, such as `*/embedding/*`, of the names of gradients that stay dense (names as --explain prints them)."""

    def check(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout, num_replicas: int) -> None:
        """Raises ConfigError when an option has no effect on gradients of these names and shapes."""
        num_elements = {name: math.prod(shape) for name, shape in shapes.items()}
        for pattern in self.dense_names:
            if not any(_matches(name, pattern) for name in num_elements):
                raise ConfigError(
                    f"--exchange.dense-names {pattern}: no gradient has such a name. Some are "
                    f"{', '.join(list(num_elements)[:3])}; --explain prints all."
                )
        most = max(num_elements.values(), default=0)
        if most < self.min_elements:
            raise ConfigError(
                f"--exchange.min-elements {self.min_elements}: no gradient would be compressed, since the largest has "
                f"{most:,} elements. Choose a smaller number, or --exchange dense."
            )
        if all(self.stays_dense(name, number) for name, number in num_elements.items()):
            raise ConfigError(
                f"--exchange.dense-names {' '.join(self.dense_names)}: no gradient would be compressed. Name fewer, or "
                "choose --exchange dense."
            )

    @abc.abstractmethod
    def send(self, message: Message, context: Context) -> Sent:
        """Sums one bucket over the replicas, approximately, inside a manual `shard_map`."""

    @abc.abstractmethod
    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""

    def suits(self, name: str, shape: tuple[int, ...], layout: GradientLayout) -> bool:
        """Whether a gradient of this local shape can be compressed at all."""
        return True

    def init_shard(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout) -> dict[str, Leaves]:
        """The initial state of the shards of the gradients that are compressed, which have these local shapes."""
        return {}

    def settings_by_step(self) -> list[tuple[float, Compressed]]:
        """(until this step, settings), from after the dense warm-up to the end of the run."""
        return [(math.inf, self)]

    def undelayed(self, layout: GradientLayout) -> CompressedExchange:
        """The exchange of gradients in the step that computes them."""
        return CompressedExchange(self, layout)

    def cost(self, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one `update` after all warm-ups."""
        dense, compressed = self.buckets(gradients.shapes, gradients.layout)
        costs = [all_reduce_cost(bucket, gradients, machine) for bucket in dense]
        return sum([*costs, *(self.bucket_cost(bucket, gradients, machine) for bucket in compressed)], Cost())

    def stays_dense(self, name: str, num_elements: int) -> bool:
        """Whether a gradient is exchanged whole; `num_elements` counts those of all its shards."""
        return num_elements < self.min_elements or any(_matches(name, p) for p in self.dense_names)

    def buckets(
        self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout
    ) -> tuple[list[Bucket], list[Bucket]]:
        """The messages for gradients of these local shapes: dense ones and compressed ones."""
        dense: list[str] = []
        compressed: list[str] = []
        for name in self.ordered(list(shapes), layout):
            stays = self.stays_dense(name, layout.num_elements(name, shapes[name]))
            (dense if stays or not self.suits(name, shapes[name], layout) else compressed).append(name)
        make = functools.partial(make_buckets, shapes=shapes, layout=layout, max_elements=self.bucket_elements)
        return make(dense), make(compressed)


@dataclass(frozen=True)
class CompressedExchange(SummedLater):
    """The exchange of any `Compressed` config: dense messages, and compressed ones by the settings of each step."""

    options: Compressed
    layout: GradientLayout

    def settings_by_step(self) -> list[tuple[float, Compressed | None]]:
        """(until this step, settings) of the whole run; None is the dense warm-up."""
        warmup = self.options.dense_warmup_steps
        later = [(until_step + warmup, settings) for until_step, settings in self.options.settings_by_step()]
        return [(warmup, None), *later] if warmup else [*later]

    def init(self, grads: Any) -> ExchangeState:
        """The state: residual and momentum, zero; the shards' own; the number of updates where settings change."""
        shapes = {name: leaf.shape for name, leaf in nonempty(grads).items()}
        # Who has a residual depends on the options, not on the mesh: that of a shard too small to be compressed
        # survives until it is whole again.
        sizes = {name: self.layout.num_elements(name, shape) for name, shape in shapes.items()}
        fed_back = [name for name in shapes if not self.options.stays_dense(name, sizes[name])]
        kept = {self.options.unsent_name: fed_back} if fed_back and self.options.error_feedback else {}
        kept |= {"momentum": list(shapes)} if self.options.momentum_factor is not None else {}
        state: ExchangeState = {}
        if kept:
            state[PER_REPLICA] = {
                entry: {name: jnp.zeros(shapes[name], jnp.float32) for name in names} for entry, names in kept.items()
            }
        _, _, compressed = self._buckets(shapes)
        if shard := self.options.init_shard({name: shapes[name] for name in compressed}, self.layout):
            state["shard"] = shard
        if len(self.settings_by_step()) > 1:
            state["common"] = {"num_updates": jnp.int32(0)}
        return state

    def update_own(self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array) -> Updated:
        """(mean gradients, new state, metrics), with this device's parts of squared norms among the metrics."""
        leaves, kept, context = nonempty(grads), state.get(PER_REPLICA, {}), Context(axis, key, self.layout)
        check_local(leaves, axis)
        dense, buckets, compressed = self._buckets({name: x.shape for name, x in leaves.items()})
        shares = due = shares_of(leaves, axis)
        factor = self.options.momentum_factor
        if factor is not None:
            # Deep Gradient Compression (Lin et al. 2018), section 3.2: the momentum is sent, and its residual kept;
            # that of gradients that stay dense too, since the optimizer has none.
            due = with_momentum(kept["momentum"], shares, factor)
        unsent, decay = kept.get(self.options.unsent_name, {}), self.options.unsent_decay
        summand = due | {name: due[name] + (x if decay == 1 else decay * x) for name, x in unsent.items()}
        dense_messages = [send_dense(Message(bucket, summand), context) for bucket in dense]
        carried = Carried(
            {name: summand[name] for name in compressed},
            None if factor is None else {name: due[name] for name in compressed},
            state.get("shard", {}),
        )
        sums = self._send(buckets, carried, context, state.get("common", {}).get("num_updates"))
        total = {name: x for message in (sums, *dense_messages) for name, x in message.total.items()}
        residual = {
            name: sums.residual.get(name, 0.0) + rounding_of(total[name], leaves[name].dtype) / context.num_replicas
            for name in unsent
        }
        residual = {name: alike((axis,), x, summand[name])[0] for name, x in residual.items()}
        momentum = {name: due[name] for bucket in dense for name in bucket.names} | (sums.momentum or {})
        of_replica = {"momentum": momentum, self.options.unsent_name: residual}
        new_state = {
            PER_REPLICA: {entry: of_replica[entry] for entry in kept},
            "shard": sums.shard,
            "common": {name: count + 1 for name, count in state.get("common", {}).items()},
        }
        costs = sums.costs + message_costs(dense_messages, context)
        metrics = measured(costs, shares, residual, context)
        return like(grads, total), {where: new_state[where] for where in state}, metrics

    def _buckets(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[list[Bucket], list[tuple[int, Bucket]], list[str]]:
        """The dense buckets, and the compressed ones, numbered, in the order of sending, with their names."""
        dense, compressed = self.options.buckets(shapes, self.layout)
        ready = self.options.ordered(list(shapes), self.layout)
        inside = {name for bucket in compressed for name in bucket.names}
        turn = [(number, compressed[number]) for number in in_turn(compressed, ready, self.layout)]
        return dense, turn, [name for name in ready if name in inside]

    def _send(
        self, buckets: Sequence[tuple[int, Bucket]], carried: Carried, context: Context, step: jax.Array | None
    ) -> Sums:
        """Sends the numbered buckets, one after the other, with the settings of this step."""

        def run(settings: Compressed | None, carried: Carried) -> Sums:
            messages: list[Sent] = []
            for number, bucket in buckets:
                message = Message(bucket, *carried, last_of(messages, bucket, self.layout), number)
                messages.append(settings.send(message, context) if settings else send_dense(message, context))
            return joined(messages, carried, context)

        by_step = self.settings_by_step()
        if step is None:
            return run(self.options, carried)
        number = sum((step >= until_step).astype(jnp.int32) for until_step, _ in by_step[:-1])
        return lax.switch(number, [functools.partial(run, settings) for _, settings in by_step], carried)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of this gradient, or of the parameter of which it is a piece."""
    return fnmatch.fnmatchcase(name.partition(PIECE)[0], pattern)
