"""The policy of a fleet whose runs share nodes: beside the dynamic programming, brute force, and cases by hand."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from test_fleet_policy import linear, runs_of

from jaxdl.core.config import ConfigError
from jaxdl.platform.fleet.policy import Rules, Run, at_share, decide
from jaxdl.platform.fleet.resources import Room, parse_amounts, parse_nodes, totals
from jaxdl.platform.fleet.shared_nodes_policy import EACH_CHANGE, decide_mixed, dominant, fair_hosts, num_nodes, value

ENOUGH = 60.0  # Seconds, so that no limit strikes on a slow machine.


def alike(count, **has):
    return {f"n{number}": has for number in range(count)}


def placed(run, **places):
    return replace(run, places=places, nodes=sum(places.values()))


@pytest.mark.parametrize("seed", range(30))
def test_whole_nodes_that_are_alike_are_shared_as_by_dynamic_programming(seed):
    draw = random.Random(seed)
    count, most = draw.randint(3, 7), draw.choice([4, 8])
    rules = Rules(draw.choice([0.1, 0.25]), draw.choice([0.1, 0.34]), ENOUGH)
    runs, names = [], iter(range(99))
    for run in runs_of(draw, count, most):
        places = {f"n{next(names)}": 1 for _ in range(run.nodes)}
        runs.append(replace(run, places=places, priority=draw.choice([0, 0, 1]), fixed=draw.random() < 0.2))
    ours, theirs = decide_mixed(runs, alike(most, gpus=8.0), rules), decide(runs, most, rules)
    assert {name for name, size in ours.nodes.items() if size} == {name for name, size in theirs.nodes.items() if size}
    assert ours.shares == pytest.approx(theirs.shares)
    admitted = [run for run in runs if theirs.nodes[run.name]]

    def total(decision):  # Without what decides between equals, which is not the same there.
        gains = (run.weight * run.speeds[decision.nodes[run.name]] / run.speeds[at_share(run, theirs.shares[run.name])]
                 for run in admitted)  # fmt: skip
        return sum(gains)

    assert total(ours) == pytest.approx(total(theirs), abs=EACH_CHANGE * len(runs))
    used = Counter(node for places in ours.places.values() for node in places)
    assert set(used.values()) <= {1}


def all_places(run, size, nodes):
    """Every way to put so many hosts on the nodes."""
    for chosen in itertools.combinations_with_replacement(nodes, size):
        places = Counter(chosen)
        if run.needs or max(places.values()) == 1:
            yield dict(places)


def by_force(runs, nodes, rules, band, limit, shares):
    """The largest value of all allocations within the rules; -inf if there is none."""
    total, options = totals(nodes), []
    for run in runs:
        unit, share = dominant(run, total, len(nodes))[0], shares[run.name]
        sizes = [one for one in run.speeds if abs(one - share) * unit <= band + 1e-9 or one == at_share(run, share)]
        if run.fixed:
            options.append([run.places])
        else:
            options.append([places for size in sizes for places in all_places(run, size, nodes)])
    best = -math.inf

    def put(number, room, changes, found):
        nonlocal best
        if changes > limit:
            return
        if number == len(runs):
            best = max(best, value(runs, found, shares))
            return
        run = runs[number]
        for places in options[number]:
            if room.holds(run.needs, places):
                less = Room(nodes)
                less.left, less.num_hosts = {name: dict(one) for name, one in room.left.items()}, dict(room.num_hosts)
                less.take(run.needs, places)
                changed = run.nodes > 0 and places != dict(run.places)
                put(number + 1, less, changes + changed, {**found, run.name: places})

    put(0, Room(nodes), 0, {})
    return best


def mixed_fleet(draw):
    """(runs of which some run, nodes)."""
    nodes = {f"n{number}": draw.choice([{"gpus": 4.0, "cpus": 8.0}, {"cpus": 12.0}]) for number in range(3)}
    room, runs = Room(nodes), []
    for number in range(4):
        needs = draw.choice([{"gpus": 1.0, "cpus": 2.0}, {"gpus": 2.0}, {"cpus": 4.0}, {"cpus": 3.0}, {}])
        sizes = sorted(draw.sample([1, 2, 3], draw.randint(1, 2)))
        run = Run(f"run{number}", {size: size ** draw.choice([0.4, 1.0]) for size in sizes}, number,
                  draw.choice([1.0, 2.0]), needs=needs)  # fmt: skip
        places = room.find(needs, draw.choice(sizes)) if number < 3 and draw.random() < 0.7 else None
        if places:
            room.take(needs, places)
            run = replace(placed(run, **places), fixed=draw.random() < 0.3)
        runs.append(run)
    return runs, nodes


@pytest.mark.parametrize("seed", range(40))
def test_no_other_allocation_is_better(seed):
    draw = random.Random(seed)
    rules = Rules(draw.choice([0.2, 0.4]), draw.choice([0.1, 0.5, 1.0]), ENOUGH)
    runs, nodes = mixed_fleet(draw)
    found = decide_mixed(runs, nodes, rules)
    room = Room(nodes)
    for run in runs:
        assert room.holds(run.needs, found.places.get(run.name, {}))
        room.take(run.needs, found.places.get(run.name, {}))
    able = [run for run in runs if "no node" not in found.reasons[run.name] and "hold" not in found.reasons[run.name]]
    able = [run for run in able if not found.reasons[run.name].endswith(f"there are {len(nodes)}")]
    admitted = [run for run in able if found.nodes[run.name]]
    limit = math.ceil(rules.resized * sum(run.nodes > 0 for run in admitted))

    def best(those):
        shares = fair_hosts(those, nodes)
        fair = by_force(those, nodes, rules, rules.fairness, limit, shares)
        return fair if fair > -math.inf else by_force(those, nodes, rules, math.inf, limit, shares)

    assert found.shares == pytest.approx({run.name: 0.0 for run in runs} | fair_hosts(admitted, nodes))
    assert value(admitted, found.places, found.shares) == pytest.approx(best(admitted), abs=2e-5)
    waiting = [run for run in able if not found.nodes[run.name]]
    if waiting:  # The next one in line has no room.
        assert best([*admitted, waiting[0]]) == -math.inf


def test_hosts_are_on_few_nodes_and_leave_others_whole():
    nodes = alike(3, gpus=4.0)
    one, two = Run("a", {4: 1.0}, 0, needs={"gpus": 1.0}), Run("b", {2: 1.0}, 1, needs={"gpus": 2.0})
    found = decide_mixed([one, two, Run("c", {1: 1.0}, 2)], nodes, Rules(1.0, 1.0, ENOUGH))
    assert [len(found.places[name]) for name in "abc"] == [1, 1, 1]
    assert num_nodes(found.places) == 6
    small = Run("d", {1: 1.0}, 3, needs={"gpus": 1.0})
    beside = decide_mixed([placed(two, n2=1), small], nodes, Rules(1.0, 0.0, ENOUGH))
    assert beside.places == {"b": {"n2": 1}, "d": {"n2": 1}} or beside.nodes["b"] == 2


def test_fair_shares_are_those_of_dominant_resource_fairness():
    # The example of Ghodsi et al. 2011: 9 CPUs and 18 GB; 3 and 2 tasks, each 2/3 of its dominant resource.
    nodes = alike(3, cpus=3.0, gb=6.0)
    a, b = (
        Run("a", linear(1, 9), 0, needs={"cpus": 1.0, "gb": 4.0}),
        Run("b", linear(1, 9), 1, needs={"cpus": 3.0, "gb": 1.0}),
    )
    b = replace(b, speeds=linear(1, 9))
    assert fair_hosts([a, b], nodes) == pytest.approx({"a": 3, "b": 2})
    # A run that does not need what is used up grows on: 3 CPUs are left by a and b at 1/3 of them each.
    gpus = alike(2, gpus=4.0, cpus=6.0)
    many = [Run(name, linear(1, 8), number, needs={"gpus": 1.0}) for number, name in enumerate("ab")]
    other = Run("c", linear(1, 12), 2, needs={"cpus": 1.0})
    assert fair_hosts([*many, other], gpus) == pytest.approx({"a": 4, "b": 4, "c": 12})
    heavy = replace(many[0], weight=3.0)
    assert fair_hosts([heavy, many[1]], gpus) == pytest.approx({"a": 6, "b": 2})


def test_what_moves_is_a_change_and_few_change_at_once():
    nodes = alike(2, gpus=4.0)
    small = [
        placed(Run(f"s{number}", {1: 1.0}, number, needs={"gpus": 2.0}), **{f"n{number}": 1}) for number in range(2)
    ]
    large = Run("large", {1: 1.0}, 9, needs={"gpus": 4.0})
    found = decide_mixed([*small, large], nodes, Rules(1.0, 0.1, ENOUGH))  # One of them moves to the other's node.
    assert len({*found.places["s0"], *found.places["s1"]}) == 1
    assert found.nodes["large"] == 1
    assert sum("moves, on 1" in why for why in found.reasons.values()) == 1
    calm = decide_mixed([*small, large], nodes, Rules(1.0, 0.0, ENOUGH))
    assert calm.nodes == {"s0": 1, "s1": 1, "large": 0}
    assert calm.reasons["large"] == "waits: it needs 1 hosts, and there is room for 0"
    urgent = decide_mixed([*small, replace(large, priority=1)], nodes, Rules(1.0, 0.0, ENOUGH))
    assert urgent.nodes == {"s0": 1, "s1": 1, "large": 1}
    held = [replace(one, fixed=True) for one in small]
    assert decide_mixed([*held, large], nodes, Rules(1.0, 1.0, ENOUGH)).nodes["large"] == 0
    both = [replace(large, name=name, priority=1) for name in ("large", "other")]
    taken = decide_mixed([*small, *both], nodes, Rules(1.0, 0.0, ENOUGH))
    assert taken.nodes == {"s0": 0, "s1": 0, "large": 1, "other": 1}
    assert taken.reasons["s1"] == "stops, and waits: what its 1 hosts have is taken by runs before it, or is lost"


def test_a_lost_node_moves_what_was_there_even_what_is_fixed():
    run = replace(placed(Run("a", linear(1, 2), 0, needs={"gpus": 2.0}), n0=1, n9=1), fixed=True)
    other = placed(Run("b", linear(1), 1, needs={"gpus": 2.0}), n0=1)
    found = decide_mixed([run, other], alike(2, gpus=4.0), Rules(1.0, 0.0, ENOUGH))
    assert found.nodes == {"a": 2, "b": 1}
    assert found.places["b"] == {"n0": 1}
    assert "n9" not in found.places["a"]
    assert decide_mixed([run], {}, Rules(solve_sec=ENOUGH)).nodes == {"a": 0}


@pytest.mark.parametrize(
    ("needs", "least", "nodes", "why"),
    [
        ({"gpus": 9.0}, 1, alike(2, gpus=8.0), "waits: no node has 9 gpus"),
        ({"tpus": 1.0}, 1, alike(2, gpus=8.0), "waits: no node has 1 tpus"),
        ({"gpus": 1.0, "cpus": 9.0}, 1, {"a": {"gpus": 1.0}, "b": {"cpus": 9.0}},
         "waits: no node has gpus=1,cpus=9 together"),
        ({"gpus": 5.0}, 3, alike(2, gpus=8.0), "waits: it needs 3 hosts with gpus=5, and all nodes hold 2"),
        ({"gpus": 1.0}, 1, alike(2), "waits: nothing is known of what the nodes have; `serve --have` says it"),
        ({}, 3, alike(2, gpus=8.0), "waits: it needs 3 nodes, and there are 2"),
    ],
)  # fmt: skip
def test_a_run_that_can_never_fit_says_why_and_keeps_nobody_waiting(needs, least, nodes, why):
    never, small = Run("never", {least: 1.0}, 0, needs=needs), Run("small", {1: 1.0}, 1)
    found = decide_mixed([never, small], nodes, Rules(solve_sec=ENOUGH))
    assert found.reasons["never"] == why
    assert found.nodes == {"never": 0, "small": 1}


def test_without_time_what_runs_stays_and_others_begin_where_they_fit_in_their_order():
    nodes = alike(2, gpus=4.0)
    running = placed(Run("running", linear(1, 3), 0, needs={"gpus": 2.0}), n0=1)
    runs = [
        running,
        Run("fits", linear(1, 2), 1, needs={"gpus": 2.0}),
        Run("large", {2: 1.0}, 2, needs={"gpus": 3.0}),
        Run("behind", {1: 1.0}, 3, needs={"gpus": 1.0}),
    ]
    found = decide_mixed(runs, nodes, Rules(solve_sec=0.0))
    assert found.places == {"running": {"n0": 1}, "fits": {"n0": 1}}
    assert found.reasons["running"].startswith("keeps 1 (n0): ")
    assert found.reasons["behind"] == (
        "waits: there is room for 4 of its hosts, for a run before it that needs more (the best found within 0 s)"
    )


def test_parts_of_a_resource_add_up():
    runs = [Run(f"r{number}", {1: 1.0}, number, needs={"gpus": 0.1}) for number in range(11)]
    found = decide_mixed(runs, alike(1, gpus=1.0), Rules(solve_sec=ENOUGH))
    assert sum(found.nodes.values()) == 10
    assert found.nodes["r10"] == 0


def test_amounts_are_read_as_they_are_typed():
    assert parse_amounts("gpus=1,memory-gb=0.5", "--needs") == {"gpus": 1.0, "memory-gb": 0.5}
    assert parse_nodes(["2x:gpus=8", "1x:cpus=4"]) == [{"gpus": 8.0}, {"gpus": 8.0}, {"cpus": 4.0}]
    for text in ("", "gpus", "gpus=0", "gpus=-1", "gpus=inf", "gpus=x", "=1", "gpus=1,,"):
        with pytest.raises(ConfigError, match=r"needs .*NAME=NUMBER above 0"):
            parse_amounts(text, "--needs")
    with pytest.raises(ConfigError, match="gpus is given twice"):
        parse_amounts("gpus=1,gpus=2", "--needs")
    for word in ("gpus=8", "0x:gpus=8", "-1x:gpus=8", "x:gpus=8"):
        with pytest.raises(ConfigError, match="write a number of nodes and what each has"):
            parse_nodes([word])
