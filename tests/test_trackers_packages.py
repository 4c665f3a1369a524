"""MLflow, Weights & Biases and trackio have the rows of metrics.jsonl, also over a resume that drops some.

Each part needs its package, of the extra `mlflow`, `wandb` or `trackio`, and is skipped without.
"""

import importlib.util
import json
import os
import signal
import socket
import struct
from pathlib import Path

import pytest
from runs import ONE_DEVICE, finish, has_step, start, stop, tiny_experiment, wait_for, write_config

from jaxdl.core.config import Config
from jaxdl.core.files import METRICS_FILE, TRACKERS_FILE, TRACKERS_FOLDER
from jaxdl.report import Event, History, sender
from jaxdl.report.trackers import MLflow, TrackedRun, Trackio, Wandb
from jaxdl.report.trackers.mlflow import mlflow_name
from jaxdl.report.tracking import Trackers

NAN = float("nan")


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {package}: pip install 'jaxdl[{package}]'")


class Parts(Config):
    """A config."""

    seed: int = 3
    """A number."""
    sizes: tuple[int, ...] = (1, 2)
    """Numbers."""


def measured(folder):
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [row for row in rows if "event" not in row]


def run_id(folder, kind):
    return json.loads((folder / TRACKERS_FILE).read_text())["runs"][kind]["run"]


def process(tracker, folder, steps, resume_step=0, state="interrupted"):
    """One process of a run with two rows for each step; its warnings."""
    warnings = []
    tracker.check(folder)
    trackers = Trackers([tracker], folder, Parts(), warnings.append)
    with History(folder, resume_step=resume_step, tensorboard=False, before_cut=trackers.before_cut) as history:
        trackers.start(history.rows, resume_step)
        history.event(Event("resume", resume_step, f"resumed from {resume_step}"))
        for step in steps:
            history.write({"step": step, "epoch": step / 2, "train/loss": NAN if step == 2 else 1 / step})
            history.write({"step": step, "epoch": step / 2, "eval/loss": float(resume_step)})
        (folder / "summary.json").write_text("{}")
    trackers.close(state)
    return warnings


