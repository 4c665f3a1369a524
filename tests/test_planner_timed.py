"""The planner's times from measured steps, and the comparison with timed layouts, on closed forms."""

import math

import pytest

from benchmarks.planner.layouts import make_rows, rank_correlation, remarks
from jaxdl.exchange.cost import Link, Machine
from jaxdl.performance.planner.memory import Fit
from jaxdl.performance.planner.steptime import Efficiency, Profile, own_time
from jaxdl.performance.planner.timed import StepParts, fit_steps, quickest, slowest, without_tables
from jaxdl.performance.planner.workload import with_measured


def test_steps_fall_apart_into_micro_batches_examples_and_the_rest():
    parts = (2e-3, 5e-4, 7e-3)
    steps = {(m, e): m * (parts[0] + parts[1] * e) + parts[2] for m, e in ((1, 8), (2, 4), (1, 4))}
    assert fit_steps(steps) == pytest.approx(parts, rel=1e-6)
    falling = {(1, 8): 1.0, (2, 4): 0.9, (4, 2): 0.8}
    assert min(fit_steps(falling)) >= 0


def test_tables_are_taken_off_a_step_but_not_all_of_it():
    assert without_tables(5e-3, 2e-3) == pytest.approx(3e-3)
    assert without_tables(5e-3, 9e-3) == pytest.approx(5e-4)


def test_collectives_are_looked_up_by_their_own_size():
    curve = ((1e3, 1e-3), (1e4, 1e-3), (1e5, 5e-3))
    machine = Machine({"fsdp": Link(1e-4, 1e8, curve=curve)})
    profile = Profile(Fit(), Fit(), Fit(), fsdp_bytes=20 * 1e4 * 2, fsdp_messages=20)
    sizes = {"replica": 1, "fsdp": 2, "tensor": 1}
    assert own_time(profile, sizes, 1, 1, machine, Efficiency()).inner_sec == pytest.approx(20 * 1e-3)


def test_the_choice_is_first_and_noise_ties():
    times = {"a": [1.0, 1.1, 1.0, 1.1], "b": [1.1, 1.0, 1.1, 1.0], "c": [2.0, 2.0, 2.0, 2.1]}
    rows = make_rows({"a": 1.2, "b": 1.0, "c": 3.0}, times, nodes=2, chosen="a")
    assert [row.layout for row in rows] == ["b", "a", "c"]
    assert [row.tied for row in rows] == [True, True, False]
    assert [row.chosen for row in rows] == [False, True, False]
    assert rows[2].error == pytest.approx(0.5)
    assert rank_correlation(rows[1:]) == 1
    assert remarks(rows)[0].startswith("the choice (a) takes 1.000 times as long as the fastest (b)")


def test_noise_leaves_the_choice_to_the_prediction():
    fast, slow = [1.0, 1.0, 1.0, 1.0, 1.0], [1.1, 1.1, 1.1, 1.1, 0.9]
    assert quickest({"a": slow, "b": fast}) == "b"
    assert quickest({"a": [1.1, 1.1, 1.1, 0.9, 1.0], "b": fast}) == "a"
    assert quickest({"a": slow + slow, "b": fast}) == "b"
    assert quickest({"a": [math.inf], "b": slow}) == "b"
    assert quickest({"a": [math.inf], "b": [math.inf]}) == "a"
    assert slowest({"a": slow, "b": fast}) == {"a": slow, "b": fast}


def test_kernels_take_the_times_of_measured_ones():
    parts = StepParts(2e-3, 1e-3, 4e-3)
    alone = Profile(Fit(7.0), Fit(1e-3, 0.0, 1e-4), Fit(0.0, 1e-3))
    whole, split = (with_measured(alone, parts, alone, 10, divided=one) for one in (False, True))
    assert (whole.passes_sec.at(1, 10), whole.other_sec.at(4, 0)) == pytest.approx((12e-3, 4e-3))
    assert split.other_sec.at(4, 0) == pytest.approx(1e-3)
    assert split.temporary == alone.temporary
    # With `tensor` they are as much slower than their least times as those without: 6 times, and 4 times the rest.
    half = Profile(Fit(), Fit(5e-4, 0.0, 5e-5), Fit(0.0, 5e-4))
    found = with_measured(half, parts, alone, 10, divided=True)
    assert (found.passes_sec.at(1, 10), found.other_sec.at(1, 0)) == pytest.approx((6e-3, 2e-3))
