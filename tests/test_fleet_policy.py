"""The policy of a fleet: the best of all allocations by brute force, fair shares by hand, priorities, lost nodes."""

import itertools
import math
import random

import pytest

from jaxdl.platform.fleet.policy import Rules, Run, at_share, decide, fair_shares, fairness_loss


def linear(*sizes):
    return {size: float(size) for size in sizes}


def runs_of(draw, count, num_nodes):
    """Some runs as they could be in a fleet: those first in line run."""
    found, left = [], num_nodes
    for number in range(count):
        sizes = sorted(draw.sample([1, 2, 3, 4, 6], draw.randint(1, 4)))
        speeds = {size: size ** draw.choice([0.3, 0.7, 1.0]) * draw.uniform(1, 50) for size in sizes}
        now = draw.choice([size for size in sizes if size <= left] or [0]) if number < count - 1 else 0
        left -= now
        found.append(Run(f"run{number}", speeds, number, draw.choice([1.0, 2.0]), nodes=now))
    return found


def value(run, size, share):
    resized = run.nodes > 0 and size != run.nodes
    return run.weight * run.speeds[size] / run.speeds[at_share(run, share)] - 1e-6 * resized - 1e-9 * size


@pytest.mark.parametrize("seed", range(30))
def test_no_other_allocation_within_the_rules_is_better(seed):
    draw, rules = random.Random(seed), Rules(fairness=0.25, resized=0.34)
    runs = runs_of(draw, 4, 8)
    found = decide(runs, 8, rules)
    admitted = [run for run in runs if found.nodes[run.name]]
    shares = fair_shares(admitted, 8)
    limit = math.ceil(rules.resized * sum(run.nodes > 0 for run in admitted))
    ours = sum(value(run, found.nodes[run.name], shares[run.name]) for run in admitted)
    assert sum(found.nodes.values()) <= 8
    best = -math.inf
    for sizes in itertools.product(*(run.speeds for run in admitted)):
        pairs = list(zip(admitted, sizes, strict=True))
        if sum(sizes) > 8 or sum(0 < run.nodes != size for run, size in pairs) > limit:
            continue
        near = all(abs(size - shares[run.name]) <= 2 or size == at_share(run, shares[run.name]) for run, size in pairs)
        if near:
            best = max(best, sum(value(run, size, shares[run.name]) for run, size in pairs))
    if best > -math.inf:
        assert ours == pytest.approx(best)


def test_fair_shares_grow_together_until_the_most():
    one, two = Run("a", linear(1, 2, 8), 0), Run("b", linear(1, 2), 1)
    assert fair_shares([one, two], 8) == pytest.approx({"a": 6, "b": 2})
    heavy = Run("c", linear(1, 8), 2, weight=2.0)
    assert fair_shares([one, heavy], 9) == pytest.approx({"a": 3, "c": 6})
    large = Run("d", linear(5, 8), 3)  # It needs more than its share, and the others share the rest.
    assert fair_shares([one, large, Run("e", linear(1, 8), 4)], 9) == pytest.approx({"a": 2, "d": 5, "e": 2})
    assert fair_shares([], 4) == {}


def test_a_run_that_gains_nothing_by_nodes_leaves_them_to_others():
    flat, steep = Run("flat", {1: 10.0, 2: 10.0, 4: 10.0}, 0), Run("steep", linear(1, 2, 3, 4), 1)
    found = decide([flat, steep], 4, Rules(fairness=0.5))
    assert found.nodes == {"flat": 1, "steep": 3}
    assert fairness_loss(found.nodes, found.shares, 4) == pytest.approx(0.5)


def test_few_runs_are_resized_at_once_and_a_newcomer_waits_for_that():
    rules, sizes = Rules(resized=0.1), linear(1, 2, 3, 4)
    running = [Run(f"run{number}", sizes, number, nodes=2) for number in range(4)]
    newcomer = Run("new", linear(2, 4), 9)
    waiting = decide([*running, newcomer], 8, rules)
    assert waiting.nodes == {**{run.name: 2 for run in running}, "new": 0}
    assert waiting.reasons["new"] == "waits: it needs 2 nodes, and 0 are free"
    small = decide([*running, Run("new", linear(1, 2), 9)], 8, rules)
    assert sorted(small.nodes.values()) == [1, 1, 2, 2, 2]  # One run gave up a node.
    urgent = decide([*running, Run("new", linear(2, 4), 9, priority=1)], 8, rules)
    assert urgent.nodes["new"] == 2
    assert sum(size != 2 for size in urgent.nodes.values()) == 2  # As many as necessary, and no more.


def test_a_higher_priority_takes_the_nodes_of_lower_ones():
    low = [Run(f"low{number}", linear(2), number, nodes=2) for number in range(2)]
    found = decide([*low, Run("high", linear(2, 4), 7, priority=5)], 4)
    assert found.nodes == {"low0": 2, "low1": 0, "high": 2}
    assert "stops, and waits" in found.reasons["low1"]


def test_a_large_run_is_not_overtaken():
    running = Run("running", linear(2), 0, nodes=2)
    found = decide([running, Run("large", linear(4), 1), Run("small", linear(1), 2)], 4)
    assert found.nodes == {"running": 2, "large": 0, "small": 0}
    assert found.reasons["small"] == "waits: 2 nodes are free, for a run before it that needs more"
    assert "there are 4" in decide([Run("giant", linear(8), 0)], 4).reasons["giant"]


def test_a_run_that_can_never_fit_keeps_nobody_waiting():
    running = Run("running", linear(2), 1, nodes=2)
    found = decide([running, Run("giant", linear(99), 0, priority=1), Run("small", linear(1), 2)], 4)
    assert found.nodes == {"running": 2, "giant": 0, "small": 1}


def test_runs_that_were_resized_lately_keep_their_nodes_unless_nodes_are_lost():
    sizes = linear(1, 2, 3, 4)
    kept = Run("kept", sizes, 0, nodes=3, fixed=True)
    assert decide([kept, Run("new", linear(1, 2), 1)], 4).nodes == {"kept": 3, "new": 1}
    assert decide([kept, Run("new", linear(2), 1)], 4).nodes == {"kept": 3, "new": 0}
    assert decide([kept], 2).nodes == {"kept": 2}
    assert decide([kept], 0).nodes == {"kept": 0}
