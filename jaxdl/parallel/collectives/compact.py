"""Choosing k of many integers without a sort: thresholds by counting, bit words, and their ranks.

Two ways of counting, the same results: scattered histograms where scattering is cheap (CPU), comparisons with a few
thresholds at once where arithmetic is (GPU). The shapes of the reductions are those that XLA turns into vector code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

WORD_BITS = 32
LARGEST = 0x7FFFFFFF
INFINITY = 0x7F800000
"""The bits of the float32 infinity: below are the numbers, above are the NaNs."""

TILE, TILE_ROWS = 128, 8
"""Entries that are reduced together on a CPU, by rows: few enough rows that XLA writes them out."""

KEY_BITS = 31
COARSE_BITS = 24
"""All bits of |x| in float32, and how many of them the method "threshold" looks at: exponent and 16 of the mantissa."""

SCATTERED_DIGITS = {KEY_BITS: (11, 10, 10), COARSE_BITS: (12, 12)}
COMPARED_DIGITS = {KEY_BITS: (5, 5, 5, 4, 4, 4, 4), COARSE_BITS: (5, 5, 5, 5, 4)}
"""Bits found by one pass: 31 thresholds are as many as a warp has lanes, and their cost grows with their number."""


def magnitudes(x: jax.Array) -> jax.Array:
    """int32 of x's shape, ordered as |x| is: the bits of float32 |x|. NaN is above infinity, infinity above numbers."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & LARGEST


def padded(keys: jax.Array, multiple: int, filler: int = -1) -> jax.Array:
    """`keys` [n], made a multiple long by entries below all magnitudes."""
    rest = -keys.size % multiple
    return jnp.concatenate([keys, jnp.full(rest, filler, keys.dtype)]) if rest else keys


