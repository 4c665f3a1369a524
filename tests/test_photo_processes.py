"""Two processes that train on photographs in phases: as one process does, and never on different data."""

import shutil

import jax
import numpy as np
import pytest
from photographs import folder_of_photographs
from runs import finish, saved_state, write_config
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
    ).replaced({"data.photos.workers": 1})


@pytest.mark.slow
@pytest.mark.long("two processes with workers, and one, train the same run")
def test_they_learn_what_one_process_does(folder, tmp_path):
    config = write_config(tmp_path, two(folder))
    ended = [finish(process) for process in start_pair(config, tmp_path / "run")]
    assert [code for code, _ in ended] == [0, 0], ended
    one_process = two(folder).replaced({"mesh.cpu_devices": None})
    alone = jaxdl.train(one_process, quiet=True, devices=jax.devices()[:2])
    found = saved_state(tmp_path / "run", one_process)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found.params, alone.state.params)


@pytest.mark.slow
def test_they_do_not_train_on_different_data(folder, tmp_path):
    config = write_config(tmp_path, two(folder))
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "train" / "b" / "3.jpg").unlink()
    # The same path on both hosts, and another folder there.
    place = tmp_path / "data"
    shutil.copytree(folder, place)
    each = (["--data.path", str(place)], ["--data.path", str(place)])
    program = ("-c", CHANGED_ROOT.format(place=str(place), other=str(other)))
    pair = start_pair(config, tmp_path / "run", each=each, programs=(("-m", "jaxdl.train"), program))
    ended = [finish(process) for process in pair]
    assert [code for code, _ in ended] == [2, 2], ended
    for _, output in ended:
        assert "the processes do not see the same data" in output
        assert "24 to train on and 6 held out" in output
        assert "23 to train on and 6 held out" in output


CHANGED_ROOT = """
import sys
from jaxdl.data import remote
find = remote.find
remote.find = lambda address, *rest: find(address.replace({place!r}, {other!r}), *rest)
from jaxdl.train import main
main()
"""
