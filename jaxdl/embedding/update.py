"""The exact update of touched rows: their gradients are summed first, then each row is updated once, in place.

AdaGrad and Adam are not linear in the gradient, so an update for each occurrence of an id would be another one. A
gradient of a whole table is never made: what is sorted, summed and sent is as long as the batch has ids.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.embedding import levels
from jaxdl.embedding.layout import Buffer
from jaxdl.embedding.lookup import Located
from jaxdl.embedding.optimizers import RowState
from jaxdl.embedding.wire import Wire


class Touched(NamedTuple):
    """Rows of a device that some example has, and the sums of their gradients."""

    rows: jax.Array
    """Row numbers, each once, int32 `[n]`; the rest are past the end."""
    grads: jax.Array
    """float32 `[n, local columns]`; zeros past the end."""


def touched(buffer: Buffer, found: Located, grads: jax.Array) -> Touched:
    """The rows of this device that the examples of its group touch; `grads` are what `owned_grads` returned.

    Equal rows are summed in the order of examples, so the bits do not depend on how examples are spread.
    """
    flat = grads.reshape(-1, grads.shape[-1])
    rows, vectors = found.rows.reshape(-1), _gradient_places(buffer, found)
    return summed(rows, vectors, flat, buffer.local_rows, in_order=found.vectors is None)


def _gradient_places(buffer: Buffer, found: Located) -> jax.Array:
    """Of each entry, its place in the gradients of all examples and ranks."""
    if found.vectors is not None:
        return found.vectors.reshape(-1)
    ranks = np.repeat(np.arange(len(buffer.widths)), buffer.widths)
    vectors = np.arange(len(found.rows))[:, None] * len(buffer.widths) + ranks
    return jnp.asarray(vectors.reshape(-1), jnp.int32)


def summed(rows: jax.Array, vectors: jax.Array, grads: jax.Array, num_rows: int, *, in_order: bool = True) -> Touched:
    """Each row once, with the sum of `grads[vectors]` over its occurrences in `rows`, `[n]`, by rising `vectors`.

    Rows that are `num_rows` or more count as none. With `in_order`, `vectors` rise already.
    """
    if in_order:
        keys, order = lax.sort_key_val(rows, jnp.arange(rows.size, dtype=jnp.int32), is_stable=True)
        wanted = jnp.take(vectors, order)
    else:
        keys, wanted = lax.sort((rows, vectors), num_keys=2)
    starts = jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
    segments = jnp.cumsum(starts, dtype=jnp.int32) - 1
    found = jnp.take(grads, wanted, axis=0)
    found = jnp.where((keys < num_rows)[:, None], found, 0)
    sums = jax.ops.segment_sum(found, segments, rows.size, indices_are_sorted=True)
    # Places past the end differ from each other, so that a scatter's indices are unique.
    beyond = num_rows + jnp.arange(rows.size, dtype=jnp.int32)
    places = jnp.where(starts, segments, rows.size)
    unique = beyond.at[places].set(jnp.where(keys < num_rows, keys, beyond), mode="drop")
    return Touched(unique, sums)


def of_all_copies(buffer: Buffer, found: Touched, send: Wire) -> Touched:
    """What the examples of all copies of the rows touch, the same on each of them.

    Every copy gets every other's rows and sums, and adds them up in the same order. If the rows of each fit into the
    room of a message, no more is sent.
    """
    if buffer.num_copies == 1:
        return found
    axes, count = buffer.spread.copies, buffer.local_rows
    total = buffer.num_copies * found.rows.size

    def exchanged(room: int, found: Touched) -> Touched:
        # Touched rows come first.
        rows = levels.all_gather(found.rows[:room], axes).reshape(-1)
        grads = send(found.grads[:room], lambda x: levels.all_gather(x, axes)).reshape(-1, found.grads.shape[-1])
        sums = summed(rows, jnp.arange(rows.size, dtype=jnp.int32), grads, count)
        beyond = count + jnp.arange(rows.size, total, dtype=jnp.int32)
        padding = jnp.zeros((total - rows.size, grads.shape[-1]), grads.dtype)
        return Touched(jnp.concatenate([sums.rows, beyond]), jnp.concatenate([sums.grads, padding]))

    room = buffer.room(found.rows.size)
    if room == found.rows.size:
        return exchanged(room, found)
    # All devices must choose alike, or some would wait for a message that nobody sends.
    most = lax.pmax(jnp.sum(found.rows < count), tuple(buffer.sizes))
    every = found.rows.size
    return lax.cond(most <= room, lambda x: exchanged(room, x), lambda x: exchanged(every, x), found)


def of_all_rows(buffer: Buffer, located: Located, grads: jax.Array) -> Touched:
    """As `touched` and `of_all_copies`, by a sum of gradients of all rows: for tables with few."""
    found = jnp.take(grads.reshape(-1, grads.shape[-1]), _gradient_places(buffer, located), axis=0)
    rows, count = located.rows.reshape(-1), buffer.local_rows
    marked = jnp.concatenate([found, jnp.ones((rows.size, 1), found.dtype)], axis=1)
    total = jnp.zeros((count, marked.shape[1]), jnp.float32).at[rows].add(marked, mode="drop")
    if buffer.num_copies > 1:
        total = levels.all_reduce(total, buffer.spread.copies, buffer.sizes)
    places = jnp.arange(count, dtype=jnp.int32)
    return Touched(jnp.where(total[:, -1] > 0, places, count + places), total[:, :-1])


def square_sum(buffer: Buffer, found: Touched) -> jax.Array:
    """The sum of squares of the gradients of all rows of the buffer, the same on all devices."""
    total = jnp.sum(found.grads**2)
    axes = buffer.spread.owners
    return lax.psum(total, axes) if axes else total


def updated(
    buffer: Buffer,
    rows: jax.Array,
    state: RowState,
    found: Touched,
    *,
    kept: jax.Array,
    rate: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, RowState]:
    """The rows of this device and their state after the update of those `found`; unchanged if not `kept`.

    Only what is touched is read and written. A choice between old and new rows would copy the table.
    """
    places = jnp.where(kept, found.rows, found.rows + jnp.int32(buffer.local_rows))

    def read(x: jax.Array) -> jax.Array:
        return x.at[places].get(mode="fill", fill_value=0)

    def write(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[places].set(new.astype(x.dtype), mode="drop", unique_indices=True)

    old, grads = read(rows), found.grads
    if buffer.optimizer.weight_decay:
        grads = grads + buffer.optimizer.weight_decay * old
    square = jnp.sum(grads**2, axis=1)
    if buffer.column_ways > 1 and buffer.optimizer.needs_square:
        square = lax.all_gather(square, buffer.spread.inner).sum(axis=0)
    before = {name: read(x) for name, x in state.items()}
    new, after = buffer.optimizer.updated(old, before, grads, square / buffer.columns, rate, count)
    return write(rows, new), {name: write(x, after[name]) for name, x in state.items()}
