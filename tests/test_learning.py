"""A run as a learner of a syncer: the same as an ordinary run where it must be, and through kills and signals."""

import jax
import numpy as np
import pytest
from asynchronous import TOKEN, Running
from runs import TinyPerceptron, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.exchange import by_name
from jaxdl.exchange.agreement import Asynchronous
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.storage import TAPE_FILE, read_tape
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.learners.replay import replay_runs
from jaxdl.training.step import StepConfig

MESH = MeshConfig(replica=1, fsdp=2, tensor=1)


@pytest.fixture
def syncer(tmp_path, monkeypatch):
    """Starts a syncer for learners in this process."""
    running = []

    def start(outer, **policy):
        running.append(Running(tmp_path / "syncer", Policy(**policy), outer))
        monkeypatch.setenv("JAXDL_SYNCER", f"127.0.0.1:{running[0].port}")
        monkeypatch.setenv("JAXDL_LEARNER", "0")
        monkeypatch.setenv("JAXDL_NUM_LEARNERS", str(running[0].num_learners))
        monkeypatch.setenv("JAXDL_RUN_TOKEN", TOKEN)
        return running[0]

    yield start
    for one in running:
        one.__exit__()


@pytest.mark.slow
def test_a_single_learner_is_an_ordinary_run(tmp_path, syncer, monkeypatch):
    """With plain averaging and one learner the anchor is what the learner has: nothing changes but the rounding."""
    # A learner's moving average is that of its anchors. What is frozen does not travel.
    experiment = tiny_experiment(model=TinyPerceptron(), mesh=MESH, steps=10, step=StepConfig(freeze=("hidden1",)))
    plain = jaxdl.train(experiment, devices=jax.devices()[:2], quiet=True)
    running = syncer(Outer(learning_rate=1.0, momentum=0.0), learners=1, every_steps=4)
    run = jaxdl.train(
        experiment.replaced({"agreement": "async"}), tmp_path / "run", devices=jax.devices()[:2], quiet=True
    )
    assert running.wait().version == 3  # After 4, 8 and 10 steps.
    for found, wanted in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(plain.state.params), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
    records = read_tape(tmp_path / "syncer" / TAPE_FILE)
    assert [(one["steps"], one["weight"]) for one in records if one["kind"] == "arrive"] == [(4, 64), (4, 64), (2, 32)]
    np.testing.assert_allclose(run.history["eval/loss"], plain.history["eval/loss"], rtol=1e-4)
    assert np.nanmax(run.history["train/agreement/merges"]) == 2
    again = replay_runs(tmp_path / "syncer" / TAPE_FILE, lambda number: run.plan.experiment, jax.devices()[:2])
    trained = by_name(run.plan.parts.trainable.of(run.state.params))
    flat = np.concatenate([np.ravel(x) for x in trained.values()])
    assert len(trained) < len(by_name(run.state.params))
    np.testing.assert_array_equal(again.anchor, flat)


@pytest.mark.slow
def test_a_learner_that_is_killed_comes_back_and_goes_on_from_the_anchor(tmp_path, syncer):
    """Stopped in mid-round, it begins a round from the anchor, with its own optimizer and its place in the data."""
    experiment = tiny_experiment(
        model=TinyPerceptron(), mesh=MESH, steps=10, agreement=Asynchronous(), evaluation={"every_steps": 10}
    )
    running = syncer(Outer(), learners=1, every_steps=4, return_sec=60)
    devices = jax.devices()[:2]
    first = jaxdl.train(experiment, tmp_path / "run", devices=devices, quiet=True, max_steps=6)
    assert first.summary["steps"] == 6
    own = first.state.own.params
    assert any(
        np.any(x[0] != y) for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(first.state.params), strict=True)
    )
    second = jaxdl.train(experiment, tmp_path / "run", devices=devices, quiet=True)
    assert running.wait().version == 2
    records = read_tape(tmp_path / "syncer" / TAPE_FILE)
    assert [one["resumes"] for one in records if one["kind"] == "join"] == ["", "step 6"]
    assert [(one["version"], one["steps"]) for one in records if one["kind"] == "arrive"] == [(0, 4), (1, 4)]
    flat = np.concatenate([np.ravel(x) for x in by_name(second.state.params).values()])
    np.testing.assert_array_equal(flat, running.result.anchor)
    with pytest.raises(ConfigError, match="learner 0 went on from its checkpoint of step 6"):
        replay_runs(tmp_path / "syncer" / TAPE_FILE, lambda number: experiment, devices)


def test_the_end_is_when_the_syncer_says_so(tmp_path, syncer):
    experiment = tiny_experiment(
        model=TinyPerceptron(), mesh=MESH, steps=1000, agreement=Asynchronous(), evaluation={"every_steps": 1000}
    )
    running = syncer(Outer(), learners=1, every_steps=4, total_steps=8)
    run = jaxdl.train(experiment, devices=jax.devices()[:2], quiet=True)
    assert running.wait().version == 2
    assert run.summary["status"] == "stopped"
    assert run.summary["steps"] == 9, "the step under way when the last anchor came"


def test_mistakes(tmp_path, syncer, monkeypatch):
    devices = jax.devices()[:2]
    experiment = tiny_experiment(model=TinyPerceptron(), mesh=MESH)
    with pytest.raises(ConfigError, match="there is no syncer"):
        jaxdl.train(experiment.replaced({"agreement": "async"}), devices=devices, quiet=True)
    syncer(Outer(), learners=2)
    with pytest.raises(ConfigError, match=r"agreement.every_step.*started as a learner"):
        jaxdl.train(experiment, devices=devices, quiet=True)
    with pytest.raises(ConfigError, match=r"mesh.replica=2.*each learner is one replica"):
        jaxdl.train(tiny_experiment(mesh=MeshConfig(replica=2), agreement=Asynchronous()), devices=devices, quiet=True)
