"""The key-value cache of self-attention: what one new token of a sequence needs of those before it.

A cache has one array of keys and one of values, [layers, rows, slots, kv_heads, head_dim]. The token at position p of a
row is in slot p modulo the number of slots. Each query attends to all slots that are filled: where attention has a
window in all layers, there are no more slots than its tokens.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdl.models.attention import PLAIN, Weighing, attend, portable_attention
from jaxdl.parallel import sharding

_read: contextvars.ContextVar[int | None] = contextvars.ContextVar("jaxdl_slots_read", default=None)


@contextlib.contextmanager
def reads_slots(slots: int) -> Iterator[None]:
    """Context: `attend_cached` that is traced inside reads only so many slots, where a cache has more.

    The positions must be below `slots`.
    """
    token = _read.set(slots)
    try:
        yield
    finally:
        _read.reset(token)


class KeyValues(NamedTuple):
    """Keys and values: of a cache, [layers, rows, slots, kv_heads, head_dim] each, or of some tokens in one layer."""

    key: jax.Array
    value: jax.Array


def empty_cache(
    num_layers: int, rows: int, slots: int, kv_heads: int, head_dim: int, *, dtype: DTypeLike, window: int | None = None
) -> KeyValues:
    """A cache for sequences of at most `slots` tokens; with `window` for any, in at most so many slots."""
    shape = (num_layers, rows, slots if window is None else min(slots, window), kv_heads, head_dim)
    empty = _constrained(jnp.zeros(shape, dtype))
    return KeyValues(empty, empty)


def with_prompt(cache: KeyValues, prompt: KeyValues, layer: jax.Array | int, lengths: jax.Array) -> KeyValues:
    """The cache with the keys and values of prompts, [rows, length, kv_heads, head_dim] each, in one layer.

    A row's first `lengths[row]` tokens count, from position 0. What is in slots that are not filled does not matter.
    """
    slots = cache.key.shape[2]

    def one(whole: jax.Array, x: jax.Array) -> jax.Array:
        if x.shape[1] > slots:  # Only the newest position of each slot is kept.
            last = lengths[:, None] - 1
            positions = jnp.maximum(last - (last - jnp.arange(slots)) % slots, 0)
            x = jnp.take_along_axis(x, positions[:, :, None, None], axis=1)
        return lax.dynamic_update_slice(whole, x.astype(whole.dtype)[None], (layer, 0, 0, 0, 0))

    return KeyValues(one(cache.key, prompt.key), one(cache.value, prompt.value))


def attend_cached(
    query: jax.Array,
    new: KeyValues,
    cache: KeyValues,
    layer: jax.Array | int,
    position: jax.Array,
    *,
    window: int | None = None,
    limited: jax.Array | None = None,
    weighing: Weighing = PLAIN,
) -> tuple[jax.Array, KeyValues]:
    """(attention of one new token in each row, [rows, 1, heads, head_dim]; the cache with that token).

    `query` is [rows, 1, heads, head_dim], `new` [rows, 1, kv_heads, head_dim], and the token is at `position`, int32
    scalar or [rows]. `layer` says which of the cache, whose rows may be more: these are the first. See `reads_slots`.
    `limited`, `window` and `weighing` are those of `attend`: where not all layers have the window, there is a slot for
    every token.
    """
    slots, rows = cache.key.shape[2], query.shape[0]
    read = min(slots, _read.get() or slots)
    cache = KeyValues(*(_written(whole, x, layer, position % slots) for whole, x in zip(cache, new, strict=True)))
    key, value = (lax.dynamic_index_in_dim(x, layer, keepdims=False)[:rows, :read] for x in cache)
    filled = jnp.broadcast_to(jnp.minimum(position + 1, slots), (rows,))
    first = _first_keys(position, window, limited, rows)
    with portable_attention():  # The scores of one query are few, and kernels for long sequences may not take it.
        return attend(query, key, value, causal=False, key_lengths=filled, first_keys=first, weighing=weighing), cache


def attend_several(
    query: jax.Array,
    new: KeyValues,
    cache: KeyValues,
    layer: jax.Array | int,
    position: jax.Array,
    *,
    window: int | None = None,
    limited: jax.Array | None = None,
    weighing: Weighing = PLAIN,
) -> tuple[jax.Array, KeyValues]:
    """As `attend_cached` for several tokens of each row, which see each other too: [rows, num, heads, head_dim].

    The first is at `position`, int32 [rows]. The cache must have a slot for every position: in fewer, which attention
    with a window reuses, the last of these tokens would replace some that the first must see.
    """
    rows, num = query.shape[:2]
    positions = position[:, None] + jnp.arange(num)
    index = jnp.arange(rows)[:, None]
    cache = KeyValues(
        *(whole.at[layer, index, positions].set(x.astype(whole.dtype), mode="drop", unique_indices=True)
          for whole, x in zip(cache, new, strict=True))
    )  # fmt: skip
    key, value = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache)

    def one(query: jax.Array, at: jax.Array) -> jax.Array:
        first = _first_keys(at, window, limited, rows)
        return attend(
            query[:, None], key, value, causal=False, key_lengths=at + 1, first_keys=first, weighing=weighing
        )[:, 0]

    with portable_attention():
        return jax.vmap(one, in_axes=1, out_axes=1)(query, positions), cache


def _first_keys(position: jax.Array, window: int | None, limited: jax.Array | None, rows: int) -> jax.Array | None:
    """The first keys that tokens at these positions see, int32 [rows], where some layers alone have the window."""
    if limited is None:
        return None
    assert window is not None, "only a window can be limited to some layers"
    return jnp.where(limited, jnp.broadcast_to(position + 1 - window, (rows,)), 0)


def _written(cache: jax.Array, x: jax.Array, layer: jax.Array | int, slot: jax.Array) -> jax.Array:
    x = x.astype(cache.dtype)
    if slot.ndim == 0 or x.shape[0] == 1:  # No scatter, which takes longer.
        slot = slot.reshape(())
        return lax.dynamic_update_slice(cache, x[None], (layer, 0, slot, 0, 0))
    rows = jnp.arange(x.shape[0])
    return cache.at[layer, rows, slot].set(x[:, 0], unique_indices=True, mode="promise_in_bounds")


def _constrained(cache: jax.Array) -> jax.Array:
    """Sharded as attention is: the rows like a batch, the heads over `tensor`."""
    return sharding.constrain(cache, "layers", "batch", "length", "kv_heads", "head_dim")
