"""What a search varies, given in Python too; conditions, tuples, and the ends of a search by time and by plateau."""

from dataclasses import replace

import numpy as np
import pytest
from search_made_up import MadeUp, Said, searched
from search_made_up import request_in as made_up_request

from jaxdl.core.errors import ConfigError, OptionError
from jaxdl.platform.search.config import combinations
from jaxdl.platform.search.driver import Search
from jaxdl.platform.search.journal import Journal
from jaxdl.platform.search.samplers import TPE, Grid, Random
from jaxdl.platform.search.schedulers import ASHA, PBT, Course, Full, New, Promote
from jaxdl.platform.search.space import Choices, Condition, Number, parse_settings, words_of
from jaxdl.platform.search.trial import Trial
from jaxdl.platform.search.vary import vary_texts

BOTH = {
    "optimizer": {
        "sgd": {"optimizer.momentum": [0.5, 0.9], "optimizer.nesterov": [True, False]},
        "lars": {"optimizer.momentum": [0.5, 0.9]},
        "adamw": None,
    },
    "model.units": [(32,), (64, 64)],
}
"""Momentum is of two optimizers, Nesterov's of one; widths are tuples."""


def test_what_varies_is_given_in_python():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    assert vary_texts("a=1,2") == ("a=1,2",)
    quoted = parse_settings(vary_texts({"a": {"x": {"b": ["1 if a=x", "it's"]}, "y": None}, "c": np.array([1, 2])}))
    assert quoted == [Choices("a", ("x", "y")), Choices("c", (1, 2)),
                      Choices("b", ("1 if a=x", "it's"), when=Condition("a", ("x",)))]  # fmt: skip
    assert parse_settings(["a=it's,that's"]) == [Choices("a", ("it's", "that's"))]
    assert vary_texts(BOTH) == (
        "optimizer=sgd,lars,adamw", "optimizer.momentum=0.5,0.9 if optimizer=sgd,lars",
        "optimizer.nesterov=True,False if optimizer=sgd", "model.units=(32,),(64, 64)",
    )  # fmt: skip
    found = parse_settings(vary_texts(BOTH))
    assert found[2] == Choices("optimizer.momentum", (0.5, 0.9), when=Condition("optimizer", ("sgd", "lars")))
    assert found[1].values == ((32,), (64, 64))
    assert words_of({"model.units": (64, 64)}) == ["--model.units", "64", "64"]
    given = {"a": FloatDistribution(1e-3, 1, log=True), "b": IntDistribution(1, 8), "c": range(2, 5),
             "d": CategoricalDistribution(["x", "1"]), "e": "uniform:0:1", "f": list(np.array([1.5, 2.5]))}  # fmt: skip
    values = [Number("a", 1e-3, 1.0, log=True), Number("b", 1, 8, whole=True), Number("c", 2, 4, whole=True),
              Choices("d", ("x", "1")), Number("e", 0.0, 1.0), Choices("f", (1.5, 2.5))]  # fmt: skip
    assert parse_settings(vary_texts(given)) == values
    steps = FloatDistribution(0, 1, step=0.5)
    for wrong, message in (({"a": 3}, "says not what varies"), ({"a": steps}, "steps of 0.5"),
                           ({"a": {"x": ["b"]}}, "no dictionary"), ({"a": {}}, "an empty dictionary")):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            vary_texts(wrong)


def test_a_condition_decides_what_a_trial_has():
    settings = parse_settings(vary_texts(BOTH))
    grid = Grid()
    assert grid.check(settings) == 2 * (4 + 2 + 1), "widths, times those of each optimizer"
    trials = []
    for number in range(14):
        values = grid.propose(settings, trials, ("minimize",), 0, {}).settings
        trials.append(Trial(number, values, 9))
        optimizer = values["optimizer"]
        assert ("optimizer.momentum" in values) == (optimizer != "adamw")
        assert ("optimizer.nesterov" in values) == (optimizer == "sgd")
    assert len({tuple(trial.settings.items()) for trial in trials}) == 14
    ends = list(combinations(settings))
    assert all(setting.applies(values) == (setting.name in values) for values in ends for setting in settings)
    for setting in settings:
        assert {values[setting.name] for values in ends if setting.name in values} == set(setting.ends())


