"""The network of a finished run in MLflow and in Weights & Biases.

Each part needs its package, of the extra `mlflow` or `wandb`, and is skipped without.
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_exported import MADE
from test_trackers_packages import needs, newest_of_wandb

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.core.files import TRACKERS_FILE, TRACKERS_FOLDER
from jaxdl.report.trackers import MLflow, Wandb

FRESH = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
inputs = json.loads(sys.argv[3])
model = mlflow.pyfunc.load_model(sys.argv[2])
answers = model.predict(inputs)
print(json.dumps({name: answers[name].tolist() for name in answers}))
"""


def without_run(workdir):
    """Removes what the run has of the network besides."""
    shutil.rmtree(workdir / "checkpoints")
    shutil.rmtree(workdir / "exported")


def frame(rows):
    import pandas

    return pandas.DataFrame(rows)


@pytest.fixture(params=MADE)
def kept(request, tmp_path, monkeypatch):
    """(name, workdir, its database, what the predictor says, inputs) of a run that is logged and registered."""
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    experiment, inputs = MADE[request.param](tmp_path)
    experiment = experiment.replaced({"report.trackers": ["mlflow"], "report.trackers.mlflow.register_as": "mine"})
    jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    batch = frame(inputs[2]) if request.param == "tables" else inputs[2]
    expected = jaxdl.restore(tmp_path / "run").predict(batch)
    without_run(tmp_path / "run")
    return request.param, f"sqlite:///{tmp_path / 'run' / TRACKERS_FOLDER / 'mlflow.db'}", expected, batch, inputs[2]


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_pyfunc_predicts_as_the_network_whose_run_is_gone(kept, tmp_path):
    import mlflow

    name, database, expected, batch, inputs = kept
    client = mlflow.MlflowClient(database)
    (version,) = client.search_model_versions("name = 'mine'")
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["model.id"] in version.source
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(database)
    try:
        model = mlflow.pyfunc.load_model("models:/mine/1")
        assert model.metadata.signature is not None
        assert mlflow.models.Model.load("models:/mine/1").load_input_example() is not None
        found = model.predict(batch)
    finally:
        mlflow.set_tracking_uri(before)
    if name == "texts":
        assert found["name"].tolist() == [each.name for each in expected]
        np.testing.assert_array_equal(found["probability"], [each.probability for each in expected])
    else:
        np.testing.assert_array_equal(found, expected)
    if name == "texts":  # One process is enough.
        done = subprocess.run(
            [sys.executable, "-c", FRESH, database, f"runs:/{version.run_id}/model", json.dumps(inputs)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["name"] == [each.name for each in expected]


@needs("wandb")
def test_wandb_keeps_the_network_as_an_artifact_offline(tmp_path):
    experiment, inputs = MADE["images"](tmp_path)
    experiment = experiment.replaced({"report.trackers": ["wandb"], "report.trackers.wandb.log_model": True})
    folder = tmp_path / "run"
    jaxdl.train(experiment, folder, quiet=True, devices=jax.devices()[:1])
    _, records, _ = newest_of_wandb(folder)
    (artifact,) = [each.request.log_artifact.artifact for each in records if each.request.HasField("log_artifact")] or [
        each.artifact for each in records if each.HasField("artifact")
    ]
    run_id = json.loads((folder / TRACKERS_FILE).read_text())["runs"]["wandb"]["run"]
    assert (artifact.name, artifact.type) == (f"model-{run_id}", "model")
    assert {"latest", "step-2"} <= set(artifact.aliases)
    # What is uploaded later is a copy, which is a workdir.
    copied = tmp_path / "copied"
    for entry in artifact.manifest.contents:
        (copied / entry.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.local_path, copied / entry.path)
    np.testing.assert_array_equal(jaxdl.restore(copied).predict(inputs[1]), jaxdl.restore(folder).predict(inputs[1]))


@pytest.mark.parametrize("tracker", [MLflow(log_model=True), MLflow(register_as="x"), Wandb(log_model=True)])
def test_trackers_say_in_which_form_they_keep_a_network(tracker):
    assert tracker.model_format == {"mlflow": "mlflow", "wandb": "jaxdl"}[tracker.kind]
    assert type(tracker)().model_format is None


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is not None, reason="is about a machine without mlflow")
def test_without_the_package_nothing_is_trained(tmp_path):
    experiment, _ = MADE["images"](tmp_path)
    with pytest.raises(ConfigError, match=r"export mlflow: it needs the package mlflow"):
        jaxdl.train(
            experiment.replaced({"export": ("mlflow",)}), tmp_path / "run", quiet=True, devices=jax.devices()[:1]
        )
