"""Which row of a buffer each id of each table has; and tables that move from one layout to another."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Layout = Sequence["Places"]


def mixed(x: Any) -> Any:
    """A number from 0 to 255 for each whole number >= 0, without a pattern; of NumPy's arrays and JAX's the same.

    It shifts the device of every group of consecutive rows, or ids with a common factor would be on one device. Only
    low bits of the product count, which are right also where it overflows.
    """
    return (x ^ (x >> 7) ^ (x >> 13) ^ (x >> 19)) * 181 >> 3 & 255


def spread_out(ids: Any, ways: int, groups: int) -> tuple[Any, Any]:
    """Of each id >= 0 of a table, the device of `ways`, and the row there from the table's first on.

    The rows of a device are in `groups`, one after the other in turn. Which ids are in one group depends on the number
    of groups of all devices alone, `ways * groups`. Of NumPy's arrays and JAX's the same.
    """
    number = ids // (ways * groups)
    group = (ids + mixed(number)) % (ways * groups)
    return group // groups, number * groups + group % groups


def id_of(device: Any, rows: Any, ways: int, groups: int) -> Any:
    """The id of each row of a table, from its first on: the inverse of `spread_out`."""
    number = rows // groups
    return number * ways * groups + (device * groups + rows % groups - mixed(number)) % (ways * groups)


@dataclass(frozen=True)
class Places:
    """Where the rows of the tables of a buffer are. A checkpoint has it, so that it can be restored in another layout.

    Each device along the outer axes has whole tables; within its group, rows are spread over `row_ways` devices.
    """

    buffer: str
    rows: Mapping[str, int]
    """Table -> its number of ids, in the order in which they lie on a device."""
    owner: Mapping[str, int]
    """Table -> its place along the outer axes."""
    num_outer: int
    row_ways: int
    groups: int = 1
    """Groups of rows on a device: see `spread_out`."""

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Of each table, the first of its rows on a device that has some."""
        used, offsets = [0] * self.num_outer, {}
        for table, rows in self.rows.items():
            owner = self.owner[table]
            offsets[table] = used[owner]
            used[owner] += self.on_device(rows)
        return offsets

    @functools.cached_property
    def local_rows(self) -> int:
        """Rows on a device; those with fewer have unused rows."""
        return max(offset + self.on_device(self.rows[table]) for table, offset in self.offsets.items())

    @property
    def num_rows(self) -> int:
        """Rows of the global array."""
        return self.local_rows * self.num_outer * self.row_ways

    def of(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of the global array that the `ids` of a table have, int64."""
        inner, row = spread_out(ids.astype(np.int64), self.row_ways, self.groups)
        return (self.owner[table] * self.row_ways + inner) * self.local_rows + self.offsets[table] + row

    def tables_in(self, first: int, stop: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(table, which of the rows are its, counted from `first`, their ids) of rows of the global array.

        Unused rows belong to no table.
        """
        for part in range(first // self.local_rows, -(-stop // self.local_rows)):
            owner, inner = divmod(part, self.row_ways)
            for table, rows in self.rows.items():
                begin = part * self.local_rows + self.offsets[table]
                here = np.arange(max(first, begin), min(stop, begin + self.on_device(rows)))
                if self.owner[table] == owner and len(here):
                    ids = id_of(inner, here - begin, self.row_ways, self.groups)
                    used = (ids >= 0) & (ids < rows)
                    yield table, here[used] - first, ids[used]

    def on_device(self, rows: int) -> int:
        """Rows on a device of a table with `rows` rows."""
        return math.ceil(rows / (self.row_ways * self.groups)) * self.groups


def to_json(layout: Layout) -> list[dict[str, Any]]:
    """The layout as JSON."""
    return [dataclasses.asdict(places) for places in layout]


def from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Places, ...]:
    """The layout that `to_json` made."""
    return tuple(Places(**value) for value in values)


class Moved:
    """Tables in a wanted layout, bit for bit, to which the rows of a stored one come piece by piece.

    A process makes the shards of its own devices.
    """

    def __init__(
        self, wanted: Layout, like: Mapping[str, Any], allocate: Callable[[str, tuple[int, ...]], np.ndarray]
    ) -> None:
        """`like` are the shape structs, with shardings, of the wanted arrays: `{"buffer.name": struct}`.

        `allocate` makes the memory of a shard, of zeros, for the name and the shape.
        """
        self._holder = {table: places for places in wanted for table in places.rows}
        self._like = dict(like)
        self._blocks = {path: _blocks(shape, functools.partial(allocate, path)) for path, shape in like.items()}

    def put(self, stored: Places, name: str, first: int, rows: np.ndarray) -> None:
        """Rows of an array `name` of a stored buffer, from row `first` of the array on."""
        for table, here, ids in stored.tables_in(first, first + len(rows)):
            holder = self._holder[table]
            places, values = holder.of(table, ids), rows[here]
            for (start, stop), columns, block in self._blocks[f"{holder.buffer}.{name}"]:
                mine = (places >= start) & (places < stop)
                block[places[mine] - start] = values[(mine, *columns)]

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays, when all rows have come; it can be called once."""
        arrays = {}
        for path in list(self._blocks):
            shape, blocks = self._like[path], self._blocks.pop(path)
            made = functools.partial(_block, blocks, shape.shape)
            arrays[path] = jax.make_array_from_callback(shape.shape, shape.sharding, made)
        return arrays


_Block = tuple[tuple[int, int], tuple[slice, ...], np.ndarray]
"""(first row, end) of a shard, its columns, its values."""


def _blocks(shape: Any, allocate: Callable[[tuple[int, ...]], np.ndarray]) -> list[_Block]:
    """The different shards that this process has of an array."""
    assert isinstance(shape.sharding, NamedSharding)
    blocks: dict[Any, _Block] = {}
    for index in shape.sharding.addressable_devices_indices_map(shape.shape).values():
        assert index is not None
        rows, *columns = index
        start, stop, _ = rows.indices(shape.shape[0])
        bounds = [piece.indices(size)[:2] for piece, size in zip(columns, shape.shape[1:], strict=True)]
        if (start, stop, *bounds) not in blocks:
            block = allocate((stop - start, *(end - begin for begin, end in bounds)))
            blocks[start, stop, *bounds] = (start, stop), tuple(slice(*bound) for bound in bounds), block
    return list(blocks.values())


def _block(blocks: Sequence[_Block], shape: Sequence[int], index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None
    rows, *columns = (piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
    return next(
        block for place, there, block in blocks if place == rows and [(c.start, c.stop) for c in there] == columns
    )
