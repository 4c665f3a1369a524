"""Which hosts of a fleet's runs are on which node, where runs take parts of nodes: a pure function, as `policy` is.

The goal, the rules and the order of admission are those of `jaxdl.platform.fleet.policy.decide`. Here each host of a
run takes what it needs of a node (or the whole node), so that it matters where it is, and the problem is Dorm's mixed
integer program (Sun et al. 2017, arXiv 1704.06738): hosts on nodes within their capacities, any other place than now a
change. Fair shares are those of weighted dominant resource fairness (Ghodsi et al. 2011).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxdl.platform.fleet.policy import Decision, Rules, Run, at_share, options_of
from jaxdl.platform.fleet.program import Candidate, Places, Program, Solution, TimeIsUp
from jaxdl.platform.fleet.resources import Amounts, Room, hosts_of, totals, why_never

EACH_CHANGE = 1e-4
"""What decides between allocations that are as good: fewer changed runs. Then fewer nodes, see `Program.solve`."""
_NODES = "whole nodes"
"""A resource that each node has one of; no user's resource has such a name."""
_FIRST_PART = 0.75
"""Of the time that is left: for the sizes; the rest is for using fewer nodes."""


def decide_mixed(runs: Sequence[Run], nodes: Mapping[str, Amounts], rules: Rules | None = None) -> Decision:
    """The best allocation of what the nodes have within the rules; `nodes`: name -> resource -> amount.

    The same input gives the same decision unless `rules.solve_sec` strikes. Then the best known one is taken: what
    HiGHS has found, or all running runs as they are, with those that wait put where they fit, in their order.
    """
    for name in ("scipy.optimize", "scipy.sparse"):  # Before the clock starts: it can take as long as a decision may.
        importlib.import_module(name)
    rules = rules or Rules()
    program = Program(nodes, time.monotonic() + rules.solve_sec)
    ordered = sorted(runs, key=lambda run: (-run.priority, run.order))
    able = [run for run in ordered if not why_never(run.needs, run.least, nodes)]
    try:
        places_of, shares, proven = _allocate(able, program, rules)
    except TimeIsUp:
        places_of = None
    room = Room(nodes)
    # HiGHS keeps constraints within a tolerance, which can be more than a host has.
    if places_of is None or not all(room.put(run.needs, places_of.get(run.name, {})) for run in runs):
        room, shares, proven = Room(nodes), fair_hosts(able, nodes), False
        places_of = _first_fit(able, nodes, shares)
        for run in able:
            room.take(run.needs, places_of[run.name])
    told = "" if proven else f" (the best found within {rules.solve_sec:g} s)"
    places = {name: dict(hosts) for name, hosts in places_of.items() if hosts}
    reasons = {run.name: _reason(run, places.get(run.name, {}), shares, nodes, room) + told for run in runs}
    sizes = {run.name: sum(places.get(run.name, {}).values()) for run in runs}
    return Decision(sizes, reasons, {run.name: shares.get(run.name, 0.0) for run in runs}, places, proven)


def _allocate(
    able: Sequence[Run], program: Program, rules: Rules
) -> tuple[Mapping[str, Places], dict[str, float], bool]:
    """(run -> places, fair shares, whether they are the best). Raises TimeIsUp."""
    nodes = program.nodes
    admitted = _admit(able, program)
    while True:
        shares = fair_hosts(admitted, nodes)
        solution, admitted = _allocation(admitted, program, shares, rules)
        if solution is not None:
            break
    if not solution.proven:
        simple = _first_fit(admitted, nodes, shares)
        if all(simple.values()) and value(admitted, simple, shares) > value(admitted, solution.places, shares):
            return simple, shares, False
    return _on_few_nodes(admitted, solution, program), shares, solution.proven


def value(runs: Sequence[Run], places: Mapping[str, Places], shares: Mapping[str, float]) -> float:
    """The sum of the runs' weighted speeds relative to those at their shares, less a little for each change."""
    total = 0.0
    for run in runs:
        if size := sum(places[run.name].values()):
            total += _gain(run, size, shares[run.name])
        total -= EACH_CHANGE * (run.nodes > 0 and dict(places[run.name]) != dict(run.places))
    return total


