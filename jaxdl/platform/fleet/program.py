"""The allocation of a fleet's resources as a mixed integer program, solved by HiGHS.

A run either keeps the places of its hosts, or has one of its sizes and a number of hosts on each node. That a run keeps
everything is a variable of its own, not a bound on the difference of old and new places: the relaxation is tighter, and
whatever differs is a change, as in Dorm.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxdl.core.solver import milp
from jaxdl.platform.fleet.policy import Run
from jaxdl.platform.fleet.resources import Amounts, most_hosts

Places = Mapping[str, int]
"""Node -> hosts there."""
_INFEASIBLE = 2
"""The status of `scipy.optimize.milp` for a program without a solution."""
_LEAST_SEC = 0.02
_PRECISION = 1e-5
"""How far a sum of gains may be from the largest one: less than a difference that decides, such as a change's."""
_Entries = list[tuple[int, float]]
"""Of a row: variables and their coefficients."""


class TimeIsUp(Exception):
    """The limit struck before there was any solution."""


@dataclass(frozen=True)
class Candidate:
    """What a run may get."""

    run: Run
    gains: Mapping[int, float]
    """Size -> what it adds to the sum when the run gets it, on places to be found."""
    keeps: float | None = None
    """What it adds that the run keeps its places; None: it cannot."""
    may_wait: bool = False
    """Whether it may get nothing. Then all of these that come behind it get nothing, too."""


@dataclass(frozen=True)
class Solution:
    """A solution."""

    places: Mapping[str, Places]
    """Run -> its places; none for one that waits."""
    kept: frozenset[str]
    proven: bool
    """Whether there is no better one; otherwise the limit struck."""


class Program:
    """Solves for places on these nodes, until `end` (of `time.monotonic`).

    `counts`: how many nodes each of them stands for, all of which have what it has; 1 by default.
    """

    def __init__(self, nodes: Mapping[str, Amounts], end: float, counts: Mapping[str, int] | None = None) -> None:
        self.nodes, self._end = nodes, end
        self._counts = counts or dict.fromkeys(nodes, 1)

    def pool(self, candidates: Sequence[Candidate]) -> tuple[Program, list[Candidate]]:
        """The program, and the same runs, with one node for all that have the same.

        It has fewer variables, and a solution at least as good: hosts fit there that fit on no single node.
        """
        first: dict[tuple[tuple[str, float], ...], str] = {}
        group = {node: first.setdefault(tuple(sorted(has.items())), node) for node, has in self.nodes.items()}
        runs = []
        for candidate in candidates:
            places: dict[str, int] = {}
            for node, count in candidate.run.places.items() if candidate.keeps is not None else ():
                places[group[node]] = places.get(group[node], 0) + count
            runs.append(replace(candidate, run=replace(candidate.run, places=places)))
        nodes = {node: self.nodes[node] for node in first.values()}
        return Program(nodes, self._end, dict(Counter(group.values()))), runs

    def solve(
        self, candidates: Sequence[Candidate], *, limit: int | None = None, part: float = 1.0, near: bool = False
    ) -> Solution | None:
        """The solution with the largest sum of gains; None if there is none.

        `limit`: how many running runs may change; None: all. `part`: of the time that is left. `near`: at last, a
        penalty of 1 for each node that a run has hosts on, and for each node that is in use. Raises TimeIsUp.
        """
        import scipy.optimize

        sec = (self._end - time.monotonic()) * part
        if sec < _LEAST_SEC:
            raise TimeIsUp
        rows = _Rows(self.nodes, self._counts, candidates, limit, near)
        if not rows.most:
            return Solution({}, frozenset(), True) if rows.possible() else None
        most: Any = np.array(rows.most)  # SciPy's types know of numbers only.
        largest = sum(max([candidate.keeps or 0.0, *candidate.gains.values()]) for candidate in candidates)
        solution = milp(
            -np.array(rows.gain),
            constraints=rows.constraint(),
            integrality=np.ones(len(rows.gain)),
            bounds=scipy.optimize.Bounds(0, most),
            options={"time_limit": sec, "mip_rel_gap": _PRECISION / max(largest, 1.0)},
        )
        if solution.status == _INFEASIBLE:
            return None
        if solution.x is None:
            raise TimeIsUp
        return rows.read(np.rint(solution.x).astype(int), solution.status == 0)


