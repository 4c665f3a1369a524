"""What a step sends for embedding tables: each collective, its mesh axes and its bytes, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdl.embedding.layout import Buffer
from jaxdl.embedding.wire import WireType, vector_bytes

_ID_BYTES, _FLOAT_BYTES = 4, 4


@dataclass(frozen=True)
class Message:
    """A collective of a step."""

    buffer: str
    what: str
    """Of what it is: `ids`, `vectors`, `gradients`, `rows` or `numbers`."""
    kind: str
    """As in HLO: `all-to-all`, `all-gather` or `all-reduce`."""
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
    found: list[Message] = []

    def add(what: str, kind: str, axes: Sequence[str], num_bytes: int) -> None:
        along = tuple(axis for axis in axes if sizes[axis] > 1)
        if along:
            found.append(Message(buffer.name, what, kind, along, num_bytes))

    whole, part = (buffer.columns, buffer.columns // buffer.column_ways)
    add("ids", "all-to-all", spread.outer, outer * local_batch * entries * _ID_BYTES)
    add("ids", "all-gather", spread.inner, examples * entries * _ID_BYTES)
    add("vectors", "all-to-all", spread.inner, examples * ranks * vector_bytes(forward, part))
    add("vectors", "all-to-all", spread.outer, outer * local_batch * ranks * vector_bytes(forward, whole))
    add("gradients", "all-to-all", spread.outer, outer * local_batch * ranks * vector_bytes(backward, whole))
    kind = "all-to-all" if spread.cut == "columns" else "all-gather"
    add("gradients", kind, spread.inner, examples * ranks * vector_bytes(backward, part))
    num_ids, copies = examples * entries, buffer.num_copies
    if buffer.scheme.dense_gradient:
        add("rows", "all-reduce", spread.copies, buffer.local_rows * (whole + 1) * _FLOAT_BYTES)
    else:
        room = buffer.room(num_ids)
        add("rows", "all-gather", spread.copies, copies * room * _ID_BYTES)
        add("rows", "all-gather", spread.copies, copies * room * vector_bytes(backward, part))
        if room < num_ids and copies > 1:
            add("numbers", "all-reduce", tuple(sizes), _FLOAT_BYTES)
        if buffer.column_ways > 1 and buffer.optimizer.needs_square:
            add("numbers", "all-gather", spread.inner, inner * copies * num_ids * _FLOAT_BYTES)
    add("numbers", "all-reduce", spread.owners, _FLOAT_BYTES)
    return found


def axis_bytes(kind: str, axes: Sequence[str], num_bytes: float, sizes: Mapping[str, int], axis: str) -> float:
    """The bytes that one device sends along a mesh axis in a collective with a result of `num_bytes` on each device.

    With the best algorithm on a network of two levels: what is gathered or summed crosses `axis` once for each group
    of devices that have the same place on it, and these share that work; inside, it is passed on along other axes.
    """
    if axis not in axes or sizes[axis] < 2:
        return 0.0
    away = 1 - 1 / sizes[axis]
    together = math.prod(sizes[one] for one in axes) / sizes[axis]
    return num_bytes * away * {"all-to-all": 1.0, "all-gather": 1 / together, "all-reduce": 2 / together}[kind]


def sent_bytes(found: Sequence[Message], sizes: Mapping[str, int], axis: str) -> float:
    """The bytes that one device sends along a mesh axis in all messages."""
    return sum(axis_bytes(one.kind, one.axes, one.num_bytes, sizes, axis) for one in found)