def _gain(run: Run, size: int, share: float) -> float:
    return run.weight * run.speeds[size] / run.speeds[at_share(run, share)]


def _keepable(run: Run, nodes: Mapping[str, Amounts]) -> bool:
    """Whether a run can stay where it is: its nodes are in service."""
    return run.nodes in run.speeds and Room(nodes).holds(run.needs, run.places)


def _admit(able: Sequence[Run], program: Program) -> list[Run]:
    """The longest beginning whose runs have room together for their fewest hosts, wherever they are now."""
    most, least = _sums(able, program.nodes), 0
    now = [run for run in able if run.nodes and _keepable(run, program.nodes)]
    for held in (now, []):  # Two first fits often know the answer.
        room, stays = Room(program.nodes), {run.name for run in held}
        if not all(room.put(run.needs, run.places) for run in held):
            continue
        count = 0
        for run in able[:most]:
            if run.name not in stays and room.place(run.needs, run.least) is None:
                break
            count += 1
        least = max(least, count)
    if least < most:
        candidates = [
            Candidate(run, {run.least: float(number >= least)}, may_wait=number >= least)
            for number, run in enumerate(able[:most])
        ]
        solution = program.solve(candidates, part=0.5)
        assert solution is not None, "the first of them fit"
        if not solution.proven:
            raise TimeIsUp
        most = sum(bool(solution.places[candidate.run.name]) for candidate in candidates)
    return list(able[:most])


def _sums(able: Sequence[Run], nodes: Mapping[str, Amounts]) -> int:
    """How many of them, at most, have room for their fewest hosts: that much is there of each resource."""
    left = {_NODES: float(len(nodes)), **totals(nodes)}
    smallest = {name: min(has.get(name, 0.0) for has in nodes.values()) for name in totals(nodes)}
    for number, run in enumerate(able):
        for name, need in (run.needs or {_NODES: 1.0, **smallest}).items():
            left[name] -= need * run.least
            if left[name] < -1e-6 * need:
                return number
    return len(able)


def _allocation(
    admitted: list[Run], program: Program, shares: Mapping[str, float], rules: Rules
) -> tuple[Solution | None, list[Run]]:
    """(The best places within the rules, the same runs); or None and those runs that do not have to wait."""
    nodes, total = program.nodes, totals(program.nodes)
    running = [run for run in admitted if run.nodes]
    limit = math.ceil(rules.resized * len(running))

    def candidates(band: float, *, keep: bool) -> list[Candidate]:
        return [
            _candidate(run, shares[run.name], band / dominant(run, total, len(nodes))[0], nodes, keep)
            for run in admitted
        ]

    for band in (rules.fairness, math.inf):
        if (solution := _best(candidates(band, keep=True), program, limit)) is not None:
            return solution, admitted
    newcomers = [run for run in admitted if not run.nodes]
    lowest = min((run.priority for run in running), default=0)
    last = {run.name for run in newcomers if run.priority <= lowest}
    if last:  # They preempt nobody: as many of them as there is room for.
        some = [
            Candidate(
                candidate.run,
                dict.fromkeys(candidate.gains, float(candidate.run.name in last)),
                None if candidate.keeps is None else 0.0,
                candidate.run.name in last,
            )
            for candidate in candidates(math.inf, keep=True)
        ]
        fitting = program.solve(some, limit=limit, part=_FIRST_PART)
        if fitting is not None and not fitting.proven:
            raise TimeIsUp
        return None, [run for run in admitted if run.name not in last or (fitting and fitting.places[run.name])]
    # A higher priority, or nodes that were lost: runs give up what they have, as few of them as necessary.
    free = candidates(math.inf, keep=False)
    fewest = [
        Candidate(candidate.run, dict.fromkeys(candidate.run.speeds, 0.0), None if candidate.keeps is None else 1.0)
        for candidate in free
    ]
    kept = program.solve(fewest, part=_FIRST_PART)
    assert kept is not None, "the fewest hosts of all admitted runs fit"
    if not kept.proven:
        raise TimeIsUp
    limit = max(limit, len(running) - len(kept.kept))
    solution = _best(free, program, limit)
    assert solution is not None, "so few changes are enough"
    return solution, admitted


