"""The search for the scheme of each embedding table, and for the device that has it: the least time that was found.

Two parts, as in the planners of TorchRec and Neo, each with the method that suits it. Which scheme each table gets is a
choice under one sum, the memory of a device: a mixed integer program, which HiGHS solves in milliseconds (`choose`).
Where whole tables go is `jaxdl.planner.placement`. The program knows each table's costs alone; what tables share, the
padding of messages to equal sizes above all, is in the costs of a whole plan (`costs_of`), so the result is improved
by changes of one table, of all tables of one scheme, and of all up to a size, while they help.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.config import ConfigError
from jaxdl.embedding import EmbeddingConfig, Scheme, Table
from jaxdl.embedding.traffic import messages
from jaxdl.exchange.cost import Machine
from jaxdl.kinds import kinds
from jaxdl.mesh import Axis
from jaxdl.planner.placement import place
from jaxdl.planner.tables import (
    Costs,
    TablePlan,
    Workload,
    costs_of,
    costs_of_buffers,
    device_bytes,
    with_schemes,
)

_ROOM_SLACK = 1.1
"""Room of messages with touched rows over the mean number of rows: batches differ."""
_SOLVER_SEC = 20.0
_INFEASIBLE = 2
"""The status of `scipy.optimize.milp` for a program without a solution."""


def plan_tables(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
) -> TablePlan:
    """The plan with the least `Costs.total_sec` that was found, with at most `memory` bytes of tables on a device.

    The tables in `fixed` have the schemes given there, and those with a place in `base` keep it. The same input gives
    the same plan. Raises ConfigError if the tables fit in no schemes; with given places, or where shards are padded,
    more may be needed than `memory`: see `Costs.device_bytes`.
    """
    search = _Search(work, machine, memory, base or EmbeddingConfig(), dict(fixed or {}))
    alone = {one.kind: {table.name: one for table in work.tables} for one in _choices()}
    found = {kind: costs_if_possible(work, search.base, one, machine) for kind, one in alone.items()}
    plan = search.planned(search.optima()[0])
    return dataclasses.replace(plan, alone={kind: costs for kind, costs in found.items() if costs is not None})


def plan_choices(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
    *,
    most: int,
) -> list[TablePlan]:
    """Plans that are worth timing: that of `plan_tables` first, and then by predicted time.

    The costs know messages and rows, not all that a processor does with them, and schemes differ most in that. So there
    are up to `most - 1` plans with one scheme for all tables, and half as many of those that no change betters, though
    their costs are higher. Tables in `fixed` keep their schemes.
    """
    search = _Search(work, machine, memory, base or EmbeddingConfig(), dict(fixed or {}))
    best, *optima = search.optima()
    plan, found = search.planned(best), list[TablePlan]()
    for choices, number in ((search.uniform(), most - 1), (optima, (most - 1) // 2)):
        others: list[TablePlan] = []
        for chosen in choices:
            with contextlib.suppress(ConfigError):  # Not every table can be cut in every way.
                one = search.planned(chosen)
                known = any(one.schemes == other.schemes for other in (plan, *found, *others))
                others += [one] if one.costs.device_bytes <= memory and not known else []
        found += sorted(others, key=lambda one: one.costs.total_sec)[:number]
    return [plan, *sorted(found, key=lambda one: one.costs.total_sec)]


class _Search:
    """Choices of a scheme for each table, with what they cost."""

    def __init__(
        self,
        work: Workload,
        machine: Machine,
        memory: float,
        base: EmbeddingConfig,
        fixed: Mapping[str, Scheme],
    ) -> None:
        if memory <= 0:
            raise ConfigError("nothing is left of a device's memory for the embedding tables. Take larger devices.")
        self.work, self.machine, self.memory, self.fixed = work, machine, memory, fixed
        self._places, self.base = dict(base.places), base.model_copy(update={"schemes": (), "places": ()})
        self._known: dict[tuple[str, ...], float] = {}
        self._free = sorted(
            (one for one in work.tables if one.name not in fixed), key=lambda one: (one.rows * one.columns, one.name)
        )

    def uniform(self) -> list[dict[str, Scheme]]:
        """All tables under one scheme, but for those that are fixed, for each scheme."""
        return [{**{table.name: one for table in self.work.tables}, **self.fixed} for one in _choices()]

    def optima(self) -> list[dict[str, Scheme]]:
        """Choices that no change betters, the best one first: from that of HiGHS, and from one scheme for all tables.

        Raises ConfigError if no choice fits.
        """
        options = {
            table.name: [self.fixed[table.name]] if table.name in self.fixed else possible(table, self.work)
            for table in self.work.tables
        }
        starts = [choose(self.work, options, self.machine, self.memory, self.base), *self.uniform()]
        return sorted((self._improved(one) for one in starts if self._value(one) < math.inf), key=self._value)

    def planned(self, chosen: Mapping[str, Scheme]) -> TablePlan:
        """The plan with these schemes: tables are placed, and its costs are those with their places."""
        chosen = _joined(self.work, chosen)
        places = _placed(self.work, self.base, chosen, self.memory) | self._places
        return TablePlan(chosen, places, costs_of(self.work, with_schemes(self.base, chosen, places), self.machine))

    def _improved(self, chosen: Mapping[str, Scheme]) -> dict[str, Scheme]:
        """The choice after changes, each the first that helps: of a table, of all of a scheme, of all up to a size.

        The last are for tables that share a message: its latency is too much for the first of them alone.
        """
        current, choices = dict(chosen), _choices()
        best, helps = self._value(current), True
        while helps:
            helps = False
            groups = [[one] for one in self._free]
            groups += [[one for one in self._free if current[one.name].kind == kind.kind] for kind in choices]
            groups += [self._free[:number] for number in range(2, len(self._free))]
            for group in groups:
                for scheme in choices:
                    changed = current | {one.name: scheme for one in group}
                    if group and (found := self._value(changed)) < best * (1 - 1e-9):
                        current, best, helps = changed, found, True
        return current

    def _value(self, chosen: Mapping[str, Scheme]) -> float:
        """What a step costs; what does not fit is worse than all that fits, and the less it fits, the worse."""
        key = tuple(chosen[table.name].kind for table in self.work.tables)
        if key not in self._known:
            found = costs_if_possible(self.work, self.base, chosen, self.machine)
            value = math.inf if found is None else found.total_sec
            if found is not None and found.device_bytes > self.memory:
                value = 1e6 * found.device_bytes / self.memory
            self._known[key] = value
        return self._known[key]


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
    [buffer] = work.buffers(config, [table])
    found = costs_of_buffers([buffer], work.local_batch, config, machine)
    return found.total_sec / buffer.num_outer, found.device_bytes / buffer.num_outer


def _choices() -> list[Scheme]:
    """A scheme of each kind."""
    classes: list[Any] = list(kinds(Scheme).values())
    return [one() for one in classes]


def possible(table: Table, work: Workload) -> list[Scheme]:
    """The schemes that a table can have, with room for the rows that batches touch."""
    ways = math.prod(size for axis, size in work.sizes.items() if axis != Axis.REPLICA.value)
    fit = [one for one in _choices() if one.spread.cut != "columns" or table.columns % ways == 0]
    return [one.with_room(_room([table], work)) for one in fit]


def _room(tables: Sequence[Table], work: Workload) -> float:
    """The share of their ids for which messages of these tables have room: that of distinct rows, and some more."""
    found = sum(work.distinct[one.name] for one in tables) / sum(work.ids_of(one) for one in tables)
    return min(1.0, math.ceil(found * _ROOM_SLACK * 1e4) / 1e4)


def under_one(work: Workload, scheme: Scheme) -> dict[str, Scheme]:
    """All tables under one scheme, with room for their distinct rows."""
    return _joined(work, {table.name: scheme for table in work.tables})


def _joined(work: Workload, chosen: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """All tables of one scheme with their common room, so that they share messages."""
    of_kind: dict[str, list[Table]] = {}
    for table in work.tables:
        of_kind.setdefault(chosen[table.name].kind, []).append(table)
    rooms = {kind: _room(tables, work) for kind, tables in of_kind.items()}
    return {name: one.with_room(rooms[one.kind]) for name, one in chosen.items()}


def costs_if_possible(
    work: Workload, base: EmbeddingConfig, chosen: Mapping[str, Scheme], machine: Machine
) -> Costs | None:
    """What a step costs with these schemes, placed by cost; None if a table cannot be cut so."""
    try:
        return costs_of(work, with_schemes(base, _joined(work, chosen)), machine)
    except ConfigError:
        return None


def _placed(work: Workload, base: EmbeddingConfig, chosen: Mapping[str, Scheme], memory: float) -> dict[str, int]:
    """The place of each assigned table, table by table of one group: balanced lookups and vectors, within memory."""
    found: dict[str, int] = {}
    buffers = work.buffers(with_schemes(base, chosen))
    rest = memory - sum(device_bytes(one) for one in buffers if not one.scheme.assigned)
    for buffer in (one for one in buffers if one.scheme.assigned and one.num_outer > 1):
        of_row = device_bytes(buffer) / buffer.local_rows
        ids = [[work.columns[name] for name in table.features] for table in buffer.tables]
        costs = np.array([[sum(one), len(one)] for one in ids], np.float64)
        sizes = np.array([math.ceil(table.rows / buffer.row_ways) * of_row for table in buffer.tables])
        devices = place(costs, sizes, buffer.num_outer, max(rest, sizes.max())).device
        found |= {table.name: int(device) for table, device in zip(buffer.tables, devices, strict=True)}
    trial = with_schemes(base, chosen, found)
    before, after = (
        sum(one.num_bytes for buffer in work.buffers(config) for one in messages(buffer, work.local_batch))
        for config in (with_schemes(base, chosen), trial)
    )
    # Messages are padded to the device with most: the placement by cost is kept where it does not make them longer.
    return found if after <= before else {}
