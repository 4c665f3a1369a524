"""MSTopK: thresholds by bisection between the mean and the maximum, and a random window of the entries between them.

Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021, Algorithm
MSTopK. Where the paper leaves a case open, this decides: without any threshold that at most k entries reach, none is
sure (instead of all), and the window never runs past the end of the band.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.compact import (
    INFINITY,
    LARGEST,
    WORD_BITS,
    bit_words,
    count_packed,
    magnitudes,
    num_set,
    padded,
    positions,
    reduce_all,
)
from jaxdl.parallel.collectives.primitive import alike

DEPTH_COMPARED, DEPTH_PACKED = 1, 3
"""Steps of the bisection that share one read of the data: it counts for all thresholds that they may come to. On a GPU
a read for one threshold is as fast as the memory, and one for 31 takes 40 times as long (measured on an H200)."""

UNROLLED_COMPARED, UNROLLED_PACKED = 30, 10
"""Reads of the data that are written out: inside a loop XLA gives the CPU's work to one core, and GPUs wait for it."""


class Search(NamedTuple):
    """What the bisection knows: the bracket of the ratio, and the best thresholds (as magnitudes) with their counts."""

    left: jax.Array
    right: jax.Array
    num_sure: jax.Array
    sure_from: jax.Array
    num_band: jax.Array
    band_from: jax.Array


def mstopk(x: jax.Array, k: int, num_passes: int, bits: jax.Array, *, compare: bool) -> jax.Array:
    """About the k largest magnitudes of `x` [n], exactly k of them: int32 `[k]`, ascending.

    `num_passes` steps of bisection, each a count over the data, O(num_passes * n); entries above the upper threshold
    are sure, the others are neighbours by position among those between the two, from a random one on (`bits`: a key).
    Infinities and NaNs are sure first; mean and maximum are those of the finite entries.
    """
    num_unbounded = jnp.sum(num_set(words_between(x, INFINITY, LARGEST, compare=compare)))
    mean, top = mean_and_max(x, x.size - num_unbounded, compare=compare)
    zero, one = jnp.float32(0), jnp.float32(1)
    start = (zero, one, num_unbounded, jnp.int32(INFINITY), jnp.int32(x.size), jnp.int32(0))
    search = Search(*alike((), *start))  # In shard_map a loop wants what it carries to be typed the same throughout.

    def steps(depth: int, search: Search) -> Search:
        return bisect(search, depth, x, k, mean, top, compare=compare)

    depth = DEPTH_COMPARED if compare else DEPTH_PACKED
    whole = num_passes // depth
    unroll = max(1, min(whole, UNROLLED_COMPARED if compare else UNROLLED_PACKED))
    search = lax.fori_loop(0, whole, lambda _, search: steps(depth, search), search, unroll=unroll)
    if num_passes % depth:
        search = steps(num_passes % depth, search)
    # With more infinities than k the window is among them, and nothing is sure.
    crowded = num_unbounded > k
    last = jnp.where(crowded, LARGEST, search.sure_from - 1)
    sure = words_between(x, last, LARGEST, compare=compare, after=True)
    band = words_between(x, jnp.where(crowded, INFINITY, search.band_from), last, compare=compare)
    spare = jnp.sum(num_set(band)) - (k - jnp.sum(num_set(sure)))
    start = jax.random.randint(jax.random.wrap_key_data(bits, impl="threefry2x32"), (), 0, spare + 1)
    return positions(sure, band, k, start, compare=compare)


def bisect(
    search: Search, depth: int, x: jax.Array, k: int, mean: jax.Array, top: jax.Array, *, compare: bool
) -> Search:
    """`depth` steps at once: counts for the whole tree of thresholds they may try, then a walk down the tree."""
    lefts, rights, ratios = search.left[None], search.right[None], []
    for _ in range(depth):
        middles = lefts + (rights - lefts) / 2
        ratios.append(middles)
        lefts = jnp.stack([lefts, middles], 1).reshape(-1)
        rights = jnp.stack([middles, rights], 1).reshape(-1)
    tree = jnp.concatenate(ratios)  # The two children of node i are 2 i + 1 (below its ratio) and 2 i + 2 (above).
    values = mean + tree * (top - mean)
    thresholds = lax.bitcast_convert_type(values, jnp.int32)
    counts = count_entries(x, values) if compare else count_packed(magnitudes(x), thresholds)
    node = jnp.int32(0)
    for _ in range(depth):
        count, ratio, threshold = counts[node], tree[node], thresholds[node]
        fits = count <= k
        surer, narrower = fits & (count > search.num_sure), ~fits & (count < search.num_band)
        search = Search(
            jnp.where(fits, search.left, ratio),
            jnp.where(fits, ratio, search.right),
            jnp.where(surer, count, search.num_sure),
            jnp.where(surer, threshold, search.sure_from),
            jnp.where(narrower, count, search.num_band),
            jnp.where(narrower, threshold, search.band_from),
        )
        node = 2 * node + jnp.where(fits, 1, 2)
    return search


def words_between(
    x: jax.Array, low: jax.Array | int, high: jax.Array | int, *, compare: bool, after: bool = False
) -> jax.Array:
    """Bit words of the entries of `x` [n] whose magnitude is in [low, high], or with `after` in (low, high]."""
    main = x.size // WORD_BITS * WORD_BITS  # Apart from the rest, so that no padded copy of x is needed.
    parts = [magnitudes(x[:main])] if main else []
    if main < x.size:
        parts.append(padded(magnitudes(x[main:]), WORD_BITS))
    flags = [(part > low if after else part >= low) & (part <= high) for part in parts]
    return jnp.concatenate([bit_words(flag, compare=compare) for flag in flags])


def count_entries(x: jax.Array, thresholds: jax.Array) -> jax.Array:
    """`[t]`: how many magnitudes of `x` [n] are at least each of the thresholds (float32, not negative), for GPUs.

    Without magnitudes: XLA would write them to memory, an array as large as x, for the next passes to read.
    """
    x = x.astype(jnp.float32)
    return jnp.stack([jnp.sum((~(x < threshold) | (x <= -threshold)).astype(jnp.int32)) for threshold in thresholds])


def mean_and_max(x: jax.Array, num_finite: jax.Array, *, compare: bool) -> tuple[jax.Array, jax.Array]:
    """float32 mean and maximum of the finite entries of |x|; zeros where there are none."""
    keys = magnitudes(x)
    top = reduce_all(jnp.max, jnp.where(keys < INFINITY, keys, 0), compare=compare)
    top = lax.bitcast_convert_type(top, jnp.float32)

    def total(x: jax.Array) -> jax.Array:
        return sum_all(jnp.abs(x.astype(jnp.float32)), compare=compare)

    # A condition inside the sum would cost the CPU its vector instructions.
    def total_of_finite(x: jax.Array) -> jax.Array:
        return total(jnp.where(magnitudes(x) < INFINITY, x, 0))

    sums = lax.cond(num_finite == x.size, total, total_of_finite, x)
    mean = sums / jnp.maximum(num_finite, 1).astype(jnp.float32)
    # Rounding, or a sum beyond the largest number, may bring the mean above the maximum.
    return jnp.minimum(mean, top), top


def sum_all(x: jax.Array, *, compare: bool) -> jax.Array:
    """The sum of `x` [n], float32; on CPUs in 16 lanes, 256 rows at a time."""
    main = 0 if compare else x.size // 4096 * 4096
    return jnp.sum(jnp.sum(x[:main].reshape(-1, 256, 16), axis=1)) + jnp.sum(x[main:])
