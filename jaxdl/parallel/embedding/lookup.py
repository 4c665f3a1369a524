"""Lookups on the mesh: ids go to the owners of their rows, pooled vectors come back, and their gradients go there.

Everything here is inside a `shard_map` that is manual over all axes, with examples sharded over all of them, whatever
the scheme. A buffer's devices form groups along `spread.inner` that together have whole tables:

1. ids are sent to the group that has their table (all-to-all along `outer`), and to all devices of it (all-gather along
   `inner`);
2. each device adds up the vectors it has, one id after the other, in an order that no scheme changes;
3. sums go back (all-to-all along `inner`, then `outer`); where a table is cut by rows the parts are added, in order.

Gradients of pooled vectors take the same way as the ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.parallel.embedding import levels
from jaxdl.parallel.embedding.jagged import examples_of
from jaxdl.parallel.embedding.layout import Buffer, Slot
from jaxdl.parallel.embedding.places import spread_out
from jaxdl.parallel.embedding.wire import Wire

NONE = -1
"""In place of an id where an example has fewer."""


class Located(NamedTuple):
    """Where the ids of a batch are, on one device; see `located`."""

    rows: jax.Array
    """The row on this device of each entry of all examples of its group, int32 `[examples, entries]`."""
    vectors: jax.Array | None
    """To which pooled vector it is added, int32 `[examples, entries]`: the example times the number of ranks, and the
    rank. None without jagged features: then an entry belongs to the example whose row it is in."""
    factors: jax.Array
    """By how much sums are multiplied, of this device's examples, float32 `[local batch, slots, 1]`: for a mean one
    over the number of ids."""


def locate(buffer: Buffer, ids: jax.Array, lengths: jax.Array | None) -> Located:
    """Sends the ids of this device's examples, `[local batch, columns]`, to where their rows are.

    `lengths` are those of each feature of the data, `[local batch, features]`, where some are jagged. Examples are in
    the order of the global batch; where this device has no row of an id, its row is `buffer.local_rows`, one past the
    end.
    """
    columns, offsets, limits = _entries(buffer, ids.shape[1])
    padded = jnp.concatenate([ids, jnp.full((ids.shape[0], 1), NONE, ids.dtype)], axis=1)
    sent = jnp.take(padded, columns.reshape(-1), axis=1).reshape(ids.shape[0], *columns.shape)
    counts = num_ids(buffer.slots, ids) if lengths is None else lengths[:, [slot.number for slot in buffer.slots]]
    if buffer.jagged_ranks:
        sent = jnp.concatenate([sent, _lengths(buffer, counts)], axis=2)
    here = lax.axis_index(buffer.spread.outer) if buffer.spread.outer else 0
    received = _gathered(buffer, _to_outer(buffer, jnp.moveaxis(sent, 1, 0)))
    vectors = _vectors(buffer, received[:, buffer.num_entries :], here, ids.shape[0]) if buffer.jagged_ranks else None
    received = received[:, : buffer.num_entries]
    offset, limit = jnp.asarray(offsets)[here], jnp.asarray(limits)[here]
    device, row = spread_out(received, buffer.row_ways, buffer.groups)
    known = (received >= 0) & (received < limit)
    if buffer.row_ways > 1:
        known &= device == lax.axis_index(buffer.spread.inner)
    means = jnp.asarray([slot.pooling == "mean" for slot in buffer.slots])
    factors = jnp.where(means, 1 / jnp.maximum(counts.astype(jnp.float32), 1), 1)
    return Located(jnp.where(known, row + offset, buffer.local_rows), vectors, factors[..., None])


def _lengths(buffer: Buffer, counts: jax.Array) -> jax.Array:
    """Of the slots at jagged ranks of each device along `outer`, `[local batch, outer, jagged ranks]`.

    At such a rank, a slot that is not jagged has as many ids in each example as it has columns.
    """
    columns = [
        counts[:, number] if slot.jagged else jnp.full_like(counts[:, number], slot.num_ids)
        for number, slot in enumerate(buffer.slots)
    ]
    columns.append(jnp.zeros_like(columns[0]))
    places = [
        [slots[rank] if rank < len(slots) else len(buffer.slots) for rank in buffer.jagged_ranks]
        for slots in buffer.ranked
    ]
    return jnp.stack(columns, axis=1)[:, np.asarray(places)].astype(jnp.int32)


def _vectors(buffer: Buffer, lengths: jax.Array, here: jax.Array | int, local_batch: int) -> jax.Array:
    """`Located.vectors`; `lengths` are `[examples, jagged ranks]` of all examples of the group."""
    num_ranks, num_blocks = len(buffer.widths), lengths.shape[0] // local_batch
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)[:, None, None] * local_batch
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None]
    parts = []
    for rank, width in enumerate(buffer.widths):
        example = jnp.broadcast_to(rows, (lengths.shape[0], width))
        if rank in buffer.jagged_ranks:
            mine = lengths[:, buffer.jagged_ranks.index(rank)].reshape(num_blocks, local_batch)
            room = [buffer.slots[slots[rank]].num_ids if rank < len(slots) else 1 for slots in buffer.ranked]
            examples = examples_of(mine, jnp.asarray(room, jnp.int32)[here], width) + blocks
            example = examples.reshape(lengths.shape[0], width)
        parts.append(example * num_ranks + rank)
    return jnp.concatenate(parts, axis=1)


def pooled(buffer: Buffer, rows: jax.Array, located: Located, send: Wire) -> jax.Array:
    """The sums of the vectors of this device's examples, float32 `[local batch, slots, columns]`, times the factors.

    `rows` are those of this device, `[local rows, local columns]`.
    """
    sums, first = [], 0
    for rank, width in enumerate(buffer.widths):
        mine = located.rows[:, first : first + width]
        if rank in buffer.jagged_ranks:
            assert located.vectors is not None
            sums.append(
                _jagged_sum(buffer, rows, mine, located.vectors[:, first : first + width] // len(buffer.widths))
            )
        else:
            sums.append(_sum(buffer, [_vector(rows, mine[:, i]) for i in range(width)], mine))
        first += width
    here = jnp.stack(sums, axis=1)
    back = _scattered(buffer, here, send)
    if buffer.spread.outer:
        back = send(back, lambda x: lax.all_to_all(x, buffer.spread.outer, 0, 0, tiled=False))
    flat = jnp.moveaxis(back, 0, 1).reshape(back.shape[1], back.shape[0] * back.shape[2], back.shape[3])
    return jnp.take(flat, _ranks(buffer), axis=1) * located.factors


def _vector(rows: jax.Array, places: jax.Array) -> jax.Array:
    return rows.at[places].get(mode="fill", fill_value=0).astype(jnp.float32)


def _sum(buffer: Buffer, vectors: Sequence[jax.Array], places: jax.Array) -> jax.Array:
    """The sum of the vectors of an example's ids, `[examples, columns]`, one after the other in each group of rows."""
    if len(vectors) == 1 or buffer.groups == 1:
        return _in_order(vectors)
    group = places % buffer.groups
    parts = [
        [jnp.where((group[:, i] == k)[:, None], x, 0) for i, x in enumerate(vectors)] for k in range(buffer.groups)
    ]
    return _in_pairs([_in_order(part) for part in parts])


