"""`exact` and `threshold` selection on NVIDIA GPUs in eight kernels: Pallas, compiled by the Triton inside XLA.

The steps are those of `blocks.two_stages`, but a threshold is found by two histograms, not by comparisons: keys
(magnitudes as integers) are counted by their 16 leading bits, then those with the right 16 bits by the others. Each
kernel begins by looking up a digit in the histogram of the kernel before it, so that nothing runs between them:

    maxima of blocks, counted | counted by the other bits | counts of each program | places of the k blocks
    their entries, counted    | counted by the other bits | counts of each program | places of the k entries

Programs meet only in sums of whole numbers, which are the same in any order. These are float32, of up to 2**24 keys:
for arrays of integers, Pallas in JAX 0.10 makes the GPU add their bits as if they were of floats.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.experimental.pallas.triton import load as fetch

from jaxdl.parallel.collectives.blocks import block_width
from jaxdl.parallel.collectives.compact import COARSE_BITS, KEY_BITS, LARGEST, magnitudes
from jaxdl.parallel.collectives.primitive import alike

WIDTHS = (8, 16, 32, 64)
"""Entries in a block: as many as one memory transaction brings, or more."""
TILE, ROWS, MAXIMA_WARPS, MAXIMA_PROGRAMS = 8192, 512, 8, 32_768
"""Entries and blocks that are read together for the maxima of blocks, by how many warps, and how many programs read;
all at most."""
CHUNK, CHUNK_WARPS, CHUNKS = 512, 16, 4
"""Keys that the other kernels look at together (one for each thread), and how often a program does so at least: the
look-up at its beginning takes as long as some of them."""
PROGRAMS = 1024
"""The most programs of the other kernels, for each of them adds up what those before it have counted."""
TRIED = 2 * CHUNK * CHUNKS * PROGRAMS - 1000
"""So many entries that, in a selection from all of them, every program has keys, and more than CHUNKS chunks of them.
The last chunk is not full."""
FIRST, LOW, SLOTS = 16, 8, 1 << 8
"""A histogram of `FIRST` bits, or of the others, has counts by all but the LOW last of them, then counts by all: so
both look-ups are in SLOTS counts."""
GATHERS = "reads_a_part"
"""The scope of kernels that read a part of their operands; `jaxdl.parallel.compiler.hlo` counts their bytes so."""
NEAR, FIELD = 3, 10
"""How many neighbouring high bits a program counts by itself, and how many bits each count has in one integer."""


class Digit(NamedTuple):
    """Which bits of a key a histogram counts, and where among all bins it begins."""

    shift: int
    bits: int
    begin: int

    @property
    def end(self) -> int:
        """Where the next histogram begins."""
        return self.begin + SLOTS + (1 << self.bits)


def digits(leading: int, begin: int = 0) -> tuple[Digit, Digit]:
    """The two histograms of a stage, from `begin` on, when the `leading` bits are compared."""
    first = Digit(KEY_BITS - FIRST, FIRST, begin)
    return first, Digit(KEY_BITS - leading, leading - FIRST, first.end)


@dataclass(frozen=True)
class Stage:
    """The kernels of one selection, of `k` among `size` keys. Each method's operands come first, then its results."""

    size: int
    k: int
    first: Digit
    second: Digit
    interpret: bool

    @property
    def span(self) -> int:
        """The keys of one program."""
        return CHUNK * max(CHUNKS, pl.cdiv(self.size, CHUNK * PROGRAMS))

    @property
    def programs(self) -> int:
        """How many programs share the keys."""
        return pl.cdiv(self.size, self.span)

    def each_chunk(self, body: Callable[..., Any], start: Any = ()) -> Any:
        """What is carried at last by `body(places, inside, carried)`, called for each chunk of this program's keys."""
        begin = pl.program_id(0) * self.span

        def step(i: jax.Array, carried: Any) -> Any:
            places = begin + i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
            return body(places, places < self.size, carried)

        return lax.fori_loop(0, self.span // CHUNK, step, start)

    # JAX's interpreter, for tests, loses one of two additions to a place, and writes what the mask forbids.
    def add(self, ref: Any, index: jax.Array, count: jax.Array, mask: jax.Array) -> None:
        """Adds to places of `ref`, while others may add to the same."""
        if self.interpret:
            ref[...] = ref[...].at[index].add(jnp.where(mask, count, 0).astype(jnp.float32))
        else:
            plt.atomic_add(ref, (index,), count.astype(jnp.float32), mask=mask)

    def store(self, ref: Any, index: jax.Array, value: jax.Array, mask: jax.Array) -> None:
        """Writes to those places of `ref` that `mask` allows."""
        if self.interpret:
            ref[...] = ref[...].at[jnp.where(mask, index, ref.shape[0])].set(value, mode="drop")
        else:
            plt.store(ref.at[index], value, mask=mask)

    def tally(self, bins: Any, keys: jax.Array, digit: Digit, low: Any = 0, least: Any = 0) -> None:
        """Adds the `keys` of at least `least` that have the bits of `low` before the digit to a histogram.

        Digit 0 is not counted: it is that of the rest. The digit and the high bits (mostly an exponent) that are shared
        by many keys are counted here and added once: the largest digit, and the NEAR largest high bits.
        """
        key_digits = (keys - low) >> digit.shift
        counted = (keys >= low) & (keys >= least) & (key_digits > 0) & (key_digits < 1 << digit.bits)
        top = jnp.max(jnp.where(counted, key_digits, 0))

        @pl.when(top > 0)
        def _() -> None:
            steps = (top >> LOW) - (key_digits >> LOW)
            near, same, ones = counted & (steps < NEAR), counted & (key_digits == top), jnp.ones_like(key_digits)
            packed = jnp.sum(jnp.where(near, ones << (FIELD * jnp.where(near, steps, 0)), 0))
            num_same = jnp.sum(same.astype(jnp.int32))
            which = jnp.arange(NEAR + 1, dtype=jnp.int32)
            count = jnp.where(which < NEAR, (packed >> (FIELD * which)) & ((1 << FIELD) - 1), num_same)
            slot = jnp.where(which < NEAR, (top >> LOW) - which, SLOTS + top)
            self.add(bins, digit.begin + slot, count, (count > 0) & (slot >= 0))
            self.add(bins, digit.begin + SLOTS + key_digits, ones, counted & ~same)
            far = counted & ~near

            @pl.when(jnp.max(far.astype(jnp.int32)) > 0)
            def _() -> None:
                self.add(bins, digit.begin + (key_digits >> LOW), ones, far)

    def find(self, bins: Any, digit: Digit, rank: Any) -> tuple[jax.Array, jax.Array]:
        """The digit of the key number `rank` (from 1, the largest first), shifted, and its rank among its equals."""
        slots = jnp.arange(SLOTS, dtype=jnp.int32)

        def look_up(begin: Any, rank: Any) -> tuple[jax.Array, jax.Array]:
            counts = fetch(bins.at[begin + slots]).astype(jnp.int32)
            at_least = jnp.sum(counts) - jnp.cumsum(counts) + counts
            slot = jnp.sum(((at_least >= rank) & (slots > 0)).astype(jnp.int32))
            return slot, rank - jnp.sum(jnp.where(slots > slot, counts, 0))

        high, rank = look_up(digit.begin, rank)
        rest, rank = look_up(digit.begin + SLOTS + (high << LOW), rank)
        return ((high << LOW) + rest) << digit.shift, rank

    def read(self, source: Any, places: jax.Array, inside: jax.Array) -> jax.Array:
        """The keys at some places of an array of keys or of entries; -1 where not `inside`."""
        values = fetch(source.at[places], mask=inside, other=0)
        return jnp.where(inside, values if values.dtype == jnp.int32 else magnitudes(values), -1)

    def maxima_kernel(self, x: Any, _: Any, maxima: Any, bins: Any, *, width: int, rounds: int) -> None:
        """The largest key of each block of x; counts them."""
        num_rows = min(ROWS, TILE // width)
        begin = pl.program_id(0) * rounds * num_rows

        def step(i: jax.Array, carried: Any) -> Any:
            rows = begin + i * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
            places = rows[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None, :]
            values = fetch(x.at[places], mask=places < x.shape[0], other=0)
            keys = jnp.max(magnitudes(values), axis=1)
            self.store(maxima, rows, keys, rows < self.size)
            self.tally(bins, jnp.where(rows < self.size, keys, -1), self.first)
            return carried

        lax.fori_loop(0, rounds, step, ())

    def gather_kernel(self, x: Any, blocks: Any, least: Any, _: Any, keys: Any, bins: Any, *, width: int) -> None:
        """The keys of the entries of some blocks of x; counts those that are at least the smallest of their maxima."""
        lowest = least[0]

        def body(places: jax.Array, inside: jax.Array, carried: Any) -> Any:
            entries = fetch(blocks.at[places // width], mask=inside, other=0) * width + places % width
            entry_keys = self.read(x, entries, inside & (entries < x.shape[0]))
            self.store(keys, places, entry_keys, inside)
            self.tally(bins, entry_keys, self.first, least=lowest)
            return carried

        self.each_chunk(body)

    def count_kernel(self, keys: Any, _: Any, bins: Any) -> None:
        """Counts keys."""

        def body(places: jax.Array, inside: jax.Array, carried: Any) -> Any:
            self.tally(bins, self.read(keys, places, inside), self.first)
            return carried

        self.each_chunk(body)

    def refine_kernel(self, keys: Any, _: Any, threshold: Any, bins: Any) -> None:
        """Finds the first digit of the k-th key, and its rank among those with the same; counts these by the second."""
        low, rank = self.find(bins, self.first, self.k)
        threshold[0], threshold[1] = low, rank

        def body(places: jax.Array, inside: jax.Array, carried: Any) -> Any:
            self.tally(bins, self.read(keys, places, inside), self.second, low=low)
            return carried

        self.each_chunk(body)

    def sum_kernel(self, keys: Any, before: Any, bins: Any, threshold: Any, counts: Any) -> None:
        """Finds the k-th key, and its rank among ties; how many keys of each program are above it, and how many tie."""
        second, rank = self.find(bins, self.second, before[1])
        low = before[0] + second
        threshold[0], threshold[1] = low, rank

        def body(places: jax.Array, inside: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            above, ties = self.compare(self.read(keys, places, inside), low)
            return sums[0] + above, sums[1] + ties

        nothing = jnp.zeros(CHUNK, jnp.int32)
        above, ties = self.each_chunk(body, (nothing, nothing))
        counts[pl.program_id(0)] = jnp.sum(above)
        counts[self.programs + pl.program_id(0)] = jnp.sum(ties)

    def pack_kernel(self, keys: Any, threshold: Any, counts: Any, *refs: Any, width: int = 1) -> None:
        """Writes where the k largest keys are, ascending, the first `rank` of all ties among them.

        With `blocks` (the first of `refs`) keys are those of the entries of these blocks, and places are the entries'.
        """
        *blocks, packed = refs
        low, rank = threshold[0], threshold[1]
        others = jnp.arange(pl.next_power_of_2(self.programs), dtype=jnp.int32)
        earlier = others < pl.program_id(0)
        above = jnp.sum(fetch(counts.at[others], mask=earlier, other=0))
        ties = jnp.sum(fetch(counts.at[self.programs + others], mask=earlier, other=0))

        def body(places: jax.Array, inside: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            written, ties = so_far
            over, tied = self.compare(self.read(keys, places, inside), low)
            chosen = over | (tied & (ties + jnp.cumsum(tied) <= rank))
            slots = written + jnp.cumsum(chosen) - 1
            chosen = chosen > 0
            if blocks:
                places = fetch(blocks[0].at[places // width], mask=chosen, other=0) * width + places % width
            self.store(packed, slots, places, chosen)
            return written + jnp.sum(chosen.astype(jnp.int32)), ties + jnp.sum(tied)

        self.each_chunk(body, (above + jnp.minimum(ties, rank), ties))

    def compare(self, keys: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
        """0 or 1: which keys are above the k-th one, `low` by the bits that count, and which are its ties."""
        above = keys > low + ((1 << self.second.shift) - 1)  # At most LARGEST, the bits of a GPU's NaN.
        return above.astype(jnp.int32), ((keys >= low) & ~above).astype(jnp.int32)

    def run(
        self,
        kernel: Callable[..., None],
        operands: Sequence[jax.Array],
        results: Sequence[int],
        *,
        bins: jax.Array | None = None,
        programs: int | None = None,
        warps: int = CHUNK_WARPS,
        **settings: int,
    ) -> list[jax.Array]:
        """The results of a kernel, int32 of these sizes, and the bins, which it adds to in place."""
        like = jax.typeof(operands[0])
        changed = [] if bins is None else [bins]
        integers = [like.update(shape=(size,), dtype=jnp.dtype(jnp.int32), weak_type=False) for size in results]
        return pl.pallas_call(
            functools.partial(kernel, **settings),
            [*integers, *map(jax.typeof, changed)],
            grid=(programs or self.programs,),
            input_output_aliases={len(operands): len(results)} if changed else {},
            compiler_params=plt.CompilerParams(num_warps=warps),
            interpret=self.interpret,
        )(*operands, *changed)

    def select(self, keys: jax.Array, bins: jax.Array, *blocks: jax.Array, width: int = 1) -> tuple[jax.Array, ...]:
        """From keys counted by the first digit: their places int32 `[k]`, the k-th key and its rank, and the bins."""
        threshold, bins = self.run(self.refine_kernel, [keys], [2], bins=bins)
        threshold, counts = self.run(self.sum_kernel, [keys, threshold, bins], [2, 2 * self.programs])
        (places,) = self.run(self.pack_kernel, [keys, threshold, counts, *blocks], [self.k], width=width)
        return places, threshold, bins


def fits(n: int, k: int) -> bool:
    """Whether `largest_by_kernels` counts right: no histogram is of so many keys that float32 skips numbers."""
    width = block_width(n, k, WIDTHS)
    return max(n if width is None else pl.cdiv(n, width), k * (width or 1)) <= 1 << 24


def largest_by_kernels(x: jax.Array, k: int, leading: int, *, interpret: bool = False) -> jax.Array:
    """The k largest magnitudes of `x` [n] by `leading` bits, ties lowest index first: int32 `[k]`, ascending.

    The result of `blocks.two_stages`, ten times fewer kernels. One read of x and O(sqrt(n k)) more; four reads where
    blocks would save nothing. `interpret` runs the kernels on a CPU, for tests.
    """
    width = block_width(x.size, k, WIDTHS)
    stage = Stage(x.size if width is None else pl.cdiv(x.size, width), k, *digits(leading), interpret)
    inner = Stage(k * (width or 1), k, *digits(leading, stage.second.end), interpret)
    num_bins = (stage if width is None else inner).second.end
    x, bins = alike((), x, jnp.zeros(num_bins, jnp.float32))
    if width is None:
        (bins,) = stage.run(stage.count_kernel, [x], [], bins=bins)
        return stage.select(x, bins)[0]
    tiles = pl.cdiv(stage.size, min(ROWS, TILE // width))
    rounds = pl.cdiv(tiles, MAXIMA_PROGRAMS)
    reading = {"programs": pl.cdiv(tiles, rounds), "warps": MAXIMA_WARPS}
    maxima, bins = stage.run(stage.maxima_kernel, [x], [stage.size], bins=bins, **reading, width=width, rounds=rounds)
    blocks, threshold, bins = stage.select(maxima, bins)
    with jax.named_scope(GATHERS):
        keys, bins = inner.run(inner.gather_kernel, [x, blocks, threshold], [inner.size], bins=bins, width=width)
    return inner.select(keys, bins, blocks, width=width)[0]


def select_rightly(n: int = TRIED, *, interpret: bool = False) -> bool:
    """Whether the kernels, run here on one device, select what NumPy does: by blocks, and from all `n` entries.

    The entries differ in size by 2**40; among them are equal ones, zeros, infinities and NaNs.
    """
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 20, n)).astype(np.float32)
    x[::7], x[::11], x[:: n // 3], x[:: n // 2] = 8, 0, np.inf, np.nan
    keys = x.view(np.int32) & LARGEST
    for k, leading in ((n // 1000, COARSE_BITS), (n // 2, KEY_BITS)):
        run = jax.jit(functools.partial(largest_by_kernels, k=k, leading=leading, interpret=interpret))
        wanted = np.sort(np.argsort(-(keys >> (KEY_BITS - leading)), kind="stable")[:k])
        if not np.array_equal(run(jnp.asarray(x)), wanted):
            return False
    return True
