"""Where each row of each table is: tables of one shape and scheme share a buffer, whose layout is static."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.embedding.jagged import Capacity
from jaxdl.parallel.embedding.optimizers import RowOptimizer
from jaxdl.parallel.embedding.places import Places
from jaxdl.parallel.embedding.schemes import Scheme, Spread
from jaxdl.parallel.embedding.table import EmbeddingConfig, Pooling, Table
from jaxdl.parallel.mesh import ways

MOST_LOCAL_ROWS = 2**30
"""A device has fewer rows of a buffer: places past their end, for what is not written, are int32 as well."""


@dataclass(frozen=True)
class Slot:
    """A feature of the data in a buffer: its ids are `num_ids` columns of the batch's, from `first` on."""

    feature: str
    table: int
    """The number of its table in the buffer."""
    first: int
    num_ids: int
    pooling: Pooling
    vector: int
    """The first column of its pooled vector among those of all features."""
    number: int = 0
    """The number of the feature in the data."""
    jagged: bool = False
    """Whether its ids follow each other, see `jaxdl.parallel.embedding.jagged`; `num_ids` is then the capacity."""


@dataclass(frozen=True)
class Buffer:
    """Tables with as many columns, one scheme and one optimizer, and where their rows are.

    The devices along `spread.outer` have whole tables each, those along `spread.inner` parts of each of them.
    """

    name: str
    tables: tuple[Table, ...]
    slots: tuple[Slot, ...]
    """In the order in which gradients of a row are summed: those of most ids first, then as the tables are given."""
    scheme: Scheme
    optimizer: RowOptimizer
    sizes: Mapping[str, int]
    """The sizes of all mesh axes."""
    owner: tuple[int, ...]
    """Of each table, its place along `spread.outer`."""

    @property
    def spread(self) -> Spread:
        """The mesh axes over which the tables are spread."""
        return self.scheme.spread

    @property
    def columns(self) -> int:
        """Numbers of a row of a table."""
        return self.tables[0].columns

    @property
    def num_outer(self) -> int:
        """Devices along `spread.outer`."""
        return ways(self.sizes, self.spread.outer)

    @property
    def num_inner(self) -> int:
        """Devices along `spread.inner`."""
        return ways(self.sizes, self.spread.inner)

    @property
    def num_copies(self) -> int:
        """How many devices, or groups of them, hold the same."""
        return ways(self.sizes, self.spread.copies)

    @property
    def row_ways(self) -> int:
        """Into how many parts the rows of a table are cut."""
        return self.num_inner if self.spread.cut == "rows" else 1

    @property
    def column_ways(self) -> int:
        """Into how many parts the columns of a table are cut."""
        return self.num_inner if self.spread.cut == "columns" else 1

    @property
    def local_columns(self) -> int:
        """Numbers of a row on a device."""
        return self.columns // self.column_ways

    @property
    def groups(self) -> int:
        """Groups of rows on a device whose vectors are summed apart."""
        return self.scheme.sum_groups // self.row_ways if self.scheme.sum_groups % self.row_ways == 0 else 1

    @property
    def rows_spec(self) -> PartitionSpec:
        """How the rows lie on the mesh, `[all rows, columns]`."""
        if self.spread.cut == "columns":
            return PartitionSpec(self.spread.outer, self.spread.inner)
        return PartitionSpec(self.spread.owners)

    @property
    def number_spec(self) -> PartitionSpec:
        """How one number of each row lies on the mesh, `[all rows]`."""
        return PartitionSpec(self.spread.outer if self.spread.cut == "columns" else self.spread.owners)

    @functools.cached_property
    def places(self) -> Places:
        """Where the rows are."""
        names = [table.name for table in self.tables]
        rows = dict(zip(names, [table.rows for table in self.tables], strict=True))
        return Places(
            self.name, rows, dict(zip(names, self.owner, strict=True)), self.num_outer, self.row_ways, self.groups
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of each table, the first of its rows on a device that has some."""
        return tuple(self.places.offsets[table.name] for table in self.tables)

    @property
    def local_rows(self) -> int:
        """Rows on a device; those with fewer have unused rows."""
        return self.places.local_rows

    @functools.cached_property
    def ranked(self) -> tuple[tuple[int, ...], ...]:
        """Of each device along `spread.outer`, its slots, in order."""
        return tuple(
            tuple(number for number, slot in enumerate(self.slots) if self.owner[slot.table] == owner)
            for owner in range(self.num_outer)
        )

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """How many ids the slot at each rank has, on the device that has most there: others are padded."""
        longest = max(map(len, self.ranked))
        return tuple(
            max(self.slots[slots[rank]].num_ids for slots in self.ranked if rank < len(slots))
            for rank in range(longest)
        )

    @functools.cached_property
    def jagged_ranks(self) -> tuple[int, ...]:
        """The ranks at which some device has a jagged slot."""
        return tuple(
            rank
            for rank in range(len(self.widths))
            if any(self.slots[slots[rank]].jagged for slots in self.ranked if rank < len(slots))
        )

    @property
    def num_entries(self) -> int:
        """Ids that a device along `spread.outer` gets of one example, padding included."""
        return sum(self.widths)

    def with_capacity(self, capacity: Capacity, jagged: Sequence[bool]) -> Buffer:
        """The same for ids that have so many columns of each feature of the data, of which some are `jagged`."""
        first = np.cumsum([0, *capacity]).tolist()
        slots = [
            dataclasses.replace(
                slot, first=first[slot.number], num_ids=capacity[slot.number], jagged=jagged[slot.number]
            )
            for slot in self.slots
        ]
        return dataclasses.replace(self, slots=tuple(slots))

    def room(self, num_ids: int) -> int:
        """The touched rows for which a device's message to its copies has room, of so many ids that it looks up.

        Rows are spread over the devices of a node at random, so the message has a quarter more room than their mean.
        """
        slack = 1.25 if self.row_ways > 1 else 1.0
        return min(num_ids, math.ceil(num_ids * self.scheme.message_room * slack / self.row_ways))


def copied_bytes(buffers: Iterable[Buffer], cached: Collection[str]) -> int:
    """Bytes of a device for a copy of the rows of each buffer that has some of these tables: an evaluation's slots."""
    some = (buffer for buffer in buffers if any(table.name in cached for table in buffer.tables))
    return sum(4 * buffer.local_rows * buffer.local_columns for buffer in some)


def first_columns(widths: Mapping[str, int]) -> dict[str, int]:
    """Of each feature the first of its columns, where those of all follow each other in this order."""
    return dict(zip(widths, np.cumsum([0, *widths.values()]).tolist(), strict=False))


def columns_of_ids(tables: Iterable[Table], num_ids: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The columns of ids of each table; `num_ids` are as in `make_buffers`."""
    first = first_columns(num_ids)
    return {
        table.name: np.concatenate([first[feature] + np.arange(num_ids[feature]) for feature in table.features])
        for table in tables
    }


def make_buffers(
    tables: Sequence[Table],
    num_ids: Mapping[str, int],
    config: EmbeddingConfig,
    sizes: Mapping[str, int],
) -> tuple[Buffer, ...]:
    """The buffers of tables. `num_ids` are the features of the data, in its order, and how many ids each has.

    Raises ConfigError for columns that cannot be cut, and for more rows than a device can address.
    """
    first = first_columns(num_ids)
    columns = {feature: table.columns for table in tables for feature in table.features}
    vector = first_columns({feature: columns[feature] for feature in num_ids})
    order = {feature: number for number, feature in enumerate(num_ids)}
    buffers = []
    for number, members in enumerate(_alike(tables, config)):
        scheme, optimizer = config.scheme_of(members[0].name), members[0].optimizer or config.optimizer
        spread = scheme.spread
        slots = [
            Slot(feature, index, first[feature], num_ids[feature], table.pooling, vector[feature], order[feature])
            for index, table in enumerate(members)
            for feature in table.features
        ]
        slots.sort(key=lambda slot: -slot.num_ids)
        num_outer = ways(sizes, spread.outer)
        owner = spread_evenly(members, num_ids, num_outer, dict(config.places))
        name = f"{number}_{scheme.kind}_{members[0].columns}"
        made = Buffer(
            name=name,
            tables=tuple(members),
            slots=tuple(slots),
            scheme=scheme,
            optimizer=optimizer,
            sizes=dict(sizes),
            owner=owner,
        )
        if made.columns % made.column_ways:
            raise ConfigError(
                f"table {members[0].name}: {made.columns} columns cannot be cut evenly over {made.column_ways} devices "
                "of a node (column_wise). Choose another scheme, or a multiple."
            )
        if made.local_rows >= MOST_LOCAL_ROWS:
            raise ConfigError(
                f"table {members[0].name} and others of its kind: a device has {made.local_rows:,} rows of them, and "
                f"may have {MOST_LOCAL_ROWS - 1:,} (int32). Spread them over more devices: another scheme, or mesh."
            )
        buffers.append(made)
    return tuple(buffers)


def _alike(tables: Sequence[Table], config: EmbeddingConfig) -> list[list[Table]]:
    """The tables that share a buffer: those with as many columns, one scheme and one optimizer."""
    schemes = config.schemes_of([table.name for table in tables])
    parts = [(schemes[table.name], table.optimizer or config.optimizer) for table in tables]
    texts = {number: repr(part) for number, part in {id(part): part for pair in parts for part in pair}.items()}
    groups: dict[tuple[int, str, str], list[Table]] = {}
    for table, (scheme, optimizer) in zip(tables, parts, strict=True):
        groups.setdefault((table.columns, texts[id(scheme)], texts[id(optimizer)]), []).append(table)
    return list(groups.values())


def spread_evenly(
    tables: Sequence[Table], num_ids: Mapping[str, int], num_places: int, assigned: Mapping[str, int]
) -> tuple[int, ...]:
    """Of each table its place of `num_places`: the `assigned` one, else, by descending cost, the cheapest so far.

    The cost of a table is what its lookups read and what it sends; of two equal ones that with fewer rows is cheaper.
    """
    loads = [(0, 0)] * num_places
    places = [assigned.get(table.name, -1) for table in tables]
    costs = [
        (sum(num_ids[feature] + 1 for feature in table.features) * table.columns, table.rows * table.columns)
        for table in tables
    ]

    def add(index: int, place: int) -> None:
        loads[place] = (loads[place][0] + costs[index][0], loads[place][1] + costs[index][1])

    for index, place in enumerate(places):
        if place >= num_places:
            raise ConfigError(
                f"--embedding.places {tables[index].name!r}: place {place} of {num_places}. Count from 0."
            )
        if place >= 0:
            add(index, place)
    for index in sorted((i for i, place in enumerate(places) if place < 0), key=lambda i: costs[i], reverse=True):
        place = min(range(num_places), key=lambda candidate: (loads[candidate], candidate))
        places[index] = place
        add(index, place)
    return tuple(places)
