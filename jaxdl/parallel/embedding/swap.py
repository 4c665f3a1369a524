"""Rows that leave their slots on the devices of a process, and rows that come: lists, and the program that swaps them.

The program runs on all devices of all processes, without a message between them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.parallel.embedding.cache import Swap
from jaxdl.parallel.embedding.hosts import Device, HostRows
from jaxdl.parallel.embedding.tables import Tables, TableState

_LEAST_SWAPPED = 64
"""Rows swapped on a device are padded to a power of two, at least this: few programs are compiled."""
Rows = Mapping[str, Mapping[str, np.ndarray]]
"""Table -> `rows` and what its optimizer keeps of them, in the memory of this process."""


class Taken(NamedTuple):
    """Rows of a table that leave a device of this process."""

    table: str
    device: Device
    numbers: np.ndarray
    """Which of the rows of the swap."""
    places: np.ndarray
    """Their places among what the device gives up."""


class Swapper:
    """Makes the lists for swaps of some tables, and runs the program."""

    def __init__(self, tables: Tables, hosts: Mapping[str, HostRows]) -> None:
        """`hosts` are those of the buffers of these tables, by the names of the tables."""
        self._tables, self._hosts = tables, hosts
        self._buffers = {host.buffer.name: host for host in hosts.values()}
        self._program = jax.jit(functools.partial(_swapped, tables), donate_argnums=0)
        mesh = tables.mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
        [first_host, *_] = hosts.values()
        self._place = {number: place for place, number in enumerate(first_host.device_numbers)}

    def __call__(self, state: TableState, lists: Any) -> tuple[TableState, Any]:
        """(the state, which is donated, after the swap; buffer -> rows that leave `[device, row, ...]`)."""
        return self._program(state, lists)

    def lists(
        self, swaps: Mapping[str, Swap], rows: Rows, only: Sequence[str] | None = None
    ) -> tuple[Any, dict[str, list[Taken]]]:
        """(what each device gives up and gets, `[device, row, ...]`; of each buffer where that belongs).

        `only` are the names of the arrays that come, if not all do.
        """
        moves = [
            (name, leaves, *np.divmod(host.buffer.places.of(name, slots), host.buffer.local_rows))
            for name, host in self._hosts.items()
            for leaves, slots in ((True, swaps[name].evicted_slots), (False, swaps[name].loaded_slots))
        ]
        room = self._room(moves)
        lists = {name: self._blank(host, room, only) for name, host in self._buffers.items()}
        taken: dict[str, list[Taken]] = {}
        used: Counter[tuple[str, int, bool]] = Counter()
        for name, leaves, parts, slot_rows in moves:
            host = self._hosts[name]
            buffer = host.buffer.name
            mine = lists[buffer]
            for place, device in enumerate(host.devices):
                numbers = np.flatnonzero(parts == device.part)
                if not len(numbers):
                    continue
                first = used[buffer, place, leaves]
                used[buffer, place, leaves] += len(numbers)
                here = slice(first, first + len(numbers))
                mine["evicted" if leaves else "loaded"][place, here] = slot_rows[numbers]
                if not leaves:
                    loaded = host.numbers(swaps[name].loaded[numbers])
                    for what, x in mine["values"].items():
                        source = rows[name][what]
                        x[place, here] = source[loaded, *device.of(source)]
                elif device.is_first:
                    taken.setdefault(buffer, []).append(Taken(name, device, numbers, np.arange(here.start, here.stop)))
        return jax.tree.map(self._global, lists), taken

    def _room(self, moves: Sequence[tuple[str, bool, np.ndarray, np.ndarray]]) -> int:
        """Rows for which the lists of every device have room: what the fullest of all processes' devices needs."""
        counts: dict[tuple[str, bool], np.ndarray] = {}
        for name, leaves, parts, _ in moves:
            buffer = self._hosts[name].buffer
            number = np.bincount(parts, minlength=buffer.num_outer * buffer.row_ways)
            counts[buffer.name, leaves] = counts.get((buffer.name, leaves), 0) + number
        most = max(int(count.max()) for count in counts.values())
        return 1 << (max(_LEAST_SWAPPED, most) - 1).bit_length()

    def _blank(self, host: HostRows, room: int, only: Sequence[str] | None) -> dict[str, Any]:
        buffer, num = host.buffer, len(host.devices)
        beyond = np.tile(buffer.local_rows + np.arange(room, dtype=np.int32), (num, 1))
        values = {
            what: np.zeros((num, room, *(size // buffer.column_ways for size in x.shape[1:])), np.float32)
            for what, x in self._tables.shapes[buffer.name].items()
            if only is None or what in only
        }
        return {"evicted": beyond.copy(), "loaded": beyond, "values": values}

    def _global(self, x: np.ndarray) -> jax.Array:
        """The array of the devices of all processes, of the part of this one's."""

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            place = self._place[index[0].start or 0]
            return x[place : place + 1]

        return jax.make_array_from_callback((self._tables.mesh.size, *x.shape[1:]), self._everywhere, of_device)


def of_devices(x: jax.Array) -> dict[Any, np.ndarray]:
    """What each `jax.Device` of this process has of an array `[device, ...]`."""
    return {shard.device: np.asarray(shard.data)[0] for shard in x.addressable_shards}


def _swapped(tables: Tables, state: TableState, lists: Any) -> tuple[TableState, Any]:
    """(the state after the swap, the rows that leave) of lists `[device, row, ...]`."""

    def one_device(state: TableState, lists: Any) -> tuple[TableState, Any]:
        after, values = dict(state), {}
        for name, swap in lists.items():
            leave, come = swap["evicted"][0], swap["loaded"][0]
            values[name] = {
                what: x.at[leave].get(mode="fill", fill_value=0, unique_indices=True)[None]
                for what, x in state[name].items()
            }
            after[name] = {
                what: x.at[come].set(swap["values"][what][0], mode="drop", unique_indices=True)
                for what, x in state[name].items()
            }
        return after, values

    everywhere = PartitionSpec(tuple(tables.mesh.axis_names))
    specs = {name: {what: tables.specs[name][what] for what in arrays} for name, arrays in state.items()}
    mapped: Any = jax.shard_map(
        one_device, mesh=tables.mesh, in_specs=(specs, everywhere), out_specs=(specs, everywhere), check_vma=False
    )
    return mapped(state, lists)
