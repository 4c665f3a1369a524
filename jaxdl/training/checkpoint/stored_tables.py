"""Embedding tables of a checkpoint: where they are stored, and reading those that Orbax does not read.

Orbax gives each device its part of an array. Tables in another layout than the stored one have rows from everywhere on
each device, and tables with a cache are in files, so both are read in pieces, and checked as they come.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdl.core.files import step_folder
from jaxdl.parallel.embedding import places
from jaxdl.parallel.embedding.store import Allocate
from jaxdl.parallel.mesh import on_hosts
from jaxdl.training.checkpoint.differential import Rows, by_array, put_changed, read_changed
from jaxdl.training.checkpoint.errors import Damaged
from jaxdl.training.checkpoint.fingerprint import text
from jaxdl.training.checkpoint.manifest import check_files
from jaxdl.training.checkpoint.meta import Meta, read_meta
from jaxdl.training.checkpoint.pieces import StoredRows, Summed
from jaxdl.training.state import TABLES

_ALIGNED = 64
"""Bytes."""


def in_memory(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An `Allocate` of zeros."""
    del name
    return aligned(shape)


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array of zeros that JAX takes as it is on a CPU: others are copied."""
    count = math.prod(shape)
    room = np.zeros(count + _ALIGNED // 4, np.float32)
    start = -room.ctypes.data % _ALIGNED // 4
    return room[start : start + count].reshape(shape)


class Base(NamedTuple):
    """The checkpoint with the whole tables of which a differential one has the changed rows."""

    folder: Path
    meta: Meta
    changed: list[Rows]


def open_base(folder: Path, meta: Meta) -> Base | None:
    """What a differential checkpoint is made of; None for another one.

    Raises Damaged, Unreadable, and what NumPy raises.
    """
    if meta.base is None:
        return None
    base = folder.parent / step_folder(meta.base)
    with named_base(base):
        if not base.is_dir():
            raise Damaged(f"there is no {base}")
        if jax.process_index() == 0:
            check_files(base)
        there = read_meta(base)
        if there.base is not None or list(there.table_layout) != list(meta.table_layout):
            raise Damaged("it is another checkpoint than the one that was written")
    return Base(base, there, read_changed(folder, {name: array.dtype for name, array in meta.arrays[TABLES].items()}))


@contextlib.contextmanager
def named_base(base: Path) -> Iterator[None]:
    """What is damaged inside is the checkpoint with the whole tables."""
    try:
        yield
    except Damaged as error:
        raise Damaged(f"it needs the embedding tables of {base.name}, which cannot be used: {error}") from None


def changed_values(names: list[str]) -> ValueError:
    """The error of arrays whose fingerprints are not those that were stored."""
    return ValueError(f"the stored values of {', '.join(names[:3])} have changed since they were written")


def read_moved(
    folder: Path,
    meta: Meta,
    base: Base | None,
    wanted: Mapping[str, Any],
    layout: places.Layout,
    allocate: Allocate = in_memory,
) -> dict[str, jax.Array]:
    """The tables of a checkpoint in another layout; every process reads all of them, piece by piece.

    `allocate` makes the parts of those in the memory of hosts. Raises ValueError if they have changed since they were
    written, and what TensorStore raises.
    """

    def part(name: str, shape: tuple[int, ...]) -> np.ndarray:
        return (allocate if on_hosts(wanted[f"{TABLES}.{name}"]) else in_memory)(name, shape)

    made = places.Moved(layout, {_short(name): x for name, x in wanted.items()}, part)
    rows = by_array([] if base is None else base.changed)
    for buffer in places.from_json(meta.table_layout):
        for name in (name for name in meta.arrays[TABLES] if _short(name).rpartition(".")[0] == buffer.buffer):
            stored = StoredRows(folder if base is None else base.folder, TABLES, name)
            before, after = Summed(stored.shape), Summed(stored.shape)
            for first, piece in stored.pieces(0, stored.shape[0]):
                if base is not None:
                    before.add(first, piece)
                    here = slice(first, first + len(piece)), *(slice(0, size) for size in stored.shape[1:])
                    put_changed(piece, here, rows.get(name, ()))
                after.add(first, piece)
                made.put(buffer, name.rpartition(".")[2], first, piece)
            if base is not None and text(before.words) != base.meta.arrays[TABLES][name].fingerprint:
                raise changed_values([f"{TABLES}.{name} of {base.folder.name}"])
            if text(after.words) != meta.arrays[TABLES][name].fingerprint:
                raise changed_values([f"{TABLES}.{name}"])
    return {f"{TABLES}.{name}": x for name, x in made.arrays().items()}


def _short(name: str) -> str:
    return name.removeprefix(f"{TABLES}.")


class Hosted:
    """Arrays in the memory of hosts, or in files of theirs: of each array a part, of which one device stands for it."""

    def __init__(self, wanted: Mapping[str, Any], allocate: Allocate) -> None:
        """`wanted` are their shape structs with shardings; `allocate` makes the parts."""
        self._wanted, self._allocate = dict(wanted), allocate
        self._parts: dict[str, np.ndarray] = {}

    def read(self, folder: Path) -> None:
        """Fills the parts from a checkpoint. Raises what TensorStore raises."""
        for name, struct in self._wanted.items():
            rows, *columns = self._index(struct)
            start, stop, _ = rows.indices(struct.shape[0])
            widths = [len(range(*column.indices(size))) for column, size in zip(columns, struct.shape[1:], strict=True)]
            part = self._parts[name] = self._allocate(_short(name), (stop - start, *widths))
            for first, piece in StoredRows(folder, TABLES, name).pieces(start, stop, columns):
                part[first - start : first - start + len(piece)] = piece

    def put(self, changed: list[Rows]) -> None:
        """Puts changed rows in place; earlier results of `arrays` must not be used any more."""
        for name, rows in by_array(changed).items():
            if name in self._parts:
                put_changed(self._parts[name], self._index(self._wanted[name]), rows)

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of all processes. They share the memory of the parts."""
        arrays = {}
        for name, part in self._parts.items():
            sharding = self._wanted[name].sharding
            [device] = sharding.addressable_devices
            array = jax.device_put(part, device)
            arrays[name] = jax.make_array_from_single_device_arrays(self._wanted[name].shape, sharding, [array])
        return arrays

    @staticmethod
    def _index(struct: Any) -> tuple[slice, ...]:
        [index] = struct.sharding.addressable_devices_indices_map(struct.shape).values()
        return tuple(index)
