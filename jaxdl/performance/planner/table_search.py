"""The search for the scheme of each embedding table, and for the device that has it: the least time that was found.

Two parts, as in the planners of TorchRec and Neo, each with the method that suits it. Which scheme each table gets is a
choice under one sum, the memory of a device: a mixed integer program, which HiGHS solves in milliseconds (`choose`).
Where whole tables go is `jaxdl.performance.planner.placement`. The program knows each table's costs alone; what tables
share, the padding of messages to equal sizes above all, is in the costs of a whole plan (`costs_of`), so the result is
improved by changes of one table, of all tables of one scheme, and of all up to a size, while they help. The costs of a
plan are the sum of those of each scheme's tables, of which a change touches few. What the search may spend is counted
in tables that are laid out, not in seconds, so that the same input gives the same plan on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.core.solver import milp
from jaxdl.exchange.cost import Machine
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme, Table
from jaxdl.parallel.mesh import INNER_AXES, ways
from jaxdl.performance.planner.table_places import place_tables
from jaxdl.performance.planner.tables import Costs, TablePlan, Workload, costs_of, costs_of_buffers, with_schemes
from jaxdl.report.explanation import readable_bytes

_ROOM_SLACK = 1.1
"""Room of messages with touched rows over the mean number of rows: batches differ."""
_MOST_WORK = 100_000
"""Tables that a search lays out at most, some seconds long; the best choices so far are then taken."""
_LAYOUT = 32
"""As many tables a layout of any takes."""
_FEW = 32
"""With more tables than this, not all of their groups by size are tried, and large ones before small ones."""
_SOLVER_NODES = 10_000
"""Of the tree of HiGHS: no limit in seconds, for all processes must choose alike."""
_INFEASIBLE = 2
"""The status of `scipy.optimize.milp` for a program without a solution."""


def plan_tables(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
) -> TablePlan:
    """The plan with the least `Costs.total_sec` that was found, for which a device has `memory` bytes.

    What a step needs for the tables counts as well: `Costs.needed_bytes`. The tables in `fixed` have the schemes given
    there, and those with a place in `base` keep it. The same input gives the same plan. Raises ConfigError if the
    tables fit in no schemes; with given places, or where shards are padded, more may be needed than `memory`.
    """
    plan = TableSearch(work, machine, memory, base, fixed).plan()
    without = (base or EmbeddingConfig()).model_copy(update={"schemes": (), "places": ()})
    alone_costs = {scheme.kind: _costs_under_one(work, without, scheme, machine) for scheme in _choices()}
    return dataclasses.replace(plan, alone={kind: costs for kind, costs in alone_costs.items() if costs is not None})


def _costs_under_one(work: Workload, base: EmbeddingConfig, scheme: Scheme, machine: Machine) -> Costs | None:
    """What a step costs with all tables under one scheme, with their common room; None if one cannot be cut so."""
    with contextlib.suppress(ConfigError):
        return costs_of(work, base.model_copy(update={"scheme": scheme.with_room(_room(work.tables, work))}), machine)
    return None


def plan_choices(
    work: Workload,
    machine: Machine,
    memory: float,
    base: EmbeddingConfig | None = None,
    fixed: Mapping[str, Scheme] | None = None,
    *,
    most: int,
) -> list[TablePlan]:
    """Plans that are worth timing, see `TableSearch.plans`."""
    return TableSearch(work, machine, memory, base, fixed).plans(most)


class TableSearch:
    """Choices of a scheme for each table, by its kind, with what they cost.

    They are searched once, when a plan is first asked for.

    Raises ConfigError where nothing is left of the memory. See `plan_tables` for the arguments.
    """

    def __init__(
        self,
        work: Workload,
        machine: Machine,
        memory: float,
        base: EmbeddingConfig | None = None,
        fixed: Mapping[str, Scheme] | None = None,
    ) -> None:
        if memory <= 0:
            raise ConfigError("nothing is left of a device's memory for the embedding tables. Take larger devices.")
        base = base or EmbeddingConfig()
        self.work, self.machine, self.memory, self.fixed = work, machine, memory, dict(fixed or {})
        self._places, self._base = dict(base.places), base.model_copy(update={"schemes": ()})
        self._options = {table.name: self._possible(table) for table in work.tables}
        for name in (table for table, some in self._options.items() if not some):
            raise ConfigError(
                f"--embedding.places {name!r}: place {self._places[name]} is none of the devices, or nodes, under any "
                "scheme. Count from 0."
            )
        self._known: dict[tuple[str, ...], tuple[float, int] | None] = {}
        self._work_left = 0
        free = (table for table in work.tables if table.name not in self.fixed)
        self._free = [table.name for table in sorted(free, key=lambda table: (table.rows * table.columns, table.name))]

    def plan(self) -> TablePlan:
        """The best plan that was found. Raises ConfigError if the tables fit in no schemes."""
        return self._planned(self._optima[0])

    def plans(self, most: int) -> list[TablePlan]:
        """Plans that are worth timing: the best one first, and then by predicted time.

        The costs know messages and rows, not all that a processor does with them, and schemes differ most in that. So
        there are up to `most - 1` plans with one scheme for all tables, and half as many of those that no change
        betters, though their costs are higher. Tables that are fixed keep their schemes.
        """
        plan, plans = self.plan(), list[TablePlan]()
        for choices, number in ((self._uniform(), most - 1), (self._optima[1:], (most - 1) // 2)):
            others: list[TablePlan] = []
            for chosen in choices:
                with contextlib.suppress(ConfigError):  # Not every table can be cut in every way.
                    other_plan = self._planned(chosen)
                    known = any(other_plan.schemes == other.schemes for other in (plan, *plans, *others))
                    others += [other_plan] if other_plan.costs.needed_bytes <= self.memory and not known else []
            plans += sorted(others, key=lambda other: other.costs.total_sec)[:number]
        return [plan, *sorted(plans, key=lambda other: other.costs.total_sec)]

    def _possible(self, table: Table) -> dict[str, Scheme]:
        """The schemes that a table may have here, by kind."""
        if table.name in self.fixed:
            return {self.fixed[table.name].kind: self.fixed[table.name]}
        place = self._places.get(table.name)
        return {scheme.kind: scheme for scheme in possible(table, self.work) if _can_have(scheme, place, self.work)}

    def _uniform(self) -> list[dict[str, str]]:
        """All tables under one scheme, but for those that are fixed, for each scheme that all may have."""
        every = [scheme.kind for scheme in _choices() if all(scheme.kind in self._options[name] for name in self._free)]
        return [
            {name: kind if kind in some else next(iter(some)) for name, some in self._options.items()} for kind in every
        ]

    @functools.cached_property
    def _optima(self) -> list[dict[str, str]]:
        """Choices that no change betters, the best one first: from that of HiGHS, and from one scheme for all tables.

        Of many tables, the best that were found with `_MOST_WORK`. Raises ConfigError if no choice fits.
        """
        options = {name: list(some.values()) for name, some in self._options.items()}
        chosen = choose(self.work, options, self.machine, self.memory, self._base)
        starts = [{table.name: chosen[table.name].kind for table in self.work.tables}, *self._uniform()]
        fit = [start for start in starts if self._value(start) < math.inf]
        if not fit:  # Raises what is wrong with all of them, such as a given place that is none.
            self._planned(starts[0])
            fit = starts[:1]
        optima, left = [], _MOST_WORK
        for number, start in enumerate(fit):
            self._work_left = part = left // (len(fit) - number)
            optima.append(self._improved(start))
            left -= part - max(0, self._work_left)
        return sorted(optima, key=self._value)

    def _planned(self, kinds: Mapping[str, str]) -> TablePlan:
        """The plan with these schemes: tables are placed, and its costs are those with their places."""
        chosen = _joined(self.work, {name: self._options[name][kind] for name, kind in kinds.items()}, self.fixed)
        places = place_tables(self.work, self._base, chosen, self._places, self.memory, self.machine)
        return TablePlan(chosen, places, costs_of(self.work, with_schemes(self._base, chosen, places), self.machine))

    def _improved(self, current: dict[str, str]) -> dict[str, str]:
        """The choice after changes, each the first that helps, until none does or the work that is left is done."""
        best, helps = self._value(current), True
        while helps:
            helps = False
            for group in self._groups(current):
                for kind in (scheme.kind for scheme in _choices()):
                    if self._work_left <= 0:
                        return current
                    moved = [name for name in group if current[name] != kind and kind in self._options[name]]
                    changed = current | dict.fromkeys(moved, kind)
                    if moved and (value := self._value(changed)) < best * (1 - 1e-9):
                        current, best, helps = changed, value, True
        return current

    def _groups(self, current: Mapping[str, str]) -> list[list[str]]:
        """What is changed together: one table, all of a scheme, all up to a size; of many tables those of like size.

        All up to a size, for tables that share a message: its latency is too much for the first of them alone.
        """
        free, number = self._free, len(self._free)
        alone = [[name] for name in free]
        of_kind = [[name for name in free if current[name] == kind.kind] for kind in _choices()]
        if number <= _FEW:
            return [*alone, *of_kind, *(free[:size] for size in range(2, number))]
        smallest = [free[:size] for size in sorted({round(x) for x in np.geomspace(2, number - 1, _FEW)})]
        lengths = [number >> halved for halved in range(1, number.bit_length()) if number >> halved > 1]
        alike = [free[first : first + length] for length in lengths for first in range(0, number, length)]
        return [*of_kind, *smallest, *alike, *alone]

    def _value(self, kinds: Mapping[str, str]) -> float:
        """What a step costs; what does not fit is worse than all that fits, and the less it fits, the worse."""
        of_kind: dict[str, list[str]] = {}
        for name, kind in kinds.items():
            of_kind.setdefault(kind, []).append(name)
        costs = [self._costs(kind, tuple(names)) for kind, names in of_kind.items()]
        fitting = [cost for cost in costs if cost is not None]
        if len(fitting) < len(costs):
            return math.inf
        size = sum(cost[1] for cost in fitting)
        return sum(cost[0] for cost in fitting) if size <= self.memory else 1e6 * size / self.memory

    def _costs(self, kind: str, names: tuple[str, ...]) -> tuple[float, int] | None:
        """(seconds, bytes of a device) of the tables with one scheme; None if they cannot have it."""
        key = (kind, *names)
        if key not in self._known:
            self._work_left -= len(names) + _LAYOUT
            self._known[key] = None
            with contextlib.suppress(ConfigError):  # Not every table can be cut in every way.
                costs = costs_of(*together(self.work, self._base, kind, names, self.fixed), self.machine)
                self._known[key] = costs.total_sec, costs.needed_bytes
        return self._known[key]


def together(
    work: Workload, base: EmbeddingConfig, kind: str, names: Collection[str], fixed: Mapping[str, Scheme]
) -> tuple[Workload, EmbeddingConfig]:
    """Some tables alone with a scheme of one kind and their common room; those in `fixed` have theirs."""
    some = with_tables(work, names)
    changes: dict[str, Any] = {"schemes": tuple((name, fixed[name]) for name in names if name in fixed)}
    if free := [table for table in some.tables if table.name not in fixed]:
        [scheme] = (scheme for scheme in _choices() if scheme.kind == kind)
        changes["scheme"] = scheme.with_room(_room(free, work))
    return some, base.model_copy(update=changes)


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
    seconds, sizes = np.array([share[0] for share in shares]), np.array([share[1] for share in shares])
    names = [table.name for table in work.tables]
    rows = [names.index(table.name) for table, _ in pairs]
    one_each = scipy.sparse.coo_array((np.ones(len(pairs)), (rows, range(len(pairs)))), (len(names), len(pairs)))
    solved = milp(
        seconds / max(seconds.max(), 1e-30),
        constraints=[
            scipy.optimize.LinearConstraint(one_each.tocsr(), 1, 1),
            scipy.optimize.LinearConstraint(sizes[None] / memory, -np.inf, 1),
        ],
        integrality=np.ones(len(pairs)),
        bounds=scipy.optimize.Bounds(0, 1),
        options={"node_limit": _SOLVER_NODES, "mip_rel_gap": 1e-4},
    )
    if solved.x is None and solved.status != _INFEASIBLE:
        raise ConfigError(
            f"the tables: HiGHS found no choice of schemes in {_SOLVER_NODES:,} nodes ({solved.message}). Give some of "
            "the tables a scheme in the config (EmbeddingConfig.schemes), and the rest is planned around it."
        )
    if solved.x is None:
        least = sum(
            min(size for (paired, _), size in zip(pairs, sizes, strict=True) if paired is table)
            for table in work.tables
        )
        raise ConfigError(
            f"the tables need {readable_bytes(least)} on each device, and it has {readable_bytes(memory)} for them. "
            "Take more devices, fewer columns, or an optimizer that keeps less of a row (rowwise_adagrad)."
        )
    return {pairs[i][0].name: pairs[i][1] for i in np.flatnonzero(solved.x > 0.5).tolist()}


def share(work: Workload, table: Table, scheme: Scheme, machine: Machine, base: EmbeddingConfig) -> tuple[float, float]:
    """(seconds, bytes on a device) of a table, where tables that are assigned share the devices evenly."""
    config = with_schemes(base, {table.name: scheme})
    [buffer] = work.buffers(config, [table])
    costs = costs_of_buffers([buffer], work.local_batch, config, machine, work.cached)
    return costs.total_sec / buffer.num_outer, costs.needed_bytes / buffer.num_outer


def _choices() -> list[Scheme]:
    """A scheme of each kind."""
    classes: list[Any] = list(kinds(Scheme).values())
    return [scheme() for scheme in classes]


def possible(table: Table, work: Workload) -> list[Scheme]:
    """The schemes that a table can have, with room for the rows that batches touch."""
    inside = ways(work.sizes, INNER_AXES)
    fit = [scheme for scheme in _choices() if scheme.spread.cut != "columns" or table.columns % inside == 0]
    return [scheme.with_room(_room([table], work)) for scheme in fit]


def _can_have(scheme: Scheme, place: int | None, work: Workload) -> bool:
    """Whether a table with this scheme can be at its given place, if it has one."""
    return place is None or (scheme.assigned and place < math.prod(work.sizes[axis] for axis in scheme.spread.outer))


def _room(tables: Sequence[Table], work: Workload) -> float:
    """The share of their ids for which messages of these tables have room: that of distinct rows, and some more."""
    distinct_share = sum(work.distinct[table.name] for table in tables) / sum(work.ids_of(table) for table in tables)
    return min(1.0, math.ceil(distinct_share * _ROOM_SLACK * 1e4) / 1e4)


def under_one(work: Workload, scheme: Scheme) -> dict[str, Scheme]:
    """All tables under one scheme, with room for their distinct rows."""
    return _joined(work, {table.name: scheme for table in work.tables})


def _joined(work: Workload, chosen: Mapping[str, Scheme], fixed: Collection[str] = ()) -> dict[str, Scheme]:
    """All tables of one scheme with their common room, so that they share messages; those in `fixed` as they are."""
    of_kind: dict[str, list[Table]] = {}
    for table in work.tables:
        if table.name not in fixed:
            of_kind.setdefault(chosen[table.name].kind, []).append(table)
    rooms = {kind: _room(tables, work) for kind, tables in of_kind.items()}
    return {name: scheme if name in fixed else scheme.with_room(rooms[scheme.kind]) for name, scheme in chosen.items()}


def with_tables(work: Workload, tables: Collection[str]) -> Workload:
    """The workload of some of its tables alone."""
    names = frozenset(tables)
    some = tuple(table for table in work.tables if table.name in names)
    features = {name for table in some for name in table.features}
    return dataclasses.replace(work, tables=some, num_ids={k: v for k, v in work.num_ids.items() if k in features})
