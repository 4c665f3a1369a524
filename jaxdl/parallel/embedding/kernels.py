"""Sums of gradients of touched rows, and their update, on NVIDIA GPUs: Pallas, compiled by the Triton inside XLA.

XLA adds the gradients of a row by atomic additions, whose order changes from run to run, and it makes arrays of as many
rows as a batch has ids for each part of an update. Here each row's gradients are added in the order of the examples, so
a resumed run has the bits of one that never stopped; only rows that are touched are read and written, once.

A frequent row has thousands of occurrences. So they are added in pieces of PIECE, counted from the row's first one, by
programs side by side, and then the pieces: the bits depend on the row's own occurrences alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.experimental.pallas.triton import load as fetch

from jaxdl.parallel.collectives.primitive import alike
from jaxdl.parallel.compiler.hlo import GATHERS
from jaxdl.parallel.embedding.optimizers import RowOptimizer, RowState, RowUpdate

PIECE = 128
"""Occurrences of a row that one program adds up."""
UNROLLED = 4
"""So many of them are read at once."""
TILE, MOST_ROWS, WARPS = 2048, 64, 4
"""Numbers, and rows, that a program handles together, at most, and by how many warps."""
MOST_COLUMNS = 4096
"""Rows of more columns are left to XLA."""


@dataclass(frozen=True)
class Rows:
    """The kernels for rows of some columns; `interpret` runs them on a CPU, for tests."""

    columns: int
    interpret: bool = False

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return pl.next_power_of_2(self.columns)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return max(1, min(MOST_ROWS, TILE // self.width))

    def own(self) -> jax.Array:
        """What this program handles, int32 `[rows]`."""
        return pl.program_id(0) * self.rows + jnp.arange(self.rows, dtype=jnp.int32)

    def inside(self, rows: jax.Array) -> jax.Array:
        """Which numbers of a tile count, of those `rows` (bool) that do."""
        return rows[:, None] & (jnp.arange(self.width, dtype=jnp.int32) < self.columns)[None, :]

    def read(self, source: Any, rows: jax.Array, some: jax.Array) -> jax.Array:
        """Those `rows` of `[n, columns]` or numbers of `[n]` where there are `some`, else zeros."""
        if len(source.shape) == 1:
            return fetch(source.at[rows], mask=some, other=0)
        columns = jnp.arange(self.width, dtype=jnp.int32)
        return fetch(source.at[rows[:, None], columns[None, :]], mask=self.inside(some), other=0)

    def write(self, target: Any, rows: jax.Array, values: jax.Array, some: jax.Array) -> None:
        """Writes what `read` reads."""
        # JAX's interpreter, for tests, writes what the mask forbids.
        if self.interpret:
            values = values if values.ndim == 1 else values[:, : self.columns]
            target[...] = target[...].at[jnp.where(some, rows, target.shape[0])].set(values, mode="drop")
        elif values.ndim == 1:
            plt.store(target.at[rows], values, mask=some)
        else:
            columns = jnp.arange(self.width, dtype=jnp.int32)
            plt.store(target.at[rows[:, None], columns[None, :]], values, mask=self.inside(some))

    def add_up(self, total: jax.Array, length: jax.Array, one: Callable[..., jax.Array]) -> jax.Array:
        """`total` and `one(number, some)` for each number below the `length` of each row, in order."""
        longest = jnp.max(length)

        def step(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            done, total = carried
            # Reads that do not wait for each other: a read takes longer than everything else here.
            for vectors in [one(done + i, done + i < length) for i in range(UNROLLED)]:
                total = total + vectors
            return done + UNROLLED, total

        return lax.while_loop(lambda carried: carried[0] < longest, step, (jnp.int32(0), total))[1]

    def sum_kernel(
        self, vectors: Any, begins: Any, ends: Any, grads: Any, pieces: Any, sums: Any, squares: Any
    ) -> None:
        """The sum of `grads[vectors[begin:end]]` of each piece, at most PIECE of them; nothing of an empty one.

        The first programs write the further pieces of rows, the others the first ones, with their sums of squares.
        """
        places, num_further = self.own(), pieces.shape[0]
        is_further = pl.program_id(0) * self.rows < num_further
        inside = places < begins.shape[0]
        begin = fetch(begins.at[places], mask=inside, other=0)
        length = jnp.minimum(fetch(ends.at[places], mask=inside, other=0) - begin, PIECE)

        @pl.when(jnp.max(length) > 0)
        def _() -> None:
            def one(number: jax.Array, some: jax.Array) -> jax.Array:
                return self.read(grads, fetch(vectors.at[begin + number], mask=some, other=0), some)

            total = self.add_up(jnp.zeros((self.rows, self.width), jnp.float32), length, one)

            @pl.when(is_further)
            def _() -> None:
                self.write(pieces, places, total, length > 0)

            @pl.when(~is_further)
            def _() -> None:
                self.write(sums, places - num_further, total, length > 0)
                self.write(squares, places - num_further, jnp.sum(total * total, axis=1), length > 0)

    def join_kernel(self, begins: Any, ends: Any, rows: Any, second: Any, pieces: Any, *refs: Any) -> None:
        """Adds the further pieces of each of the `rows` to its first one, in order; the `second` ones begin them.

        The sums and squares, all that `refs` are, change in place.
        """
        sums, squares = refs[len(refs) // 2 :]
        places = self.own()
        inside = places < begins.shape[0]
        some = fetch(second.at[places], mask=inside, other=0) > 0

        @pl.when(jnp.max(some.astype(jnp.int32)) > 0)
        def _() -> None:
            left = fetch(ends.at[places], mask=some, other=0) - fetch(begins.at[places], mask=some, other=0)
            row = fetch(rows.at[places], mask=some, other=0)
            total = self.add_up(
                self.read(sums, row, some), pl.cdiv(left, PIECE), lambda i, alive: self.read(pieces, places + i, alive)
            )
            self.write(sums, row, total, some)
            self.write(squares, row, jnp.sum(total * total, axis=1), some)

    def update_kernel(
        self, places: Any, sums: Any, numbers: Any, *refs: Any, optimizer: RowOptimizer, names: Sequence[str]
    ) -> None:
        """Updates the rows `places`, in place; `numbers` are the gradients' factor, the rate, and the count."""
        table, *kept = refs[len(refs) // 2 :]
        index, limit = self.own(), table.shape[0]
        row = fetch(places.at[index], mask=index < places.shape[0], other=limit)
        some = row < limit

        @pl.when(jnp.min(row) < limit)
        def _() -> None:
            factor, rate, count = numbers[0], numbers[1], numbers[2]
            old = self.read(table, row, some)
            grads = self.read(sums, index, some) * factor
            if optimizer.weight_decay:
                grads = grads + optimizer.weight_decay * old
            square = jnp.sum(grads * grads, axis=1) / self.columns
            before = {name: self.read(ref, row, some) for name, ref in zip(names, kept, strict=True)}
            new, after = optimizer.update(RowUpdate(old, before, grads, square, rate, count))
            self.write(table, row, new, some)
            for name, ref in zip(names, kept, strict=True):
                self.write(ref, row, after[name], some)

    def run(
        self,
        kernel: Callable[..., None],
        num_items: int,
        operands: Sequence[jax.Array],
        results: Sequence[Any],
        changed: Sequence[jax.Array] = (),
    ) -> list[jax.Array]:
        """The results of a kernel for so many items, of these types, and what it changes in place."""
        with jax.named_scope(GATHERS):
            return pl.pallas_call(
                kernel,
                [*results, *map(jax.typeof, changed)],
                grid=(pl.cdiv(num_items, self.rows),),
                input_output_aliases={len(operands) + i: len(results) + i for i in range(len(changed))},
                compiler_params=plt.CompilerParams(num_warps=WARPS),
                interpret=self.interpret,
            )(*operands, *changed)


def fits(columns: int) -> bool:
    """Whether there are kernels for rows of so many columns."""
    return columns <= MOST_COLUMNS


def sums_by_kernels(
    keys: jax.Array, vectors: jax.Array, grads: jax.Array, num_rows: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row once, int32 `[n]`; the sum of `grads[vectors]` of each, `[n, columns]`; and its sum of squares, `[n]`.

    `keys` are rows in rising order, `[n]`; `num_rows` or more is none. Rows past the end have any sums and squares.
    """
    keys, vectors, grads = alike((), keys, vectors, grads)
    kernels, size = Rows(grads.shape[1], interpret), keys.size
    places = jnp.arange(size, dtype=jnp.int32)
    valid = keys < num_rows
    starts = valid & jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
    segments = jnp.cumsum(starts, dtype=jnp.int32) - 1
    total = jnp.sum(valid, dtype=jnp.int32)
    first = jnp.full(size + 1, total).at[jnp.where(starts, segments, size + 1)].set(places, mode="drop")
    begins, ends = first[:-1], first[1:]
    unique = jnp.where(begins < total, keys[begins], num_rows + places)
    # A further piece is PIECE or more behind every other one, so this numbers them, those of a row in turn. Programs
    # have either further pieces or first ones.
    num_further = pl.cdiv(pl.cdiv(size, PIECE), kernels.rows) * kernels.rows
    within = places - first[segments]
    number = jnp.where(valid & (within > 0) & (within % PIECE == 0), places // PIECE, size)
    further = jnp.full(num_further, size, jnp.int32).at[number].set(places, mode="drop")
    there = further < size
    row = segments[further]
    stop = jnp.where(there, ends[row], further)
    second = there & (further - begins[row] == PIECE)
    like = jax.typeof(grads)
    shapes = [(num_further, grads.shape[1]), (size, grads.shape[1]), (size,)]
    operands = [vectors, jnp.concatenate([further, begins]), jnp.concatenate([stop, ends]), grads]
    results = [like.update(shape=shape) for shape in shapes]
    pieces, sums, squares = kernels.run(kernels.sum_kernel, num_further + size, operands, results)
    operands = [further, stop, row, second.astype(jnp.int32), pieces]
    sums, squares = kernels.run(kernels.join_kernel, num_further, operands, [], [sums, squares])
    return unique, sums, squares


def update_by_kernel(
    table: jax.Array,
    state: RowState,
    places: jax.Array,
    sums: jax.Array,
    numbers: jax.Array,
    optimizer: RowOptimizer,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, RowState]:
    """The table `[rows, columns]` and what the optimizer keeps of its rows after the update of the rows `places`.

    `places` are unique, those past the end none; `numbers` are the gradients' factor, the learning rate, and the count
    of updates with this one.
    """
    kernels, names = Rows(table.shape[1], interpret), tuple(state)
    operands = alike((), places, sums, numbers, table, *state.values())
    kernel = functools.partial(kernels.update_kernel, optimizer=optimizer, names=names)
    new, *after = kernels.run(kernel, places.size, operands[:3], [], operands[3:])
    return new, dict(zip(names, after, strict=True))
