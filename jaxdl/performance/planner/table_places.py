"""The device, or node, of each embedding table whose scheme assigns whole tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.parallel.embedding import Buffer, EmbeddingConfig, Scheme
from jaxdl.parallel.embedding.traffic import messages
from jaxdl.performance.planner.machine import Machine
from jaxdl.performance.planner.placement import devices_of
from jaxdl.performance.planner.tables import Workload, costs_of_buffers, device_bytes, with_schemes


def place_tables(
    work: Workload,
    base: EmbeddingConfig,
    chosen: Mapping[str, Scheme],
    given: Mapping[str, int],
    memory: float,
    machine: Machine,
) -> dict[str, int]:
    """The places of tables with these schemes, those in `given` first: balanced lookups and vectors, within memory.

    Tables without one are spread by `make_buffers`: those of a buffer whose messages a placement by cost makes longer,
    for they are padded to the device with most, or for which none was found in the memory that a step and other buffers
    leave.
    """
    config = with_schemes(base, chosen, given)

    def needed(some: Mapping[str, Buffer]) -> int:
        return costs_of_buffers(list(some.values()), work.local_batch, config, machine, work.cached).needed_bytes

    buffers = {buffer.name: buffer for buffer in work.buffers(config)}
    places, most = dict(given), needed(buffers)
    for buffer in [buffer for buffer in buffers.values() if buffer.scheme.assigned and buffer.num_outer > 1]:
        room = memory - (most - device_bytes(buffer))
        try:
            moved = dataclasses.replace(buffer, owner=_by_cost(buffer, work, given, room))
        except ConfigError:
            continue
        after = needed(buffers | {buffer.name: moved})
        if after > max(memory, most) or (most <= memory and _sent(moved, work) > _sent(buffer, work)):
            continue
        places |= {table.name: place for table, place in zip(moved.tables, moved.owner, strict=True)}
        buffers[buffer.name], most = moved, after
    return places


def _by_cost(buffer: Buffer, work: Workload, given: Mapping[str, int], room: float) -> tuple[int, ...]:
    """The place of each table of a buffer, which may have `room` bytes of a device. ConfigError if none was found."""
    of_row = device_bytes(buffer) / buffer.local_rows
    ids = [[work.columns[name] for name in table.features] for table in buffer.tables]
    costs = np.array([[sum(table_ids), len(table_ids)] for table_ids in ids], np.float64)
    sizes = np.array([math.ceil(table.rows / buffer.row_ways) * of_row for table in buffer.tables])
    fixed = {number: given[table.name] for number, table in enumerate(buffer.tables) if table.name in given}
    return tuple(devices_of(costs, sizes, buffer.num_outer, room, fixed).tolist())


def _sent(buffer: Buffer, work: Workload) -> int:
    return sum(message.num_bytes for message in messages(buffer, work.local_batch))