@dataclass
class _Rows:
    """The variables, all integers from 0, and the constraints, low <= sum of coefficients times variables <= high."""

    nodes: Mapping[str, Amounts]
    counts: Mapping[str, int]
    candidates: Sequence[Candidate]
    limit: int | None
    near: bool
    gain: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    keep: dict[str, int] = field(default_factory=dict)
    """Run -> the variable that it keeps its places."""
    hosts: dict[tuple[str, str], int] = field(default_factory=dict)
    """(run, node) -> the variable of its hosts there."""
    _used: dict[tuple[str, str], _Entries] = field(default_factory=dict)
    """(node, resource) -> what is used of it there."""
    _alone: dict[str, _Entries] = field(default_factory=dict)
    """Node -> hosts that take all of it."""
    _on: dict[str, _Entries] = field(default_factory=dict)
    """Node -> hosts there."""
    _entries: list[tuple[int, int, float]] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        waits: list[_Entries] = []
        for candidate in self.candidates:
            chosen = self._run(candidate)
            if candidate.may_wait:
                waits.append(chosen)
        for (node, resource), entries in self._used.items():
            has = self.nodes[node][resource] * self.counts[node]
            unit = max(value for _, value in entries)  # HiGHS has one tolerance for bytes and GPUs.
            self._row([(at, value / unit) for at, value in entries], -np.inf, has / unit)
        for node, entries in self._alone.items():
            self._row(entries, -np.inf, float(self.counts[node]))
        for first, second in itertools.pairwise(waits):
            self._row([*first, *((at, -value) for at, value in second)], 0.0, np.inf)
        running = [candidate.run for candidate in self.candidates if candidate.run.nodes]
        if self.limit is not None and self.limit < len(running):
            kept = [(self.keep[run.name], 1.0) for run in running if run.name in self.keep]
            self._row(kept, len(running) - self.limit, np.inf)
        for entries in self._on.values() if self.near else ():
            most = float(sum(self.most[at] for at, _ in entries))
            self._row([(self._variable(-1.0, 1), -most), *entries], -np.inf, 0.0)

    def possible(self) -> bool:
        """Of a program without variables: whether its constraints hold."""
        return all(low <= 0 <= high for low, high in zip(self._low, self._high, strict=True))

    def _variable(self, gain: float, most: int) -> int:
        self.gain.append(gain)
        self.most.append(most)
        return len(self.gain) - 1

    def _row(self, entries: _Entries, low: float, high: float) -> None:
        self._entries += [(len(self._low), at, value) for at, value in entries]
        self._low.append(low)
        self._high.append(high)

    def _run(self, candidate: Candidate) -> _Entries:
        """Adds a run; the variables of which one is 1 when it gets something."""
        run, chosen, total = candidate.run, _Entries(), _Entries()
        if candidate.keeps is not None:
            self.keep[run.name] = self._variable(candidate.keeps, 1)
            chosen.append((self.keep[run.name], 1.0))
            for node, count in run.places.items():
                self._use(run, node, self.keep[run.name], count)
        largest = max(candidate.gains, default=0)
        for size, gain in candidate.gains.items():
            at = self._variable(gain, 1)
            chosen.append((at, 1.0))
            total.append((at, -float(size)))
        for node, has in self.nodes.items() if candidate.gains else ():
            most = min(largest, self.counts[node] * (most_hosts(run.needs, has) if run.needs else 1))
            if most > 0:
                at = self.hosts[run.name, node] = self._variable(0.0, most)
                total.append((at, 1.0))
                self._use(run, node, at, 1)
                if self.near:
                    self._row([(self._variable(-1.0, 1), -float(most)), (at, 1.0)], -np.inf, 0.0)
        if total:
            self._row(total, 0.0, 0.0)
        self._row(chosen, 0.0 if candidate.may_wait else 1.0, 1.0)
        return chosen

    def _use(self, run: Run, node: str, at: int, count: int) -> None:
        """So many hosts of a run are on a node where a variable is 1."""
        needs = run.needs or self.nodes[node]
        for resource, amount in needs.items():
            self._used.setdefault((node, resource), []).append((at, amount * count))
        if not run.needs:
            self._alone.setdefault(node, []).append((at, float(count)))
        self._on.setdefault(node, []).append((at, 1.0))

    def constraint(self) -> Any:
        """All rows, for `scipy.optimize.milp`."""
        import scipy.optimize
        import scipy.sparse

        at_row, at_column, values = zip(*self._entries, strict=True)
        shape = (len(self._low), len(self.gain))
        matrix = scipy.sparse.coo_array((values, (at_row, at_column)), shape).tocsr()
        low: Any = np.array(self._low)
        high: Any = np.array(self._high)
        return scipy.optimize.LinearConstraint(matrix, low, high)

    def read(self, values: np.ndarray, proven: bool) -> Solution:
        """The solution that these values are."""
        kept = frozenset(name for name, at in self.keep.items() if values[at])
        places: dict[str, dict[str, int]] = {candidate.run.name: {} for candidate in self.candidates}
        for candidate in self.candidates:
            if candidate.run.name in kept:
                places[candidate.run.name] = dict(candidate.run.places)
        for (name, node), at in self.hosts.items():
            if values[at]:
                places[name][node] = int(values[at])
        return Solution(places, kept, proven)
