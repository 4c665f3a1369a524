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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.embedding import levels
from jaxdl.embedding.layout import Buffer, Slot
from jaxdl.embedding.places import spread_out
from jaxdl.embedding.wire import Wire

NONE = -1
"""In place of an id where an example has fewer."""


def owned_ids(buffer: Buffer, ids: jax.Array) -> jax.Array:
    """The rows that this device has for the ids of all examples of its group, int32 `[examples, entries]`.

    `ids` are `[local batch, columns]`, of this device's examples. Examples are in the order of the global batch; where
    this device has no row of an id, its place is `buffer.local_rows`, one past the end.
    """
    columns, offsets, limits = _entries(buffer, ids.shape[1])
    padded = jnp.concatenate([ids, jnp.full((len(ids), 1), NONE, ids.dtype)], axis=1)
    sent = jnp.take(padded, columns.reshape(-1), axis=1).reshape(len(ids), *columns.shape)
    found = _gathered(buffer, _to_outer(buffer, jnp.moveaxis(sent, 1, 0)))
    here = lax.axis_index(buffer.spread.outer) if buffer.spread.outer else 0
    offset, limit = jnp.asarray(offsets)[here], jnp.asarray(limits)[here]
    device, row = spread_out(found, buffer.row_ways, buffer.groups)
    known = (found >= 0) & (found < limit)
    if buffer.row_ways > 1:
        known &= device == lax.axis_index(buffer.spread.inner)
    return jnp.where(known, row + offset, buffer.local_rows)


def pooled(buffer: Buffer, rows: jax.Array, owned: jax.Array, send: Wire) -> jax.Array:
    """The sums of the vectors of this device's examples, float32 `[local batch, slots, columns]`.

    `rows` are those of this device, `[local rows, local columns]`; `owned` is what `owned_ids` returned.
    """
    sums, first = [], 0
    for width in buffer.widths:
        mine = owned[:, first : first + width]
        found = [rows.at[mine[:, i]].get(mode="fill", fill_value=0).astype(jnp.float32) for i in range(width)]
        if width > 1 and buffer.groups > 1:
            group = mine % buffer.groups
            parts = [
                [jnp.where((group[:, i] == k)[:, None], x, 0) for i, x in enumerate(found)]
                for k in range(buffer.groups)
            ]
            sums.append(_in_pairs([_in_order(one) for one in parts]))
        else:
            sums.append(_in_order(found))
        first += width
    here = jnp.stack(sums, axis=1)
    back = _scattered(buffer, here, send)
    if buffer.spread.outer:
        back = send(back, lambda x: lax.all_to_all(x, buffer.spread.outer, 0, 0, tiled=False))
    flat = jnp.moveaxis(back, 0, 1).reshape(back.shape[1], -1, back.shape[3])
    return jnp.take(flat, _ranks(buffer), axis=1)


def owned_grads(buffer: Buffer, grads: jax.Array, send: Wire) -> jax.Array:
    """The gradients of the sums of all examples of this device's group, `[examples, ranks, local columns]`.

    `grads` are those of this device's examples, `[local batch, slots, columns]`.
    """
    places = np.full(buffer.num_outer * len(buffer.widths), len(buffer.slots))
    places[_ranks(buffer)] = np.arange(len(buffer.slots))
    padded = jnp.concatenate([grads, jnp.zeros((len(grads), 1, grads.shape[2]), grads.dtype)], axis=1)
    sent = jnp.take(padded, places, axis=1).reshape(len(grads), buffer.num_outer, -1, grads.shape[2])
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
    counts = [jnp.sum(ids[:, one.first : one.first + one.num_ids] >= 0, axis=1) for one in slots]
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
    found = np.zeros(len(buffer.slots), np.int32)
    for owner, slots in enumerate(buffer.ranked):
        for rank, number in enumerate(slots):
            found[number] = owner * len(buffer.widths) + rank
    return found


def _to_outer(buffer: Buffer, x: jax.Array) -> jax.Array:
    """`[outer, local batch, ...]`: to each device along `outer` its part, and from each its examples."""
    return lax.all_to_all(x, buffer.spread.outer, 0, 0, tiled=False) if buffer.spread.outer else x


def _gathered(buffer: Buffer, x: jax.Array, send: Wire | None = None) -> jax.Array:
    """`[outer, local batch, ...]` of all devices of the group: `[examples, ...]`."""

    def gather(x: jax.Array) -> jax.Array:
        return levels.all_gather(x, buffer.spread.inner) if buffer.spread.inner else x[None]

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
