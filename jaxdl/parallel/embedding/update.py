"""The exact update of touched rows: their gradients are summed first, then each row is updated once, in place.

AdaGrad and Adam are not linear in the gradient, so an update for each occurrence of an id would be another one. A
gradient of a whole table is made for `data_parallel` tables alone, which are small: else what is sorted, summed and
sent is as long as the batch has ids.

On NVIDIA GPUs sums and updates are kernels of our own (`kernels.py`), where these prove right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jaxdl.parallel.collectives.own_kernels import OwnKernels
from jaxdl.parallel.collectives.primitive import Result, alike, define
from jaxdl.parallel.embedding import levels
from jaxdl.parallel.embedding.layout import Buffer
from jaxdl.parallel.embedding.lookup import Located
from jaxdl.parallel.embedding.optimizers import RowOptimizer, RowState, RowUpdate
from jaxdl.parallel.embedding.sorting import by_row
from jaxdl.parallel.embedding.wire import Wire

ROUTE = "JAXDL_TABLES"
"""The environment variable that chooses kernels of our own, or plain XLA: see `OwnKernels`."""


class Touched(NamedTuple):
    """Rows of a device that some example has, and the sums of their gradients."""

    rows: jax.Array
    """Row numbers, each once, int32 `[n]`; the rest are past the end."""
    grads: jax.Array
    """float32 `[n, local columns]`; anything past the end."""
    squares: jax.Array
    """The sum of squares of each row of `grads`, `[n]`; anything past the end."""


def touched(buffer: Buffer, located: Located, grads: jax.Array) -> Touched:
    """The rows of this device that the examples of its group touch; `grads` are what `owned_grads` returned.

    Equal rows are summed in the order of examples, so the bits do not depend on how examples are spread.
    """
    flat = grads.reshape(-1, grads.shape[-1])
    rows, vectors = located.rows.reshape(-1), _gradient_places(buffer, located)
    return summed(rows, vectors, flat, buffer.local_rows, in_order=located.vectors is None)


def _gradient_places(buffer: Buffer, located: Located) -> jax.Array:
    """Of each entry, its place in the gradients of all examples and ranks."""
    if located.vectors is not None:
        return located.vectors.reshape(-1)
    ranks = np.repeat(np.arange(len(buffer.widths)), buffer.widths)
    vectors = np.arange(len(located.rows))[:, None] * len(buffer.widths) + ranks
    return jnp.asarray(vectors.reshape(-1), jnp.int32)


def summed(rows: jax.Array, vectors: jax.Array, grads: jax.Array, num_rows: int, *, in_order: bool = True) -> Touched:
    """Each row once, with the sum of `grads[vectors]` over its occurrences in `rows`, `[n]`, by rising `vectors`.

    Rows that are `num_rows` or more count as none. With `in_order`, `vectors` rise already.
    """
    keys, wanted = by_row(rows, vectors, in_order=in_order)
    operands = alike((), keys, wanted, grads)
    return Touched(*_sums_p.bind(*operands, num_rows=num_rows))


def _sums_by_xla(keys: jax.Array, wanted: jax.Array, grads: jax.Array, *, num_rows: int) -> tuple[jax.Array, ...]:
    """The fields of `Touched`, from rows in rising order and the places of their gradients."""
    starts = jnp.concatenate([jnp.ones(1, bool), keys[1:] != keys[:-1]])
    segments = jnp.cumsum(starts, dtype=jnp.int32) - 1
    entry_grads = jnp.take(grads, wanted, axis=0)
    entry_grads = jnp.where((keys < num_rows)[:, None], entry_grads, 0)
    sums = jax.ops.segment_sum(entry_grads, segments, keys.size, indices_are_sorted=True)
    # Places past the end differ from each other, so that a scatter's indices are unique.
    beyond = num_rows + jnp.arange(keys.size, dtype=jnp.int32)
    places = jnp.where(starts, segments, keys.size)
    unique = beyond.at[places].set(jnp.where(keys < num_rows, keys, num_rows + segments), mode="drop")
    return unique, sums, jnp.sum(sums**2, axis=1)


def _sums_on_cuda(keys: jax.Array, wanted: jax.Array, grads: jax.Array, *, num_rows: int) -> tuple[jax.Array, ...]:
    """The same, by kernels of our own where these prove right."""
    if SUMS.used():
        from jaxdl.parallel.embedding import kernels

        if kernels.fits(grads.shape[1]):
            return kernels.sums_by_kernels(keys, wanted, grads, num_rows)
    return _sums_by_xla(keys, wanted, grads, num_rows=num_rows)


def _sums_types(keys: Any, wanted: Any, grads: Any, *, num_rows: int) -> Sequence[Result]:
    del wanted, num_rows
    types = (((), jnp.int32), (grads.shape[1:], jnp.float32), ((), jnp.float32))
    return [Result((keys.size, *shape), dtype) for shape, dtype in types]


_sums_p = define("sum_rows", _sums_by_xla, _sums_types, core_ndims=(1, 1, 2), platforms={"cuda": _sums_on_cuda})


def of_all_copies(buffer: Buffer, touched_rows: Touched, send: Wire) -> Touched:
    """What the examples of all copies of the rows touch, the same on each of them.

    Every copy gets every other's rows and sums, and adds them up in the same order. If the rows of each fit into the
    room of a message, no more is sent.
    """
    if buffer.num_copies == 1:
        return touched_rows
    axes, count = buffer.spread.copies, buffer.local_rows
    total = buffer.num_copies * touched_rows.rows.size

    def exchanged(room: int, local_touched: Touched) -> Touched:
        # Touched rows come first.
        rows = levels.all_gather(local_touched.rows[:room], axes).reshape(-1)
        grads = send(local_touched.grads[:room], lambda x: levels.all_gather(x, axes)).reshape(
            -1, local_touched.grads.shape[-1]
        )
        sums = summed(rows, jnp.arange(rows.size, dtype=jnp.int32), grads, count)
        beyond = count + jnp.arange(rows.size, total, dtype=jnp.int32)
        padding = jnp.zeros((total - rows.size, grads.shape[-1]), grads.dtype)
        return Touched(
            jnp.concatenate([sums.rows, beyond]),
            jnp.concatenate([sums.grads, padding]),
            jnp.concatenate([sums.squares, padding[:, 0]]),
        )

    room = buffer.room(touched_rows.rows.size)
    if room == touched_rows.rows.size:
        return exchanged(room, touched_rows)
    # All devices must choose alike, or some would wait for a message that nobody sends.
    most = lax.pmax(jnp.sum(touched_rows.rows < count), tuple(buffer.sizes))
    every = touched_rows.rows.size
    return lax.cond(most <= room, lambda x: exchanged(room, x), lambda x: exchanged(every, x), touched_rows)


def of_all_rows(buffer: Buffer, located: Located, grads: jax.Array) -> Touched:
    """As `touched` and `of_all_copies`, by a sum of gradients of all rows: for tables with few."""
    entry_grads = jnp.take(grads.reshape(-1, grads.shape[-1]), _gradient_places(buffer, located), axis=0)
    rows, count = located.rows.reshape(-1), buffer.local_rows
    marked = jnp.concatenate([entry_grads, jnp.ones((rows.size, 1), entry_grads.dtype)], axis=1)
    total = jnp.zeros((count, marked.shape[1]), jnp.float32).at[rows].add(marked, mode="drop")
    if buffer.num_copies > 1:
        total = levels.all_reduce(total, buffer.spread.copies, buffer.sizes)
    places = jnp.arange(count, dtype=jnp.int32)
    sums = total[:, :-1]
    return Touched(jnp.where(total[:, -1] > 0, places, count + places), sums, jnp.sum(sums**2, axis=1))


def square_sum(buffer: Buffer, touched_rows: Touched) -> jax.Array:
    """The sum of squares of the gradients of all rows of the buffer, the same on all devices."""
    total = jnp.sum(jnp.where(touched_rows.rows < buffer.local_rows, touched_rows.squares, 0))
    axes = buffer.spread.owners
    return lax.psum(total, axes) if axes else total


@dataclass(frozen=True)
class _Hashable:
    """An optimizer as a parameter of a primitive, which JAX hashes; a field of a user's own optimizer may be a list."""

    kind: type[RowOptimizer]
    text: str
    config: RowOptimizer = field(compare=False)


