"""`python -m jaxdl.export`: what was written is loaded again, without jaxdl, and predicts the same."""

import contextlib
import json
import re

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import ONE_DEVICE, tiny_experiment
from safetensors import safe_open

import jaxdl
from jaxdl.data import Clicks, ImageSpec, Tabular, TextSpec
from jaxdl.data.array_spec import ArrayInfo, ArraySpec
from jaxdl.data.tables.columns import NumbersSpec
from jaxdl.data.tables.tabular import Feature, TabularSpec
from jaxdl.inference.export.__main__ import main
from jaxdl.models import DLRM, Perceptron
from jaxdl.optim import AdamW
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Binary, Classification


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The folder of an export of the newest checkpoint."""
    folder = tmp_path_factory.mktemp("exported") / "new"
    main(["--workdir", str(run.workdir), "--to", str(folder)])
    return folder


def test_the_readme_loads_parameters_and_function(run, exported):
    blocks = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    loaded = {}
    with contextlib.chdir(exported):
        for block in blocks:
            exec(block, loaded)
    assert Experiment.from_json(json.dumps(loaded["config"])) == jaxdl.restore(run.workdir).experiment
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x)
        for tree in (run.state.ema_params, run.state.model_state)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    assert loaded["params"].keys() == expected.keys()
    for name, x in expected.items():
        assert loaded["params"][name].dtype == x.dtype
        np.testing.assert_array_equal(loaded["params"][name], x)
    images = run.plan.splits.test.batch(np.arange(5))["image"]
    predictions = jaxdl.restore(run.workdir).predict(images)
    for count in (5, 2):  # Any batch size.
        found = np.asarray(loaded["predict"](images[:count]))
        np.testing.assert_allclose(found, predictions[:count], rtol=1e-5)
    function = jax.export.deserialize(bytearray((exported / "predict.stablehlo").read_bytes()))
    assert function.platforms == ("cpu", "cuda")
    assert function.nr_devices == 1


def test_one_format_of_an_earlier_checkpoint_for_one_batch_size(run, tmp_path, capsys):
    places = ["--workdir", str(run.workdir), "--to", str(tmp_path / "a"), "--step", "2"]
    main([*places, "--format", "stablehlo", "--platforms", "cpu", "--batch-size", "3"])
    printed = capsys.readouterr().out
    assert "step 2" in printed
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "README.md", "predict.json", "predict.py", "predict.stablehlo",
    ]  # fmt: skip
    assert "uint8 [3, 8, 8, 1]" in (tmp_path / "a" / "README.md").read_text()
    images = run.plan.splits.test.batch(np.arange(3))["image"]
    function = jax.export.deserialize(bytearray((tmp_path / "a" / "predict.stablehlo").read_bytes()))
    expected = jaxdl.restore(run.workdir, step=2).predict(images)
    np.testing.assert_allclose(np.asarray(function.call(images)), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="shape"):
        function.call(images[:2])


def test_the_metadata_of_the_parameters(run, exported):
    with safe_open(exported / "params.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["step"] == "4"
    assert json.loads(metadata["data"])["num_classes"] == 4
    assert metadata["jaxdl"] == jaxdl.__version__


SPECS = {
    "images": ImageSpec(height=8, width=9, channels=3, num_classes=2, mean=(0.0,) * 3, std=(1.0,) * 3),
    "text": TextSpec(vocab_size=9, length=7, bytes_per_token=1.0),
    "arrays": ArraySpec((ArrayInfo("x", (3, 2), "float32"), ArrayInfo("y", (), "int32", num_classes=3))),
    "columns": NumbersSpec(("a", "b.c"), 2, (0.0, 1.0), (1.0, 2.0)),
    "table": TabularSpec(("n", "m"), (Feature("user", 5), Feature("genres", 4, 3)), 0.5),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_data_has_an_example_that_its_networks_read(name):
    spec = SPECS[name]
    found, blank = spec.to_predict(spec.example(), "export", ("x",) if name == "arrays" else ()), spec.blank()
    assert found.keys() <= blank.keys() - {"label", "y"}
    assert found
    for key, array in found.items():
        assert (array.shape, array.dtype) == (blank[key].shape, blank[key].dtype)


def of_numbers(tmp_path):
    """(a run on columns of numbers, inputs of its network, what the README says of them)."""
    rows = np.random.default_rng(0).normal(size=(40, 2)) * 100
    text = "".join(f"{a:.5},{b:.5},{int(a > b)}\n" for a, b in rows)
    (tmp_path / "x.csv").write_text(f"mass,charge,label\n{text}")
    data = Tabular(train=(str(tmp_path / "x.csv"),))
    run = {"data": data, "model": Perceptron(units=()), "task": Classification(), "optimizer": AdamW()}
    return (
        run,
        rows[:5].astype(np.float32),
        "float32 [batch, 2], as they are in the data, not normalized, in the order ",
    )


def of_clicks(tmp_path):
    """The same of numbers and ids."""
    del tmp_path
    data = Clicks(train_examples=64, test_examples=32, rows=(7, 5), num_ids=(1, 2))
    run = {"data": data, "model": DLRM(columns=4, bottom=(4,), top=(4,)), "task": Binary(), "optimizer": AdamW()}
    batch = data.build().test.batch(np.arange(5))
    inputs = {name: batch[name] for name in ("numbers", "ids")}
    return run, inputs, "a dictionary of numbers float32 [batch, 13], ids int32 [batch, 3], numbers in the order "


@pytest.mark.parametrize("made", [pytest.param(of_numbers, marks=pytest.mark.slow), of_clicks])
def test_tables(made, tmp_path):
    values, inputs, told = made(tmp_path)
    experiment = tiny_experiment(**values, steps=2, mesh=ONE_DEVICE, step=StepConfig(), checkpoint={}, evaluation={})
    jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    main(["--workdir", str(tmp_path / "run"), "--to", str(tmp_path / "to"), "--platforms", "cpu"])
    assert told in (tmp_path / "to" / "README.md").read_text()
    function = jax.export.deserialize(bytearray((tmp_path / "to" / "predict.stablehlo").read_bytes()))
    expected = jaxdl.restore(tmp_path / "run").predict(inputs)
    np.testing.assert_allclose(np.asarray(function.call(inputs)), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--workdir", "RUN"], "--to: required"),
        (["--workdir", "nowhere", "--to", "NEW"], "--workdir nowhere: there is no run in this folder"),
        (
            ["--workdir", "RUN", "--to", "DONE"],
            "it has params.safetensors, predict.stablehlo, README.md, predict.json, predict.py already",
        ),
        (["--workdir", "RUN", "--to", "DONE/README.md"], "a file, not a folder"),
        (["--workdir", "RUN", "--to", "NEW", "--step", "3"], "there are checkpoints of steps 2, 4"),
        (["--workdir", "RUN", "--to", "NEW", "--format", "onx"], "--format onx: not"),
        (["--workdir", "RUN", "--to", "NEW", "--batch-size", "0"], "--batch-size 0: give a whole number"),
    ],
)
def test_mistakes(run, exported, tmp_path, capsys, args, problem):
    places = {"RUN": run.workdir, "NEW": tmp_path / "new", "DONE": exported}
    for name, path in places.items():
        args = [one.replace(name, str(path), 1) if one.startswith(name) else one for one in args]
    assert problem in refusal(capsys, *args, run=main)
