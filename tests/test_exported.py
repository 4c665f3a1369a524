"""What `python -m jaxdl.export` and `--export` write is used without jaxdl, and predicts as the network does."""

import datetime
import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from runs import ONE_DEVICE, tiny_experiment
from test_labelled_texts import TOKENIZER, write_csv

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.data import LabelledTexts, Table
from jaxdl.inference.export.__main__ import main
from jaxdl.inference.export.program import Predictor as Outside
from jaxdl.models import Encoder, TableMLP
from jaxdl.optim import AdamW, Constant
from jaxdl.parallel.precision import BFloat16
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import TableTask

RUNTIMES = [
    "stablehlo",
    pytest.param("onnx", marks=pytest.mark.skipif(
        importlib.util.find_spec("jax2onnx") is None, reason="needs the package jax2onnx: pip install 'jaxdl[onnx]'"
    )),
]  # fmt: skip
SMALL = {
    "batch_size": 16,
    "steps": 4,
    "mesh": ONE_DEVICE,
    "schedule": Constant(),
    "optimizer": AdamW(learning_rate=1e-2),
}
QUIET = ReportConfig(tensorboard=False, curves=False)


def of_images(folder):
    """(a tiny run on images, inputs of three sizes)."""
    experiment = tiny_experiment(mesh=ONE_DEVICE, steps=2, checkpoint={}, evaluation={})
    rng = np.random.default_rng(0)
    return experiment, [rng.integers(0, 256, (size, 8, 8, 1)).astype(np.uint8) for size in (1, 3, 17)]


DAYS = ["3.1.2024", "14.2.2024 15:30", "", "28.12.2023"]


def of_tables(folder):
    """The same on a table with words, numbers, dates and gaps."""
    rng = np.random.default_rng(0)
    rows = [
        {"colour": str(rng.choice(["red", "green", "blue", ""])), "price": f"{rng.integers(1000, 9999):,}",
         "when": str(rng.choice(DAYS)), "size": f"{rng.normal():.4f}", "flag": str(rng.choice(["true", "false"]))}
        for _ in range(80)
    ]  # fmt: skip
    lines = [",".join(f'"{value}"' for value in (*row.values(), "ab"[float(row["size"]) > 0])) for row in rows]
    path = folder / "rows.csv"
    path.write_text("\n".join([",".join((*rows[0], "label")), *lines]))
    data = Table(file=(str(path),), label="label")
    experiment = Experiment(
        data=data, model=TableMLP(units=(8,), members=2, frequencies=4), task=TableTask(), report=QUIET, **SMALL
    )
    strange = {"colour": "violet", "price": None, "when": "1.2.2024", "size": 3, "flag": True}
    return experiment, [[strange], rows[:3], rows[:17]]


def of_texts(folder):
    """The same on texts, with a tokenizer that puts nothing around them."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcdefgh"), size=size)) for size in rng.integers(1, 40, 60)]
    path = write_csv(folder / "x.csv", [(text, "yes" if "a" in text else "no") for text in dict.fromkeys(texts)])
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    data = LabelledTexts(train=(path,), tokenizer=str(folder / "tokenizer.json"), length=32)
    model = Encoder(num_layers=1, embed_dim=16, num_heads=2, max_length=32)
    return Experiment(data=data, model=model, report=QUIET, **SMALL), [texts[:1], texts[:3], texts[:17]]


MADE = {"images": of_images, "tables": of_tables, "texts": of_texts}


@pytest.fixture(scope="module", params=MADE)
def exported(request, tmp_path_factory):
    """(name, workdir of a run that exported itself, inputs)."""
    folder = tmp_path_factory.mktemp(request.param)
    experiment, inputs = MADE[request.param](folder)
    forms = ("stablehlo", "jaxdl") + (("onnx",) if importlib.util.find_spec("jax2onnx") else ())
    experiment = experiment.replaced({"export": forms})
    jaxdl.train(experiment, folder / "run", quiet=True, devices=jax.devices()[:1])
    return request.param, folder / "run", inputs


def probabilities(predictor, inputs):
    """What the network itself predicts."""
    if isinstance(inputs, list) and isinstance(inputs[0], str):
        return np.array([each.probabilities for each in predictor.predict(inputs)])
    return predictor.predict_probabilities(inputs)


@pytest.mark.filterwarnings("ignore:predict")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_program_of_an_exported_folder_predicts_as_the_network(exported, runtime):
    """For batches of 1, 3 and 17."""
    name, workdir, inputs = exported
    predictor, outside = jaxdl.restore(workdir), Outside(workdir / "exported", runtime)
    assert outside.about["inputs"][0]["shape"][0] == "batch"
    assert outside.about["differences"][runtime] <= 1e-5
    for batch in inputs:
        expected = probabilities(predictor, batch)
        np.testing.assert_allclose(outside.probabilities(batch), expected, atol=1e-5, err_msg=name)
        classes = predictor.classes or range(expected.shape[1])
        assert outside.predict(batch) == [classes[number] for number in expected.argmax(axis=1)]


OUTSIDE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jaxdl", "flax", "orbax", "optax"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
import json
from predict import Predictor
predictor = Predictor(sys.argv[1], "stablehlo")
inputs = json.loads(sys.argv[2])
print(json.dumps(predictor.probabilities(inputs).tolist()))
assert not [name for name in sys.modules if name.partition(".")[0] == "jaxdl"]
"""