def _jagged_sum(buffer: Buffer, rows: jax.Array, places: jax.Array, examples: jax.Array) -> jax.Array:
    """The same sums, in the same order, of ids that follow each other; `examples` says whose they are."""
    flat, owner, count = places.reshape(-1), examples.reshape(-1), places.shape[0]
    if buffer.groups == 1:
        return jax.ops.segment_sum(_vector(rows, flat), owner, count, indices_are_sorted=True)
    group_sums = jax.ops.segment_sum(
        _vector(rows, flat), owner * buffer.groups + flat % buffer.groups, count * buffer.groups
    )
    parts = group_sums.reshape(count, buffer.groups, -1)
    return _in_pairs([parts[:, k] for k in range(buffer.groups)])


def owned_grads(buffer: Buffer, grads: jax.Array, located: Located, send: Wire) -> jax.Array:
    """The gradients of the sums of all examples of this device's group, `[examples, ranks, local columns]`.

    `grads` are those of the pooled vectors of this device's examples, `[local batch, slots, columns]`.
    """
    grads = grads * located.factors
    places = np.full(buffer.num_outer * len(buffer.widths), len(buffer.slots))
    places[_ranks(buffer)] = np.arange(len(buffer.slots))
    padded = jnp.concatenate([grads, jnp.zeros((grads.shape[0], 1, grads.shape[2]), grads.dtype)], axis=1)
    sent = jnp.take(padded, places, axis=1).reshape(grads.shape[0], buffer.num_outer, -1, grads.shape[2])
    sent = jnp.moveaxis(sent, 1, 0)
    if buffer.spread.outer:
        sent = send(sent, lambda x: lax.all_to_all(x, buffer.spread.outer, 0, 0, tiled=False))
    if buffer.column_ways > 1:
        parts = sent.reshape(*sent.shape[:3], buffer.num_inner, -1)
        parts = send(parts, lambda x: lax.all_to_all(x, buffer.spread.inner, 3, 0, tiled=False))
        return _by_example(parts)
    return _gathered(buffer, sent, send)


