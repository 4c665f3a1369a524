"""What a step costs for embedding tables whose schemes and places are known: messages, rows, and memory."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxdl.exchange.cost import Machine
from jaxdl.parallel.embedding import Buffer, EmbeddingConfig, Scheme, Table, make_buffers
from jaxdl.parallel.embedding.jagged import Feature, buckets, is_jagged
from jaxdl.parallel.embedding.layout import copied_bytes
from jaxdl.parallel.embedding.traffic import Message, axis_bytes, messages
from jaxdl.parallel.mesh import AXES, Axis

_SLOW = Axis.REPLICA.value
_READS = 4
"""How often a vector of the batch is read or written: looked up; its gradient sorted and summed."""
_OF_ID = 4
"""Whole numbers for an id while gradients are sorted: the id, its row, its place among others, the segment."""
_JOINED_BYTES = 30 * 2**20
"""All-reduces of fewer bytes are copied next to others and sent with them: XLA's default of
`xla_gpu_all_reduce_combine_threshold_bytes`."""
_COLLECTIVES = {
    "all-to-all": "all_to_all",
    "all-gather": "all_gather",
    "all-reduce": "all_reduce/float32",
    "reduce-scatter": "reduce_scatter",
}


@dataclass(frozen=True)
class Workload:
    """The tables of a run, and what its batches do with them."""

    tables: tuple[Table, ...]
    num_ids: Mapping[str, int]
    """Feature -> how many columns of ids it has."""
    distinct: Mapping[str, float]
    """Table -> distinct rows in a node's batch, on average."""
    batch_size: int
    """The global one."""
    sizes: Mapping[str, int]
    """The sizes of the mesh axes; one that is left out has one device."""
    jagged: Mapping[str, Feature] = field(default_factory=dict)
    """Each feature with the statistics of its ids, if these are sent as values and lengths; empty: in columns."""
    cached: frozenset[str] = frozenset()
    """The tables that the host holds: their rows are the slots of the devices."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", dict.fromkeys(AXES, 1) | dict(self.sizes))

    @property
    def local_batch(self) -> int:
        """Examples on each device."""
        return self.batch_size // math.prod(self.sizes.values())

    @functools.cached_property
    def columns(self) -> dict[str, int]:
        """Feature -> how many columns its ids have in a batch: with values and lengths, those of the first bucket."""
        if not self.jagged:
            return dict(self.num_ids)
        first, *_ = buckets([self.jagged[name] for name in self.num_ids], self.local_batch)
        return dict(zip(self.num_ids, first, strict=True))

    def buffers(self, config: EmbeddingConfig, tables: Sequence[Table] | None = None) -> tuple[Buffer, ...]:
        """The buffers of the tables, or of some, under a config, for such ids. Raises ConfigError as `make_buffers`."""
        tables = self.tables if tables is None else tables
        features = {name for table in tables for name in table.features}
        num_ids = {name: count for name, count in self.num_ids.items() if name in features}
        made = make_buffers(tables, num_ids, config, self.sizes)
        if not self.jagged:
            return made
        capacity = tuple(self.columns[name] for name in num_ids)
        jagged = [is_jagged(self.jagged[name]) for name in num_ids]
        return tuple(buffer.with_capacity(capacity, jagged) for buffer in made)

    def ids_of(self, table: Table) -> int:
        """Ids of a table in a node's batch."""
        return sum(self.columns[name] for name in table.features) * self.batch_size // self.sizes[_SLOW]


@dataclass(frozen=True)
class Costs:
    """What a step costs for all tables."""

    inner_sec: float
    """Messages inside a node."""
    slow_sec: float
    """Messages between nodes."""
    memory_sec: float
    """Reading and writing rows on the device that has most to do."""
    slow_bytes: float
    """Bytes that one device sends to other nodes."""
    device_bytes: int
    """Memory of a device for tables and what is kept of their rows; all devices have as much."""
    vector_bytes: int = 0
    """Memory for pooled vectors as they come from other devices, while the forward pass runs."""
    update_bytes: int = 0
    """Memory that a step needs while it updates the tables: most of the forward pass's is free again then."""
    evaluation_bytes: int = 0
    """Memory that an evaluation needs besides: slots of its own for tables that the host holds."""

    @property
    def total_sec(self) -> float:
        """One after the other."""
        return self.inner_sec + self.slow_sec + self.memory_sec

    @property
    def needed_bytes(self) -> int:
        """Memory of a device for the tables while a step or an evaluation runs."""
        return self.device_bytes + max(self.vector_bytes, self.update_bytes, self.evaluation_bytes)


@dataclass(frozen=True)
class TablePlan:
    """The scheme of each table, and the place of those that are assigned."""

    schemes: Mapping[str, Scheme]
    places: Mapping[str, int]
    costs: Costs
    alone: Mapping[str, Costs] = field(default_factory=dict)
    """Scheme -> the costs with all tables under it; those that cannot be are missing."""

    def config(self, base: EmbeddingConfig) -> EmbeddingConfig:
        """The config of embeddings with this plan."""
        return with_schemes(base, self.schemes, self.places)


