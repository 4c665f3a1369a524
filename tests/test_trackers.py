"""Trackers get the rows of metrics.jsonl, whatever fails on their side, and over a resume. With one in this process."""

import json
import threading
from collections.abc import Mapping

import jax
import pydantic
import pytest
from runs import rows, tiny_experiment

import jaxdl
from jaxdl.core.config import Config, ConfigError
from jaxdl.core.files import METRICS_FILE, TRACKERS_FILE
from jaxdl.core.kinds import forgotten
from jaxdl.core.options import parse
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Event, History, sender
from jaxdl.report.trackers import MLflow, Tracker, Trackio, Wandb, Writer
from jaxdl.report.tracking import Trackers, TrackersFile
from jaxdl.training.experiment import Experiment

ONE = jax.devices()[:1]


class Store:
    """What the fake tracker has, and how it behaves."""

    def __init__(self):
        self.runs, self.forgotten = {}, 0
        self.failures = []  # Names of calls that fail, the first of them once.
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def run(self):
        """The only run."""
        (found,) = self.runs.values()
        return found

    def call(self, name):
        self.reached.set()
        self.gate.wait()
        if name in self.failures:
            self.failures.remove(name)
            raise ConnectionError("the server is gone")


store = Store()

with forgotten():  # The kinds that tests list are those of jaxdl.

    class Fake(Tracker, kind="fake"):
        """A tracker in this process."""

        number: int = pydantic.Field(default=1, ge=1)
        """A field."""

        def open(self, run):
            mine = store  # A thread that is left over from one test is not in the way of the next.
            mine.call("open")
            return FakeRun(run, mine)


class FakeRun(Writer):
    def __init__(self, run, store):
        self._store = store
        self.run_id = run.run_id or f"run {len(store.runs) + 1}"
        self._run = store.runs.setdefault(self.run_id, {"rows": [], "tags": {}, "files": [], "states": []})
        if run.rows_changed:
            store.forgotten += 1
            self._run["rows"] = []
        self._run |= {"name": run.name, "config": dict(run.config)}
        self._run["tags"] |= run.tags
        self.num_rows = len(self._run["rows"])
        self._waiting = []

    def write(self, row):
        self._store.call("write")
        assert isinstance(row, Mapping)
        self._waiting.append(dict(row))

    def flush(self):
        self._store.call("flush")
        self._run["rows"] += self._waiting
        self._waiting = []

    def tag(self, tags):
        self._run["tags"] |= tags

    def keep(self, path):
        self._run["files"].append(path.name)

    def close(self, state=None):
        self._store.call("close")
        self._run["states"].append(state)


