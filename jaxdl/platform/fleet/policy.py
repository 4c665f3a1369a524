"""How many nodes each run of a fleet has: a pure function of the runs, the nodes, and what each run has now.

The goal and its limits are those of Dorm (Sun et al. 2017, arXiv 1704.06738): utilization, while no run is far from
its fair share and few runs are resized at a time. Nodes are whole and alike here, and a run uses only the sizes that
its mesh and batch allow, so the best allocation follows exactly by dynamic programming. In place of utilization it
maximizes the sum of the runs' speeds, each relative to that at its fair share: more nodes that make a run no faster are
of no use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_EACH_CHANGE, _EACH_NODE = 1e-6, 1e-9
"""What decides between allocations that are as good: fewer resized runs, then fewer nodes."""


@dataclass(frozen=True)
class Run:
    """What the policy knows of a run that is to run now."""

    name: str
    speeds: Mapping[int, float]
    """Number of nodes that it may have -> examples a second on them."""
    order: int
    """The place in the order of submission."""
    weight: float = 1.0
    """Its fair share, relative to those of others."""
    priority: int = 0
    """Nodes are taken from runs of a lower priority where that is what a run of a higher one needs to run."""
    nodes: int = 0
    """What it has now; 0: it waits. Of a run that shares nodes: its hosts, as are its sizes."""
    fixed: bool = False
    """Whether it was resized so lately that it keeps its nodes, unless a higher priority or a lost node takes them."""
    needs: Mapping[str, float] = field(default_factory=dict)
    """What each of its hosts takes of a node; empty: a whole node. Of `jaxdl.platform.fleet.shared_nodes_policy`, as is
    `places`."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Node -> the hosts that it has there now."""

    @property
    def least(self) -> int:
        """The fewest nodes that it can run on."""
        return min(self.speeds)

    @property
    def most(self) -> int:
        """The most nodes that it can use."""
        return max(self.speeds)


@dataclass(frozen=True)
class Rules:
    """The limits of an allocation."""

    fairness: float = 0.2
    """How far a run may be from its fair share, as a part of all nodes: theta 1 of Dorm. A run that cannot have
    such a number of nodes has the nearest one."""
    resized: float = 0.1
    """The part of the running runs that one decision may resize, rounded up: theta 2 of Dorm."""
    solve_sec: float = 0.8
    """The longest time for a decision on runs that share nodes."""


