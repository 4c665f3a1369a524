"""Which scheme each embedding table gets, and which device has it: the least time, under the memory of a device.

Two parts, as in the planners of TorchRec and Neo, each with the method that suits it. Which scheme each table gets is a
choice under one sum, the memory of a device: a mixed integer program, which HiGHS solves in milliseconds (`choose`).
Where whole tables go is `jaxdl.planner.placement`. The program knows each table's costs alone; what tables share, the
padding of messages to equal sizes above all, is in the costs of a whole plan (`costs_of`), so the result is improved
by changes of one table, and of all tables of one scheme, while they help.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdl.config import ConfigError
from jaxdl.embedding import (
    Buffer,
    EmbeddingConfig,
    Scheme,
    Table,
    make_buffers,
)
from jaxdl.embedding.traffic import Message, axis_bytes, messages
from jaxdl.exchange.cost import Machine
from jaxdl.kinds import kinds
from jaxdl.mesh import Axis
from jaxdl.planner.placement import place

_SLOW = Axis.REPLICA.value
_ROOM_SLACK = 1.1
"""Room of messages with touched rows over the mean number of rows: batches differ."""
_SOLVER_SEC = 20.0
_INFEASIBLE = 2
"""The status of `scipy.optimize.milp` for a program without a solution."""
_READS = 4
"""How often a vector of the batch is read or written: looked up; its gradient sorted and summed."""
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
    """The sizes of all mesh axes."""

    @property
    def local_batch(self) -> int:
        """Examples on each device."""
        return self.batch_size // math.prod(self.sizes.values())

    def ids_of(self, table: Table) -> int:
        """Ids of a table in a node's batch."""
        return sum(self.num_ids[name] for name in table.features) * self.batch_size // self.sizes[_SLOW]


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

    @property
    def total_sec(self) -> float:
        """One after the other."""
        return self.inner_sec + self.slow_sec + self.memory_sec


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


def with_schemes(
    base: EmbeddingConfig, schemes: Mapping[str, Scheme], places: Mapping[str, int] | None = None
) -> EmbeddingConfig:
    """`base` with the schemes and places of tables by their names."""
    return base.model_copy(update={"schemes": tuple(schemes.items()), "places": tuple((places or {}).items())})


def costs_of(work: Workload, config: EmbeddingConfig, machine: Machine) -> Costs:
    """What a step costs under a config. Raises ConfigError for tables that cannot be cut so."""
    buffers = make_buffers(work.tables, work.num_ids, config, work.sizes)
    slow = inner = memory = slow_bytes = 0.0
    for buffer in buffers:
        for one in messages(buffer, work.local_batch, config.forward_wire, config.backward_wire):
            away, inside = message_sec(one, work.sizes, machine)
            slow, inner = slow + away, inner + inside
            slow_bytes += axis_bytes(one.kind, one.axes, one.num_bytes, work.sizes, _SLOW)
        memory += _memory_sec(buffer, work, machine)
    return Costs(inner, slow, memory, slow_bytes, sum(map(device_bytes, buffers)))


def message_sec(one: Message, sizes: Mapping[str, int], machine: Machine) -> tuple[float, float]:
    """Seconds of a message (between nodes, inside a node).

    An all-to-all over several axes is one collective among all of their devices. It takes what was measured of such
    ones, or without that as long as one along each axis, one after the other.
    """
    over = machine.link_over(one.axes) if one.kind == "all-to-all" and len(one.axes) > 1 else None
    if over is not None:
        others = math.prod(sizes[axis] for axis in one.axes) - 1
        seconds = sum(over.of(_COLLECTIVES[one.kind]).seconds(others, one.num_bytes * others / (others + 1)))
        return (seconds, 0.0) if _SLOW in one.axes else (0.0, seconds)
    found = {True: 0.0, False: 0.0}
    for axis in one.axes:
        link = machine.link(axis).of(_COLLECTIVES[one.kind])
        rounds = (sizes[axis] - 1) * (2 if one.kind == "all-reduce" else 1)
        sent = axis_bytes(one.kind, one.axes, one.num_bytes, sizes, axis)
        found[axis == _SLOW] += sum(link.seconds(rounds, sent))
    return found[True], found[False]


def device_bytes(buffer: Buffer) -> int:
    """Memory of a device for the rows of a buffer and what its optimizer keeps of them."""
    columns = buffer.columns // buffer.column_ways
    kept = sum(1 if one else columns for one in buffer.optimizer.row_numbers.values())
    return buffer.local_rows * (columns + kept) * 4


def _memory_sec(buffer: Buffer, work: Workload, machine: Machine) -> float:
    examples = buffer.num_outer * buffer.num_inner * work.local_batch
    columns = buffer.columns // buffer.column_ways
    vectors = examples * buffer.num_entries * _READS
    return machine.passes_sec(columns * (vectors + buffer.local_rows * (2 if buffer.scheme.dense_gradient else 0)), 1)