def whole_run(tracker, folder):
    """Three processes: the second continues the first, the third drops the last step of the second."""
    tracker = tracker.replaced({"wait_sec": 120.0})
    assert process(tracker, folder, [1, 2]) == []
    first = run_id(folder, tracker.kind)
    assert process(tracker, folder, [3, 4], resume_step=2) == []
    assert run_id(folder, tracker.kind) == first
    assert process(tracker, folder, [4, 5], resume_step=3, state="finished") == []
    assert [row["step"] for row in measured(folder)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    return first


def as_json(value):
    return None if value in ("NaN", None) or value != value else value


# MLflow


def rows_of_mlflow(client, run):
    """The rows of a run: each has a time of its own."""
    rows = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            rows.setdefault(metric.timestamp, {"step": metric.step})[name] = as_json(metric.value)
    ordered = [rows[time] for time in sorted(rows)]
    assert [row.pop("row") for row in ordered] == list(range(1, len(rows) + 1))
    return ordered


@needs("mlflow")
def test_mlflow_in_the_workdir(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "mine"
    first = whole_run(MLflow(experiment="e", tags=("word",)), folder)
    client = MlflowClient(f"sqlite:///{folder / TRACKERS_FOLDER / 'mlflow.db'}")
    run = client.get_run(run_id(folder, "mlflow"))
    assert rows_of_mlflow(client, run) == measured(folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.params == {"seed": "3", "sizes": "[1, 2]"}
    assert run.data.tags["event.3"] == "step 3: resumed from 3"
    assert {"word", "hosts", "version.jax"} <= run.data.tags.keys()
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["summary.json"]
    # Metrics cannot be removed: the run with the dropped rows is in MLflow's trash, and the other is the only one.
    assert client.get_run(first).info.lifecycle_stage == "deleted"
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("optimizer.rate_factors.stem*", "optimizer.rate_factors.stem_"),
        ("eval/top 5:é-1", "eval/top 5:é-1"),
        ("/a//./b/../..c/", "a/b/__/__c"),
        ("", "_"),
        ("...", "__."),
        ("a\n" * 200, "a_" * 125),
    ],
)
def test_names_that_mlflow_takes(name, allowed):
    assert mlflow_name(name) == allowed


ODD_NAMES = {"stem*": 0.1, "stem?": 0.2, "a/../b//c/": 1, "": 2, "long" * 100: 3, "d.é-:_ 9": 4}


@needs("mlflow")
def test_mlflow_has_every_name_also_those_that_it_refuses(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = TrackedRun("mine", None, False, tmp_path, {f"rates.{name}": value for name, value in ODD_NAMES.items()}, {})
    writer = MLflow(tags=("a=b|c*", "..")).open(run)
    writer.write({"step": 1} | {name: float(value) for name, value in ODD_NAMES.items()})
    writer.flush()
    found = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(writer.run_id).data
    assert sorted(found.params.values()) == sorted(map(str, ODD_NAMES.values()))
    assert sorted(found.metrics.values()) == sorted([*ODD_NAMES.values(), 1])  # And the number of the row.
    assert {"rates.stem_", "rates.stem_ 2", "rates.d.é-:_ 9"} <= found.params.keys()
    assert {"a_b_c_", "__"} <= found.tags.keys()


@needs("mlflow")
def test_mlflow_makes_no_further_run_when_one_cannot_be_described(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    log_batch, failures = MlflowClient.log_batch, [ConnectionError("gone")] * 4

    def failing(self, *args, **keywords):
        if failures:
            raise failures.pop()
        return log_batch(self, *args, **keywords)

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(MlflowClient, "log_batch", failing)
    monkeypatch.setattr(sender, "RETRY_SEC", 0.01)
    process(MLflow(wait_sec=60.0), tmp_path, [1, 2])
    process(MLflow(wait_sec=60.0), tmp_path, [3], resume_step=2)
    client = MlflowClient(f"sqlite:///{tmp_path / TRACKERS_FOLDER / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("jaxdl").experiment_id])
    assert run.info.run_id == run_id(tmp_path, "mlflow")
    assert rows_of_mlflow(client, run) == measured(tmp_path)
    assert run.data.params == {"seed": "3", "sizes": "[1, 2]"}


@needs("mlflow")
def test_mlflow_where_nothing_can_be_written(tmp_path):
    (tmp_path / TRACKERS_FOLDER).write_text("a file")
    warnings = process(MLflow(wait_sec=60.0), tmp_path, [1, 2])
    assert len(measured(tmp_path)) == 4
    assert [one.partition(":")[0] for one in warnings] == ["tracker mlflow"] * 2
    assert "4 of 4 rows were not written" in warnings[1]


@needs("mlflow")
def test_mlflow_whose_server_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        tracker = MLflow(uri=f"http://127.0.0.1:{taken.getsockname()[1]}", wait_sec=60.0)
        warnings = process(tracker, tmp_path, [1, 2])
    assert len(measured(tmp_path)) == 4
    assert len(warnings) == 2
    assert "4 of 4 rows were not written" in warnings[1]


# Weights & Biases


def records(data):
    """The records of a file of Weights & Biases: LevelDB's log format, after a header of 7 bytes."""
    at, found = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        found += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield found
            found = b""


def newest_of_wandb(folder):
    """The newest file of a run, its records, and the rows among them."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (folder / TRACKERS_FOLDER / "wandb").glob("offline-run-*/*.wandb")
    found = [Record.FromString(record) for record in records(path.read_bytes())]
    rows = [
        {
            item.nested_key[0] if item.nested_key else item.key: as_json(json.loads(item.value_json))
            for item in record.history.item
        }
        for record in found
        if record.HasField("history")
    ]
    return path, found, [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


@needs("wandb")
def test_wandb_offline(tmp_path):
    first = whole_run(Wandb(project="p"), tmp_path / "mine")
    path, found, rows = newest_of_wandb(tmp_path / "mine")
    assert rows == measured(tmp_path / "mine")
    (run,) = [record.run for record in found if record.HasField("run")]
    assert (run.run_id, run.project, run.display_name) == (first, "p", "mine")
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0]
    assert (path.parent / "files" / "summary.json").read_text() == "{}"
    assert first == run_id(tmp_path / "mine", "wandb")


@needs("wandb")
@pytest.mark.parametrize("how", ["a file", "without rights"])
def test_wandb_where_nothing_can_be_written(tmp_path, monkeypatch, how):
    folder, access = tmp_path / TRACKERS_FOLDER, os.access
    if how == "a file":
        folder.write_text("a file")
    else:  # Weights & Biases would take the temporary folder of the system, and the run would not know.
        monkeypatch.setattr(os, "access", lambda path, *mode: Path(path) != folder and access(path, *mode))
    warnings = process(Wandb(wait_sec=60.0), tmp_path, [1, 2])
    assert len(measured(tmp_path)) == 4
    assert [one.partition(":")[0] for one in warnings] == ["tracker wandb"] * 2
    assert "4 of 4 rows were not written" in warnings[1]
    assert not list(tmp_path.rglob("*.wandb"))


# A run of the command line


@needs("mlflow")
@needs("wandb")
@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumes_is_one_run(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    every = {"checkpoint": {"every_steps": 100}, "evaluation": {"every_steps": 100}}
    config = write_config(tmp_path, tiny_experiment(steps=400, mesh=ONE_DEVICE, **every))
    folder, options = tmp_path / "run", ["--report.trackers", "mlflow", "wandb", "--mesh.cpu-devices", "1"]
    options += [word for kind in ("mlflow", "wandb") for word in (f"--report.trackers.{kind}.wait-sec", "120")]
    first = start(config, folder, *options)
    wait_for(first, has_step(folder, 20))
    assert stop(first, signal.SIGTERM)[0] == 128 + signal.SIGTERM
    ids = {kind: run_id(folder, kind) for kind in ("mlflow", "wandb")}
    code, said = finish(start(config, folder, *options))
    assert code == 0, said
    rows = measured(folder)
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 401))
    client = MlflowClient(f"sqlite:///{folder / TRACKERS_FOLDER / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("jaxdl").experiment_id], run_view_type=3)
    assert rows_of_mlflow(client, run) == rows
    _, found, in_wandb = newest_of_wandb(folder)
    assert in_wandb == rows
    (record,) = [record.run for record in found if record.HasField("run")]
    assert {"mlflow": run.info.run_id, "wandb": record.run_id} == ids


# trackio


@needs("trackio")
def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # Read when trackio is imported.
    from trackio import SQLiteStorage

    first = whole_run(Trackio(project="p"), tmp_path / "mine")
    found = [
        {name: as_json(value) for name, value in row.items() if name != "timestamp"}
        for row in SQLiteStorage.get_logs("p", run_id=first)
    ]
    assert found == measured(tmp_path / "mine")
    config = SQLiteStorage.get_run_config("p", "mine", run_id=first)
    assert (config["seed"], config["tags.state"], config["tags.event.3"]) == (3, "finished", "step 3: resumed from 3")
    assert first == run_id(tmp_path / "mine", "trackio")
