"""Runs that are stopped, killed or damaged, and resume: bit-equal to one that never stopped."""

import functools
import itertools
import json
import os
import random
import shutil
import signal

import jax
import pytest
from runs import (
    TinyPerceptron,
    assert_bit_equal,
    has_step,
    kill,
    measured,
    rows,
    saved_state,
    start,
    stop,
    tiny_experiment,
    wait_for,
    write_config,
)

import jaxdl
from jaxdl.core.files import step_dir, step_folder
from jaxdl.report.reporter import Reporter

EXPERIMENT = tiny_experiment()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)


def train_here(experiment, workdir, **options):
    """Trains in this process, which has more devices than the experiment asks for."""
    return jaxdl.train(experiment.replaced({"mesh.cpu_devices": None}), workdir, devices=jax.devices()[:4], **options)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The workdir of a run that never stopped."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    train_here(EXPERIMENT, workdir, quiet=True)
    return workdir


@functools.cache
def state_of(workdir):
    return saved_state(workdir, EXPERIMENT)


def assert_same_run(workdir, uninterrupted):
    assert_bit_equal(state_of(workdir), state_of(uninterrupted))
    assert measured(workdir) == measured(uninterrupted), "the history should have no gap, no repetition, no difference"


def test_sigkill_at_a_random_step(tmp_path, config, uninterrupted):
    step = random.Random().randint(1, EXPERIMENT.steps - 1)
    process = start(config, tmp_path)
    wait_for(process, has_step(tmp_path, step))
    kill(process)
    train_here(EXPERIMENT, tmp_path, quiet=True)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_sigterm_while_compiling_and_sigint_while_training(tmp_path, config, uninterrupted):
    process = start(config, tmp_path)
    wait_for(process, (tmp_path / "metrics.jsonl").exists)  # Opened just before the steps are compiled.
    assert not rows(tmp_path)
    code, output = stop(process, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM, output
    assert "saved" in output
    assert step_dir(tmp_path, 0).is_dir(), "stopped while compiling, the initial state is saved"

    with pytest.raises(jaxdl.Interrupted) as stopped:
        train_here(EXPERIMENT, tmp_path, on_step=lambda info: info.step == 5 and os.kill(os.getpid(), signal.SIGINT))
    assert stopped.value.code == 128 + signal.SIGINT
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", 5)
    events = [row["event"] for row in rows(tmp_path) if "event" in row]
    assert "resumed from the checkpoint at step 0" in events

    train_here(EXPERIMENT, tmp_path, quiet=True)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_sigterm_while_evaluating(tmp_path, monkeypatch):
    """At the third batch."""

    def count_batches(reporter, poll, total):
        number = itertools.count(1)

        def counting():
            if next(number) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            poll()

        return counting

    evaluation = {"every_steps": 3, "batch_size": 4}
    experiment = tiny_experiment(model=TinyPerceptron(), evaluation=evaluation, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "count_batches", count_batches)
        with pytest.raises(jaxdl.Interrupted) as stopped:
            train_here(experiment, tmp_path, quiet=True)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not any("eval/accuracy" in row for row in rows(tmp_path))
    assert step_dir(tmp_path, 3).is_dir()
    # The restarted run has no step left, but catches up on the evaluation.
    train_here(experiment, tmp_path, quiet=True)
    [row] = [row for row in rows(tmp_path) if "eval/accuracy" in row]
    assert row["step"] == 3


@pytest.mark.slow
def test_damaged_newest_checkpoint(tmp_path, uninterrupted, capsys):
    """Flipped bits; test_checkpoint_faults.py has every damage to every file."""
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    newest = step_dir(tmp_path, 12)
    files = [path for path in newest.rglob("*") if path.is_file() and path.parent.name == "d"]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(len(content) // 4, len(content), max(1, len(content) // 8)):
        content[place] ^= 1
    largest.write_bytes(content)
    train_here(EXPERIMENT, tmp_path)
    output = capsys.readouterr().out
    assert f"{step_folder(12)} is damaged" in output
    assert "resumed from the checkpoint at step 8" in output
    assert (tmp_path / "checkpoints" / "damaged" / step_folder(12)).is_dir(), (
        "a damaged checkpoint is kept, not deleted"
    )
    assert_same_run(tmp_path, uninterrupted)


def test_another_config_is_refused(tmp_path, uninterrupted):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(jaxdl.ConfigError, match=r"-optimizer.momentum = 0.9\s+\+optimizer.momentum = 0.8"):
        train_here(EXPERIMENT.replaced({"optimizer.momentum": 0.8}), tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