def reduce_minor(reduce: Callable[..., jax.Array], x: jax.Array, *, compare: bool) -> jax.Array:
    """`reduce` (jnp.max, ...) over the last dimension.

    On CPUs eight rows at a time, so that the loop inside runs along contiguous vectors; the barrier keeps XLA from
    making one slow loop of it again.
    """
    while not compare and x.shape[-1] >= WORD_BITS:
        *shape, size = x.shape
        rows = 4 if size <= 2 * WORD_BITS else 8
        main = size // rows * rows
        short = lax.optimization_barrier(reduce(x[..., :main].reshape(*shape, rows, main // rows), axis=-2))
        x = jnp.concatenate([short, x[..., main:]], -1) if main < size else short
    return reduce(x, axis=-1)


def count_at_least(keys: jax.Array, low: jax.Array, shift: int, bits: int, *, compare: bool) -> jax.Array:
    """`[2**bits - 1]`: how many of `keys` are at least `low + (d << shift)`, for d = 1, 2, ..."""
    if compare:
        return count_above(keys, low + (jnp.arange(1, 1 << bits, dtype=jnp.int32) << shift))
    digits = jnp.clip((keys - low) >> shift, 0, (1 << bits) - 1)
    histogram = jnp.zeros(1 << bits, jnp.int32).at[digits].add(1, mode="promise_in_bounds")
    return lax.cumsum(histogram, reverse=True)[1:]


def count_above(keys: jax.Array, thresholds: jax.Array) -> jax.Array:
    """`[t]`: how many of `keys` are at least each of the thresholds; all are compared in one pass over the keys."""
    return jnp.sum((keys[:, None] >= thresholds).astype(jnp.int32), axis=0)


def count_packed(keys: jax.Array, thresholds: jax.Array) -> jax.Array:
    """`count_above` for up to 7 thresholds on a CPU: their counts share an integer until they no longer fit.

    Eight rows of a tile are added in fields of 4 bits, eight sums of those in fields of 8, and so on.
    """
    num = thresholds.size
    main = keys.size // TILE * TILE
    rest = count_above(keys[main:], thresholds)
    if not main:
        return rest

    def add_rows(packed: jax.Array) -> jax.Array:
        tiles = padded(packed, TILE, 0).reshape(-1, TILE_ROWS, TILE // TILE_ROWS)
        return lax.optimization_barrier(tiles.sum(1)).reshape(-1)

    tiled = keys[:main]
    flags = [(tiled >= thresholds[i]).astype(jnp.int32) << (4 * i) for i in range(num)]
    fields = [(add_rows(functools.reduce(jnp.add, flags)), list(range(num)))]
    for width, mask in ((4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        halves = [((packed >> by * width) & mask, which[by::2]) for packed, which in fields for by in (0, 1)]
        fields = [(add_rows(packed), which) for packed, which in halves if which]
    counts: list[jax.Array] = [jnp.int32(0)] * num
    for packed, which in fields:
        for i, field in enumerate(which):
            counts[field] = jnp.sum((packed >> 16 * i) & 0xFFFF)
    return jnp.stack(counts) + rest


def reduce_all(reduce: Callable[..., jax.Array], x: jax.Array, *, compare: bool) -> jax.Array:
    """`reduce` over all of `x` [n]; on CPUs by rows of a tile first."""
    main = 0 if compare else x.size // (2 * TILE) * (2 * TILE)
    parts = [x[main:]] if main < x.size else []
    if main:
        tiles = x[:main].reshape(-1, TILE_ROWS, 2 * TILE // TILE_ROWS)
        parts.append(lax.optimization_barrier(reduce(tiles, axis=1)).reshape(-1))
    return reduce(jnp.stack([reduce(part) for part in parts]))


def interval_of_kth(keys: jax.Array, k: int, bits: int, *, compare: bool) -> tuple[jax.Array, jax.Array]:
    """(low, high): the keys whose leading `bits` bits are those of the k-th largest of `keys`, both inclusive."""
    low, shift = jnp.int32(0), KEY_BITS
    for digit_bits in (COMPARED_DIGITS if compare else SCATTERED_DIGITS)[bits]:
        shift -= digit_bits
        counts = count_at_least(keys, low, shift, digit_bits, compare=compare)
        low = low + (jnp.sum(counts >= k, dtype=jnp.int32) << shift)
    return low, low + ((1 << shift) - 1)


def bit_words(flags: jax.Array, *, compare: bool) -> jax.Array:
    """uint32 `[n / 32]`: `flags` [n] (bool) as bits, the first one lowest. n is a multiple of 32."""
    bits = flags.reshape(-1, WORD_BITS).astype(jnp.int32) << jnp.arange(WORD_BITS, dtype=jnp.int32)
    return lax.bitcast_convert_type(reduce_minor(jnp.sum, bits, compare=compare), jnp.uint32)


def num_set(words: jax.Array) -> jax.Array:
    """How many bits of each word are set, int32."""
    return lax.population_count(words).astype(jnp.int32)


def nth_set(words: jax.Array, rank: jax.Array) -> jax.Array:
    """The position of each word's set bit number `rank` (from 0, lowest first), by halving; 31 where there is none."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        lower = num_set((words >> position.astype(jnp.uint32)) & jnp.uint32((1 << half) - 1))
        beyond = rank >= lower
        rank = jnp.where(beyond, rank - lower, rank)
        position = jnp.where(beyond, position + half, position)
    return position


def first_set(words: jax.Array, count: jax.Array) -> jax.Array:
    """The words with only their `count` lowest set bits."""
    below = (jnp.uint32(1) << nth_set(words, count).astype(jnp.uint32)) - 1
    return jnp.where(count >= num_set(words), words, words & below)


def positions(sure: jax.Array, band: jax.Array, k: int, start: jax.Array | int = 0, *, compare: bool) -> jax.Array:
    """The places of all `sure` bits and, to make it k, of the bits of `band` from its bit number `start` on.

    int32 `[k]`, ascending. Both are bit words `[w]` without a common bit; together they have enough bits.
    """
    quota = k - jnp.sum(num_set(sure))
    in_band = num_set(band)
    before = jnp.cumsum(in_band) - in_band
    skipped = first_set(band, jnp.clip(start - before, 0, in_band))
    taken = first_set(band, jnp.clip(start + quota - before, 0, in_band))
    words = sure | (taken & ~skipped)
    counts = num_set(words)
    ends = jnp.cumsum(counts)
    slots = jnp.arange(k, dtype=jnp.int32)
    # Unrolled it is one GPU kernel; as a loop the CPU compiles it faster.
    word = jnp.searchsorted(ends, slots, side="right", method="scan_unrolled" if compare else "scan").astype(jnp.int32)
    word = jnp.minimum(word, words.size - 1)
    return word * WORD_BITS + nth_set(words[word], slots - (ends - counts)[word])


def largest(keys: jax.Array, k: int, bits: int, *, compare: bool) -> jax.Array:
    """Where the k largest of `keys` [n] are, by their leading `bits` bits, ties lowest first: int32 `[k]`, ascending.

    Negative keys are none. O(n) for each of the few counting passes, and O(k log n).
    """
    keys = padded(keys, WORD_BITS)
    low, high = interval_of_kth(keys, k, bits, compare=compare)
    words = functools.partial(bit_words, compare=compare)
    return positions(words(keys > high), words((keys >= low) & (keys <= high)), k, compare=compare)