def test_a_field_may_have_a_range_for_each_value_of_another(tmp_path):
    vary = {"optimizer": {"sgd": {"rate": "log:1e-2:1"}, "adamw": {"rate": "log:1e-4:1e-3"}, "lars": None}}
    settings = parse_settings(vary_texts(vary))
    assert [setting.key for setting in settings] == ["optimizer", "rate if optimizer=sgd", "rate if optimizer=adamw"]
    journal = Journal(tmp_path / "journal", settings, "minimize")
    for seed in range(30):
        values = TPE(startup=3).propose(settings, journal.trials(), ("minimize",), seed, {}).settings
        low, high = {"sgd": (1e-2, 1), "adamw": (1e-4, 1e-3), "lars": (None, None)}[values["optimizer"]]
        assert ("rate" in values) == (low is not None)
        assert low is None or low <= values["rate"] <= high
        journal.add(values, 9)
        journal.finish(seed, values.get("rate", 0.5))
        assert dict(journal.trials()[seed].settings) == values
    assert len({trial.settings["optimizer"] for trial in journal.trials()}) == 3


def test_a_large_grid_is_counted_at_once():
    texts = [*(f"{name}=int:1:1000" for name in "abcdef"), "g=1,2 if a=1,2", "h=1,2,3 if g=1"]
    assert Grid().check(parse_settings(texts)) == 1000**5 * (998 + 2 * (3 + 1))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=1,2 if b=3"], "b does not vary"),
        (["a=1,2 if b=3", "b=1,2"], "b is never 3"),
        (["a=1,2 if b=1", "b=uniform:0:1"], "no list of values"),
        (["a=1,2 if b=1", "b=1,2 if a=1"], "depends on itself"),
        (["a=1,2 if b=1", "a=3,4", "b=1,2"], "given twice"),
        (["a=1,2 if b=1", "a=3,4 if b=1,2", "b=1,2"], "given twice"),
    ],
)
def test_conditions_that_cannot_hold_are_refused(texts, message):
    with pytest.raises(OptionError, match=message):
        parse_settings(texts)


def test_a_journal_keeps_tuples_and_what_applies(tmp_path):
    settings = parse_settings(vary_texts(BOTH))
    journal = Journal(tmp_path / "journal", settings, "minimize")
    sgd = {"optimizer": "sgd", "model.units": (32,), "optimizer.momentum": 0.5, "optimizer.nesterov": False}
    given = [{"optimizer": "adamw", "model.units": (64, 64)}, sgd]
    for values in given:
        journal.add(values, 9)
        journal.finish(len(journal.trials()) - 1, 1.0)
    again = Journal(tmp_path / "journal", settings, "minimize")
    assert [dict(trial.settings) for trial in again.trials()] == given
    proposed = [TPE(startup=1).propose(settings, again.trials(), ("minimize",), seed, {}).settings for seed in range(8)]
    assert all(values["model.units"] in ((32,), (64, 64)) for values in proposed)
    assert {values["optimizer"] == "sgd" for values in proposed if "optimizer.nesterov" in values} <= {True}


@pytest.mark.parametrize("first", [None, 3])
def test_a_plateau_ends_the_start_of_trials(first):
    """Three in a row are no better than the best before them, of which one failed."""
    course = Course(20, 9, lambda step: step, "minimize", (), 0, patience=3)
    policy = Full().policy(course) if first is None else ASHA(rungs=(first,), reduction=20).policy(course)
    trials = []
    for value in (None, None, None, 5.0, 4.0, 6.0, 4.0, 3.0, 7.0, None, 3.0):
        assert policy.next(trials) == New(first)
        target = first or 9
        assert policy.next([*trials, Trial(len(trials), {}, target)]) == New(first), "one that trains says nothing yet"
        state = "failed" if value is None else "finished" if first is None else "open"
        trials.append(Trial(len(trials), {}, target, {} if value is None else {target: value}, state))
    following = policy.next(trials)
    assert following is None if first is None else following == Promote(7, 9), "the best one is completed"
    with pytest.raises(ConfigError, match="patience"):
        PBT(interval=3).policy(course)


def test_the_time_of_a_search_ends_and_it_goes_on(tmp_path):
    request = replace(made_up_request(tmp_path), hours=0.4 / 3600)
    journal = Journal(tmp_path / "journal.log", list(request.settings), "minimize")
    course = Course(2, 9, lambda step: step, "minimize", request.settings, 0)
    slow, said = MadeUp(request, lambda number, start: 0), Said()
    slow.poll = dict
    assert Search(request, journal, Random(), Full().policy(course), slow, said).run() is None
    assert slow.calls == ["stop", "close"]
    assert "time is over" in said.events[-1]
    assert [trial.busy for trial in journal.trials()] == [True]
    trials, _, _ = searched(replace(request, hours=None), Full().policy(course))
    assert [trial.state for trial in trials] == ["finished", "finished"]
