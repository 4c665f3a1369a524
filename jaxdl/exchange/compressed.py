"""What all compressed exchanges share: options, what stays dense, warm-up, residuals, metrics.

The *share* of a replica is its own gradient over the number of replicas; the mean gradient is the sum of shares. A
compressed exchange sends part of share and residual and keeps the rest, the new residual, for later (error feedback,
Seide et al. 2014; Karimireddy et al. 2019): sum of shares + residuals before = mean + residuals after. Where gradients
have 16 bits, so has the mean; what is lost by rounding it goes into the residual, too.
"""

from __future__ import annotations

import abc
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from jaxdl.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.collectives.primitive import alike
from jaxdl.config import ConfigError
from jaxdl.exchange.alone import alone, grown
from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    ExchangeMetrics,
    ExchangeState,
    GradientLayout,
    check_local,
    like,
    nonempty,
    residual_norms,
    rounding_of,
    shares_of,
)
from jaxdl.exchange.buckets import Bucket, held_back, in_turn, make_buckets
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Gradients, Machine, all_reduce_cost
from jaxdl.exchange.delayed import delayed

Leaves = dict[str, jax.Array]
"""Gradients by name, float32."""


class Compressed(ExchangeConfig):
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
        """See `ExchangeConfig.check`."""
        del layout, num_replicas
        num_elements = {name: math.prod(shape) for name, shape in shapes.items()}
        for pattern in self.dense_names:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in num_elements):
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
    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""

    def cost(self, gradients: Gradients, machine: Machine) -> Cost:
        """See `ExchangeConfig.cost`."""
        dense, compressed = self.buckets(gradients.shapes, gradients.layout)
        costs = [all_reduce_cost(bucket, gradients, machine) for bucket in dense]
        return sum([*costs, *(self.bucket_cost(bucket, gradients, machine) for bucket in compressed)], Cost())

    def buckets(
        self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout
    ) -> tuple[list[Bucket], list[Bucket]]:
        """See `ExchangeConfig.buckets`."""
        return self.engine(layout).buckets({name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()})

    @property
    def warmup_steps(self) -> int:
        """Steps before the exchange has its final settings."""
        return self.dense_warmup_steps

    @abc.abstractmethod
    def engine(self, layout: GradientLayout) -> CompressedExchange:
        """The exchange with all its parts; `build` gives what of it the step needs."""

    def build(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange, for gradients that lie as `layout` says, or else are all this device's own."""
        return delayed(self.engine(layout or GradientLayout()).build(), self.delay_steps)

    def build_alone(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange of a single replica: it sends nothing, but has the same state as that of several replicas."""
        engine = self.engine(layout or GradientLayout())
        return delayed(alone(engine.build(), engine.momentum_correction, engine.layout), self.delay_steps)

    def stays_dense(self, name: str, num_elements: int) -> bool:
        """Whether a gradient is exchanged whole; `num_elements` counts those of all its shards."""
        return num_elements < self.min_elements or any(fnmatch.fnmatchcase(name, p) for p in self.dense_names)


@dataclass(frozen=True)
class Sent:
    """What one message did: the sum, what of the summand was not sent, and its cost."""

    total: Leaves
    error: Leaves | None
    """What was not sent; None without error feedback."""
    sent_bytes: Mapping[str, float]
    """Axis -> bytes that one device sent."""
    num_entries: float
    """Elements that one device handed to the collective, of `num_elements`."""
    num_elements: float
    momentum: Leaves | None = None
    """The momentum, zero where entries were sent; None without momentum correction."""
    shard: dict[str, Leaves] = field(default_factory=dict)
    """New state of the shards."""
    last: jax.Array | None = None
    """A number of the sum, for the next message to wait for."""


class Send(Protocol):
    """One message: sums one bucket of `summand`, this replica's share and residual, over `axis`, approximately."""

    def __call__(
        self,
        bucket: Bucket,
        summand: Leaves,
        momentum: Leaves | None,
        shard: dict[str, Leaves],
        *,
        axis: str,
        key: jax.Array,
        last: jax.Array | None,
    ) -> Sent:
        """What was sent, after the message that `last` came with."""
        ...


class Stage(NamedTuple):
    """A part of the run with one way of sending; `send` None is dense."""

    until_step: float
    send: Send | None


@dataclass(frozen=True)
class CompressedExchange:
    """An exchange that sends buckets by the stage of the run, with everything that its options say."""

    options: Compressed
    layout: GradientLayout
    stages: Sequence[Stage]
    suits: Callable[[str, tuple[int, ...]], bool] = lambda name, shape: True
    """Says of a gradient's name and local shape whether it can be compressed at all."""
    init_shard: Callable[[Leaves], dict[str, Leaves]] = lambda leaves: {}
    """Makes the state of the shards of the gradients that are compressed."""
    momentum_correction: float | None = None

    def build(self) -> Exchange:
        """The exchange."""
        return Exchange(self.init, self.update)

    def plan(self) -> list[Stage]:
        """All stages, with the dense warm-up in front."""
        warmup = self.options.dense_warmup_steps
        later = [Stage(stage.until_step + warmup, stage.send) for stage in self.stages]
        return [Stage(warmup, None), *later] if warmup else later

    def feeds_back(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a residual of a gradient of this local shape; a question of the options, not of the mesh.

        So that of a shard which is too small to be compressed survives until it is whole again.
        """
        num_elements = math.prod(shape) * self.layout.ways(self.layout.used(name))
        return self.options.error_feedback and not self.options.stays_dense(name, num_elements)

    def chosen(self, leaves: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """The names of those that stay dense and of those that are compressed, in the order of the buckets."""
        layout, dense, compressed = self.layout, [], []
        for name in self.options.ordered(list(leaves), layout):
            num_elements = math.prod(leaves[name].shape) * layout.ways(layout.used(name))
            stays = self.options.stays_dense(name, num_elements) or not self.suits(name, leaves[name].shape)
            (dense if stays else compressed).append(name)
        return dense, compressed

    def buckets(self, leaves: Mapping[str, Any]) -> tuple[list[Bucket], list[Bucket]]:
        """The messages for gradients of these shapes: dense ones and compressed ones."""
        shapes, limit = {name: leaf.shape for name, leaf in leaves.items()}, self.options.bucket_elements
        dense, compressed = self.chosen(leaves)
        return (
            make_buckets(dense, shapes, self.layout, max_elements=limit),
            make_buckets(compressed, shapes, self.layout, max_elements=limit),
        )

    def init(self, grads: Any) -> ExchangeState:
        """The state: residual and momentum, zero; the shards' own; the number of updates for the stages."""
        leaves = nonempty(grads)
        compressed = self.chosen(leaves)[1]
        fed_back = [name for name in leaves if self.feeds_back(name, leaves[name].shape)]
        kept = {"residual": fed_back} if fed_back else {}
        kept |= {"momentum": list(leaves)} if self.momentum_correction is not None else {}
        state: ExchangeState = {}
        if kept:
            state[PER_REPLICA] = {
                entry: {name: jnp.zeros(leaves[name].shape, jnp.float32) for name in names}
                for entry, names in kept.items()
            }
        shard = self.init_shard({name: leaves[name] for name in compressed})
        if shard:
            state["shard"] = shard
        if len(self.plan()) > 1:
            state["common"] = {"num_updates": jnp.int32(0)}
        return state

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """See `UpdateExchange`."""
        leaves = nonempty(grads)
        check_local(leaves, axis)
        shares = shares_of(leaves, axis)
        dense, buckets = self.buckets(leaves)
        compressed = self.chosen(leaves)[1]
        kept = state.get(PER_REPLICA, {})
        due = self._due(shares, kept)
        summand = due | {name: due[name] + x for name, x in kept.get("residual", {}).items()}
        dense_messages = [send_dense(bucket, summand, layout=self.layout, axis=axis) for bucket in dense]
        momentum = {name: due[name] for name in compressed} if self.momentum_correction is not None else None
        carried = ({name: summand[name] for name in compressed}, momentum, state.get("shard", {}))
        total, error, momentum, shard, costs = self._sent(buckets, carried, state, axis, key)
        for message in dense_messages:
            total |= message.total
        residual = {
            name: error.get(name, 0.0) + rounding_of(total[name], leaves[name].dtype) / lax.axis_size(axis)
            for name in kept.get("residual", {})
        }
        rest = {
            "residual": {name: alike((axis,), x, summand[name])[0] for name, x in residual.items()},
            "momentum": {name: due[name] for bucket in dense for name in bucket.names} | (momentum or {}),
        }
        new_state = {
            PER_REPLICA: {entry: rest[entry] for entry in kept},
            "shard": shard,
            "common": {name: count + 1 for name, count in state.get("common", {}).items()},
        }
        costs = costs + message_costs(dense_messages, axis, self.layout)
        metrics = measured(costs, shares, rest["residual"], layout=self.layout, axis=axis)
        return like(grads, total), {where: new_state[where] for where in state}, metrics

    def _due(self, shares: Leaves, kept: dict[str, Leaves]) -> Leaves:
        """What this replica adds to the mean of this step: its shares, or with momentum correction their momentum.

        Deep Gradient Compression (Lin et al. 2018), section 3.2: what is added up and sent is the momentum. So it is
        of gradients that stay dense, for the optimizer has none.
        """
        if self.momentum_correction is None:
            return shares
        return grown(kept["momentum"], shares, self.momentum_correction)

    def _sent(self, buckets: Sequence[Bucket], carried: Any, state: ExchangeState, axis: str, key: jax.Array) -> Any:
        """`(total, error, momentum, shard, costs)` of all buckets, sent as the stage says."""
        turn = in_turn(buckets, list(carried[0]))

        def by_stage(stage: Stage) -> Callable[[Any], Any]:
            def run(carried: Any) -> Any:
                summand, momentum, shard = carried
                messages: list[Sent] = []
                for number in turn:
                    bucket, last = buckets[number], messages[-1].last if messages else None
                    if stage.send is None:
                        message = send_dense(
                            bucket, summand, layout=self.layout, axis=axis, momentum=momentum, last=last
                        )
                    else:
                        own_key = device_key(jax.random.fold_in(key, number), (*bucket.used, *bucket.whole))
                        message = stage.send(bucket, summand, momentum, shard, axis=axis, key=own_key, last=last)
                    messages.append(message)
                return _joined(messages, carried, axis, self.layout)

            return run

        plan = self.plan()
        if len(plan) == 1:
            return by_stage(plan[0])(carried)
        step = state["common"]["num_updates"]
        number = sum((step >= stage.until_step).astype(jnp.int32) for stage in plan[:-1])
        return lax.switch(number, [by_stage(stage) for stage in plan], carried)


def _joined(messages: Sequence[Sent], carried: Any, axis: str, layout: GradientLayout) -> Any:
    """`(total, error, momentum, shard, costs)` of several messages; the same structure at every stage."""
    summand, momentum, shard = carried
    total: Leaves = {}
    error: Leaves = {}
    new_momentum: Leaves = {}
    for message in messages:
        total |= message.total
        error |= message.error or {}
        new_momentum |= message.momentum or {}
        shard = {name: entry | message.shard.get(name, {}) for name, entry in shard.items()}
    # Without error feedback nobody reads what is left; a stage that leaves nothing still has to have its shape.
    error = {name: error.get(name, jnp.zeros_like(x)) for name, x in summand.items()}
    error = {name: alike((axis,), x, summand[name])[0] for name, x in error.items()}
    return total, error, None if momentum is None else new_momentum, shard, message_costs(messages, axis, layout)


def device_key(key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A key of this device's own among those of the inner axes `axes`; of all replicas the same."""
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


def send_dense(
    bucket: Bucket,
    summand: Leaves,
    *,
    layout: GradientLayout,
    axis: str,
    momentum: Leaves | None = None,
    dtype: Any = jnp.float32,
    last: jax.Array | None = None,
) -> Sent:
    """Sums a bucket by one all-reduce in `dtype`, after the message that `last` came with; nothing remains."""
    own = held_back(bucket.join(summand), last)
    total = lax.psum(own, axis) if dtype == jnp.float32 else half_all_reduce(own, axis, dtype)
    sent = all_reduce_sent_bytes(bucket.num_own, lax.axis_size(axis), dtype)
    return Sent(
        total=bucket.split(total),
        error=None,
        sent_bytes={axis: sent} | bucket.split_bytes(layout),
        num_entries=bucket.num_own,
        num_elements=bucket.num_own,
        momentum=None if momentum is None else {name: momentum[name] for name in bucket.names},
        last=total[0],
    )


def message_costs(messages: Sequence[Sent], axis: str, layout: GradientLayout) -> jax.Array:
    """`[bytes over axis, entries, elements, bytes over each inner axis...]`, float32."""
    inner = [sum(message.sent_bytes.get(name, 0.0) for message in messages) for name in layout.inner]
    slow = sum(message.sent_bytes.get(axis, 0.0) for message in messages)
    entries = sum(message.num_entries for message in messages)
    return jnp.asarray([slow, entries, sum(message.num_elements for message in messages), *inner], jnp.float32)


def measured(
    costs: jax.Array, shares: Leaves, residual: Leaves, *, layout: GradientLayout, axis: str
) -> ExchangeMetrics:
    """The metrics of an exchange; see `ExchangeMetrics`."""
    slow, entries, elements, *inner = costs
    dense = elements * all_reduce_sent_bytes(1, lax.axis_size(axis), jnp.float32)
    sent = {f"bytes_sent/{name}": value for name, value in zip(layout.inner, inner, strict=True)}
    return {
        f"bytes_sent/{axis}": slow,
        **sent,
        "compression": dense / jnp.maximum(slow, 1),
        "density": entries / jnp.maximum(elements, 1),
        **residual_norms(shares, residual, layout=layout, axis=axis),
    }
