"""Differential checkpoints of embedding tables: the rows that changed since the last whole one.

The idea is that of Check-N-Run (Eisenman et al., NSDI 2022), without its quantization.

Which rows changed is known by a fingerprint of each row and its state, 8 bytes a row in the memory of the host, taken
when the tables are written whole. Compared with the alternatives, it needs no second copy of the tables, the step
neither keeps nor updates a bitmap, and whatever changes a row is seen: updates, rollbacks, and a state that comes from
elsewhere. It costs one read of the tables on their devices. A change goes unseen with a probability of about 2**-64;
then the fingerprint of the whole array, which is of what should be restored, differs at a restore.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import future

from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.mesh import on_hosts
from jaxdl.training.checkpoint.fingerprint import row_fingerprints, tag_words

CHANGED = "changed_rows"
"""The item of a checkpoint with the changed rows: a file of each process, with the rows of its devices."""
_AT_ONCE = 2**16
"""Rows that are gathered on a device at once: the copy that they need is small beside a table."""
_WORD_BYTES = 8
Prints = dict[str, dict[tuple[int, int], np.ndarray]]
"""Buffer -> (first row, end) of a shard on this process -> fingerprints of its rows, uint32 `[rows, 2]`."""


class Rows(NamedTuple):
    """Some rows of an array."""

    name: str
    """The array's in the checkpoint."""
    rows: np.ndarray
    """Their numbers in the global array, int64."""
    column: int
    """The first column of the values in the global array."""
    values: np.ndarray


@dataclass(frozen=True)
class Changed:
    """What a differential checkpoint has of the tables."""

    base: int
    """The step of the checkpoint that has the whole tables."""
    rows: tuple[Rows, ...]
    """Of the devices of this process."""
    num_rows: int
    """Changed rows of all processes."""
    num_bytes: int
    """Bytes of all processes' rows and their numbers."""


