"""Buckets: many gradients as few flat buffers, so that messages are large and selections see many elements at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxdl.exchange.base import GradientLayout, leaf_names
from jaxdl.parallel.collectives.primitive import all_gather_same

_NO_NUMBER = 0x7FDEAD01
"""The bits of a NaN that no computation yields."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent as one flat buffer; all are sharded, and replicated, over the same inner axes."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Local shapes, one for each name."""
    used: tuple[str, ...]
    """The inner axes over which they are split."""
    whole: tuple[str, ...]
    """The inner axes on whose devices they are the same: each of these devices exchanges its share of the buffer."""
    ways: int
    """How many devices `whole` has together."""

    @property
    def num_elements(self) -> int:
        """Elements of the buffer."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def num_own(self) -> int:
        """Elements that one device exchanges."""
        return -(-self.num_elements // self.ways)

    def join(self, leaves: Mapping[str, jax.Array], *, multiple: int = 1) -> jax.Array:
        """The part of the flat buffer that this device exchanges: `[num_own]`, and zeros up to a `multiple`."""
        pad = -self.num_own % multiple
        parts = [leaves[name].reshape(-1) for name in self.names]
        if not self.whole:  # Zeros in the one copy that is made anyway.
            return jnp.concatenate([*parts, jnp.zeros(pad, parts[0].dtype)])
        flat = jnp.concatenate([*parts, jnp.zeros(self.num_own * self.ways - self.num_elements, parts[0].dtype)])
        local_part = lax.dynamic_slice_in_dim(flat, lax.axis_index(self.whole) * self.num_own, self.num_own)
        return jnp.pad(local_part, (0, pad))

    def split(self, local_part: jax.Array) -> dict[str, jax.Array]:
        """The inverse of `join`: the parts of all devices in `whole`, gathered, as named arrays."""
        local_part = local_part[: self.num_own]
        for axis in reversed(self.whole):
            local_part = all_gather_same(local_part, (axis,)).reshape(-1)
        leaves, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            size = math.prod(shape)
            leaves[name] = lax.slice_in_dim(local_part, start, start + size).reshape(shape)
            start += size
        return leaves

    def split_bytes(self, layout: GradientLayout, count: int = 1) -> dict[str, float]:
        """Bytes that one device sends over each inner axis in `count` splits of float32 numbers."""
        sent, size = {}, count * self.num_own * 4
        for axis in reversed(self.whole):
            sent[axis] = float((layout.inner[axis] - 1) * size)
            size *= layout.inner[axis]
        return sent


def make_buckets(
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    layout: GradientLayout,
    *,
    max_elements: float,
    max_last: float = 0,
) -> list[Bucket]:
    """Buckets of gradients sharded alike, in the order of `names`, each of at most `max_elements` or a single one.

    With `max_last` the last of the gradients that are sharded as the very last one is, up to so many elements, are
    apart. Gradients without elements are in no bucket.
    """
    filling: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    buckets: list[Bucket] = []

    def close(where: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        inside = filling.pop(where)
        used, whole = where
        buckets.append(Bucket(tuple(inside), tuple(shapes[name] for name in inside), used, whole, layout.ways(whole)))

    for name in (names := [name for name in names if math.prod(shapes[name])]):
        where = layout.used(name), layout.whole(name)
        inside = filling.get(where, [])
        if inside and sum(math.prod(shapes[other]) for other in (*inside, name)) > max_elements:
            close(where)
        filling.setdefault(where, []).append(name)
    for where, inside in list(filling.items()):
        sizes = [math.prod(shapes[name]) for name in inside]
        most = max_last if inside[-1] == names[-1] else 0
        first = next(first for first in range(len(sizes) + 1) if sum(sizes[first:]) <= most)
        for part in (inside[:first], inside[first:]):
            if part:
                filling[where] = part
                close(where)
    return buckets


def in_turn(buckets: Sequence[Bucket], names: Sequence[str], layout: GradientLayout) -> list[int]:
    """The numbers of buckets in the order in which they can be sent, when gradients are ready in the order `names`.

    If all are ready at once, those come first whose sums are gathered inside the replica.
    """
    if layout.at_once:
        return sorted(range(len(buckets)), key=lambda number: not buckets[number].whole)
    place = {name: number for number, name in enumerate(names)}
    return sorted(range(len(buckets)), key=lambda number: max(place[name] for name in buckets[number].names))


def held_back(x: jax.Array, last: jax.Array | None) -> jax.Array:
    """`x`, the content of a message, made to depend on `last`, a result of the message before (the first one has none).

    XLA would merge small messages of one kind into one, which has to wait for the whole backward pass. It does not
    merge messages that depend on each other; and the link carries one after the other anyway. An optimization barrier
    does not help: XLA drops its unused results.
    """
    if last is None:
        return x
    # A message that is the same on all devices of an axis must stay so. Several devices of an axis divide the message,
    # so the axes here have one device each, over which a sum sends nothing.
    single = sorted(jax.typeof(last).mat.varying - jax.typeof(x).mat.varying)
    token = lax.psum(last, tuple(single)) if single else last
    bits = lax.bitcast_convert_type(token.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits == np.uint32(_NO_NUMBER), jnp.zeros_like(x), x)


def backward_order(loss: Callable[..., jax.Array], params: Any, *args: Any) -> tuple[str, ...]:
    """The names of the gradients of `loss(params, *args)` in the order in which they are ready; nothing is computed.

    Read off the traced program: the place of the operation that yields each gradient. Arguments may be shape structs.
    """
    traced = jax.make_jaxpr(jax.grad(loss))(params, *args).jaxpr
    place = {
        id(variable): number
        for number, step in enumerate(traced.eqns)
        if not all(isinstance(x, Literal) for x in step.invars)
        for variable in step.outvars
    }
    # A gradient that depends on nothing, of a parameter that is not used, is ready from the start.
    ready = [place.get(id(variable), -1) for variable in traced.outvars]
    names = leaf_names(params)
    # Of those that one operation yields (all layers of a scanned stack) the later parameters come first.
    return tuple(names[number] for number in sorted(range(len(names)), key=lambda number: (ready[number], -number)))