class Parts(Config):
    """A config with parts."""

    seed: int = 3
    """A number."""
    sizes: tuple[int, ...] = (1, 2)
    """Numbers."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """An empty store; what fails is tried again at once."""
    global store
    store = Store()
    for name in ("PERIOD_SEC", "RETRY_SEC", "LONGEST_RETRY_SEC"):
        monkeypatch.setattr(sender, name, 0.01)
    yield
    store.gate.set()


@pytest.fixture
def warnings():
    return []


def measured(folder):
    """The rows of metrics.jsonl without its events."""
    return [row for row in rows(folder) if "event" not in row]


class Process:
    """What the reporter of one process does with its history and its trackers."""

    def __init__(self, folder, warnings, step=0, *, fake=None, tracked=True):
        self.trackers = Trackers([fake or Fake()] if tracked else [], folder, Parts(), warnings.append)
        self.folder, self.step = folder, step
        self.history = self._open()
        self.trackers.start(self.history.rows, step)

    def _open(self):
        return History(self.folder, resume_step=self.step, tensorboard=False, before_cut=self.trackers.before_cut)

    def train(self, *steps):
        for step in steps:
            self.history.write({"step": step, "train/loss": 1 / step})
            self.trackers.look()

    def roll_back(self, step):
        self.step = step
        self.history.close()
        self.history = self._open()
        self.trackers.restart(self.history.rows)

    def end(self, state="interrupted"):
        self.history.close()
        self.trackers.close(state)


def test_a_tracker_gets_rows_events_config_files_and_the_state(tmp_path, warnings):
    process = Process(tmp_path / "mine", warnings)
    process.train(1, 2)
    process.history.event(Event("resume", 2, "resumed"))
    process.train(3)
    (tmp_path / "mine" / "summary.json").write_text("{}")
    process.end("finished")
    assert store.run["rows"] == measured(tmp_path / "mine")
    assert [row["step"] for row in store.run["rows"]] == [1, 2, 3]
    assert store.run["tags"]["event.1"] == "step 2: resumed"
    assert (store.run["name"], store.run["config"]) == ("mine", {"seed": 3, "sizes": "[1, 2]"})
    assert (store.run["files"], store.run["states"], warnings) == (["summary.json"], ["finished"], [])
    assert {"hosts", "devices", "version.jax", "workdir"} <= store.run["tags"].keys()


@pytest.mark.parametrize("call", ["open", "write", "flush"])
def test_what_fails_is_one_warning_and_is_written_later(tmp_path, warnings, call):
    store.failures = [call] * 3
    process = Process(tmp_path, warnings)
    process.train(*range(1, 8))
    while store.failures:
        store.gate.wait(0.01)
    process.end()
    assert store.run["rows"] == measured(tmp_path)
    assert [one.split(";")[0] for one in warnings] == [
        "tracker fake: ConnectionError: the server is gone",
        "tracker fake: all rows have been written after all",
    ]


def test_the_id_of_a_run_is_kept_before_anything_else_of_it_can_fail(tmp_path, warnings):
    store.failures = ["flush"] * 10_000
    Process(tmp_path, warnings).end()
    assert warnings[0].startswith("tracker fake: ConnectionError"), "it was flushed when it was opened, without rows"
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["runs"]["fake"]["run"] == "run 1"


def test_a_server_that_stays_away_costs_one_warning_and_the_rows_are_counted(tmp_path, warnings):
    process = Process(tmp_path, warnings)
    process.train(1, 2)
    while not store.runs or len(store.run["rows"]) < 2:
        store.gate.wait(0.01)
    store.failures = ["open", "write", "flush", "close"] * 10_000
    process.train(3, 4, 5)
    process.end()
    assert warnings[0].startswith("tracker fake: ConnectionError")
    assert warnings[1:] == ["tracker fake: 3 of 5 rows were not written"]
    assert len(measured(tmp_path)) == 5
    store.failures = []
    Process(tmp_path, warnings, step=5).end()
    assert store.run["rows"] == measured(tmp_path)
    assert len(warnings) == 2


def test_one_that_never_answers_is_waited_for_a_bounded_time(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(sender, "MAX_WAITING_ROWS", 3)
    store.gate.clear()
    process = Process(tmp_path, warnings, fake=Fake(wait_sec=0.05))
    store.reached.wait()  # So that the thread is not in the way of the next test.
    process.train(*range(1, 10))
    process.end()
    assert warnings == [
        "tracker fake: 4 rows wait to be written; the run does not wait for them",
        "tracker fake: 9 of 9 rows were not written",
    ]


def test_a_resume_is_the_same_run(tmp_path, warnings):
    first = Process(tmp_path, warnings)
    first.train(1, 2, 3)
    first.end()
    again = Process(tmp_path, warnings, step=3)
    again.train(4)
    again.end("finished")
    assert store.run["rows"] == measured(tmp_path)
    assert (store.run["states"], store.forgotten) == (["interrupted", "finished"], 0)


def test_rows_that_a_resume_drops_are_forgotten_there(tmp_path, warnings):
    first = Process(tmp_path, warnings)
    first.train(1, 2, 3, 4)
    first.end()
    again = Process(tmp_path, warnings, step=2)
    again.train(3, 5)
    again.end()
    assert [row["step"] for row in store.run["rows"]] == [1, 2, 3, 5]
    assert store.run["rows"] == measured(tmp_path)


def test_rows_dropped_by_a_process_without_the_tracker_are_forgotten_too(tmp_path, warnings):
    first = Process(tmp_path, warnings)
    first.train(1, 2, 3, 4)
    first.end()
    without = Process(tmp_path, warnings, step=2, tracked=False)
    without.train(3, 4)
    without.end()
    third = Process(tmp_path, warnings, step=4)
    third.end()
    assert (store.run["rows"], store.forgotten) == (measured(tmp_path), 1)


def test_a_row_that_metrics_jsonl_lost_with_its_process_is_forgotten(tmp_path, warnings):
    first = Process(tmp_path, warnings)
    first.train(1, 2, 3)
    first.end()
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-5])  # The process was killed while it wrote the last line.
    again = Process(tmp_path, warnings, step=2)
    again.train(3)
    again.end()
    assert (store.run["rows"], store.forgotten) == (measured(tmp_path), 1)


def test_a_rollback_is_followed(tmp_path, warnings):
    process = Process(tmp_path, warnings)
    process.train(1, 2, 3, 4)
    while not store.runs or len(store.run["rows"]) < 4:
        store.gate.wait(0.01)
    process.roll_back(2)
    process.train(5)
    process.end()
    assert [row["step"] for row in store.run["rows"]] == [1, 2, 5]


def test_a_cut_while_the_tracker_opens_is_not_lost(tmp_path):
    kept = TrackersFile(tmp_path)
    before = kept.num_cuts
    kept.note_cut()
    kept.note_run("fake", "a", before)
    assert TrackersFile(tmp_path).run_of("fake") == ("a", False)
    kept.note_run("fake", "a", kept.num_cuts)
    assert TrackersFile(tmp_path).run_of("fake") == ("a", True)


def test_other_devices_are_tags_of_the_run(tmp_path):
    eight = {"platform": "cpu", "kind": "cpu", "num_devices": 8, "num_processes": 2}
    TrackersFile(tmp_path).note_devices(eight, 0)
    TrackersFile(tmp_path).note_devices(eight, 3)
    TrackersFile(tmp_path).note_devices(eight | {"num_devices": 4, "num_processes": 1}, 7)
    assert TrackersFile(tmp_path).changes == ["step 7: hosts 2 -> 1, devices 8 -> 4"]


def test_a_damaged_file_of_ids_means_new_runs(tmp_path, warnings):
    (tmp_path / TRACKERS_FILE).write_text("{")
    process = Process(tmp_path, warnings)
    process.train(1)
    process.end()
    assert (len(store.run["rows"]), warnings) == (1, [])
    assert json.loads((tmp_path / TRACKERS_FILE).read_text())["runs"]["fake"] == {"run": "run 1", "whole": True}


# Whole runs

EXPERIMENT = tiny_experiment(mesh=MeshConfig(), steps=6, checkpoint={"every_steps": 2}, evaluation={"every_steps": 3})
EXPERIMENT = EXPERIMENT.replaced({"report.trackers": (Fake(name="tiny"),)})


def test_a_run_that_is_stopped_and_resumed(tmp_path):
    train = jaxdl.train
    train(EXPERIMENT, tmp_path / "run", quiet=True, devices=ONE, max_steps=3)
    assert store.run["rows"] == measured(tmp_path / "run")
    run = train(EXPERIMENT, tmp_path / "run", quiet=True, devices=ONE)
    assert store.run["rows"] == measured(tmp_path / "run")
    assert [row["step"] for row in store.run["rows"]].count(6) == 2
    assert (store.run["name"], store.run["states"]) == ("tiny", ["stopped", "finished"])
    assert store.run["config"]["optimizer.kind"] == "lars"
    assert "summary.json" in store.run["files"]
    assert run.summary["status"] == "finished"


def test_a_run_that_a_hook_ends_without_a_workdir():
    def stop(info):
        if info.step == 2:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        jaxdl.train(EXPERIMENT, quiet=True, devices=ONE, on_step=stop)
    assert store.run["states"] == ["interrupted"]
    assert [row["step"] for row in store.run["rows"]] == [1]


def test_a_missing_package_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(Fake, "package", "not_there")
    with pytest.raises(ConfigError, match=r"report\.trackers fake: .*pip install 'jaxdl\[not_there\]'"):
        jaxdl.train(EXPERIMENT, tmp_path / "run", quiet=True, devices=ONE)
    assert not (tmp_path / "run").exists()
    assert not store.runs


# Options


def test_trackers_are_chosen_by_name_and_keep_their_fields():
    args = ["--report.trackers", "mlflow", "wandb", "--report.trackers.mlflow.uri", "http://a:1"]
    chosen = parse(Experiment(epochs=1), [*args, "--report.trackers.wandb.tags", "a", "b"])
    assert chosen.report.trackers == (MLflow(uri="http://a:1"), Wandb(tags=("a", "b")))
    assert Experiment.from_json(chosen.to_json()) == chosen
    fewer = chosen.replaced({"report.trackers": ["mlflow", "trackio"], "report.trackers.trackio.project": "p"})
    assert fewer.report.trackers == (MLflow(uri="http://a:1"), Trackio(project="p"))
    assert parse(chosen, ["--report.trackers"]).report.trackers == ()
    assert chosen.replaced({"report.trackers": "wandb"}).report.trackers == (Wandb(tags=("a", "b")),)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mlflo"], "report.trackers mlflo: there is no such kind; choose one of mlflow.*Did you mean mlflow"),
        (["mlflow", "mlflow"], "report.trackers mlflow mlflow: mlflow is named twice"),
        (["mlflow", "--report.trackers.wandb.mode", "online"], "--report.trackers.wandb.mode: there is no such option"),
        (
            ["mlflow", "--report.trackers.mlflow.wait-sec", "-1"],
            "--report.trackers.mlflow.wait-sec -1: must be greater",
        ),
        (["mlflow", "--report.trackers.mlflow.uri", "http://a:b@c"], "http://a:b@c: there is a password in it"),
        (["wandb", "--report.trackers.wandb.mode", "away"], "not one of offline, online"),
    ],
)
def test_mistakes_are_one_message(args, message):
    with pytest.raises(ConfigError, match=message):
        parse(Experiment(epochs=1), ["--report.trackers", *args])


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ((Wandb(), Wandb()), "report.trackers: wandb is given twice"),
        ((Wandb,), "Wandb is a class, not an object"),
        (("wandb",), "'wandb' is a string; give an object: Wandb"),
    ],
)
def test_mistakes_in_a_config_file_are_one_message(trackers, message):
    with pytest.raises(ConfigError, match=message):
        Experiment(epochs=1, report={"trackers": trackers})


@pytest.mark.parametrize(("tracker", "advice"), [(MLflow(), "mlflow.uri"), (Wandb(), "leave wandb out")])
def test_what_needs_a_workdir_says_so(tracker, advice, monkeypatch):
    monkeypatch.setattr(type(tracker), "package", None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=f"without a workdir .*{advice}"):
        tracker.check(None)
