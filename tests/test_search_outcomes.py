"""Trials that diverge cannot win; what Optuna's own tools make of a search."""

import dataclasses
import math
import random
from datetime import datetime

import numpy as np
import optuna
import pytest
from search_made_up import RATE, MadeUp, Said, course, request_in, searched

from jaxdl.core.files import step_dir
from jaxdl.platform.search.copies import write_copies
from jaxdl.platform.search.driver import Search
from jaxdl.platform.search.journal import STUDY, Journal, storage_at
from jaxdl.platform.search.report import importances, result, write_report
from jaxdl.platform.search.samplers import Random
from jaxdl.platform.search.schedulers import PBT, Full, Halving
from jaxdl.platform.search.show import SearchView
from jaxdl.platform.search.space import Choices
from jaxdl.platform.search.trial import Objective, Trial, best
from jaxdl.report.divergence import divergence, losses

GONE = [2.3, 4e9, 8.6e21, 8.6e21, 8.6e21]


@pytest.mark.parametrize(
    "policy", [Full().policy(course(4)), Halving([3, 9], 2, 4, "minimize"), PBT(interval=3).policy(course(4))]
)
def test_a_trial_whose_loss_left_its_start_cannot_win(tmp_path, policy):
    """Its metric is the best one, by chance: it counts as failed, is not promoted, and nobody copies it."""
    request = request_in(tmp_path)
    workers = MadeUp(request, lambda number, start: 0)

    def end(number, start):
        if start == 1 and number < 4:  # A copy begins with the history of another.
            for step, loss in enumerate(GONE if number == 0 else [2.3, 2.0, 90.0, 1.0], start=1):
                workers.write(number, {"step": min(step, 3), "train/loss": loss})
        for step in (3, 6):
            step_dir(request.workdir(number), step).mkdir(parents=True, exist_ok=True)
        return 0

    workers.end = end
    journal, said = Journal(tmp_path / "journal.log", list(request.settings), request.direction), Said()
    Search(request, journal, Random(), policy, workers, said).run()
    trials = journal.trials()
    assert trials[0].state == "failed"
    assert trials[0].reason == (
        "diverged: the training loss is 8.6e+21 at step 3, and was 2.3 at first; eval/loss was 1 by chance"
    )
    assert workers.started.count(0) == 1
    assert 0 not in {one.parent for one in trials}
    assert best(trials, "minimize").number == 1
    shown = SearchView(request, course(4), Full())
    found = result(request, trials, shown)
    assert (found["num_failed"], found["num_diverged"]) == (1, 1)
    write_report(tmp_path, request, trials, found, shown)
    page = (tmp_path / "report.md").read_text()
    assert "1 failed, 1 of them diverged;" in page
    assert "failed: diverged: the training loss is 8.6e+21 at step 3" in page


