"""Two processes that train on photographs in phases: as one process does, and never on different data."""

import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from photographs import folder_of_photographs
from runs import finish, rows, write_config
from several_trains import several
from test_phases import experiment
from test_processes import start_pair

import jaxdl
from jaxdl.data.phases import Phase

PHASES = (Phase(epochs=1, size=32), Phase(epochs=1, size=48, batch_size=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("two"))


def two(folder):
    return experiment(
        folder,
        phases=PHASES,
        mesh={"replica": 2, "fsdp": 1, "tensor": 1, "cpu_devices": 1},
        report={"every_steps": 1, "tensorboard": False, "curves": False},
    ).replaced({"data.photos.workers": 1, "evaluation.norm_batches": 2})


@pytest.fixture(scope="module")
def story(folder, tmp_path_factory):
    """What came of two processes that train, and then train on data that one of them has in part only."""
    # The same path on both hosts, and another folder there.
    data, other, workdir = (tmp_path_factory.mktemp(name) for name in ("data", "other", "runs"))
    for copy in (data, other):
        shutil.copytree(folder, copy, dirs_exist_ok=True)
    (other / "train" / "b" / "3.jpg").unlink()
    runs = ({"args": ["--workdir", str(workdir / "run")]}, {"args": ["--data.path", str(data)]})
    program = several(*runs)
    changed = ("-c", CHANGED_ROOT.format(place=str(data), other=str(other)), *program[2:])
    pair = start_pair(write_config(workdir, two(folder)), workdir / "never", programs=(program, changed))
    return SimpleNamespace(ended=[finish(process) for process in pair], workdir=workdir)


@pytest.mark.slow
def test_they_learn_what_one_process_does(folder, story):
    one_process = two(folder).replaced({"mesh.cpu_devices": None})
    alone = jaxdl.train(one_process, quiet=True, devices=jax.devices()[:2])
    found = jaxdl.restore(story.workdir / "run")
    assert found.step == alone.summary["steps"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found.params, alone.state.params)
    # The statistics of batch norm are estimated, from training data of both.
    estimated, expected = found.model_state, alone.inference.model_state
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), estimated, expected)
    losses = [row["eval/loss"] for row in rows(story.workdir / "run") if "eval/loss" in row]
    np.testing.assert_allclose(losses[-1], alone.metrics["loss"], rtol=1e-4)


@pytest.mark.slow
def test_they_do_not_train_on_different_data(story):
    assert [code for code, _ in story.ended] == [2, 2], story.ended
    for _, output in story.ended:
        assert "the processes do not see the same data" in output
        assert "24 to train on and 6 held out" in output
        assert "23 to train on and 6 held out" in output
    assert not (story.workdir / "never" / "config.json").exists()


CHANGED_ROOT = """
import runpy
from jaxdl.data import remote
find = remote.find
remote.find = lambda address, *rest: find(address.replace({place!r}, {other!r}), *rest)
runpy.run_module("tests.several_trains", run_name="__main__")
"""
