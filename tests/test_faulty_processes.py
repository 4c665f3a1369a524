"""Two processes of one run whose data is bad, or of which one has a disk that refuses, or another workdir."""

import json
import re
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from faulty_train import make_labels_poisonous, poison_batches
from runs import TinyPerceptron, finish, rows, tiny_experiment, write_config
from test_processes import start_pair

import jaxdl
from jaxdl.parallel.lease.shared import appears
from jaxdl.training.run.compile import shared_programs

EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    mesh={"replica": 2, "fsdp": 1, "tensor": 1, "cpu_devices": 1},
    steps=16,
    checkpoint={"every_steps": 4, "keep": 3, "keep_best": 0},
    evaluation={"every_steps": 8},
    report={"every_steps": 3, "tensorboard": False, "curves": False},
    guard={"rollback_after": 3},
)
BAD = [2, 3, 4, 10, 11, 12]
"""The first row comes before the first checkpoint."""


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A run of two processes of which the second cannot write two checkpoints, the last one too.

    Before, they begin with workdirs of which each sees another one.
    """
    folder = tmp_path_factory.mktemp("runs")
    config, workdir = write_config(folder, EXPERIMENT), folder / "run"
    faults = [{"bad": BAD, "elsewhere": str(folder / name)} for name in ("one", "other")]
    faults[1]["refused"] = [8, 16]
    programs = [("-m", "tests.faulty_train", json.dumps(one)) for one in faults]
    ended = [finish(process) for process in start_pair(config, workdir, programs=programs)]
    events = [row["event"] for row in rows(workdir) if "event" in row]
    return SimpleNamespace(folder=folder, workdir=workdir, ended=ended, events=events)


@pytest.mark.slow
def test_a_disk_that_refuses_one_costs_both_the_checkpoint_and_no_more(story):
    assert [code for code, _ in story.ended] == [1, 1], story.ended
    notes = [text for text in story.events if "could not be written" in text]
    assert [text.partition(";")[0] for text in notes] == [
        f"the checkpoint of step {step} could not be written: another process failed" for step in (8, 16)
    ]
    for _, output in story.ended:
        assert "the state of step 16 could not be saved" in output
        assert "signal" not in output
        assert "Traceback" not in output


@pytest.mark.slow
def test_they_go_back_together_and_learn_what_one_process_does(story, tmp_path, monkeypatch):
    back = [text.partition(":")[0] for text in story.events if text.startswith("rolled back")]
    assert back == ["rolled back from step 4 to the start", "rolled back from step 12 to the checkpoint of step 4"]
    make_labels_poisonous(monkeypatch.setattr)
    poison_batches(BAD, monkeypatch.setattr)
    one_process = EXPERIMENT.replaced({"mesh.cpu_devices": None})
    with shared_programs():
        alone, resumed = (
            jaxdl.train(one_process, workdir, quiet=True, devices=jax.devices()[:2])
            for workdir in (tmp_path, story.workdir)
        )
    assert "resumed from the checkpoint at step 12" in resumed.history["event"]
    for run in (alone, resumed):
        assert (int(run.state.step), int(run.state.guard["bad_steps"])) == (16, len(BAD))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), resumed.state.params, alone.state.params
    )


@pytest.mark.slow
def test_another_folder_under_the_name_of_the_workdir_is_a_mistake_on_both(story):
    for _, output in story.ended:
        assert re.search(r"mistake: .* see the same --workdir: \S+ on \S+ \(process 1\) is not the folder of", output)
    assert {path.name for path in (story.folder / "one").iterdir()} == {"failures", "status.json"}
    assert not (story.folder / "other").exists()


@pytest.mark.slow
def test_a_file_that_comes_to_be_seen_late(tmp_path):
    threading.Timer(0.5, (tmp_path / "late").touch).start()
    assert appears(tmp_path / "late", 60)
    assert not appears(tmp_path / "never", 0.3)
