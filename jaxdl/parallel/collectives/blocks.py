"""Selections that look at each block of an array once: the k largest in two stages, and the largest of each block."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.compact import KEY_BITS, LARGEST, largest, magnitudes, reduce_minor

BLOCK_WIDTHS = (16, 32, 64)


def block_width(n: int, k: int, widths: tuple[int, ...] = BLOCK_WIDTHS) -> int | None:
    """Entries in a block of the two stages, about sqrt(n / k); None where the stages would not save work.

    The stages handle n / width maxima and k * width gathered entries, so this is where their sum is least.
    """
    width = min(widths, key=lambda width: abs(math.log(width**2 * k / n)))
    return width if 2 * k * width <= n else None


def block_maxima(x: jax.Array, width: int, *, compare: bool) -> jax.Array:
    """int32 `[ceil(n / width)]`: the largest magnitude in each block of `width` entries; one read of `x` [n]."""
    main = x.size // width * width
    maxima = reduce_minor(jnp.max, magnitudes(x[:main]).reshape(-1, width), compare=compare)
    return jnp.concatenate([maxima, jnp.max(magnitudes(x[main:]), keepdims=True)]) if main < x.size else maxima


def gather_blocks(x: jax.Array, blocks: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Magnitudes `[k, width]` of some blocks, and the index of each one's first entry, `[k]`.

    A last block that is not full begins earlier; what it shares with the block before has magnitude -1 in it.
    """
    wanted = blocks * width
    starts = jnp.minimum(wanted, x.size - width)
    dims = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    rows = lax.gather(
        x,
        starts[:, None],
        dims,
        (width,),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    keys = magnitudes(rows)
    if x.size % width:
        is_own = starts[:, None] + jnp.arange(width, dtype=jnp.int32) >= wanted[:, None]
        keys = jnp.where(is_own, keys, -1)
    return keys, starts


def two_stages(x: jax.Array, k: int, bits: int, *, compare: bool) -> jax.Array:
    """The k largest magnitudes of `x` [n] by `bits` leading bits, ties lowest index first: int32 `[k]`, ascending.

    Each of them is in one of the k blocks with the largest maxima: otherwise each of those k blocks would have an entry
    that ranks before it. One read of x, then about n / width + k * width entries.
    """
    width = block_width(x.size, k)
    if width is None:
        return largest(magnitudes(x), k, bits, compare=compare)
    blocks = largest(block_maxima(x, width, compare=compare), k, bits, compare=compare)
    keys, starts = gather_blocks(x, blocks, width)
    chosen = largest(keys.reshape(-1), k, bits, compare=compare)
    return starts[chosen // width] + chosen % width


def largest_of_blocks(x: jax.Array, k: int, num_per_block: int, *, compare: bool) -> jax.Array:
    """The `num_per_block` largest magnitudes of each of k / num_per_block blocks of `x` [n]: int32 `[k]`, ascending.

    The first n % num_blocks blocks have one entry more than the others. Ties: lowest index first. Two reads of x
    for the largest of each block.
    """
    num_blocks = k // num_per_block
    size, num_longer = divmod(x.size, num_blocks)
    longer = num_longer * (size + 1)
    parts = []
    for first, count, width in ((0, num_longer, size + 1), (longer, num_blocks - num_longer, size)):
        if count:
            keys = magnitudes(x[first : first + count * width]).reshape(count, width)
            places = largest_of_rows(keys, num_per_block, compare=compare)
            starts = first + width * jnp.arange(count, dtype=jnp.int32)
            parts.append((starts[:, None] + places).reshape(-1))
    return jnp.concatenate(parts)


def largest_of_rows(keys: jax.Array, count: int, *, compare: bool) -> jax.Array:
    """int32 `[rows, count]`: where the `count` largest of each row of `keys` [rows, width] are, ascending.

    Ties: lowest index first. No row is sorted, neither on a GPU, which counts, nor on a CPU, which keeps a heap: XLA
    has one for float32, whose order is that of the keys.
    """
    if count == 1:
        column = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        value = reduce_minor(jnp.max, keys, compare=compare)
        at = jnp.where(keys == value[:, None], column, LARGEST)
        return reduce_minor(jnp.min, at, compare=compare)[:, None]
    if compare:
        return jax.vmap(lambda row: largest(row, count, KEY_BITS, compare=True))(keys)
    return jnp.sort(lax.top_k(lax.bitcast_convert_type(keys, jnp.float32), count)[1], axis=1)
