"""Messages: what one update sends, a bucket at a time, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.exchange.base import ExchangeMetrics, GradientLayout, Leaves, residual_squares
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.parallel.collectives.primitive import alike


@dataclass(frozen=True)
class Message:
    """A bucket that is to be summed over the replicas."""

    bucket: Bucket
    summand: Leaves
    """This replica's share and residual, of these gradients at least."""
    momentum: Leaves | None = None
    """With momentum correction the momentum, of these gradients at least."""
    shard: Mapping[str, Leaves] = field(default_factory=dict)
    """The state of the shards."""
    last: jax.Array | None = None
    """A number that the message before received: this one has to wait for it."""
    number: int = 0
    """Of the bucket, for its random key."""


@dataclass(frozen=True)
class Context:
    """What all messages of an update share."""

    axis: str
    key: jax.Array
    """Of the step; the same in all replicas."""
    layout: GradientLayout
    """How the gradients are sharded."""

    @property
    def num_replicas(self) -> int:
        """Devices on the axis."""
        return lax.axis_size(self.axis)

    def device_key(self, message: Message) -> jax.Array:
        """A key of a message and of this device among those inside the replica; the same in all replicas."""
        key = jax.random.fold_in(self.key, message.number)
        axes = (*message.bucket.used, *message.bucket.whole)
        return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


@dataclass(frozen=True)
class Sent:
    """What one message did: the sum, the new residual, and its cost."""

    bucket: Bucket
    total: Leaves
    residual: Leaves | None
    """What of the summand was not sent; None without error feedback."""
    sent_bytes: Mapping[str, float]
    """Axis -> bytes that one device sent."""
    num_entries: float
    """Elements that one device handed to the collective, of the bucket's `num_own`."""
    last: jax.Array
    """A number of the sum, for the next message to wait for."""
    momentum: Leaves | None = None
    """The momentum, zero where entries were sent; None without momentum correction."""
    shard: Mapping[str, Leaves] = field(default_factory=dict)
    """New state of the shards."""


def last_of(sent: Sequence[Sent], bucket: Bucket, layout: GradientLayout) -> jax.Array | None:
    """`Message.last` of the next message, that of a bucket; None if it waits for none.

    Gradients that are all ready at once wait only for those whose sums are gathered inside the replica (see `in_turn`):
    XLA would merge both messages, and wait for the large one to gather the small one early.
    """
    if layout.at_once:
        sent = [] if bucket.whole else [message for message in sent if message.bucket.whole]
    return sent[-1].last if sent else None


class Carried(NamedTuple):
    """What all messages of the compressed buckets start from."""

    summand: Leaves
    momentum: Leaves | None
    shard: dict[str, Leaves]


class Sums(NamedTuple):
    """What several messages did together; the same structure in every step of the run."""

    total: Leaves
    residual: Leaves
    momentum: Leaves | None
    shard: dict[str, Leaves]
    costs: jax.Array
    """`[bytes over the axis, entries, elements, bytes over each inner axis...]`, float32."""


def send_dense(message: Message, context: Context, *, dtype: Any = jnp.float32) -> Sent:
    """Sums a bucket by one all-reduce in `dtype`; nothing remains."""
    bucket, momentum = message.bucket, message.momentum
    summand = held_back(bucket.join(message.summand), message.last)
    total = lax.psum(summand, context.axis) if dtype == jnp.float32 else half_all_reduce(summand, context.axis, dtype)
    sent = all_reduce_sent_bytes(bucket.num_own, context.num_replicas, dtype)
    return Sent(
        bucket,
        total=bucket.split(total),
        residual=None,
        sent_bytes={context.axis: sent} | bucket.split_bytes(context.layout),
        num_entries=bucket.num_own,
        last=total[0],
        momentum=None if momentum is None else {name: momentum[name] for name in bucket.names},
    )


def joined(messages: Sequence[Sent], carried: Carried, context: Context) -> Sums:
    """What the messages did together."""
    total: Leaves = {}
    residual: Leaves = {}
    momentum: Leaves = {}
    shard = carried.shard
    for message in messages:
        total |= message.total
        residual |= message.residual or {}
        momentum |= message.momentum or {}
        shard = {name: entry | message.shard.get(name, {}) for name, entry in shard.items()}
    # Without error feedback nobody reads the residual; settings without one must have the same structure.
    residual = {name: residual.get(name, jnp.zeros_like(x)) for name, x in carried.summand.items()}
    residual = {name: alike((context.axis,), x, carried.summand[name])[0] for name, x in residual.items()}
    costs = message_costs(messages, context)
    return Sums(total, residual, None if carried.momentum is None else momentum, shard, costs)


def message_costs(messages: Sequence[Sent], context: Context) -> jax.Array:
    """`[bytes over the axis, entries, elements, bytes over each inner axis...]`, float32."""
    slow, *inner = (
        sum(message.sent_bytes.get(axis, 0.0) for message in messages) for axis in (context.axis, *context.layout.inner)
    )
    entries = sum(message.num_entries for message in messages)
    elements = sum(message.bucket.num_own for message in messages)
    return jnp.asarray([slow, entries, elements, *inner], jnp.float32)


def measured(costs: jax.Array, shares: Leaves, residual: Leaves, context: Context) -> ExchangeMetrics:
    """The metrics of an exchange; see `ExchangeMetrics`."""
    axis, layout = context.axis, context.layout
    slow, entries, elements, *inner = costs
    dense = elements * all_reduce_sent_bytes(1, context.num_replicas, jnp.float32)
    alone = context.num_replicas == 1
    sent = {f"bytes_sent/{name}": value for name, value in zip(layout.inner, inner, strict=True)}
    return {
        f"bytes_sent/{axis}": slow,
        **sent,
        "compression": jnp.float32(1) if alone else dense / jnp.maximum(slow, 1),
        "density": entries / jnp.maximum(elements, 1),
        **residual_squares(shares, residual, layout=layout, axis=axis),
    }
