"""The report on the input pipeline: how long steps wait for it, and why."""

import types
from collections import Counter

import pytest

from jaxdl.report.inputs import InputWatch


def watched(shares, seconds, tiers=None, passed=None):
    """The rows and warnings of reports whose waits are `shares`; each adds the work `seconds`."""
    done = types.SimpleNamespace(tiers=Counter(), seconds={}, passed=Counter())
    told = []
    watch = InputWatch(lambda: done, told.append)
    rows = []
    for share in shares:
        done = types.SimpleNamespace(
            tiers=done.tiers + Counter(tiers or {"origin": 100}),
            passed=done.passed + Counter(passed or dict.fromkeys(seconds, 100)),
            seconds={stage: done.seconds.get(stage, 0) + spent for stage, spent in seconds.items()},
        )
        rows.append(watch.report(share))
    return rows, told


def test_the_input_is_reported_since_the_last_report():
    rows, told = watched(
        [0.1, 0.1], {"read": 2.0, "decode": 4.0}, {"origin": 60, "disk": 40}, {"read": 60, "decode": 100}
    )
    wanted = {
        "input/wait": 0.1,
        "input/hits/disk": 0.4,
        "input/hits/origin": 0.6,
        "input/per_sec/decode": 25.0,
        "input/per_sec/read": 30.0,
    }
    assert rows == [wanted, wanted]
    assert told == []


@pytest.mark.parametrize(("seconds", "stage", "cure"), [
    ({"read": 9.0, "decode": 1.0}, "read", "local disk"),
    ({"read": 1.0, "decode": 4.0}, "decode", "cache decoded images"),
    ({"augment": 3.0, "memory": 1.0}, "augment", "less augmentation"),
])  # fmt: skip
def test_waiting_for_data_names_the_slow_stage_once(seconds, stage, cure):
    _, told = watched([0.5] * 10, seconds)
    (line,) = told
    assert f"the slowest stage is {stage!r}" in line
    assert cure in line
    assert watched([0.5, 0.5, 0.0] * 5, seconds)[1] == [], "occasional waits are no reason for a warning"


def test_a_source_that_says_nothing_is_not_asked():
    assert InputWatch(lambda: None, print).report(0.25) == {"input/wait": 0.25}
