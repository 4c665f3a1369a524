"""Tables in the memory of hosts, or in memory-mapped files; the devices have some of their rows in slots."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.embedding.cache import SlotPlan, Swap, Window
from jaxdl.parallel.embedding.hosts import HostRows, local_part
from jaxdl.parallel.embedding.initial import rows_of_ids
from jaxdl.parallel.embedding.layout import columns_of_ids
from jaxdl.parallel.embedding.places import Places, id_of
from jaxdl.parallel.embedding.swap import Swapper, Taken, of_devices
from jaxdl.parallel.embedding.table import Table
from jaxdl.parallel.embedding.tables import ROWS, Tables, TableState
from jaxdl.parallel.mesh import make_host_mesh

Allocate = Callable[[str, tuple[int, ...]], np.ndarray]
"""Makes a float32 array for a name and a shape."""
_CHUNK_ROWS = 2**17


class _Leaving(NamedTuple):
    """Rows that a step read out of their slots on this process's devices; `values` are still being computed."""

    ids: Mapping[str, np.ndarray]
    """Table -> ids."""
    taken: Mapping[str, Sequence[Taken]]
    """Buffer -> where what its devices give up belongs."""
    values: Any


class Store:
    """All rows of some tables, and what is kept of them, in the memory of hosts: each process has those it needs.

    `tables` has as many rows of these on the devices as they have slots; `whole` are their configs. All processes call
    the methods in the same order, with the same swaps.
    """

    def __init__(
        self,
        tables: Tables,
        whole: Sequence[Table],
        num_ids: Mapping[str, int],
        allocate: Allocate,
        allocate_copy: Allocate,
    ) -> None:
        """`allocate` makes the arrays of the rows, `allocate_copy` those of a checkpoint, of zeros.

        Raises ConfigError for what a cache does not work with.
        """
        self._allocated, self._copy = allocate, allocate_copy
        self.tables, self.config = tables, tables.config.cache
        slots = {table.name: table.rows for table in tables.tables}
        self.whole = {table.name: table for table in whole if slots[table.name] != table.rows}
        if not self.whole:
            most = max(whole, key=lambda table: table.rows)
            raise ConfigError(
                f"--embedding.cache: no table that may have one has {self.config.min_rows:,} rows or more; the "
                f"largest, {most.name}, has {most.rows:,}. Set --embedding.cache.min-rows, or leave out the cache."
            )
        self._hosts = self._make_hosts({table.name: table.rows for table in whole})
        self._cached = {
            table.name: host
            for host in self._hosts.values()
            for table in host.buffer.tables
            if table.name in self.whole
        }
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        """Table -> `rows` `[rows, columns]` and what its optimizer keeps, float32: what `HostRows` says is here."""
        self._slots = slots
        self._columns = columns_of_ids(self.whole.values(), num_ids)
        self._swap = Swapper(tables, self._cached)
        self._id_of: dict[str, np.ndarray] = {}
        self._leaving: deque[_Leaving] = deque()
        self._in_flight = {name: np.zeros(self.whole[name].rows, bool) for name in self._here}
        self.reset()

    def _make_hosts(self, rows: Mapping[str, int]) -> dict[str, HostRows]:
        """The buffers with tables that have a cache."""
        try:
            host_mesh = make_host_mesh(self.tables.mesh)
        except ConfigError as error:
            raise ConfigError(f"--embedding.cache: {error}") from None
        processes = [device.process_index for device in host_mesh.devices.flat]
        here = self.tables.mesh, host_mesh, processes.index(jax.process_index())
        return {
            buffer.name: HostRows(buffer, {table.name: rows[table.name] for table in buffer.tables}, *here)
            for buffer in self.tables.buffers
            if any(table.name in self.whole for table in buffer.tables)
        }

    @property
    def _here(self) -> list[str]:
        """The tables of which this process has rows."""
        return [name for name, host in self._cached.items() if host.has(name)]

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
        for name in self._here:
            host, arrays = self._cached[name], self.rows[name]
            for first in range(0, len(arrays[ROWS]), _CHUNK_ROWS):
                stop = min(first + _CHUNK_ROWS, len(arrays[ROWS]))
                numbers, ids = host.ids(name, np.arange(first, stop))
                arrays[ROWS][first:stop] = 0
                arrays[ROWS][numbers] = rows_of_ids(self.whole[name], words, ids)[:, host.columns]
            for what, x in arrays.items():
                if what != ROWS:
                    x[:] = 0
        wait_for_all()  # One process may have more rows to make than another, and Gloo does not wait this long.

    def _allocate(self) -> None:
        if self.rows:
            return
        for name in self._here:
            host = self._cached[name]
            kept = {ROWS: False} | dict(host.buffer.optimizer.row_numbers)
            self.rows[name] = {
                what: self._allocated(f"{name}.{what}", host.shape(name, one_number=one_number))
                for what, one_number in kept.items()
            }

    def in_order(self, name: str) -> dict[str, np.ndarray]:
        """The rows of a table, and what is kept of them, in the order of ids, where one process has all of them."""
        numbers = self._cached[name].numbers(np.arange(self.whole[name].rows))
        return {what: x[numbers] for what, x in self.rows[name].items()}

    def window(self, size_option: str = "--batch-size") -> Window:
        """A plan for batches from here on, whose slots are empty; `size_option` sets their size."""
        plans = {
            name: SlotPlan(
                name,
                self.whole[name].rows,
                self._slots[name],
                self.config.policy,
                host.num_homes,
                host.home_of,
                size_option=size_option,
            )
            for name, host in self._cached.items()
        }
        return Window(plans, self._columns, self.config.window)

    def swapped(self, state: TableState, swaps: Mapping[str, Swap]) -> TableState:
        """The state after a swap of each table; it is donated."""
        self._settle(swaps)
        lists, taken = self._swap.lists(swaps, self.rows)
        state, values = self._swap(state, lists)
        if taken:
            leaving = {name: swaps[name].evicted[self._is_here(name, swaps[name].evicted)] for name in self._here}
            for name, ids in leaving.items():
                self._in_flight[name][ids] = True
            self._leaving.append(_Leaving({name: swaps[name].evicted for name in self._here}, taken, values))
        for name, swap in swaps.items():
            self._id_of[name][swap.evicted_slots] = -1
            self._id_of[name][swap.loaded_slots] = swap.loaded
        return state

    def _is_here(self, name: str, ids: np.ndarray) -> np.ndarray:
        return self._cached[name].is_here(name, ids)

    def copied(self, rows: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A copy of the rows of each buffer with a cache: slots of their own, for an evaluation."""
        return {name: jnp.copy(rows[name]) for name in self._hosts}

    def with_rows(self, rows: Mapping[str, jax.Array], swaps: Mapping[str, Swap]) -> dict[str, jax.Array]:
        """What `copied` returned, which is donated, after the rows of a swap have come."""
        loads = {
            name: swap._replace(evicted=swap.evicted[:0], evicted_slots=swap.evicted_slots[:0])
            for name, swap in swaps.items()
        }
        lists, _ = self._swap.lists(loads, self.rows, (ROWS,))
        state = {name: {ROWS: x} for name, x in rows.items()}
        return {name: arrays[ROWS] for name, arrays in self._swap(state, lists)[0].items()}

    def _settle(self, swaps: Mapping[str, Swap]) -> None:
        """Rows that left arrive in the store: those of long ago, and all if one of them is loaded again."""
        again = any(self._in_flight[name][swaps[name].loaded].any() for name in self._here)
        while self._leaving and (again or len(self._leaving) > self.config.window):
            self._arrive(self._leaving.popleft())

    def _arrive(self, leaving: _Leaving) -> None:
        for buffer, pieces in leaving.taken.items():
            values = {what: of_devices(x) for what, x in leaving.values[buffer].items()}
            for name, device, mine, places in pieces:
                numbers = self._cached[name].numbers(leaving.ids[name][mine])
                for what, x in values.items():
                    kept = self.rows[name][what]
                    kept[numbers, *device.of(kept)] = x[device.device][places]
        for name, ids in leaving.ids.items():
            self._in_flight[name][ids] = False

    def write_back(self, state: TableState) -> None:
        """Everything that the devices have is in the store afterwards; the slots stay as they are.

        Raises ConfigError, on all processes, where they have other rows in their slots.
        """
        while self._leaving:
            self._arrive(self._leaving.popleft())
        for host in self._hosts.values():
            for device, arrays in host.on_devices(state[host.buffer.name]):
                for name in self._of(host):
                    slots = np.flatnonzero(self._id_of[name] >= 0)
                    parts, places = np.divmod(host.buffer.places.of(name, slots), host.buffer.local_rows)
                    mine = parts == device.part
                    numbers = host.numbers(self._id_of[name][slots[mine]])
                    for what, x in arrays.items():
                        kept = self.rows[name][what]
                        kept[numbers, *device.of(kept)] = x[places[mine]]
        self._check_same()

    def _of(self, host: HostRows) -> list[str]:
        """The tables of a buffer that have a cache, and rows in this process."""
        return [table.name for table in host.buffer.tables if table.name in self.whole and host.has(table.name)]

    def _check_same(self) -> None:
        """Each process plans for itself, from the ids of whole batches: if they differed, rows would get mixed up."""
        if jax.process_count() == 1:
            return
        checksum = 0
        for ids in self._id_of.values():
            checksum = zlib.crc32(ids.data, checksum)
        wait_for_all()  # One process may have more to copy than another, and Gloo does not wait this long.
        if len(set(from_each_process(checksum.to_bytes(4, "big")))) > 1:
            raise ConfigError(
                "--embedding.cache: the processes have other rows in their slots, so they read other ids for the same "
                "examples. Check that the data are the same on all hosts, and that a source of your own returns the "
                "same for equal indices; or leave out the cache. The newest checkpoint is intact."
            )

    # What a checkpoint has: whole tables, as arrays on the CPUs of all processes.

    @property
    def layout(self) -> tuple[Places, ...]:
        """Where rows are in checkpoints: those of buffers with a cache as processes hold them, others as devices do."""
        return tuple(
            self._hosts[places.buffer].places if places.buffer in self._hosts else places
            for places in self.tables.layout
        )

    def abstract(self, state: Mapping[str, Any]) -> Any:
        """The shapes of what a checkpoint has for a state of shapes."""
        abstract_state: dict[str, Any] = dict(state)
        for name, host in self._hosts.items():
            specs = self.tables.specs[name]
            abstract_state[name] = {what: host.abstract(x, specs[what]) for what, x in state[name].items()}
        return abstract_state

    def stored(self, state: TableState) -> TableState:
        """What a checkpoint has: a copy, which further steps do not change."""
        self.write_back(state)
        stored_state = dict(state)
        for buffer, host in self._hosts.items():
            arrays = {
                what: self._copy(f"{buffer}.{what}", (host.places.local_rows, *host.width(x)))
                for what, x in state[buffer].items()
            }
            for name in self._of(host):
                for what, x in arrays.items():
                    host.part_of(name, x)[:] = self.rows[name][what]
            for device, values in host.on_devices(state[buffer]):
                for name, ids, places in self._uncached(host, device.part):
                    numbers = host.numbers(ids)
                    for what, x in arrays.items():
                        host.part_of(name, x)[numbers, *device.of(x)] = values[what][places]
            stored_state[buffer] = {what: host.array(x, self.tables.specs[buffer][what]) for what, x in arrays.items()}
        return stored_state

    def _uncached(self, host: HostRows, part: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(table, ids, their rows) of the tables without a cache in a part of a buffer that also has others."""
        places = host.buffer.places
        owner, inner = divmod(part, places.row_ways)
        for name, rows in places.rows.items():
            if name not in self.whole and places.owner[name] == owner:
                numbers = np.arange(places.on_device(rows))
                ids = id_of(inner, numbers, places.row_ways, places.groups)
                used = (ids >= 0) & (ids < rows)
                yield name, ids[used], places.offsets[name] + numbers[used]

    def live(self, stored: TableState) -> TableState:
        """The state on the devices for what a checkpoint had, with empty slots; fills the store."""
        self._begin()
        live_state, shardings = dict(stored), self.tables.shardings()
        for buffer, host in self._hosts.items():
            arrays = {what: local_part(x) for what, x in stored[buffer].items()}
            for name in self._of(host):
                for what, x in arrays.items():
                    self.rows[name][what][:] = host.part_of(name, x)
            live_state[buffer] = {
                what: jax.make_array_from_callback(
                    self.tables.shapes[buffer][what].shape,
                    shardings[buffer][what],
                    functools.partial(self._without_slots, host, x),
                )
                for what, x in arrays.items()
            }
        return live_state

    def _without_slots(self, host: HostRows, x: np.ndarray, index: tuple[slice, ...] | None) -> np.ndarray:
        """What a device has of a buffer while all slots are empty; `x` is this process's part of the buffer's array."""
        assert index is not None
        start, stop, _ = index[0].indices(host.buffer.places.num_rows)
        columns = [
            slice(
                (bounds.start or 0) - host.columns.start,
                None if bounds.stop is None else bounds.stop - host.columns.start,
            )
            for bounds in index[1:]
        ]
        made = np.zeros((stop - start, *x[:0, *columns].shape[1:]), np.float32)
        for part in range(start // host.buffer.local_rows, stop // host.buffer.local_rows):
            mine = made[part * host.buffer.local_rows - start :]
            for name, ids, places in self._uncached(host, part):
                mine[places] = host.part_of(name, x)[host.numbers(ids), *columns]
        return made