@pytest.mark.parametrize(
    ("losses", "others", "step"),
    [
        (GONE, math.inf, 2),
        (GONE[:2], math.inf, 2),
        ([1e12, 1e13, 1e14], 2.3, 1),  # It diverged before its first report.
        ([1e12], 2.3, 1),
        ([2.3, math.inf, math.inf, math.inf], math.inf, 2),
        ([-5.0, -6.0, -4.0, 6001.0, 7000.0, 8000.0], math.inf, 4),
        ([2.3, 2.2, 1e7, 1e7, 1e7], math.inf, 3),
        ([1e8, 1e3, 1.0, 1.0, 1.0, 1.0, 1e5, 1e6, 1e7], math.inf, 7),  # It began in a bad place, and left a good one.
        ([1.5**i for i in range(30)], math.inf, 21),  # Slowly.
        ([2.3, *[5e4] * 10], math.inf, 2),  # Too high a rate from the start, and it stays there.
        ([2.3, 2.2, *[5e5] * 10], math.inf, 3),
        ([2.3, 1.0, 3e3, *[5e4] * 10], math.inf, 3),
        ([5e6] * 10, 2.3, 1),
        ([2.3, *[5e4] * 9], math.inf, None),
        ([1e-6, 1e-6, 1e-6, 1e3, 1e5, 1e6, 1e6], math.inf, 4),
        ([50.0, 50.0, 0.0, 50.0, 50.0, 50.0], math.inf, None),  # A dip, as any report may be.
        ([0.0, 50.0, 50.0, 50.0, 50.0], math.inf, None),
        ([5000.0, 5000.0, 5000.0], 2.3, None),
        ([-5.0, 6000.0, 7000.0, 8000.0], math.inf, None),
        ([1e8, 1e6, 1e3, 1.0, 0.1], math.inf, None),
        ([2.0, -100.0, -3000.0, 1500.0, 1500.0, 1500.0], math.inf, None),  # Of the size that it had.
        ([-1.0, -1e3, -1e6, -1e6, -1e6], math.inf, None),
        ([1e12, 1e13, 1e14], math.inf, None),  # In this unit it only grew.
        ([2.3, 1.0, 1e9], math.inf, None),  # A spike, as it may be any report.
        ([2.3, 1e9, 1e9, 1e9, 1.0], math.inf, None),  # It came back.
        ([2.3, 1e-7, 0.1, 0.1, 0.1], math.inf, None),
        ([1e-5, 0.5, 0.5, 0.5], math.inf, None),
        ([2.3], math.inf, None),
        ([math.inf], math.inf, None),
        ([], 1.0, None),
    ],
)
def test_what_counts_as_divergence(losses, others, step):
    found = divergence(list(enumerate(losses, start=1)), others)
    assert (None if found is None else found.step) == step


@pytest.mark.parametrize(("rows", "num_reports"), [(1, 12), (1, 79), (1, 1000), (2, 1000)])
def test_noise_is_no_divergence(rows, num_reports):
    """Squared errors of batches of a few rows, whose scale never changes, with the least first one of all runs."""
    draw = np.random.default_rng(rows)
    runs = 1e4 * (draw.standard_normal((200, num_reports, rows)) ** 2).mean(2)
    assert not [found for run in runs if (found := divergence([*enumerate(run.tolist())], runs[:, 0].min()))]


def test_the_reason_says_whose_losses_were_low():
    found = divergence([(1, 5e12), (2, 5e12)], 2.3)
    assert found is not None
    assert found.why == "the training loss is 5e+12 at step 2, and other runs began at 2.3"


def test_reports_in_which_nothing_counted_are_no_divergence():
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate([0.7, 0.6, None, math.nan, None], start=1)]
    assert losses(rows) == [(1, 0.7), (2, 0.6)]
    assert losses([{"step": 9, "train/loss": math.inf}]) == [(9, math.inf)]


def names_of(study):
    return [one.state.name for one in study.get_trials(deepcopy=False)]


def opened(path, name=STUDY):
    return optuna.load_study(storage=storage_at(path), study_name=name)


def test_a_trial_that_waits_is_waiting_for_optuna_too(tmp_path):
    """Only what a process trains is RUNNING; the trials that were stopped resume under their own numbers."""
    request, journal = request_in(tmp_path), tmp_path / "journal.log"
    seen = []

    def end(number, start):
        seen.append((number, names_of(opened(journal))[number], names_of(opened(journal)).count("RUNNING")))
        return 75 if (number, start) == (1, 1) else 143 if number == 3 else 0

    halving = Halving([3, 9], 4, 4, "minimize")
    trials, *_ = searched(request, halving, end)
    assert {(state, count) for _, state, count in seen} == {("RUNNING", 1)}
    assert names_of(opened(journal)) == ["COMPLETE", "WAITING", "WAITING", "WAITING"]
    assert [one.state for one in trials] == ["finished", "open", "open", "failed"]
    assert trials[3].given_up
    more = Halving([3, 9], 2, 6, "minimize")
    trials, again, _ = searched(request, more)
    assert len(trials) == 6, "and no copies"
    assert 1 in again.started, "the second best of the first rung trains on"
    assert names_of(opened(journal)) == ["COMPLETE" if one.state == "finished" else "WAITING" for one in trials]
    assert [one.number for one in trials] == list(range(6))