def _best(candidates: Sequence[Candidate], program: Program, limit: int) -> Solution | None:
    """The solution with the largest sum of gains; None if there is none. Raises TimeIsUp.

    Sizes that are best where nodes are pooled are best on the nodes if they have places there, which is quick to find
    out. Only otherwise sizes and places are one problem.
    """
    pool, runs = program.pool(candidates)
    bound = pool.solve(runs, limit=limit, part=0.5)
    if bound is None:
        return None
    if bound.proven:
        sizes = {name: sum(hosts.values()) for name, hosts in bound.places.items()}
        places = _pack(candidates, sizes, bound.kept, program.nodes)
        if places is not None:
            return Solution(places, bound.kept, True)
        try:
            solution = program.solve(_fix_sizes(candidates, sizes, bound.kept), part=0.5)
        except TimeIsUp:
            solution = None
        if solution is not None:
            return replace(solution, proven=True)
    return program.solve(candidates, limit=limit, part=_FIRST_PART)


def _fix_sizes(candidates: Sequence[Candidate], sizes: Mapping[str, int], kept: frozenset[str]) -> list[Candidate]:
    """What is left to choose once sizes are, and who keeps its places: the places of the others."""
    return [
        replace(candidate, gains={}, keeps=0.0)
        if candidate.run.name in kept
        else replace(candidate, gains={sizes[candidate.run.name]: 0.0}, keeps=None)
        for candidate in candidates
    ]


def _pack(
    candidates: Sequence[Candidate], sizes: Mapping[str, int], kept: frozenset[str], nodes: Mapping[str, Amounts]
) -> dict[str, Places] | None:
    """Places for runs of these sizes by best fit, those first that need most of a node; None if that finds none."""
    room, total = Room(nodes), totals(nodes)
    places_of: dict[str, Places] = {
        candidate.run.name: candidate.run.places for candidate in candidates if candidate.run.name in kept
    }
    if not all(
        room.put(candidate.run.needs, candidate.run.places) for candidate in candidates if candidate.run.name in kept
    ):
        return None
    largest = sorted((candidate.run for candidate in candidates), key=lambda run: -dominant(run, total, len(nodes))[0])
    for run in largest:
        if run.name not in kept:
            if (places := room.place(run.needs, sizes[run.name])) is None:
                return None
            places_of[run.name] = places
    return places_of


def _candidate(run: Run, share: float, band: float, nodes: Mapping[str, Amounts], keep: bool) -> Candidate:
    """What a run may get: one of its sizes near its share, and what it has if that is one of them."""
    sizes, stays = options_of(run, share, band, keep=keep), run.nodes > 0 and _keepable(run, nodes)
    gains = {size: _gain(run, size, share) - EACH_CHANGE * (run.nodes > 0) for size in sizes}
    keeps = _gain(run, run.nodes, share) if stays and run.nodes in sizes else None
    held = run.fixed and keep and keeps is not None
    return Candidate(run, {} if held else gains, keeps)


def _on_few_nodes(runs: Sequence[Run], solution: Solution, program: Program) -> Mapping[str, Places]:
    """The same sizes and kept places, with the other hosts on as few nodes as there is time to find."""
    sizes = {name: sum(hosts.values()) for name, hosts in solution.places.items()}
    candidates = _fix_sizes([Candidate(run, {}) for run in runs], sizes, solution.kept)
    try:
        better = program.solve(candidates, near=True)
    except TimeIsUp:
        better = None
    if better is None or num_nodes(better.places) > num_nodes(solution.places):
        return solution.places
    return better.places


def num_nodes(places: Mapping[str, Places]) -> int:
    """Nodes that runs have hosts on, counted for each run and once more for all: fewer are better."""
    return sum(map(len, places.values())) + len({node for hosts in places.values() for node in hosts})