class WrittenTables(NamedTuple):
    """What a checkpoint has of the tables."""

    base: int | None
    """The step of the checkpoint with the whole ones, if this one has changed rows alone."""
    num_bytes: int
    whole_bytes: int
    """Bytes of the whole tables and what is kept of each row."""
    num_rows: int
    """Changed rows; 0 if the tables are whole."""

    @property
    def text(self) -> str:
        """In words."""
        if self.base is None:
            return f"the embedding tables are written whole, {_size(self.num_bytes)}"
        return (
            f"{self.num_rows:,} rows of the embedding tables have changed since step {self.base}: "
            f"{_size(self.num_bytes)} are written instead of {_size(self.whole_bytes)}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.1f} kB"


class Differences:
    """Decides which checkpoints of a run have whole tables, and finds the changed rows for the others.

    All processes call the methods at the same steps.
    """

    def __init__(self, every: int | None) -> None:
        """Every `every`-th checkpoint has whole tables; with None all of them have."""
        self._every, self._since = every, 0
        self._base: tuple[int, Prints] | None = None
        self._programs: dict[Any, Any] = {}

    def find(self, step: int, tables: Mapping[str, jax.Array], complete: Sequence[int]) -> Changed | None:
        """The rows to write in the checkpoint of this step; None if the tables are to be written whole.

        They are whole if the last whole ones are not among the `complete` checkpoints (any more), or changed rows would
        take as many bytes. The first ones of a process are whole.
        """
        if self._every is None or not tables:
            return None
        prints = self._prints(tables, step)
        if self._base is not None and self._base[0] in complete and self._since + 1 < self._every:
            base, before = self._base
            changed = {
                buffer: {
                    place: np.flatnonzero((words != before[buffer][place]).any(axis=1))
                    for place, words in shards.items()
                }
                for buffer, shards in prints.items()
            }
            counts = _totals(_counts(tables, changed))
            if counts[1] < whole_bytes(tables):
                self._since += 1
                return Changed(base, tuple(_gather(tables, changed)), *counts)
        self._base, self._since = (step, prints), 0
        return None

    def written(self, tables: Mapping[str, jax.Array], changed: Changed | None) -> WrittenTables | None:
        """What is written of the tables, as `find` decided; None if no checkpoints are to be differential."""
        if self._every is None or not tables:
            return None
        whole = whole_bytes(tables)
        if changed is None:
            return WrittenTables(None, whole, whole, 0)
        return WrittenTables(changed.base, changed.num_bytes, whole, changed.num_rows)

    def _prints(self, tables: Mapping[str, jax.Array], step: int) -> Prints:
        """The fingerprints of all rows on this process.

        They have the step while they are on the devices: where those of an earlier one were fetched, all rows would
        have changed, and none that has is missed.
        """
        tag = np.uint32(step % 2**32)
        buffers: dict[str, list[jax.Array]] = {}
        for name in sorted(tables):
            buffers.setdefault(_buffer(name), []).append(tables[name])
        on_devices = {name: arrays for name, arrays in buffers.items() if not on_hosts(arrays[0])}
        waiting = {name: self._program(arrays)(arrays, tag) for name, arrays in on_devices.items()}
        jax.block_until_ready(waiting)
        prints: Prints = {}
        for name, words in waiting.items():
            shards = prints[name] = {}
            for shard in words.addressable_shards:
                place = _place(shard.index, words.shape)
                if place not in shards:
                    shards[place] = np.array(shard.data) ^ tag_words(tag)
        for name, arrays in buffers.items():
            if name not in on_devices:
                prints[name] = _prints_here(arrays, tag)
        return prints

    def _program(self, arrays: Sequence[jax.Array]) -> Any:
        """`row_fingerprints`, whose result is spread as the rows are."""
        sharding = arrays[0].sharding
        assert isinstance(sharding, NamedSharding)
        spec = PartitionSpec(*sharding.spec[:1])
        key = sharding.mesh, spec
        if key not in self._programs:
            self._programs[key] = jax.jit(row_fingerprints, out_shardings=NamedSharding(sharding.mesh, spec))
        return self._programs[key]


@jax.jit
def _of_rows(arrays: Sequence[jax.Array], tag: jax.Array) -> jax.Array:
    return row_fingerprints(arrays, tag)


def _prints_here(arrays: Sequence[jax.Array], tag: np.uint32) -> dict[tuple[int, int], np.ndarray]:
    """The fingerprints of the columns that this process has of rows in the memory of hosts.

    Where processes share the columns, each writes those of its own that have changed: no messages between CPUs.
    """
    parts = [x.addressable_shards[0] for x in arrays]
    prints = np.zeros((len(parts[0].data), 2), np.uint32)
    for start in range(0, len(prints), _AT_ONCE):
        rows = [np.asarray(part.data)[start : start + _AT_ONCE] for part in parts]
        words = jax.block_until_ready(_of_rows(jax.device_put(rows, parts[0].device), tag))
        prints[start : start + _AT_ONCE] = np.asarray(words) ^ tag_words(tag)
    return {_place(parts[0].index, arrays[0].shape): prints}


def whole_bytes(tables: Mapping[str, jax.Array]) -> int:
    """Bytes of the whole tables and their states."""
    return sum(x.nbytes for x in tables.values())


def _buffer(name: str) -> str:
    """`tables.BUFFER` of `tables.BUFFER.rows`."""
    return name.rpartition(".")[0]


def _place(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[int, int]:
    """(first row, end) of a shard."""
    start, stop, _ = index[0].indices(shape[0])
    return start, stop


def _shards_to_write(tables: Mapping[str, jax.Array]) -> Iterable[tuple[str, Any]]:
    """(name, shard) of what this process writes: of equal copies the first."""
    return ((name, shard) for name, x in tables.items() for shard in x.addressable_shards if shard.replica_id == 0)


def _counts(tables: Mapping[str, jax.Array], changed: Mapping[str, Mapping[tuple[int, int], np.ndarray]]) -> list[int]:
    """Changed rows, each counted once, and bytes to write, of this process."""
    num_rows, num_bytes = 0, 0
    counted = {_buffer(name): name for name in sorted(tables, reverse=True)}
    for name, shard in _shards_to_write(tables):
        here = changed[_buffer(name)][_place(shard.index, tables[name].shape)]
        num_bytes += len(here) * (_WORD_BYTES + shard.data.nbytes // max(1, len(shard.data)))
        if counted[_buffer(name)] == name and all(not extent.start for extent in shard.index[1:]):
            num_rows += len(here)
    return [num_rows, num_bytes]


def _totals(numbers: list[int]) -> tuple[int, int]:
    every = [json.loads(content) for content in from_each_process(json.dumps(numbers).encode())]
    num_rows, num_bytes = np.sum(every, axis=0).tolist()
    return num_rows, num_bytes


def _gather(
    tables: Mapping[str, jax.Array], changed: Mapping[str, Mapping[tuple[int, int], np.ndarray]]
) -> Iterable[Rows]:
    for name, shard in _shards_to_write(tables):
        start, stop = _place(shard.index, tables[name].shape)
        here = changed[_buffer(name)][start, stop]
        if len(here):
            column = shard.index[1].start or 0 if len(shard.index) > 1 else 0
            yield Rows(name, start + here.astype(np.int64), column, _taken(shard.data, here))


@jax.jit
def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x[rows]


def _taken(x: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Some rows of an array on one device, on the host. Their number is made a power of two: few programs."""
    made = np.empty((len(rows), *x.shape[1:]), x.dtype)
    for start in range(0, len(rows), _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        padded = np.zeros(1 << (len(part) - 1).bit_length(), np.int32)
        padded[: len(part)] = part
        made[start : start + len(part)] = np.asarray(_take(x, padded))[: len(part)]
    return made


class ChangedHandler(ocp.AsyncCheckpointHandler):
    """Orbax's handler of the item: it becomes a part of the checkpoint with the others, or the folder is removed."""

    async def async_save(self, directory: Any, args: SaveChanged) -> list[Any]:
        """Starts writing; the rows are on the host already."""
        writing = functools.partial(_write, tuple(args.rows))

        async def write() -> None:
            writing(Path(directory))

        return [future.CommitFutureAwaitingContractedSignals(write(), name="changed_rows_save")]

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Checkpoints are written asynchronously."""
        raise NotImplementedError

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """`read_changed` reads without Orbax."""
        raise NotImplementedError


@ocp.args.register_with_handler(ChangedHandler, for_save=True, for_restore=True)
@dataclass
class SaveChanged(ocp.args.CheckpointArgs):
    """The rows that this process writes."""

    rows: tuple[Rows, ...]


def _write(rows: Sequence[Rows], folder: Path) -> None:
    """Writes the file of this process."""
    arrays: dict[str, Any] = {"index": json.dumps([(part.name, part.column) for part in rows])}
    for number, row in enumerate(rows):
        # As bytes, since NumPy's files do not have all of JAX's types.
        values = np.ascontiguousarray(row.values).reshape(len(row.rows), -1).view(np.uint8)
        arrays |= {f"rows_{number}": row.rows, f"values_{number}": values}
    with (folder / f"process_{jax.process_index()}.npz").open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def read_changed(folder: Path, dtypes: Mapping[str, str | None]) -> list[Rows]:
    """The changed rows of all processes in the checkpoint in `folder`; `dtypes` are those of the whole arrays.

    Raises OSError, and other errors for files that are damaged.
    """
    parts = []
    for path in sorted((folder / CHANGED).glob("process_*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            for number, (name, column) in enumerate(json.loads(str(arrays["index"]))):
                values = arrays[f"values_{number}"].view(np.dtype(dtypes[name]))
                parts.append(Rows(name, arrays[f"rows_{number}"], column, values))
    return parts


def by_array(changed: Iterable[Rows]) -> dict[str, list[Rows]]:
    """The changed rows of each array, by its name."""
    rows: dict[str, list[Rows]] = {}
    for buffer in changed:
        rows.setdefault(buffer.name, []).append(buffer)
    return rows


def with_changed(arrays: Mapping[str, jax.Array], changed: Iterable[Rows]) -> dict[str, jax.Array]:
    """Whole tables on their devices after the changed rows are put in place.

    Shards are changed in the memory of the host, one array after the other, and those on the devices are deleted
    before: an array is never on a device twice.
    """
    rows = by_array(changed)
    return {name: _changed_array(x, rows[name]) if name in rows else x for name, x in arrays.items()}


def _changed_array(x: jax.Array, changed: Sequence[Rows]) -> jax.Array:
    shape, sharding, dtype = x.shape, x.sharding, x.dtype
    shards: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}
    for shard in x.addressable_shards:
        key = _bounds(shard.index, shape)
        if key not in shards:
            shards[key] = np.array(shard.data)
            put_changed(shards[key], shard.index, changed)
    x.delete()
    return jax.make_array_from_callback(shape, sharding, lambda index: shards[_bounds(index, shape)], dtype=dtype)


def _bounds(index: tuple[slice, ...] | None, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    assert index is not None
    return tuple(extent.indices(size) for extent, size in zip(index, shape, strict=True))


def put_changed(block: np.ndarray, index: tuple[slice, ...], changed: Sequence[Rows]) -> None:
    """Puts rows of an array in place in its part `index`."""
    flat = block.reshape(len(block), -1)
    first = index[0].start or 0
    left = index[1].start or 0 if len(index) > 1 else 0
    for buffer in changed:
        mine = (buffer.rows >= first) & (buffer.rows < first + len(flat))
        start, stop = max(left, buffer.column), min(left + flat.shape[1], buffer.column + buffer.values.shape[1])
        if start < stop:
            values = buffer.values[mine, start - buffer.column : stop - buffer.column]
            flat[buffer.rows[mine] - first, start - left : stop - left] = values