def plan_tables(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
) -> TablePlan:
    """The plan with the least `Costs.total_sec` that was found, with at most `memory` bytes of tables on a device.

    The tables in `fixed` have the schemes given there, and those with a place in `base` keep it. The same input gives
    the same plan. Raises ConfigError if no plan fits; with given places more may be needed than `memory`.
    """
    base = base or EmbeddingConfig()
    given_places, base = dict(base.places), base.model_copy(update={"schemes": (), "places": ()})
    fixed = dict(fixed or {})
    choices = _choices()
    alone = {
        one.kind: found
        for one in choices
        if (found := costs_if_possible(work, base, {t.name: one for t in work.tables}, machine))
    }
    options = {
        table.name: [fixed[table.name]] if table.name in fixed else possible(table, work) for table in work.tables
    }
    chosen = choose(work, options, machine, memory, base)
    chosen = _improved(work, base, chosen, fixed, machine, memory)
    return _planned(work, base, chosen, given_places, machine, memory, alone)


def plan_choices(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
    *,
    most: int,
) -> list[TablePlan]:
    """Up to `most` plans that are worth timing: that of `plan_tables`, then those with one scheme, by predicted time.

    The costs know messages and rows, not all that a processor does with them; schemes differ most in that. Tables in
    `fixed` keep their schemes.
    """
    base, fixed = base or EmbeddingConfig(), dict(fixed or {})
    plan = plan_tables(work, machine, memory, base, fixed)
    given_places, base = dict(base.places), base.model_copy(update={"schemes": (), "places": ()})
    others: list[TablePlan] = []
    for scheme in _choices():
        chosen = _joined(work, {**{table.name: scheme for table in work.tables}, **fixed})
        with contextlib.suppress(ConfigError):  # Not every table can be cut in every way.
            others.append(_planned(work, base, chosen, given_places, machine, memory))
    fit = [one for one in others if one.costs.device_bytes <= memory and one.schemes != plan.schemes]
    return [plan, *sorted(fit, key=lambda one: one.costs.total_sec)][:most]


def _planned(
    work: Workload,
    base: EmbeddingConfig,
    chosen: Mapping[str, Scheme],
    given_places: Mapping[str, int],
    machine: Machine,
    memory: float,
    alone: Mapping[str, Costs] | None = None,
) -> TablePlan:
    """The plan with these schemes: tables are placed, and its costs are those with their places."""
    places = _placed(work, base, chosen, memory) | dict(given_places)
    return TablePlan(chosen, places, costs_of(work, with_schemes(base, chosen, places), machine), alone or {})


def choose(
    work: Workload,
    options: Mapping[str, Sequence[Scheme]],
    machine: Machine,
    memory: float,
    base: EmbeddingConfig,
) -> dict[str, Scheme]:
    """A scheme for each table: the least sum of times of tables alone, with a sum of memory that fits.

    Raises ConfigError if the tables do not fit under any.
    """
    import scipy.optimize
    import scipy.sparse

    pairs = [(table, scheme) for table in work.tables for scheme in options[table.name]]
    shares = [share(work, table, scheme, machine, base) for table, scheme in pairs]
    seconds, sizes = np.array([one[0] for one in shares]), np.array([one[1] for one in shares])
    names = [table.name for table in work.tables]
    rows = [names.index(table.name) for table, _ in pairs]
    one_each = scipy.sparse.coo_array((np.ones(len(pairs)), (rows, range(len(pairs)))), (len(names), len(pairs)))
    found = scipy.optimize.milp(
        seconds / max(seconds.max(), 1e-30),
        constraints=[
            scipy.optimize.LinearConstraint(one_each.tocsr(), 1, 1),
            scipy.optimize.LinearConstraint(sizes[None] / memory, -np.inf, 1),
        ],
        integrality=np.ones(len(pairs)),
        bounds=scipy.optimize.Bounds(0, 1),
        options={"time_limit": _SOLVER_SEC, "mip_rel_gap": 1e-4},
    )
    if found.x is None and found.status != _INFEASIBLE:
        raise ConfigError(
            f"the tables: HiGHS found no choice of schemes within {_SOLVER_SEC:g} s ({found.message}). Give some of "
            "the tables a scheme in the config (EmbeddingConfig.schemes), and the rest is planned around it."
        )
    if found.x is None:
        least = sum(
            min(size for (one, _), size in zip(pairs, sizes, strict=True) if one is table) for table in work.tables
        )
        raise ConfigError(
            f"the tables need {least / 2**30:,.2f} GiB on each device, and it has {memory / 2**30:,.2f} GiB for them. "
            "Take more devices, fewer columns, or an optimizer that keeps less of a row (rowwise_adagrad)."
        )
    return {pairs[i][0].name: pairs[i][1] for i in np.flatnonzero(found.x > 0.5).tolist()}


