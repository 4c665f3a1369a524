"""What a step sends for embedding tables: each collective, its mesh axes and its bytes, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdl.parallel.embedding import levels
from jaxdl.parallel.embedding.layout import Buffer
from jaxdl.parallel.embedding.wire import WireType, vector_bytes

_ID_BYTES, _FLOAT_BYTES = 4, 4


@dataclass(frozen=True)
class Message:
    """A collective of a step."""

    buffer: str
    what: str
    """Of what it is: `ids` (and lengths), `vectors`, `gradients`, `rows` or `numbers`."""
    kind: str
    """As in HLO: `all-to-all`, `all-gather`, `reduce-scatter` or `all-reduce`."""
    axes: tuple[str, ...]
    """The mesh axes of its groups, each with several devices."""
    num_bytes: int
    """Of its result on one device."""


def messages(
    buffer: Buffer, local_batch: int, forward: WireType = "float32", backward: WireType = "float32"
) -> list[Message]:
    """The collectives of a buffer in one training step, with `local_batch` examples on each device.

    Where touched rows have limited room, those of a batch that does not exceed it.
    """
    spread, sizes = buffer.spread, buffer.sizes
    outer, inner = buffer.num_outer, buffer.num_inner
    examples = outer * inner * local_batch
    ranks, entries = len(buffer.widths), buffer.num_entries
    numbers = entries + len(buffer.jagged_ranks)
    collectives: list[Message] = []

    def add(what: str, kind: str, axes: Sequence[str], num_bytes: int) -> None:
        along = tuple(axis for axis in axes if sizes[axis] > 1)
        if along:
            collectives.append(Message(buffer.name, what, kind, along, num_bytes))

    def gather(what: str, axes: Sequence[str], num_bytes: int) -> None:
        slow, others = levels.split(axes)
        add(what, "all-gather", slow, num_bytes // math.prod(sizes[axis] for axis in others))
        add(what, "all-gather", others, num_bytes)

    whole, part = (buffer.columns, buffer.local_columns)
    add("ids", "all-to-all", spread.outer, outer * local_batch * numbers * _ID_BYTES)
    gather("ids", spread.inner, examples * numbers * _ID_BYTES)
    add("vectors", "all-to-all", spread.inner, examples * ranks * vector_bytes(forward, part))
    add("vectors", "all-to-all", spread.outer, outer * local_batch * ranks * vector_bytes(forward, whole))
    add("gradients", "all-to-all", spread.outer, outer * local_batch * ranks * vector_bytes(backward, whole))
    gradient_bytes = examples * ranks * vector_bytes(backward, part)
    if spread.cut == "columns":
        add("gradients", "all-to-all", spread.inner, gradient_bytes)
    else:
        gather("gradients", spread.inner, gradient_bytes)
    num_ids, copies = examples * entries, buffer.num_copies
    if buffer.scheme.dense_gradient:
        slow, others = levels.split(spread.copies)
        ways = math.prod(sizes[axis] for axis in others) if math.prod(sizes[axis] for axis in slow) > 1 else 1
        share = math.ceil(buffer.local_rows * (whole + 1) / ways) * _FLOAT_BYTES
        if ways > 1:
            add("rows", "reduce-scatter", others, share)
            add("rows", "all-gather", others, share * ways)
        add("rows", "all-reduce", slow if ways > 1 else spread.copies, share)
    else:
        room = buffer.room(num_ids)
        gather("rows", spread.copies, copies * room * _ID_BYTES)
        gather("rows", spread.copies, copies * room * vector_bytes(backward, part))
        if room < num_ids and copies > 1:
            add("numbers", "all-reduce", tuple(sizes), _FLOAT_BYTES)
        if buffer.column_ways > 1 and buffer.optimizer.needs_square:
            add("numbers", "all-gather", spread.inner, inner * copies * num_ids * _FLOAT_BYTES)
    add("numbers", "all-reduce", spread.owners, _FLOAT_BYTES)
    return collectives


def axis_bytes(kind: str, axes: Sequence[str], num_bytes: float, sizes: Mapping[str, int], axis: str) -> float:
    """The bytes that one device sends along a mesh axis in a collective with a result of `num_bytes` on each device.

    Of an all-to-all over several axes each device sends to each other one. Others are over one axis, or over those of
    a node, where devices pass parts on in a ring, along the first of the axes.
    """
    if axis not in axes or sizes[axis] < 2 or (kind != "all-to-all" and axis != axes[0]):
        return 0.0
    ways = sizes[axis] if kind == "all-to-all" else math.prod(sizes[name] for name in axes)
    return num_bytes * {"reduce-scatter": ways - 1, "all-reduce": 2 * (ways - 1) / ways}.get(kind, (ways - 1) / ways)


def sent_bytes(collectives: Sequence[Message], sizes: Mapping[str, int], axis: str) -> float:
    """The bytes that one device sends along a mesh axis in all messages."""
    return sum(axis_bytes(message.kind, message.axes, message.num_bytes, sizes, axis) for message in collectives)