def num_ids(slots: Sequence[Slot], ids: jax.Array) -> jax.Array:
    """How many ids each example has in each slot, float32 `[local batch, slots]`."""
    counts = [jnp.sum(ids[:, slot.first : slot.first + slot.num_ids] >= 0, axis=1) for slot in slots]
    return jnp.stack(counts, axis=1).astype(jnp.float32)


def _entries(buffer: Buffer, padding: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each entry on each device along `outer`: the column of the ids, the offset of its table, and its rows.

    Entries that are there for other devices' sake have the column `padding`.
    """
    shape = (buffer.num_outer, buffer.num_entries)
    columns = np.full(shape, padding, np.int32)
    offsets, limits = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    starts = np.cumsum([0, *buffer.widths])
    for owner, slots in enumerate(buffer.ranked):
        for rank, number in enumerate(slots):
            slot = buffer.slots[number]
            of_slot = slice(starts[rank], starts[rank] + slot.num_ids)
            columns[owner, of_slot] = slot.first + np.arange(slot.num_ids)
            offsets[owner, of_slot] = buffer.offsets[slot.table]
            limits[owner, of_slot] = buffer.tables[slot.table].rows
    return columns, offsets, limits


def _ranks(buffer: Buffer) -> np.ndarray:
    """Of each slot, its place among the ranks of all devices along `outer`."""
    ranks = np.zeros(len(buffer.slots), np.int32)
    for owner, slots in enumerate(buffer.ranked):
        for rank, number in enumerate(slots):
            ranks[number] = owner * len(buffer.widths) + rank
    return ranks


def _to_outer(buffer: Buffer, x: jax.Array) -> jax.Array:
    """`[outer, local batch, ...]`: to each device along `outer` its part, and from each its examples."""
    return lax.all_to_all(x, buffer.spread.outer, 0, 0, tiled=False) if buffer.spread.outer else x


def _gathered(buffer: Buffer, x: jax.Array, send: Wire | None = None) -> jax.Array:
    """`[outer, local batch, ...]` of all devices of the group: `[examples, ...]`."""

    def gather(x: jax.Array) -> jax.Array:
        return levels.all_gather(x, buffer.spread.inner) if buffer.num_inner > 1 else x[None]

    return _by_example(gather(x) if send is None or not buffer.spread.inner else send(x, gather))


def _by_example(x: jax.Array) -> jax.Array:
    """`[inner, outer, local batch, ...]` in the order of the global batch: `[examples, ...]`."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[3:])


def _scattered(buffer: Buffer, x: jax.Array, send: Wire) -> jax.Array:
    """`[examples, ranks, local columns]` -> `[outer, local batch, ranks, columns]` of this device's examples."""
    parts = x.reshape(buffer.num_outer, buffer.num_inner, -1, *x.shape[1:])
    if not buffer.spread.inner:
        return parts[:, 0]
    parts = send(parts, lambda x: lax.all_to_all(x, buffer.spread.inner, 1, 0, tiled=False))
    if buffer.spread.cut == "columns":
        return jnp.concatenate(list(parts), axis=-1)
    return _in_pairs(list(parts))


def _in_order(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum, one after the other, so that it has the same bits whatever else is on the device."""
    return functools.reduce(jnp.add, parts)


def _in_pairs(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum, of neighbours first, then of neighbouring pairs, ...

    With a power of two of parts, those of one half may be summed on one device, and have the same bits.
    """
    while len(parts) > 1:
        parts = [_in_order(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]
