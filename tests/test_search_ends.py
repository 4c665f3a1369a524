"""How trials of a search end, and what becomes of them: a real journal and loop, trials that are made up."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import optuna
import pytest
from children import CHILD, child_of, ends

from jaxdl.errors import ConfigError
from jaxdl.files import step_dir
from jaxdl.launch import processes
from jaxdl.report.divergence import divergence
from jaxdl.report.tracking import name_of
from jaxdl.search import command
from jaxdl.search.attempts import Attempts
from jaxdl.search.copies import write_copies
from jaxdl.search.driver import Request, Search, check_any
from jaxdl.search.engines import Job, Processes
from jaxdl.search.journal import STUDY, Journal, storage_at
from jaxdl.search.report import result, write_report
from jaxdl.search.samplers import Random
from jaxdl.search.schedulers import PBT, Course, Full, Halving
from jaxdl.search.show import Shown, table
from jaxdl.search.space import Choices
from jaxdl.search.trial import Trial, best
from jaxdl.status import Reason, Record, State, utc_now, write_record

RATE = Choices("optimizer.learning_rate", (0.1, 0.2, 0.4, 0.8))


class MadeUp:
    """Workers whose trials end at once.

    `end(number, start)` has the exit code of a trial's start of that number; where it is 0, a value is in its history,
    but for the trial `silent`.
    """

    def __init__(self, request, end, capacity=1, silent=None):
        self.request, self.end, self.capacity, self.silent = request, end, capacity, silent
        self.started, self.jobs, self.calls = [], [], []

    def start(self, job):
        self.started.append(job.number)
        self.jobs.append(job)

    def ended(self):
        codes = {}
        while self.jobs:
            job = self.jobs.pop()
            codes[job.number] = code = self.end(job.number, self.started.count(job.number))
            if code == 0 and job.number != self.silent:
                words = list(job.command)
                step = int(words[words.index("--max-steps") + 1]) if "--max-steps" in words else 9
                self.write(job.number, {"step": step, "eval/loss": 1.0 + job.number})
        return codes

    def write(self, number, row):
        workdir = self.request.workdir(number)
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def stop(self):
        self.calls.append("stop")

    def close(self):
        self.calls.append("close")


class Said:
    """What a search shows."""

    def __init__(self):
        self.events, self.trials = [], []

    def event(self, text):
        self.events.append(text)

    def refresh(self, trials, running):
        self.trials = list(trials)


def request_in(folder, **changes):
    given = {"command": ("--config", "x"), "settings": (RATE,), "metric": "eval/loss", "direction": "minimize"}
    return Request(**{"folder": folder, **given, "length": lambda settings: 9, **changes})


def course(trials):
    return Course(trials, 9, lambda step: step, "minimize", (RATE,), seed=0)


def searched(request, policy, end=lambda number, start: 0, **workers):
    """One process of a search, to its end: (trials, workers, what it said)."""
    journal = Journal(request.folder / "journal.log", list(request.settings), request.direction)
    made, said = MadeUp(request, end, **workers), Said()
    Search(request, journal, Random(), policy, made, said).run()
    return journal.trials(), made, said


class Killed(BaseException):
    pass


def killed(*args):
    raise Killed


@pytest.mark.parametrize("policy", [Full().policy(course(1)), Halving([3, 9], 3, 1, "minimize")])
def test_a_trial_whose_search_was_killed_before_it_was_finished_is_finished(tmp_path, monkeypatch, policy):
    request = request_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "finish", killed)
        with pytest.raises(Killed):
            searched(request, policy)
    (trial,), workers, _ = searched(request, policy)
    assert (trial.state, trial.value, trial.step) == ("finished", 1.0, 9)
    assert workers.started == [], "it has been trained"


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
    shown = Shown(request, course(4), Full())
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
        ([-5.0, 6000.0, 7000.0, 8000.0], math.inf, 2),
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


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PAUSE_SEC", 0.0)


@pytest.mark.usefixtures("fast", "on_command_line")
def test_a_trial_that_was_halted_waits_and_the_same_command_resumes_it(tmp_path):
    request = request_in(tmp_path)

    def halted(number, start):
        if number != 1:
            return 0
        reason = Reason("halt file: stopped at step 4 (lunch)", 4, utc_now())
        request.workdir(1).mkdir(parents=True)
        write_record(request.workdir(1), Record(State.HALTED, utc_now(), utc_now(), step=4, reason=reason))
        return 4

    trials, workers, said = searched(request, Full().policy(course(3)), halted)
    assert workers.started == [0, 1, 2], "it is not started again, and the others go on"
    assert [one.state for one in trials] == ["finished", "open", "finished"]
    assert trials[1].busy
    assert trials[1].reason == "halt file: stopped at step 4 (lunch)"
    assert any("trial 1: halt file: stopped at step 4 (lunch); the same command resumes" in one for one in said.events)
    shown = Shown(request, course(3), Full())
    assert "to be resumed: halt file: stopped at step 4 (lunch)" in table(shown, said.trials, []).columns[2]._cells
    given = SimpleNamespace(workdir=tmp_path)
    assert "waiting 1 trial, to be resumed by the same command" in command._lines(given, result(request, trials, shown))
    trials, workers, _ = searched(request, Full().policy(course(3)))
    assert not [one for one in command._lines(given, result(request, trials, shown)) if "waiting" in one]
    assert workers.started == [1]
    assert [(one.state, one.reason) for one in trials] == [("finished", "")] * 3


@pytest.mark.usefixtures("fast", "on_command_line")
def test_what_diverged_or_was_refused_stays_failed_and_what_broke_off_is_tried_by_the_next_command(tmp_path):
    codes, request = {0: 3, 1: 2, 2: 75, 3: -9}, request_in(tmp_path, retries=1)
    trials, workers, _ = searched(request, Full().policy(course(4)), lambda number, start: codes[number])
    assert [one.state for one in trials] == ["failed"] * 4
    assert workers.started == [0, 1, 2, 2, 3, 3]
    assert "exit code 75, 1 times started again" in trials[2].reason
    with pytest.raises(ConfigError, match="the same command tries those again that may yet train") as raised:
        check_any(trials)
    assert "--vary" not in str(raised.value), "its ranges are not why"
    trials, workers, _ = searched(request, Full().policy(course(4)), lambda number, start: 0)
    assert workers.started == [2, 3]
    assert [(one.state, one.given_up, bool(one.reason)) for one in trials] == [
        ("failed", False, True), ("failed", False, True), ("finished", False, False), ("finished", False, False),
    ]  # fmt: skip


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("printed", "passing"),
    [
        ("--workdir x is in use: by 1", True),
        ("--stage-data /disk: No space left on device", True),
        ("--stage-data: data digits reads no files, so it has no effect. Leave it out.", False),
        ("--stage-data: the tokens are not in x yet. Prepare them first, with python -m jaxdl.data prepare.", False),
    ],
)
def test_a_refusal_that_is_not_of_the_settings_is_not_for_good(tmp_path, printed, passing):
    request = request_in(tmp_path, retries=1)
    request.log(0).parent.mkdir()
    request.log(0).write_text(f"error: {printed}\n")
    trials, workers, _ = searched(request, Full().policy(course(1)), lambda number, start: 2)
    assert (trials[0].given_up, workers.started) == (passing, [0, 0] if passing else [0])


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(("code", "advice"), [(3, "Change the ranges of --vary"), (2, "what the trials printed.")])
def test_ranges_are_blamed_for_trials_that_diverged_alone(tmp_path, code, advice):
    trials, _, _ = searched(request_in(tmp_path), Full().policy(course(2)), lambda number, start: code)
    with pytest.raises(ConfigError, match="all 2 trials failed") as raised:
        check_any(trials)
    assert advice in str(raised.value)
    assert ("--vary" in str(raised.value)) == (code == 3)


def test_starts_of_a_trial_that_breaks_off_are_further_and_further_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PAUSE_SEC", 0.4)
    at = []

    def end(number, start):
        if number == 0:
            at.append(time.monotonic())
        return 75 if number == 0 and start < 3 else 0

    trials, workers, _ = searched(request_in(tmp_path), Full().policy(course(2)), end)
    assert [one.state for one in trials] == ["finished"] * 2
    assert workers.started == [0, 1, 0, 0], "the other trial does not wait for it"
    assert 0.4 <= at[1] - at[0] < at[2] - at[1]


def test_a_trial_that_trained_for_long_is_started_again_at_once():
    now = [0.0]
    attempts = Attempts(3, lambda: now[0])
    attempts.started(0)
    assert attempts.again(0) == 1.0
    assert not attempts.is_due(0)
    now[0] = 1.0
    assert attempts.is_due(0)
    attempts.started(0)
    now[0] = 1000.0
    assert attempts.again(0) == 0.0
    assert attempts.is_due(0)
    attempts.reached(0)
    assert [attempts.again(0) is None for _ in range(4)] == [False, False, False, True], "counted from there"


@pytest.mark.usefixtures("fast", "on_command_line")
def test_a_member_whose_place_was_taken_is_not_tried_again(tmp_path, monkeypatch):
    request, policy = request_in(tmp_path, retries=0), PBT(interval=4).policy(course(3))
    monkeypatch.setattr("jaxdl.search.driver.copy_workdir", lambda source, target, step: True)
    trials, _, _ = searched(request, policy, lambda number, start: 75 if number == 0 else 0)
    assert next(one.replaces for one in trials if one.parent is not None) == 0
    again, workers, _ = searched(request, policy)
    assert workers.started == []
    assert (again[0].state, again[0].given_up) == ("failed", False)


@pytest.mark.usefixtures("on_command_line")
def test_a_metric_that_the_first_run_to_end_has_not_stops_the_search_and_fails_no_trial(tmp_path):
    with pytest.raises(ConfigError, match=r"--metric eval/top1/accuracy: trial 0.* no run has.*: eval/loss\.$"):
        searched(request_in(tmp_path, metric="eval/top1/accuracy"), Full().policy(course(4)))
    trials, workers, _ = searched(request_in(tmp_path), Full().policy(course(4)))
    assert [one.state for one in trials] == ["finished"] * 4
    assert workers.started == [0, 1, 2, 3]


def test_a_metric_that_is_of_neither_training_nor_evaluation_is_one_that_a_run_has(tmp_path):
    request = request_in(tmp_path, metric="examples_per_sec")

    def end(number, start):
        request.workdir(number).mkdir(parents=True)
        (request.workdir(number) / "metrics.jsonl").write_text('{"step": 5, "examples_per_sec": 7.0}\n')
        return 0

    trials, _, _ = searched(request, Full().policy(course(2)), end)
    assert [(one.state, one.reason.partition(":")[0]) for one in trials] == [
        ("failed", "no examples_per_sec at step 9")
    ] * 2


def test_a_later_trial_without_the_metric_fails_and_ends_no_search(tmp_path):
    request = request_in(tmp_path)

    def end(number, start):
        if number == 1:
            request.workdir(1).mkdir(parents=True)
            (request.workdir(1) / "metrics.jsonl").write_text('{"step": 9, "eval/accuracy": 1.0}\n')
        return 0

    trials, _, _ = searched(request, Full().policy(course(3)), end, silent=1)
    assert [one.state for one in trials] == ["finished", "failed", "finished"]
    assert trials[1].reason == "no eval/loss at step 9: its metrics are eval/accuracy"


def test_trials_save_before_the_search_ends_by_an_error(tmp_path):
    """Such as a full disk when the journal is written."""
    request = request_in(tmp_path)
    workers = MadeUp(request, lambda number, start: 0)

    class OnAFullDisk(Journal):
        def report(self, number, step, value):
            raise OSError(28, "No space left on device")

    journal = OnAFullDisk(tmp_path / "journal.log", [RATE], "minimize")
    with pytest.raises(OSError, match="No space"):
        Search(request, journal, Random(), Full().policy(course(2)), workers, Said()).run()
    assert workers.calls == ["stop", "close"]


def test_copies_of_the_data_are_for_trials_and_may_be_elsewhere_next_time(tmp_path):
    digits = ["--config", "digits", "--workdir", str(tmp_path), "--vary", "seed=1,2", "--epochs", "3"]
    files = ["--data", "tabular", "--data.train", "a.csv", "--data.test", "b.csv"]
    line = [*digits, *files]
    given = command.parse_command([*line, "--stage-data", "/local/disk"], "search")
    assert (given.stage_data, given.words) == ("/local/disk", ("--epochs", "3", *files))
    assert command.parse_command(line, "search").stage_data is None
    request = request_in(tmp_path, stage_data=given.stage_data)
    trial = Trial(0, {RATE.name: 0.1}, 9)
    words = request.train(trial)
    assert words[words.index("--stage-data") + 1] == "/local/disk"
    assert "--stage-data" not in request_in(tmp_path).train(trial)
    for wrong, message in ((["--stage-data", ""], "empty"), (["--stage-data"], "give one value")):
        with pytest.raises(ConfigError, match=message):
            command.parse_command([*line, *wrong], "search")
    with pytest.raises(ConfigError, match="data digits reads no files, so it has no effect"):
        command.parse_command([*digits, "--stage-data", "/local/disk"], "search")
    varied = [*digits[:4], "--vary", "data=digits,tabular", "--stage-data", "/local/disk"]
    assert command.parse_command(varied, "search").stage_data == "/local/disk", "some trials may have files"


def test_trials_have_names_that_say_which_search_they_are_of(tmp_path):
    trial = tmp_path / "rates" / "trials" / "0003"
    trial.mkdir(parents=True)
    assert name_of(trial) == "0003", "a folder that is of no search"
    (tmp_path / "rates" / "search.json").write_text("{}")
    assert name_of(trial) == "rates/0003"
    assert name_of(tmp_path / "rates") == "rates"


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_what_a_trial_has_started_ends_with_it(tmp_path, how):
    """Workers that read data, say, of a trial that is killed."""
    workers = Processes([{}])
    workers.start(Job(0, [sys.executable, "-c", f"{CHILD}time.sleep(300)"], tmp_path / "log"))
    child = child_of(tmp_path / "log")
    if how == "killed":
        ((process, _),) = workers._running.values()
        process.kill()
        while not (codes := workers.ended()):
            time.sleep(0.02)
        assert codes == {0: -9}
        assert ends(child)
    workers.close()
    assert ends(child)


def test_what_a_trial_has_started_ends_with_a_search_that_is_killed(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from jaxdl.search.engines import Job, Processes
workers = Processes([{{}}])
workers.start(Job(0, [sys.executable, "-c", {CHILD + "time.sleep(300)"!r}], Path({str(tmp_path / "log")!r})))
time.sleep(300)
"""
    search = subprocess.Popen([sys.executable, "-c", code])
    child = child_of(tmp_path / "log")
    search.kill()
    search.wait()
    assert ends(child)


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
    write_copies(path, trials, [RATE, other], "minimize")
    write_copies(path, trials, [RATE, other], "minimize")
    study = opened(path)
    assert names_of(study) == ["COMPLETE", "FAIL", "WAITING", *["PRUNED"] * 9]
    assert study.best_trial.number == 0
    assert [dict(one.intermediate_values) for one in study.trials] == [dict(one.values) for one in trials]
    at_3 = opened(path, f"{STUDY} at step 3")
    assert set(names_of(at_3)) == {"COMPLETE"}
    assert [one.user_attrs["number"] for one in at_3.trials] == [0, *range(3, 12)]
    found = optuna.importance.get_param_importances(at_3, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    assert list(found) == [RATE.name, other.name]
    assert [path.name for path in tmp_path.iterdir()] == ["optuna.log"]