def _first_fit(runs: Sequence[Run], nodes: Mapping[str, Amounts], shares: Mapping[str, float]) -> dict[str, Places]:
    """Run -> places: those that run stay, those that wait begin where they fit, in their order, none overtaken."""
    places_of: dict[str, Places] = {run.name: {} for run in runs}
    room = Room(nodes)
    for run in runs:
        if run.nodes and room.put(run.needs, run.places):
            places_of[run.name] = run.places
    for run in runs:
        if not places_of[run.name]:
            sizes = sorted({at_share(run, shares[run.name]), run.least}, reverse=True)
            places = next((candidate for size in sizes if (candidate := room.place(run.needs, size))), None)
            if places is None:
                break
            places_of[run.name] = places
    return places_of


def dominant(run: Run, total: Amounts, num: int) -> tuple[float, str]:
    """(the dominant share of one host of a run, the resource). A whole node counts as the average one of `num`."""
    if not run.needs:
        return 1.0 / num, _NODES
    return max((need / total[name], name) for name, need in run.needs.items())


def fair_hosts(runs: Sequence[Run], nodes: Mapping[str, Amounts], *, from_least: bool = True) -> dict[str, float]:
    """Run -> hosts by weighted dominant resource fairness, by progressive filling from the least to the most.

    Dominant shares grow together, by weight, until a resource is used up: then those that need it have their share, and
    the others grow on. Without `from_least` they grow from 0, so that any number of runs has shares.
    """
    total = {**totals(nodes), _NODES: float(len(nodes))}
    unit = {run.name: dominant(run, total, len(nodes))[0] for run in runs}
    needs = {run.name: run.needs or {name: amount / len(nodes) for name, amount in total.items()} for run in runs}
    least = {run.name: run.least if from_least else 0 for run in runs}
    ended: dict[str, float] = {}

    def hosts(run: Run, level: float) -> float:
        return min(max(ended.get(run.name, level) * run.weight / unit[run.name], least[run.name]), run.most)

    while growing := [run for run in runs if run.name not in ended]:
        bends = [size * unit[run.name] / run.weight for run in growing for size in (least[run.name], run.most)]
        levels = np.unique(bends)
        full: dict[str, float] = {}
        for name in {name for run in growing for name in needs[run.name]}:
            used = [sum(needs[run.name].get(name, 0.0) * hosts(run, float(value)) for run in runs) for value in levels]
            if used[-1] > total[name] * (1 + 1e-9):
                full[name] = float(np.interp(total[name], used, levels))
        level = min(full.values(), default=float(levels[-1]))
        scarce = {name for name, value in full.items() if value <= level * (1 + 1e-9)}
        ended |= {run.name: level for run in growing if not full or scarce & needs[run.name].keys()}
    return {run.name: hosts(run, 0.0) for run in runs}


def _reason(run: Run, mine: Places, shares: Mapping[str, float], nodes: Mapping[str, Amounts], room: Room) -> str:
    """Why a run has these places, or none, in a few words."""
    if not mine:
        if why := why_never(run.needs, run.least, nodes):
            return f"waits: {why}"
        if run.nodes:
            return f"stops, and waits: what its {run.nodes} hosts have is taken by runs before it, or is lost"
        free = sum(room.most(run.needs, node) for node in nodes)
        what = "hosts" if run.needs else "nodes"
        if free >= run.least:
            return f"waits: there is room for {free} of its {what}, for a run before it that needs more"
        return f"waits: it needs {run.least} {what}, and there is room for {free}"
    size = sum(mine.values())
    where = ", ".join(
        f"{node} x{mine[node]}" if mine[node] > 1 else node for node in dict.fromkeys(hosts_of(mine, list(nodes)))
    )
    _, resource = dominant(run, {**totals(nodes), _NODES: float(len(nodes))}, len(nodes))
    why = f"its fair share is {shares[run.name]:.3g}" + (f", by {resource}" if run.needs else "")
    if not run.nodes:
        return f"starts on {size} ({where}): {why}"
    if dict(mine) == dict(run.places):
        return f"keeps {size} ({where}): {why}" + (", and it was resized lately" if run.fixed else "")
    if size == run.nodes:
        return f"moves, on {size} ({where}): {why}"
    change = run.speeds[size] / run.speeds[run.nodes] - 1 if run.nodes in run.speeds else 0.0
    return f"{run.nodes} -> {size} ({where}): {why}, speed {change:+.0%}"