def share(work: Workload, table: Table, scheme: Scheme, machine: Machine, base: EmbeddingConfig) -> tuple[float, float]:
    """(seconds, bytes on a device) of a table, where tables that are assigned share the devices evenly."""
    config = with_schemes(base, {table.name: scheme})
    [buffer] = make_buffers([table], {name: work.num_ids[name] for name in table.features}, config, work.sizes)
    found = messages(buffer, work.local_batch, base.forward_wire, base.backward_wire)
    seconds = sum(sum(message_sec(one, work.sizes, machine)) for one in found) + _memory_sec(buffer, work, machine)
    return seconds / buffer.num_outer, device_bytes(buffer) / buffer.num_outer


def _choices() -> list[Scheme]:
    """A scheme of each kind."""
    classes: list[Any] = list(kinds(Scheme).values())
    return [one() for one in classes]


def possible(table: Table, work: Workload) -> list[Scheme]:
    """The schemes that a table can have, with room for the rows that batches touch."""
    ways = math.prod(size for axis, size in work.sizes.items() if axis != _SLOW)
    fit = [one for one in _choices() if one.spread.cut != "columns" or table.columns % ways == 0]
    return [_with_room(one, [table], work) for one in fit]


def _with_room(scheme: Scheme, tables: Sequence[Table], work: Workload) -> Scheme:
    """The scheme with room for the distinct rows of these tables, if it limits that."""
    room = sum(work.distinct[one.name] for one in tables) / sum(work.ids_of(one) for one in tables)
    return scheme.with_room(min(1.0, math.ceil(room * _ROOM_SLACK * 1e4) / 1e4))


def under_one(work: Workload, scheme: Scheme) -> dict[str, Scheme]:
    """All tables under one scheme, with room for their distinct rows."""
    return _joined(work, {table.name: scheme for table in work.tables})


def _joined(work: Workload, chosen: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """All tables of one scheme with their common room, so that they share messages."""
    of_kind: dict[str, list[Table]] = {}
    for table in work.tables:
        of_kind.setdefault(chosen[table.name].kind, []).append(table)
    return {name: _with_room(one, of_kind[one.kind], work) for name, one in chosen.items()}


def costs_if_possible(
    work: Workload, base: EmbeddingConfig, chosen: Mapping[str, Scheme], machine: Machine
) -> Costs | None:
    """What a step costs with these schemes, placed by cost; None if a table cannot be cut so."""
    try:
        return costs_of(work, with_schemes(base, _joined(work, chosen)), machine)
    except ConfigError:
        return None


def _improved(
    work: Workload,
    base: EmbeddingConfig,
    chosen: Mapping[str, Scheme],
    fixed: Mapping[str, Scheme],
    machine: Machine,
    memory: float,
) -> dict[str, Scheme]:
    """The choice after changes of single tables, and of all tables of one scheme, each the first that helps."""
    current, choices = dict(chosen), _choices()

    def value(one: Mapping[str, Scheme]) -> float:
        found = costs_if_possible(work, base, one, machine)
        if found is None:
            return math.inf
        # What does not fit is worse than all that fits, and the less it fits, the worse.
        return found.total_sec if found.device_bytes <= memory else 1e6 * found.device_bytes / memory

    starts = [current] + [{**{t.name: one for t in work.tables}, **fixed} for one in choices]
    current = min(starts, key=value)
    best, helps = value(current), True
    while helps:
        helps = False
        free = [one for one in work.tables if one.name not in fixed]
        groups = [[one] for one in free]
        groups += [[one for one in free if current[one.name].kind == kind.kind] for kind in choices]
        for group in groups:
            for scheme in choices:
                changed = current | {one.name: scheme for one in group}
                if group and (found := value(changed)) < best * (1 - 1e-9):
                    current, best, helps = changed, found, True
    return _joined(work, current)


def _placed(work: Workload, base: EmbeddingConfig, chosen: Mapping[str, Scheme], memory: float) -> dict[str, int]:
    """The place of each assigned table, table by table of one group: balanced lookups and vectors, within memory."""
    found: dict[str, int] = {}
    buffers = make_buffers(work.tables, work.num_ids, with_schemes(base, chosen), work.sizes)
    rest = memory - sum(device_bytes(one) for one in buffers if not one.scheme.assigned)
    for buffer in (one for one in buffers if one.scheme.assigned and one.num_outer > 1):
        of_row = device_bytes(buffer) / buffer.local_rows
        ids = [[work.num_ids[name] for name in table.features] for table in buffer.tables]
        costs = np.array([[sum(one), len(one)] for one in ids], np.float64)
        sizes = np.array([math.ceil(table.rows / buffer.row_ways) * of_row for table in buffer.tables])
        devices = place(costs, sizes, buffer.num_outer, max(rest, sizes.max())).device
        found |= {table.name: int(device) for table, device in zip(buffer.tables, devices, strict=True)}
    trial = with_schemes(base, chosen, found)
    before, after = (
        sum(
            one.num_bytes
            for buffer in make_buffers(work.tables, work.num_ids, config, work.sizes)
            for one in messages(buffer, work.local_batch)
        )
        for config in (with_schemes(base, chosen), trial)
    )
    # Messages are padded to the device with most: the placement by cost is kept where it does not make them longer.
    return found if after <= before else {}
