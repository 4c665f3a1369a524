"""Prediction from a workdir: as the run itself predicts, on any mesh, without the data; and text."""

import shutil

import jax
import numpy as np
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir, step_folder
from jaxdl.models.network import Call
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.step import apply_network


def make_oracle(run, params=None):
    """A function of a batch: the network's predictions with the state that the run returned."""
    parts, state = run.plan.parts, run.state

    @jax.jit
    def outputs(params, model_state, batch):
        return apply_network(parts, parts.layout, params, model_state, batch, Call(train=False))[0]

    params = state.eval_params if params is None else params
    return lambda batch: np.asarray(parts.task.predictions(outputs(params, state.model_state, batch)))


@pytest.fixture(scope="module")
def images(tiny_run):
    """(run, held-out images): a few steps with a moving average."""
    return tiny_run, tiny_run.plan.splits.test.batch(np.arange(24))["image"]


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("mesh", [None, MeshConfig(replica=4, fsdp=2)])
def test_predicts_what_the_run_does(images, mesh):
    run, pictures = images
    expected = make_oracle(run)({"image": pictures})
    before = files_of(run.workdir)
    predictor = jaxdl.restore(run.workdir, mesh=mesh)
    assert files_of(run.workdir) == before, "a run may still be writing there"
    assert predictor.step == 4
    assert predictor.experiment.optimizer == run.plan.experiment.optimizer
    for count in (24, 5, 1, 0):  # Most of these do not divide a mesh of 8.
        found = predictor.predict(pictures[:count])
        assert found.shape == (count, 4)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected[:count], rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    assert np.ptp(expected, axis=0).max() > 5e-4, "the pictures are told apart"


def test_predicts_with_the_moving_average(images):
    run, pictures = images
    averaged, last = (
        make_oracle(run, params)({"image": pictures}) for params in (run.state.ema_params, run.state.params)
    )
    found = jaxdl.restore(run.workdir).predict(pictures)
    assert np.abs(found - averaged).max() < 1e-4 < np.abs(found - last).max()


@pytest.mark.parametrize(
    ("pictures", "problem"),
    [
        (np.zeros((2, 8, 8, 1), np.float32), r"float32 \[2, 8, 8, 1\]; this network reads uint8 \[batch, 8, 8, 1\]"),
        (np.zeros((2, 8, 9, 1), np.uint8), r"uint8 \[2, 8, 9, 1\]"),
        (np.zeros((8, 8, 1), np.uint8), r"uint8 \[8, 8, 1\]"),
    ],
)
def test_refuses_other_images(images, pictures, problem):
    with pytest.raises(ConfigError, match=problem):
        jaxdl.restore(images[0].workdir).predict(pictures)


def test_a_network_of_images_writes_no_text(images):
    with pytest.raises(ConfigError, match=r"reads images; use predict"):
        jaxdl.restore(images[0].workdir).generate("a")


def test_a_damaged_checkpoint_is_told_and_left_where_it_is(images, tmp_path):
    run, pictures = images
    shutil.copytree(run.workdir, tmp_path, dirs_exist_ok=True)
    for path in (step_dir(tmp_path, 4) / "model").rglob("d/*"):
        path.unlink()
    before = files_of(tmp_path)
    with pytest.warns(UserWarning, match=rf"{step_folder(4)} is damaged .*; {step_folder(2)} is used"):
        predictor = jaxdl.restore(tmp_path)
    assert predictor.step == 2
    assert np.abs(predictor.predict(pictures) - make_oracle(run)({"image": pictures})).max() > 1e-4
    assert files_of(tmp_path) == before
