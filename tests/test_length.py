"""Where a run ends: `max_steps`, and a run whose length is changed when it resumes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from mistakes import refusal
from runs import assert_bit_equal, measured, tiny_experiment, write_config

import jaxdl
from jaxdl import ahead
from jaxdl.exchange import TopK
from jaxdl.mesh import MeshConfig
from jaxdl.optim import Constant
from jaxdl.timeline import Phase, make_timeline

TWO = jax.devices()[:2]
EXPERIMENT = tiny_experiment(
    mesh=MeshConfig(replica=2, fsdp=1),
    exchange=TopK(density=0.1, dense_warmup_steps=6),
    schedule=Constant(),
    evaluation={"every_steps": 100},
    checkpoint={"every_steps": 100},
    report={"every_steps": 3, "tensorboard": False, "profile_start_step": 7},
    steps=8,
)


def train(experiment, workdir=None, **options):
    return jaxdl.train(experiment, workdir, quiet=True, devices=TWO, **options)


def as_numpy(run):
    return jax.tree.map(np.asarray, run.state)


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """All runs here are of one step: under a constant schedule the length makes no difference to it."""
    original, found = ahead.compile_steps, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ahead,
            "compile_steps",
            lambda plan, stretch: found[0] if found else found.append(original(plan)) or found[0],
        )
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 8 steps that never stopped: its final state and its workdir."""
    workdir = tmp_path_factory.mktemp("straight")
    return as_numpy(train(EXPERIMENT, workdir)), workdir


def test_a_trial_stops_evaluates_saves_and_resumes(tmp_path, straight, capsys):
    # Shorter than the exchange's warm-up (6) and the profile's start (7), which are for the whole run.
    trial = train(EXPERIMENT, tmp_path, max_steps=4)
    assert "stopped at step 4 of 8, as --max-steps asks; the same command without it resumes" in capsys.readouterr().out
    assert (trial.summary["status"], trial.summary["steps"], trial.summary["total_steps"]) == ("stopped", 4, 8)
    assert trial.metrics["accuracy"] >= 0, "the last step is evaluated"
    assert (tmp_path / "checkpoints" / "step_4").is_dir()
    before = measured(tmp_path)
    again = train(EXPERIMENT, tmp_path, max_steps=4)
    assert again.summary == trial.summary, "the same trial again has nothing to do"
    assert measured(tmp_path) == before

    whole = train(EXPERIMENT, tmp_path)
    assert whole.summary["status"] == "finished"
    assert_bit_equal(as_numpy(whole), straight[0])
    assert [row["step"] for row in measured(tmp_path)] == [3, 4, 4, 7, 8, 8]
    assert (tmp_path / "profile").is_dir()


def test_a_trial_without_a_workdir_says_that_nothing_is_kept(capsys):
    run = train(EXPERIMENT, max_steps=2)
    assert run.summary["steps"] == 2
    assert "no checkpoint of this step was written" in capsys.readouterr().out


def test_a_trial_as_long_as_the_run_is_the_run(straight):
    assert train(EXPERIMENT, straight[1], max_steps=9).summary["status"] == "finished"


def test_trials_that_are_refused(tmp_path, straight, capsys):
    config = write_config(tmp_path, EXPERIMENT.replaced({"mesh.fsdp": 4}))
    message = refusal(capsys, "--config", config, "--max-steps", 0)
    assert message == "error: --max-steps 0: give a whole number, 1 or more, or leave it out."
    message = refusal(capsys, "--config", config, "--workdir", straight[1], "--max-steps", 5)
    assert "--max-steps 5: the run in this --workdir has done 8 steps already" in message


def test_a_stretch_after_the_end_is_not_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(ahead, "compile_steps", lambda plan, stretch: compiled.append(stretch.index))
    phases = [Phase(epochs=1, size=16), Phase(epochs=1, size=32)]
    timeline = make_timeline(64, 16, epochs=None, steps=None, phases=phases)
    plan = SimpleNamespace(timeline=timeline)
    ahead.CompiledSteps(plan, 4).of(timeline.stretches[0])
    assert compiled == [0]
    futures = ahead.CompiledSteps(plan, 5)
    futures.of(timeline.stretches[0])
    futures.of(timeline.stretches[1])
    assert compiled == [0, 0, 1]
