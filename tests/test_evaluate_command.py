"""`python -m jaxdl.evaluate`: the numbers of the run itself, on its mesh bit by bit; other data and other meshes."""

import json

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import rows

import jaxdl
from jaxdl.data import SyntheticImages
from jaxdl.inference.evaluate.__main__ import main


@pytest.fixture
def run(tiny_run):
    return tiny_run


def evaluated(capsys, *args):
    """What the command prints as JSON."""
    main([str(one) for one in (*args, "--json")])
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def history(run, step):
    """The metrics that the run itself wrote of a step."""
    row = next(row for row in rows(run.workdir) if row["step"] == step and "eval/loss" in row)
    return {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}


@pytest.mark.parametrize("step", [4, 2])
def test_the_metrics_are_those_of_the_run_bit_by_bit(run, capsys, step):
    files = {path: path.stat().st_mtime_ns for path in run.workdir.rglob("*")}
    found = evaluated(capsys, "--workdir", run.workdir, "--step", step)
    assert (found["step"], found["examples"], found["data"]) == (step, 40, "synthetic_images")
    assert found["metrics"] == history(run, step)
    assert {path: path.stat().st_mtime_ns for path in run.workdir.rglob("*")} == files
    assert history(run, 2) != history(run, 4), "the steps are told apart"


def test_the_best_checkpoint_on_another_mesh_with_another_batch_size(run, capsys):
    found = evaluated(
        capsys, "--workdir", run.workdir, "--step", "best", "--mesh.replica", 1, "--mesh.fsdp", 4,
        "--mesh.tensor", 2, "--batch-size", 3,
    )  # fmt: skip
    assert found["metrics"]["accuracy"] == max(history(run, step)["accuracy"] for step in (2, 4))
    np.testing.assert_allclose(found["metrics"]["loss"], history(run, found["step"])["loss"], rtol=1e-5)


@pytest.mark.slow
def test_other_data_is_normalized_as_the_training_data(run, capsys):
    other = run.plan.experiment.data.replaced({"num_test": 24, "height": 12, "seed": 9})
    found = evaluated(capsys, "--workdir", run.workdir, "--data.num-test", 24, "--data.height", 12, "--data.seed", 9)
    assert found["examples"] == 24
    source = other.build().test
    trained, batch = run.plan.parts.data_spec, source.batch(np.arange(24))
    assert source.spec.mean != trained.mean
    images = (batch["image"].astype(np.float32) - np.array(trained.mean)) / np.array(trained.std)
    logits, _ = run.plan.parts.network.apply(
        run.state.eval_params, run.state.model_state, images.astype(np.float32), train=False
    )
    losses = -np.asarray(jax.nn.log_softmax(logits))[np.arange(24), batch["label"]]
    np.testing.assert_allclose(found["metrics"]["loss"], losses.mean(), rtol=1e-4)


def test_the_same_from_python(run):
    predictor = jaxdl.restore(run.workdir, step="best", mesh=run.plan.experiment.mesh)
    assert predictor.evaluate() == history(run, predictor.step)
    assert predictor.evaluate(run.plan.splits) == predictor.evaluate(run.plan.splits.test) == predictor.evaluate()
    images = run.plan.splits.test.batch(np.arange(5))["image"]
    odds = np.exp(predictor.logits(images))
    np.testing.assert_allclose(odds / odds.sum(axis=1, keepdims=True), predictor.predict(images), rtol=1e-5)
    shapes = jax.tree.map(lambda x: x.shape, predictor.params)
    assert shapes == jax.tree.map(lambda x: x.shape, run.state.params)
    with pytest.raises(jaxdl.ConfigError, match=r"type str\. Give a data config"):
        predictor.evaluate("digits")
    with pytest.raises(jaxdl.ConfigError, match=r"num_classes 4, channels 1.*num_classes 5, channels 1"):
        predictor.evaluate(SyntheticImages(height=8, width=8, channels=1, num_classes=5, num_train=96, num_test=40))


def test_what_a_person_reads(run, capsys):
    main(["--workdir", str(run.workdir)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{run.workdir}, step 4: 40 held-out examples of synthetic_images"
    assert f"{history(run, 4)['loss']:.6g}" in " ".join(printed[1:])


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "no --workdir. Give --workdir FOLDER"),
        (["--workdir"], "--workdir: needs a value, the folder of a run"),
        (["--workdir", "nowhere"], "--workdir nowhere: there is no run in this folder (no config.json)"),
        (["--workdir", "RUN/.."], "Did you mean"),
        (["--workdir", "RUN", "--step", "latest"], "--step 'latest': choose \"newest\", \"best\""),
        (["--workdir", "RUN", "--step", "3"], "no checkpoint of step 3; there are checkpoints of steps 2, 4"),
        (["--workdir", "RUN", "--batch-size", "0"], "--batch-size 0: give a whole number"),
        (["--workdir", "RUN", "--optimizer.learning-rate", "1"], "--optimizer.learning-rate: there is no such option"),
        (["--workdir", "RUN", "--data.num-classes", "5"], "num_classes 5"),
        (["--workdir", "RUN", "--mesh.fsdp", "64"], "64"),
    ],
)  # fmt: skip
def test_mistakes(run, capsys, args, problem):
    args = [one.replace("RUN", str(run.workdir)) for one in args]
    assert problem in refusal(capsys, *args, run=main)