def _hashable(optimizer: RowOptimizer) -> _Hashable:
    return _Hashable(type(optimizer), repr(optimizer), optimizer)


def update_rows(
    buffer: Buffer,
    rows: jax.Array,
    state: RowState,
    found: Touched,
    *,
    kept: jax.Array,
    factor: jax.Array,
    rate: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, RowState]:
    """The rows of this device and their state after the update of those `found`; unchanged if not `kept`.

    Gradients are multiplied by `factor`. Only what is touched is read and written. A choice between old and new rows
    would copy the table.
    """
    places = jnp.where(kept, found.rows, found.rows + jnp.int32(buffer.local_rows))
    numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in (factor, rate, count)])
    operands = alike((), rows, places, found.grads, numbers, *state.values())
    same: dict[str, Any] = {"optimizer": _hashable(buffer.optimizer), "names": tuple(state)}
    if buffer.column_ways > 1 and buffer.optimizer.needs_square:
        # Each device has a part of the squares of a row.
        new = _update_by_xla(*operands, **same, columns=buffer.columns, axes=buffer.spread.inner)
    else:
        new = _update_primitive(tuple(x.ndim for x in state.values())).bind(*operands, **same)
    return new[0], dict(zip(state, new[1:], strict=True))


def _update_by_xla(
    rows: jax.Array,
    places: jax.Array,
    sums: jax.Array,
    numbers: jax.Array,
    *state: jax.Array,
    optimizer: _Hashable,
    names: Sequence[str],
    columns: int | None = None,
    axes: Sequence[str] = (),
) -> Sequence[jax.Array]:
    """The rows, and what is kept of them, after the update of those at `places`, of which `sums` are the gradients.

    `numbers` are their factor, the learning rate and the count of updates. Devices along `axes` have parts of a row's
    `columns`.
    """
    factor, rate, count = numbers

    def read(x: jax.Array) -> jax.Array:
        return x.at[places].get(mode="fill", fill_value=0)

    def write(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[places].set(new.astype(x.dtype), mode="drop", unique_indices=True)

    old, grads = read(rows), sums * factor
    if optimizer.config.weight_decay:
        grads = grads + optimizer.config.weight_decay * old
    square = jnp.sum(grads**2, axis=1)
    if axes:
        square = lax.all_gather(square, tuple(axes)).sum(axis=0)
    before = {name: read(x) for name, x in zip(names, state, strict=True)}
    mean_square = square / (columns or rows.shape[1])
    new, after = optimizer.config.update(RowUpdate(old, before, grads, mean_square, rate, count))
    return write(rows, new), *(write(x, after[name]) for name, x in zip(names, state, strict=True))


def _update_on_cuda(
    rows: jax.Array,
    places: jax.Array,
    sums: jax.Array,
    numbers: jax.Array,
    *state: jax.Array,
    optimizer: _Hashable,
    names: Sequence[str],
) -> Sequence[jax.Array]:
    """The same, by a kernel of our own where this proves right for the optimizer."""
    if _kernel_of(optimizer).used():
        from jaxdl.parallel.embedding import kernels

        if kernels.fits(rows.shape[1]):
            before = dict(zip(names, state, strict=True))
            new, after = kernels.update_by_kernel(rows, before, places, sums, numbers, optimizer.config)
            return new, *after.values()
    return _update_by_xla(rows, places, sums, numbers, *state, optimizer=optimizer, names=names)


def _update_types(rows: Any, places: Any, sums: Any, numbers: Any, *state: Any, **_: Any) -> Sequence[Result]:
    del places, sums, numbers
    return [Result(x.shape, x.dtype) for x in (rows, *state)]


@functools.cache
def _update_primitive(state_ndims: tuple[int, ...]) -> Primitive:
    """The update of tables of which arrays with so many dimensions are kept."""
    ndims = (2, 1, 2, 1, *state_ndims)
    return define("update_rows", _update_by_xla, _update_types, core_ndims=ndims, platforms={"cuda": _update_on_cuda})


def _sums_are_right() -> bool:
    from jaxdl.parallel.embedding import kernels_trial

    return kernels_trial.sums_are_right()


SUMS = OwnKernels(
    ROUTE,
    "the kernels that sum the gradients of rows of tables",
    "XLA's slower sums are used, whose last digits can differ from run to run",
    _sums_are_right,
)


@functools.cache
def _kernel_of(optimizer: _Hashable) -> OwnKernels:
    """The kernel that updates rows with this optimizer, whose settings can make it another program."""

    def rightly() -> bool:
        from jaxdl.parallel.embedding import kernels_trial

        return kernels_trial.updates_are_right(optimizer.config)

    what = f"the kernel that updates rows of tables by {optimizer.kind.kind}"
    return OwnKernels(ROUTE, what, "XLA's slower update is used, with the same results", rightly)


def agree_on_kernels(optimizers: Iterable[RowOptimizer]) -> None:
    """All processes of a run on GPUs agree on the kernels for tables with these optimizers; all call it alike."""
    SUMS.agree()
    for optimizer in dict.fromkeys(map(_hashable, optimizers)):
        _kernel_of(optimizer).agree()