def describe_schemes(schemes: Mapping[str, Scheme]) -> str:
    """How many tables have each scheme, such as `15 data_parallel, 8 table_wise`."""
    counts = collections.Counter(scheme.kind for scheme in schemes.values())
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def with_schemes(
    base: EmbeddingConfig, schemes: Mapping[str, Scheme], places: Mapping[str, int] | None = None
) -> EmbeddingConfig:
    """`base` with the schemes and places of tables by their names."""
    return base.model_copy(update={"schemes": tuple(schemes.items()), "places": tuple((places or {}).items())})


def costs_of(work: Workload, config: EmbeddingConfig, machine: Machine) -> Costs:
    """What a step costs under a config. Raises ConfigError for tables that cannot be cut so."""
    return costs_of_buffers(work.buffers(config), work.local_batch, config, machine, work.cached)


def costs_of_buffers(
    buffers: Sequence[Buffer],
    local_batch: int,
    config: EmbeddingConfig,
    machine: Machine,
    cached: Collection[str] = (),
) -> Costs:
    """What a step costs for buffers with `local_batch` examples on each device, and the wires of a config.

    The host holds the tables in `cached`.
    """
    slow = inner = memory = slow_bytes = 0.0
    vectors = update = 0
    for buffer in buffers:
        sent = messages(buffer, local_batch, config.forward_wire, config.backward_wire)
        vectors += sum(message.num_bytes for message in sent if message.what == "vectors")
        update += update_bytes(buffer, local_batch, sent)
        for message in sent:
            away, inside = message_sec(message, buffer.sizes, machine)
            slow, inner = slow + away, inner + inside
            slow_bytes += axis_bytes(message.kind, message.axes, message.num_bytes, buffer.sizes, _SLOW)
        memory += memory_sec(buffer, local_batch, machine)
    size, copied = sum(map(device_bytes, buffers)), copied_bytes(buffers, cached)
    return Costs(inner, slow, memory, slow_bytes, size, vectors, update, copied)


def message_sec(message: Message, sizes: Mapping[str, int], machine: Machine) -> tuple[float, float]:
    """Seconds of a message (between nodes, inside a node).

    An all-to-all over several axes is one collective among all of their devices. It takes what was measured of such
    ones, or without that as long as one along each axis, one after the other.
    """
    over = machine.link_over(message.axes) if message.kind == "all-to-all" and len(message.axes) > 1 else None
    if over is not None:
        others = math.prod(sizes[axis] for axis in message.axes) - 1
        seconds = sum(over.of(_COLLECTIVES[message.kind]).seconds(others, message.num_bytes * others / (others + 1)))
        return (seconds, 0.0) if _SLOW in message.axes else (0.0, seconds)
    total_sec = {True: 0.0, False: 0.0}
    for axis in message.axes:
        link = machine.link(axis).of(_COLLECTIVES[message.kind])
        rounds = (sizes[axis] - 1) * (2 if message.kind == "all-reduce" else 1)
        sent = axis_bytes(message.kind, message.axes, message.num_bytes, sizes, axis)
        total_sec[axis == _SLOW] += sum(link.seconds(rounds, sent))
    return total_sec[True], total_sec[False]


def update_bytes(buffer: Buffer, local_batch: int, sent: Sequence[Message]) -> int:
    """Memory of a device while the rows of a buffer are updated, where a step sends these messages for it.

    There are the gradients of the pooled vectors of all examples whose ids the device has, and sorted ones of each id;
    or gradients of all rows, before and after their sum. Touched rows of copies come, and are summed; also where
    messages have less room: a batch that touches more rows sends all.
    """
    columns, examples = buffer.local_columns, buffer.num_outer * buffer.num_inner * local_batch
    num_ids = examples * buffer.num_entries
    num_words = examples * len(buffer.widths) * columns + num_ids * (columns + _OF_ID)
    if buffer.scheme.dense_gradient:
        num_words += 2 * buffer.local_rows * (columns + 1)  # 1: rows are marked.
    elif buffer.num_copies > 1:
        num_words += 2 * buffer.num_copies * num_ids * (columns + 1)
    for message in sent:
        if message.what == "numbers" or (message.kind == "all-reduce" and message.num_bytes <= _JOINED_BYTES):
            num_words += message.num_bytes // 4
    return 4 * num_words


def device_bytes(buffer: Buffer) -> int:
    """Memory of a device for the rows of a buffer and what its optimizer keeps of them."""
    columns = buffer.local_columns
    kept = sum(1 if number else columns for number in buffer.optimizer.row_numbers.values())
    return buffer.local_rows * (columns + kept) * 4


def memory_sec(buffer: Buffer, local_batch: int, machine: Machine) -> float:
    """Seconds in which a device reads and writes the rows of a buffer."""
    examples = buffer.num_outer * buffer.num_inner * local_batch
    columns = buffer.local_columns
    vectors = examples * buffer.num_entries * _READS
    return machine.passes_sec(columns * (vectors + buffer.local_rows * (2 if buffer.scheme.dense_gradient else 0)), 1)
