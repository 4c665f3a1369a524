"""`python -m jaxdl.export`: what was written is loaded again, without jaxdl, and predicts the same."""

import contextlib
import json
import re

import jax
import numpy as np
import pytest
from mistakes import refusal
from safetensors import safe_open

import jaxdl
from jaxdl.experiment import Experiment
from jaxdl.export.__main__ import main


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
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["README.md", "predict.stablehlo"]
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


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--workdir", "RUN"], "--to: required"),
        (["--workdir", "nowhere", "--to", "NEW"], "--workdir nowhere: there is no run in this folder"),
        (["--workdir", "RUN", "--to", "DONE"], "it has params.safetensors, predict.stablehlo, README.md already"),
        (["--workdir", "RUN", "--to", "DONE/README.md"], "a file, not a folder"),
        (["--workdir", "RUN", "--to", "NEW", "--step", "3"], "there are checkpoints of steps 2, 4"),
        (["--workdir", "RUN", "--to", "NEW", "--format", "onnx"], "--format onnx: not"),
        (["--workdir", "RUN", "--to", "NEW", "--batch-size", "0"], "--batch-size 0: give a whole number"),
    ],
)
def test_mistakes(run, exported, tmp_path, capsys, args, problem):
    places = {"RUN": run.workdir, "NEW": tmp_path / "new", "DONE": exported}
    for name, path in places.items():
        args = [one.replace(name, str(path), 1) if one.startswith(name) else one for one in args]
    assert problem in refusal(capsys, *args, run=main)