def test_trials_that_run_in_a_journal_of_a_killed_search_do_not_run(tmp_path):
    request = request_in(tmp_path)
    journal = Journal(tmp_path / "journal.log", [RATE], "minimize")
    journal.start(journal.add({RATE.name: 0.1}, 3))
    journal.start(journal.add({RATE.name: 0.2}, 3))
    journal.report(0, 3, 1.0)  # As every trial that waited did, in a journal of an earlier version.
    assert names_of(opened(tmp_path / "journal.log")) == ["RUNNING", "RUNNING"]
    trials, workers, _ = searched(request, Halving([3, 9], 9, 2, "minimize"))
    assert names_of(opened(tmp_path / "journal.log")) == ["COMPLETE", "WAITING"]
    assert workers.started == [1, 0]
    assert [one.state for one in trials] == ["finished", "open"]


def test_optunas_tools_understand_the_copies(tmp_path):
    """Importances of the study at the first stop are those of a study of complete trials, and all has ended."""
    draw = random.Random(0)
    rates = [draw.choice((0.1, 0.2, 0.4, 0.8)) for _ in range(12)]
    other = Choices("optimizer.momentum", (0.5, 0.9))
    trials = [
        Trial(n, {RATE.name: rate, other.name: draw.choice((0.5, 0.9))}, 3, {3: rate + n / 1000})
        for n, rate in enumerate(rates)
    ]
    trials[0] = dataclasses.replace(trials[0], values={3: 0.1, 9: 0.05}, target=9, state="finished")
    trials[1] = dataclasses.replace(trials[1], values={}, state="failed", reason="diverged: it did")
    trials[2] = dataclasses.replace(trials[2], values={})
    path = tmp_path / "optuna.log"
    loss = [Objective("eval/loss", "minimize")]
    times = {n: (datetime(2026, 11, 1, 9, n), datetime(2026, 11, 1, 10, n)) for n in range(12)}
    write_copies(path, trials, [RATE, other], loss)
    write_copies(path, trials, [RATE, other], loss, times)
    study = opened(path)
    assert names_of(study) == ["COMPLETE", "FAIL", "WAITING", *["PRUNED"] * 9]
    assert study.best_trial.number == 0
    assert [dict(one.intermediate_values) for one in study.trials] == [dict(one.values) for one in trials]
    assert [one.value for one in study.trials] == [one.value for one in trials], "as Optuna ends those it prunes"
    ended = [one.datetime_complete for one in study.trials if one.state.name == "PRUNED"]
    assert ended == [times[n][1] for n in range(3, 12)]
    assert study.metric_names == ["eval/loss"]
    at_3 = opened(path, f"{STUDY} at step 3")
    assert names_of(at_3) == ["COMPLETE", "FAIL", "WAITING", *["COMPLETE"] * 9], "under the same numbers"
    assert [one.value for one in at_3.trials] == [one.values.get(3) for one in trials]
    assert [dict(one.intermediate_values) for one in at_3.trials] == [
        {3: one.values[3]} if one.values else {} for one in trials
    ]
    assert at_3.metric_names == ["eval/loss at step 3"]
    found = optuna.importance.get_param_importances(at_3, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    assert found == importances(trials, request_in(tmp_path, settings=(RATE, other))), "those of the report"
    assert list(found) == [RATE.name, other.name]
    by_trees = optuna.importance.FanovaImportanceEvaluator(seed=0)
    fanova = optuna.importance.get_param_importances(at_3, evaluator=by_trees)
    assert list(fanova) == [RATE.name, other.name]
    assert fanova[RATE.name] > 0.7
    assert [path.name for path in tmp_path.iterdir()] == ["optuna.log"]
