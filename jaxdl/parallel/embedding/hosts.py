"""Which rows and columns of tables the memory of each process holds, where its devices have slots for some of them.

A process holds what its own devices may need: the tables of its devices and nodes, its part of those that are cut over
processes, and a copy of those of which each process has one. So the memory for tables grows with the number of
processes, and no row is ever sent between them. `jaxdl.parallel.mesh.make_host_mesh` says which processes there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.embedding.layout import Buffer
from jaxdl.parallel.embedding.places import Places, id_of, spread_out
from jaxdl.parallel.mesh import host_axes, host_spec


class Device(NamedTuple):
    """A device of this process, and what it has of a buffer."""

    device: Any
    """The `jax.Device`."""
    part: int
    """The number of its part of the rows, as `Places` counts them."""
    columns: slice
    """Its columns, of those that the process has."""
    is_first: bool
    """Whether no device of the process before it has the same."""

    def of(self, x: np.ndarray) -> tuple[Any, ...]:
        """Its columns, as an index after that of the rows, of rows or of one number a row."""
        return (self.columns,) if x.ndim > 1 else ()


class HostRows:
    """Where rows of a buffer's tables are in the memory of one process, whose devices have slots as `buffer` says."""

    def __init__(self, buffer: Buffer, rows: Mapping[str, int], mesh: Mesh, host_mesh: Mesh, process: int) -> None:
        """`rows` has the number of all ids of each table, `process` is the place of the process in `host_mesh`."""
        self.buffer, self._mesh = buffer, host_mesh
        spread, by_rows = buffer.spread, buffer.spread.cut == "rows"
        self._sizes = dict(host_mesh.shape)
        self._here = dict(zip(self._sizes, np.unravel_index(process, tuple(self._sizes.values())), strict=True))
        num_outer, num_inner = self._ways(spread.outer), self._ways(spread.inner)
        row_ways = num_inner if by_rows else 1
        each = buffer.num_outer // num_outer
        owner = {name: place // each for name, place in buffer.places.owner.items()}
        # As many groups in all as there are on the devices, so that a part has the ids of its own devices' parts.
        groups = buffer.groups * (buffer.row_ways // row_ways)
        self.places = Places(buffer.name, dict(rows), owner, num_outer, row_ways, groups)
        """Where rows are in the array of all processes: what a checkpoint has."""
        self._outer, inner = self._number(spread.outer), self._number(spread.inner)
        self._inner = inner if by_rows else 0
        width = buffer.columns // (1 if by_rows else num_inner)
        self.columns = slice(0, width) if by_rows else slice(inner * width, (inner + 1) * width)
        """The columns of a row that this process has."""
        num_devices = mesh.size // host_mesh.size
        self.device_numbers = range(process * num_devices, (process + 1) * num_devices)
        """The places of its devices in the mesh."""
        self.devices = tuple(self._devices(mesh))
        """Its devices, in this order."""

    def _ways(self, axes: Sequence[str]) -> int:
        """Over how many processes these axes of the devices' mesh are spread."""
        return math.prod(self._sizes[axis] for axis in host_axes(axes))

    def _number(self, axes: Sequence[str]) -> int:
        """The place of this process along them."""
        number = 0
        for axis in host_axes(axes):
            number = number * self._sizes[axis] + int(self._here[axis])
        return number

    def _devices(self, mesh: Mesh) -> Iterator[Device]:
        sizes, spread, seen = self.buffer.sizes, self.buffer.spread, set()
        width = self.buffer.local_columns
        for number in self.device_numbers:
            place = dict(zip(sizes, np.unravel_index(number, tuple(sizes.values())), strict=True))
            outer, inner, part = (_along(axes, place, sizes) for axes in (spread.outer, spread.inner, spread.owners))
            first = 0
            if spread.cut == "columns":
                part, first = outer, inner * width - self.columns.start
            yield Device(mesh.devices.flat[number], part, slice(first, first + width), (part, first) not in seen)
            seen.add((part, first))

    @property
    def num_homes(self) -> int:
        """The number of processes, or groups of them that hold the same, over which the rows of a table are cut."""
        return self.places.row_ways

    def home_of(self, ids: np.ndarray) -> np.ndarray:
        """Of ids their home among these; of slots the home of the device that they are on."""
        return spread_out(ids.astype(np.int64), self.places.row_ways, self.places.groups)[0]

    def has(self, table: str) -> bool:
        """Whether this process has rows of a table."""
        return self.places.owner[table] == self._outer

    def is_here(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Whether this process has the rows of ids, or the devices of slots."""
        return self.has(table) & (self.home_of(ids) == self._inner)

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """The places of ids that are here among the rows of their table that are here."""
        return spread_out(ids.astype(np.int64), self.places.row_ways, self.places.groups)[1]

    def ids(self, table: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(those of the numbers that have an id, their ids): the inverse of `numbers`. Some are of no id."""
        ids = id_of(self._inner, numbers, self.places.row_ways, self.places.groups)
        used = (ids >= 0) & (ids < self.places.rows[table])
        return numbers[used], ids[used]

    def shape(self, table: str, *, one_number: bool) -> tuple[int, ...]:
        """The shape of the rows of a table that are here, or of one number for each of them."""
        num_rows = self.places.on_device(self.places.rows[table])
        return (num_rows,) if one_number else (num_rows, self.columns.stop - self.columns.start)

    def part_of(self, table: str, x: np.ndarray) -> np.ndarray:
        """The rows of a table, of an array `[local rows, ...]` of this process's part of the buffer: a view."""
        first = self.places.offsets[table]
        return x[first : first + self.places.on_device(self.places.rows[table])]

    def width(self, x: Any) -> tuple[int, ...]:
        """`(columns that this process has,)` of an array of the buffer, `()` of one number for each row."""
        return (self.columns.stop - self.columns.start,) if x.ndim > 1 else ()

    def on_devices(self, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[Device, dict[str, np.ndarray]]]:
        """What the devices of this process have of arrays of the buffer, of copies the first alone."""
        shards = {what: {shard.device: shard.data for shard in x.addressable_shards} for what, x in arrays.items()}
        for device in self.devices:
            if device.is_first:
                yield device, {what: np.asarray(x[device.device]) for what, x in shards.items()}

    # Arrays of all processes.

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """How an array of the buffer with this spec on the devices lies on the processes."""
        return NamedSharding(self._mesh, host_spec(spec))

    def abstract(self, like: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """The shape of the array of all processes, for one of the devices."""
        return jax.ShapeDtypeStruct((self.places.num_rows, *like.shape[1:]), like.dtype, sharding=self.sharding(spec))

    def array(self, mine: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """The array of all processes, each of which gives its own part, which must not change afterwards."""
        shape = (self.places.num_rows, *((self.buffer.columns,) if mine.ndim > 1 else ()))
        sharding = self.sharding(spec)
        [device] = sharding.addressable_devices
        return jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(mine, device)])


def local_part(x: jax.Array) -> np.ndarray:
    """What this process has of an array of all processes, see `HostRows.array`; a view."""
    [shard] = x.addressable_shards
    return np.asarray(shard.data)


def _along(axes: Sequence[str], place: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """The number of a place in the mesh along these axes."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + int(place[axis])
    return number
