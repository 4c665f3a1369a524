"""Tables in the host's memory, or in memory-mapped files; the devices have some of their rows in slots."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.config import ConfigError
from jaxdl.embedding.cache import SlotPlan, Swap, Window
from jaxdl.embedding.initial import rows_of_ids
from jaxdl.embedding.layout import Buffer
from jaxdl.embedding.places import Places
from jaxdl.embedding.table import Table
from jaxdl.embedding.tables import ROWS, Tables, TableState

Allocate = Callable[[str, tuple[int, ...]], np.ndarray]
"""Makes a float32 array for a name and a shape."""
_CHUNK_ROWS = 2**17
_LEAST_SWAPPED = 64
"""Rows swapped on a device are padded to a power of two, at least this: few programs are compiled."""


class _Leaving(NamedTuple):
    """Rows that a step read out of their slots; `values` are still being computed."""

    ids: Mapping[str, np.ndarray]
    """Table -> ids."""
    taken: Mapping[str, Sequence[tuple[str, int, np.ndarray, np.ndarray]]]
    """Buffer -> (table, device, positions among the table's ids, positions on the device)."""
    values: Any


class _Holding(NamedTuple):
    """What a device has of a buffer; devices with the same are copies."""

    part: int
    """The number of its part of the rows, as `Places` counts them."""
    columns: slice
    """Its columns of these rows."""

    def of(self, x: np.ndarray) -> tuple[Any, ...]:
        """Its columns, as an index after that of the rows, of rows or of one number a row."""
        return (self.columns,) if x.ndim > 1 else ()


class _Piece(NamedTuple):
    """Rows of a table on one device."""

    buffer: str
    table: str
    device: int
    numbers: np.ndarray
    """Which of the rows of the swap."""
    rows: np.ndarray
    """Their row numbers on the device."""
    leaves: bool


class Store:
    """All rows of some tables, and what is kept of them, on the host. For one process.

    `tables` has as many rows of these on the devices as they have slots; `whole` are their configs.
    """

    def __init__(self, tables: Tables, whole: Sequence[Table], num_ids: Mapping[str, int], allocate: Allocate) -> None:
        """`allocate` makes the arrays of the rows. Raises ConfigError for what a cache does not work with."""
        self._allocated = allocate
        self.tables, self.config = tables, tables.config.cache
        if jax.process_count() > 1:
            raise ConfigError("--embedding.cache: it works in one process with its devices. Leave out the cache.")
        slots = {one.name: one.rows for one in tables.tables}
        self.whole = {one.name: one for one in whole if slots[one.name] != one.rows}
        if not self.whole:
            most = max(whole, key=lambda one: one.rows)
            raise ConfigError(
                f"--embedding.cache: no table that may have one has {self.config.min_rows:,} rows or more; the "
                f"largest, {most.name}, has {most.rows:,}. Set --embedding.cache.min-rows, or leave out the cache."
            )
        self._buffers = {
            table.name: buffer for buffer in tables.buffers for table in buffer.tables if table.name in self.whole
        }
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        """Table -> `rows` `[rows, columns]` and what its optimizer keeps, float32."""
        self._slots = slots
        self._columns = _columns_of(self.whole.values(), num_ids)
        self._swap = jax.jit(functools.partial(_swapped, tables), donate_argnums=0)
        self._devices = {buffer.name: _holdings(buffer) for buffer in self._buffers.values()}
        self._id_of: dict[str, np.ndarray] = {}
        self._leaving: deque[_Leaving] = deque()
        self._in_flight = {name: np.zeros(one.rows, bool) for name, one in self.whole.items()}
        self.reset()

    def reset(self) -> None:
        """All slots are empty from now on: what they had is in the store."""
        self._id_of = {name: np.full(self._slots[name], -1, np.int64) for name in self.whole}

    def _begin(self) -> None:
        """Empty slots, and a store to be filled; rows that were under way are those of another state."""
        self._allocate()
        self._leaving.clear()
        for flags in self._in_flight.values():
            flags[:] = False
        self.reset()

    def init(self, key: jax.Array) -> None:
        """Fills the store with the initial rows of a run with this key, those of `Tables.init`."""
        self._begin()
        words = np.asarray(jax.random.key_data(jax.random.fold_in(key, 2)))
        for name, table in self.whole.items():
            for first in range(0, table.rows, _CHUNK_ROWS):
                ids = np.arange(first, min(first + _CHUNK_ROWS, table.rows))
                self.rows[name][ROWS][ids] = rows_of_ids(table, words, ids)
            for what, x in self.rows[name].items():
                if what != ROWS:
                    x[:] = 0

    def _allocate(self) -> None:
        if self.rows:
            return
        for name, table in self.whole.items():
            kept = self._buffers[name].optimizer.row_numbers
            shapes = {ROWS: (table.rows, table.columns)}
            shapes |= {what: (table.rows,) if one else (table.rows, table.columns) for what, one in kept.items()}
            self.rows[name] = {what: self._allocated(f"{name}.{what}", shape) for what, shape in shapes.items()}

    def window(self) -> Window:
        """A plan for batches from here on, whose slots are empty."""
        plans = {
            name: SlotPlan(name, table.rows, self._slots[name], self.config.policy)
            for name, table in self.whole.items()
        }
        return Window(plans, self._columns, self.config.window)

    def swapped(self, state: TableState, swaps: Mapping[str, Swap]) -> TableState:
        """The state after a swap of each table; it is donated."""
        self._settle(swaps)
        lists, taken = self._lists(swaps, None)
        state, values = self._swap(state, lists)
        leaving = {name: swap.evicted for name, swap in swaps.items()}
        for name, ids in leaving.items():
            self._in_flight[name][ids] = True
        if taken:
            self._leaving.append(_Leaving(leaving, taken, values))
        for name, swap in swaps.items():
            self._id_of[name][swap.evicted_slots] = -1
            self._id_of[name][swap.loaded_slots] = swap.loaded
        return state

    def _lists(self, swaps: Mapping[str, Swap], only: Sequence[str] | None) -> tuple[Any, dict[str, list[Any]]]:
        """(what each device gives up and gets, `[device, row, ...]`; where what it gives up belongs)."""
        pieces = [piece for name, swap in swaps.items() for piece in self._pieces(name, swap)]
        counts: Counter[tuple[str, int, bool]] = Counter()
        for one in pieces:
            counts[one.buffer, one.device, one.leaves] += len(one.rows)
        room = 1 << (max(_LEAST_SWAPPED, *counts.values(), 1) - 1).bit_length()
        lists = {name: self._blank(name, room, only) for name in self._devices}
        taken: dict[str, list[Any]] = {}
        used: Counter[tuple[str, int, bool]] = Counter()
        holdings = self._devices
        for one in pieces:
            key = (one.buffer, one.device, one.leaves)
            places = used[key] + np.arange(len(one.rows))
            used[key] += len(one.rows)
            mine = lists[one.buffer]
            if not one.leaves:
                mine["loaded"][one.device, places] = one.rows
                for what, x in mine["values"].items():
                    source, loaded = self.rows[one.table][what], swaps[one.table].loaded[one.numbers]
                    x[one.device, places] = source[loaded, *holdings[one.buffer][one.device].of(source)]
                continue
            mine["evicted"][one.device, places] = one.rows
            if holdings[one.buffer].index(holdings[one.buffer][one.device]) == one.device:  # Of copies the first.
                taken.setdefault(one.buffer, []).append((one.table, one.device, one.numbers, places))
        everywhere = NamedSharding(self.tables.mesh, PartitionSpec(tuple(self.tables.mesh.axis_names)))
        return jax.device_put(lists, everywhere), taken

    def _pieces(self, name: str, swap: Swap) -> Iterator[_Piece]:
        """The rows of a table's swap by device."""
        buffer = self._buffers[name]
        for slots, leaves in ((swap.evicted_slots, True), (swap.loaded_slots, False)):
            parts, rows = np.divmod(buffer.places.of(name, slots), buffer.local_rows)
            for device, one in enumerate(self._devices[buffer.name]):
                mine = np.flatnonzero(parts == one.part)
                if len(mine):
                    yield _Piece(buffer.name, name, device, mine, rows[mine], leaves)

    def _blank(self, buffer: str, room: int, only: Sequence[str] | None) -> dict[str, Any]:
        num, shapes = self.tables.mesh.size, self.tables.shapes[buffer]
        here = next(one for one in self._buffers.values() if one.name == buffer)
        beyond = np.tile(here.local_rows + np.arange(room, dtype=np.int32), (num, 1))
        values = {
            what: np.zeros((num, room, *(size // here.column_ways for size in x.shape[1:])), np.float32)
            for what, x in shapes.items()
            if only is None or what in only
        }
        return {"evicted": beyond.copy(), "loaded": beyond, "values": values}

    def with_rows(self, rows: Mapping[str, jax.Array], swaps: Mapping[str, Swap]) -> dict[str, jax.Array]:
        """Rows of each buffer in slots of their own, for evaluation, after those of a swap have come; donated."""
        loads = {
            name: swap._replace(evicted=swap.evicted[:0], evicted_slots=swap.evicted_slots[:0])
            for name, swap in swaps.items()
        }
        lists, _ = self._lists(loads, (ROWS,))
        state = {name: {ROWS: x} for name, x in rows.items()}
        return {name: one[ROWS] for name, one in self._swap(state, lists)[0].items()}

    def _settle(self, swaps: Mapping[str, Swap]) -> None:
        """Rows that left arrive in the store: those of long ago, and all if one of them is loaded again."""
        again = any(self._in_flight[name][swap.loaded].any() for name, swap in swaps.items())
        while self._leaving and (again or len(self._leaving) > self.config.window):
            self._arrive(self._leaving.popleft())

    def _arrive(self, one: _Leaving) -> None:
        for buffer, pieces in one.taken.items():
            values = {what: np.asarray(x) for what, x in one.values[buffer].items()}
            for name, device, mine, places in pieces:
                ids = one.ids[name][mine]
                for what, x in values.items():
                    kept = self.rows[name][what]
                    kept[ids, *self._devices[buffer][device].of(kept)] = x[device, places]
        for name, ids in one.ids.items():
            self._in_flight[name][ids] = False

    def write_back(self, state: TableState) -> None:
        """Everything that the devices have is in the store afterwards; the slots stay as they are."""
        while self._leaving:
            self._arrive(self._leaving.popleft())
        for name, buffer in self._buffers.items():
            slots = np.flatnonzero(self._id_of[name] >= 0)
            places = buffer.places.of(name, slots)
            for what, x in state[buffer.name].items():
                self.rows[name][what][self._id_of[name][slots]] = np.asarray(x)[places]

    # What a checkpoint has: whole tables, as arrays of the host's own CPU.

    @property
    def layout(self) -> tuple[Places, ...]:
        """Where rows are in checkpoints: those of tables with a cache in the order of ids, others as on the devices.

        A buffer with tables of both sorts is stored table by table.
        """
        found = [one for one in self.tables.layout if not any(name in self.whole for name in one.rows)]
        mixed = [one for one in self.tables.layout if any(name in self.whole for name in one.rows)]
        for one in mixed:
            for name in one.rows:
                rows = self.whole[name].rows if name in self.whole else one.rows[name]
                found.append(Places(f"table_{name}", {name: rows}, {name: 0}, 1, 1))
        return tuple(found)

    @property
    def _home(self) -> NamedSharding:
        return NamedSharding(Mesh(np.array(jax.devices("cpu")[:1]), ("host",)), PartitionSpec())

    def abstract(self, state: Mapping[str, Any]) -> Any:
        """The shapes of what a checkpoint has for a state of shapes."""
        found: dict[str, Any] = {name: one for name, one in state.items() if name not in self._mixed}
        for name, buffer in self._mixed_tables:
            count = self.whole[name].rows if name in self.whole else buffer.places.rows[name]
            found[f"table_{name}"] = {
                what: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=self._home)
                for what, x in state[buffer.name].items()
            }
        return found

    def stored(self, state: TableState) -> TableState:
        """What a checkpoint has: a copy, which further steps do not change."""
        self.write_back(state)
        found = {name: one for name, one in state.items() if name not in self._mixed}
        for name, buffer in self._mixed_tables:
            if name in self.whole:
                values = {what: np.array(x) for what, x in self.rows[name].items()}
            else:
                places = buffer.places.of(name, np.arange(buffer.places.rows[name]))
                values = {what: np.asarray(x)[places] for what, x in state[buffer.name].items()}
            found[f"table_{name}"] = {what: jax.device_put(x, self._home) for what, x in values.items()}
        return found

    def live(self, stored: TableState) -> TableState:
        """The state on the devices for what a checkpoint had, with empty slots; fills the store."""
        self._begin()
        found = {name: one for name, one in stored.items() if name in self.tables.specs and name not in self._mixed}
        shardings = self.tables.shardings()
        for one in self._mixed:
            buffer = next(buffer for buffer in self._buffers.values() if buffer.name == one)
            arrays = {what: np.zeros(x.shape, x.dtype) for what, x in self.tables.shapes[one].items()}
            for name in buffer.places.rows:
                for what, x in stored[f"table_{name}"].items():
                    if name in self.whole:
                        self.rows[name][what][:] = np.asarray(x)
                    else:
                        arrays[what][buffer.places.of(name, np.arange(len(x)))] = np.asarray(x)
            found[one] = {what: jax.device_put(x, shardings[one][what]) for what, x in arrays.items()}
        return found

    @functools.cached_property
    def _mixed(self) -> set[str]:
        """Buffers with tables that have a cache."""
        return {buffer.name for buffer in self._buffers.values()}

    @property
    def _mixed_tables(self) -> list[tuple[str, Buffer]]:
        return [(table.name, one) for one in self.tables.buffers if one.name in self._mixed for table in one.tables]


def _columns_of(tables: Any, num_ids: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The columns of ids of each table."""
    first = dict(zip(num_ids, np.cumsum([0, *num_ids.values()]).tolist(), strict=False))
    return {
        table.name: np.concatenate([first[one] + np.arange(num_ids[one]) for one in table.features]) for table in tables
    }


def _holdings(buffer: Buffer) -> list[_Holding]:
    """What each device of the mesh has of the buffer, in the order of the mesh."""
    sizes, spread = buffer.sizes, buffer.spread
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)

    def numbers(axes: Sequence[str]) -> list[int]:
        found = np.zeros(places.shape[1], np.int64)
        for axis in axes:
            found = found * sizes[axis] + places[list(sizes).index(axis)]
        return found.tolist()

    width = buffer.columns // buffer.column_ways
    if spread.cut == "columns":
        pairs = zip(numbers(spread.outer), numbers(spread.inner), strict=True)
    else:
        pairs = ((part, 0) for part in numbers(spread.owners))
    return [_Holding(part, slice(first * width, (first + 1) * width)) for part, first in pairs]


def _swapped(tables: Tables, state: TableState, lists: Any) -> tuple[TableState, Any]:
    """(the state after the swap, the rows that leave) of lists `[device, row, ...]`."""

    def one_device(state: TableState, lists: Any) -> tuple[TableState, Any]:
        after, values = dict(state), {}
        for name, one in lists.items():
            leave, come = one["evicted"][0], one["loaded"][0]
            values[name] = {
                what: x.at[leave].get(mode="fill", fill_value=0, unique_indices=True)[None]
                for what, x in state[name].items()
            }
            after[name] = {
                what: x.at[come].set(one["values"][what][0], mode="drop", unique_indices=True)
                for what, x in state[name].items()
            }
        return after, values

    everywhere = PartitionSpec(tuple(tables.mesh.axis_names))
    specs = {name: {what: tables.specs[name][what] for what in one} for name, one in state.items()}
    mapped: Any = jax.shard_map(
        one_device, mesh=tables.mesh, in_specs=(specs, everywhere), out_specs=(specs, everywhere), check_vma=False
    )
    return mapped(state, lists)