def test_the_program_runs_where_jaxdl_cannot_be_imported(exported):
    name, workdir, inputs = exported
    if name == "images":
        pytest.skip("the other two start a process")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OUTSIDE), str(workdir / "exported"), json.dumps(inputs[1])],
        cwd=workdir, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(json.loads(done.stdout), probabilities(jaxdl.restore(workdir), inputs[1]), atol=1e-5)


def test_dates_of_a_data_frame_are_those_of_texts(exported):
    name, workdir, inputs = exported
    if name != "tables":
        pytest.skip("of tables alone")
    outside = Outside(workdir / "exported")
    rows = [inputs[2][0] | {"when": when} for when in ("14.2.2024", datetime.datetime(2024, 2, 14))]
    made = outside.arrays(rows)["numbers"]
    np.testing.assert_array_equal(made[0], made[1])


@pytest.mark.filterwarnings("ignore:predict")
def test_the_network_alone_predicts_without_its_run(exported, tmp_path):
    """Its folder may be moved; the run, its data and its tokenizer may be gone."""
    name, workdir, inputs = exported
    expected = probabilities(jaxdl.restore(workdir), inputs[2])
    network = tmp_path / "moved"
    (workdir / "exported" / "network").rename(network)
    assert not list(network.rglob("optimizer"))
    hidden = [path for path in workdir.parent.iterdir() if path.name != "run"]
    for path in [*hidden, workdir]:
        path.rename(path.with_name(f"hidden {path.name}"))
    try:
        np.testing.assert_array_equal(probabilities(jaxdl.restore(network), inputs[2]), expected, err_msg=name)
    finally:
        for path in [*hidden, workdir]:
            path.with_name(f"hidden {path.name}").rename(path)
        network.rename(workdir / "exported" / "network")


def test_a_network_trained_in_bfloat16_says_how_far_the_function_is_from_it(tmp_path):
    experiment = tiny_experiment(mesh=ONE_DEVICE, steps=2, checkpoint={}, evaluation={}, precision=BFloat16())
    run = jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    main(["--workdir", str(run.workdir), "--to", str(tmp_path / "to"), "--format", "stablehlo", "--platforms", "cpu"])
    about = json.loads((tmp_path / "to" / "predict.json").read_text())
    assert about["precision"] == "bfloat16"
    images = np.random.default_rng(1).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    outside = Outside(tmp_path / "to")
    difference = np.abs(outside.probabilities(images) - run.predict(images)).max()
    for given in (list(images), iter(images), jax.numpy.asarray(images)):
        np.testing.assert_array_equal(outside.probabilities(given), outside.probabilities(images))
    assert difference <= 10 * about["differences"]["stablehlo"] + 1e-2
    assert "differ from the network's by" in (tmp_path / "to" / "README.md").read_text()


def test_an_export_that_fails_ends_no_run(tmp_path, capsys, monkeypatch):
    def refuse(*args, **options):
        raise ConfigError("--format stablehlo: not today.")

    monkeypatch.setattr("jaxdl.inference.export.writing.export", refuse)
    experiment = tiny_experiment(mesh=ONE_DEVICE, steps=3, checkpoint={}, evaluation={}, export=())
    run = jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    assert run.summary["status"] == "finished"
    assert "could not be exported: format stablehlo: not today. To try again:" in capsys.readouterr().err


def test_without_a_workdir_there_is_nothing_to_export():
    with pytest.raises(ConfigError, match=r"export.*: without a workdir"):
        jaxdl.train(tiny_experiment(mesh=ONE_DEVICE, export=()), quiet=True, devices=jax.devices()[:1])
