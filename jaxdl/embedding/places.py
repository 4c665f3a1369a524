"""Which row of a buffer each id of each table has; and tables that move from one layout to another."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
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
        used, found = [0] * self.num_outer, {}
        for table, rows in self.rows.items():
            owner = self.owner[table]
            found[table] = used[owner]
            used[owner] += self.on_device(rows)
        return found

    @functools.cached_property
    def local_rows(self) -> int:
        """Rows on a device; those with fewer have rows that nobody uses."""
        return max(offset + self.on_device(self.rows[table]) for table, offset in self.offsets.items())

    @property
    def num_rows(self) -> int:
        """Rows of the global array."""
        return self.local_rows * self.num_outer * self.row_ways

    def of(self, table: str, ids: np.ndarray) -> np.ndarray:
        """The rows of the global array that the `ids` of a table have, int64."""
        inner, row = spread_out(ids.astype(np.int64), self.row_ways, self.groups)
        return (self.owner[table] * self.row_ways + inner) * self.local_rows + self.offsets[table] + row

    def on_device(self, rows: int) -> int:
        """Rows on a device of a table with so many."""
        return math.ceil(rows / (self.row_ways * self.groups)) * self.groups


def to_json(layout: Layout) -> list[dict[str, Any]]:
    """The layout as JSON."""
    return [dataclasses.asdict(one) for one in layout]


def from_json(values: Sequence[Mapping[str, Any]]) -> tuple[Places, ...]:
    """The layout that `to_json` made."""
    return tuple(Places(**one) for one in values)


def moved(stored: Layout, wanted: Layout, arrays: Mapping[str, np.ndarray], like: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of a stored layout in another one, `{"buffer.name": array}`, bit for bit.

    `like` are the shape structs, with shardings, of the wanted arrays. A process makes the shards of its own devices.
    """
    holder = {table: one for one in stored for table in one.rows}
    found = {}
    for here in wanted:
        for path, shape in like.items():
            buffer, _, name = path.rpartition(".")
            if buffer == here.buffer:
                make = functools.partial(_shard, here, holder, arrays, name, shape)
                assert isinstance(shape.sharding, NamedSharding)
                found[path] = jax.make_array_from_callback(shape.shape, shape.sharding, make)
    return found


def _shard(
    here: Places,
    holder: Mapping[str, Places],
    arrays: Mapping[str, np.ndarray],
    name: str,
    shape: Any,
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """The part `index` of an array of a buffer."""
    assert index is not None
    rows, *columns = index
    start, stop, _ = rows.indices(shape.shape[0])
    widths = [len(range(*one.indices(size))) for one, size in zip(columns, shape.shape[1:], strict=True)]
    made = np.zeros((stop - start, *widths), shape.dtype)
    for table, count in here.rows.items():
        ids = np.arange(count)
        places = here.of(table, ids)
        mine = (places >= start) & (places < stop)
        source = arrays[f"{holder[table].buffer}.{name}"]
        made[places[mine] - start] = source[(holder[table].of(table, ids[mine]), *columns)]
    return made
