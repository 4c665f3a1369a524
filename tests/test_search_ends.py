"""How trials of a search end, and what becomes of them: a real journal and loop, trials that are made up."""

import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from children import CHILD, child_of, ends
from search_made_up import RATE, MadeUp, Said, course, request_in, searched

from jaxdl.core.errors import ConfigError
from jaxdl.core.options import parse
from jaxdl.platform.launch import processes
from jaxdl.platform.search import command
from jaxdl.platform.search.attempts import Attempts
from jaxdl.platform.search.conduct import settings_of
from jaxdl.platform.search.driver import Search, check_any
from jaxdl.platform.search.engines import Job, Processes
from jaxdl.platform.search.journal import Journal
from jaxdl.platform.search.report import result
from jaxdl.platform.search.samplers import Random
from jaxdl.platform.search.schedulers import PBT, Full, Halving
from jaxdl.platform.search.show import SearchView, table
from jaxdl.platform.search.trial import Trial
from jaxdl.report.status import Reason, Record, State, utc_now, write_record
from jaxdl.report.tracking import name_of
from jaxdl.training.experiment import load


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
    shown = SearchView(request, course(3), Full())
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
    attempts.note_start(0)
    assert attempts.again(0) == 1.0
    assert not attempts.is_due(0)
    now[0] = 1.0
    assert attempts.is_due(0)
    attempts.note_start(0)
    now[0] = 1000.0
    assert attempts.again(0) == 0.0
    assert attempts.is_due(0)
    attempts.note_stop(0)
    assert [attempts.again(0) is None for _ in range(4)] == [False, False, False, True], "counted from there"


@pytest.mark.usefixtures("fast", "on_command_line")
def test_a_member_whose_place_was_taken_is_not_tried_again(tmp_path, monkeypatch):
    request, policy = request_in(tmp_path, retries=0), PBT(interval=4).policy(course(3))
    monkeypatch.setattr("jaxdl.platform.search.driver.copy_workdir", lambda source, target, step: True)
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


def test_a_length_that_varies_replaces_that_of_all_trials(tmp_path):
    line = ["--config", "tabular", "--workdir", str(tmp_path), "--vary", "epochs=2,4", "--scheduler", "none"]
    request = replace(request_in(tmp_path), command=("--config", "tabular", "--batch-size", "9", "--steps", "7"))
    options = request.options(Trial(0, {"epochs": 2.0}, 9))
    asked = parse(load("tabular"), options[2:])
    assert (options.count("None"), asked.epochs, asked.steps, asked.steps_within) == (1, 2, None, None)
    with pytest.raises(ConfigError, match="vary epochs: a length that varies has no limits"):
        settings_of(command.parse_command([*line, "--steps-within", "4", "9"], "search"))


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
        while not (codes := workers.poll()):
            time.sleep(0.02)
        assert codes == {0: -9}
        assert ends(child)
    workers.close()
    assert ends(child)


def test_what_a_trial_has_started_ends_with_a_search_that_is_killed(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from jaxdl.platform.search.engines import Job, Processes
workers = Processes([{{}}])
workers.start(Job(0, [sys.executable, "-c", {CHILD + "time.sleep(300)"!r}], Path({str(tmp_path / "log")!r})))
time.sleep(300)
"""
    search = subprocess.Popen([sys.executable, "-c", code])
    child = child_of(tmp_path / "log")
    search.kill()
    search.wait()
    assert ends(child)