@dataclass(frozen=True)
class Decision:
    """Nodes for every run; 0: it waits."""

    nodes: Mapping[str, int]
    reasons: Mapping[str, str]
    """Why, in a few words, of each run."""
    shares: Mapping[str, float]
    """The fair share of each run, in nodes (of one that shares nodes: in hosts)."""
    places: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Node -> hosts there, of every run that has any; empty where nodes are alike, and any are as good."""
    proven: bool = True
    """Whether no other is better; otherwise `Rules.solve_sec` struck."""


def decide(runs: Sequence[Run], num_nodes: int, rules: Rules | None = None) -> Decision:
    """The best allocation of `num_nodes` nodes within the rules. The same input gives the same decision.

    Runs are admitted by priority, then in the order of submission, each with its fewest nodes: one that does not fit
    keeps those behind it waiting, so that a large run is not overtaken again and again; one that needs more nodes than
    there are blocks no other. A newcomer of the lowest priority waits where it would need more runs to be resized than
    the rules allow; for a higher priority, or when nodes were lost, as few runs more are resized as necessary.
    """
    rules = rules or Rules()
    ordered = sorted(runs, key=lambda run: (-run.priority, run.order))
    admitted = _admit(ordered, num_nodes)
    while True:
        shares = fair_shares(admitted, num_nodes)
        allocation = _allocation(admitted, num_nodes, shares, rules)
        if allocation is not None:
            break
        # Only a newcomer that preempts no run can be the reason.
        admitted.remove(next(run for run in reversed(admitted) if not run.nodes))
    nodes = {run.name: allocation.get(run.name, 0) for run in runs}
    return Decision(
        nodes, _reasons(runs, nodes, shares, num_nodes), {run.name: shares.get(run.name, 0) for run in runs}
    )


def _admit(ordered: Sequence[Run], num_nodes: int) -> list[Run]:
    """Those that may have nodes, in this order; one that needs more than there are blocks no other."""
    admitted: list[Run] = []
    for run in (run for run in ordered if run.least <= num_nodes):
        if sum(other.least for other in admitted) + run.least > num_nodes:
            break
        admitted.append(run)
    return admitted


def fair_shares(runs: Sequence[Run], num_nodes: int) -> dict[str, float]:
    """Run -> nodes by weighted max-min fairness: shares grow together by weight, from the least to the most.

    This is dominant resource fairness (Ghodsi et al. 2011) for one resource.
    """
    if not runs:
        return {}
    levels = np.unique([size / run.weight for run in runs for size in (run.least, run.most)])

    def shares(level: float) -> list[float]:
        return [min(max(level * run.weight, run.least), run.most) for run in runs]

    # Their sum is piecewise linear in the common level, with bends where a run begins or ends to grow.
    level = float(np.interp(num_nodes, [sum(shares(float(value))) for value in levels], levels))
    return {run.name: share for run, share in zip(runs, shares(level), strict=True)}


def at_share(run: Run, share: float) -> int:
    """The most nodes that a run can use within its share, or its fewest."""
    return max((size for size in run.speeds if size <= share + 1e-9), default=run.least)


def _allocation(
    admitted: Sequence[Run], num_nodes: int, shares: Mapping[str, float], rules: Rules
) -> dict[str, int] | None:
    """Run -> nodes; None where a newcomer has to wait."""
    running = [run for run in admitted if run.nodes]
    limit = math.ceil(rules.resized * len(running))
    band = rules.fairness * num_nodes
    for fair in (True, False):
        options = [options_of(run, shares[run.name], band if fair else math.inf, keep=True) for run in admitted]
        if (allocation := _best(admitted, options, num_nodes, shares, limit)) is not None:
            return allocation
    newcomers = [run for run in admitted if not run.nodes]
    lowest = min((run.priority for run in running), default=0)
    if newcomers and newcomers[-1].priority <= lowest:
        return None
    # A higher priority, or nodes that were lost: runs give nodes up, as few of them as necessary.
    options = [options_of(run, shares[run.name], math.inf, keep=False) for run in admitted]
    for more in range(limit, len(running) + 1):
        if (allocation := _best(admitted, options, num_nodes, shares, more)) is not None:
            return allocation
    raise AssertionError("the fewest nodes of all admitted runs fit")


def options_of(run: Run, share: float, band: float, *, keep: bool) -> list[int]:
    """The sizes that a run may get."""
    if run.fixed and run.nodes in run.speeds and keep:
        return [run.nodes]
    near = {size for size in run.speeds if abs(size - share) <= band + 1e-9}
    return sorted(near | {at_share(run, share)})


def _best(
    runs: Sequence[Run], options: Sequence[Sequence[int]], num_nodes: int, shares: Mapping[str, float], limit: int
) -> dict[str, int] | None:
    """The allocation with the largest sum of weighted relative speeds; None if none keeps the limits.

    Dynamic programming over the runs; a state is (running runs resized so far, nodes used so far).
    """
    value = np.full((limit + 1, num_nodes + 1), -np.inf)
    value[0, 0] = 0.0
    choices: list[np.ndarray] = []
    for run, sizes in zip(runs, options, strict=True):
        following, chosen = np.full_like(value, -np.inf), np.zeros(value.shape, np.int64)
        base = run.speeds[at_share(run, shares[run.name])]
        for size in sizes:
            resized = int(run.nodes > 0 and size != run.nodes)
            if size > num_nodes or resized > limit:
                continue
            gain = run.weight * run.speeds[size] / base - _EACH_CHANGE * resized - _EACH_NODE * size
            moved = np.full_like(value, -np.inf)
            moved[resized:, size:] = value[: limit + 1 - resized, : num_nodes + 1 - size] + gain
            better = moved > following
            following, chosen = np.where(better, moved, following), np.where(better, size, chosen)
        value, choices = following, [*choices, chosen]
    if not np.isfinite(value.max()):
        return None
    at, used = (int(index) for index in np.unravel_index(int(value.argmax()), value.shape))
    allocation = {}
    for run, chosen in zip(reversed(runs), reversed(choices), strict=True):
        size = int(chosen[at, used])
        allocation[run.name] = size
        at, used = at - int(run.nodes > 0 and size != run.nodes), used - size
    return allocation


def fairness_loss(nodes: Mapping[str, int], shares: Mapping[str, float], num_nodes: int) -> float:
    """The sum over the runs of how far each is from its fair share, as parts of all nodes."""
    return sum(abs(nodes[name] - share) for name, share in shares.items()) / num_nodes


def _reasons(
    runs: Sequence[Run], nodes: Mapping[str, int], shares: Mapping[str, float], num_nodes: int
) -> dict[str, str]:
    free = num_nodes - sum(nodes.values())
    reasons = {}
    for run in runs:
        size, share = nodes[run.name], shares.get(run.name, 0.0)
        if not size:
            if run.least > num_nodes:
                reasons[run.name] = f"waits: it needs {run.least} nodes, and there are {num_nodes}"
            elif run.nodes:
                reasons[run.name] = f"stops, and waits: its {run.nodes} nodes are taken by runs before it, or are lost"
            elif run.least <= free:
                reasons[run.name] = f"waits: {free} nodes are free, for a run before it that needs more"
            else:
                reasons[run.name] = f"waits: it needs {run.least} nodes, and {free} are free"
            continue
        why = f"its fair share is {share:.3g}"
        if size == run.nodes:
            held = ", and it was resized lately" if run.fixed else ""
            reasons[run.name] = f"keeps {size}: {why}{held}"
        elif not run.nodes:
            reasons[run.name] = f"starts on {size}: {why}"
        else:
            change = run.speeds[size] / run.speeds[run.nodes] - 1 if run.nodes in run.speeds else 0.0
            reasons[run.name] = f"{run.nodes} -> {size}: {why}, speed {change:+.0%}"
    return reasons
