"""Gradients that are applied one step late: the same means, a step later, that wait for no gradient of the step."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import EXCHANGES, NAMED_SHAPES, PLACES, Run, run_of
from runs import TinyPerceptron, assert_bit_equal, rows, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import step_dir
from jaxdl.data import TrainLoader
from jaxdl.exchange import Auto, Dense, TopK, by_name
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.compiler.wire_bytes import sent_bytes
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import Float16
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.tasks import Classification

PLACE = "replica 4 x fsdp 2"
CASES = ["dense", "topk block"]
EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    task=Classification(),
    optimizer=SGD(learning_rate=0.5, momentum=0.0),
    schedule=Constant(),
    step={},
    batch_size=16,
    steps=5,
    evaluation={"every_steps": 5},
    checkpoint={"every_steps": 3},
)


@functools.cache
def late(exchange):
    return Run(EXCHANGES[exchange].replaced({"delay_steps": 1}), PLACES[PLACE])


def host(tree):
    return jax.tree.map(np.asarray, tree)


def on(experiment, *sizes):
    mesh = MeshConfig(**dict(zip(("replica", "fsdp", "tensor"), sizes, strict=True)))
    return experiment.replaced({"mesh": mesh})


@pytest.mark.parametrize("exchange", CASES)
def test_the_same_means_one_step_later(exchange):
    """With 4 replicas shares are exact, so all is equal to the bit: zeros first, then what was handed over before."""
    delayed, plain = late(exchange), run_of(exchange, PLACE)
    state, expected = delayed.init(), plain.init()
    gradients = [plain.gradients(step) for step in range(3)]
    zeros = {name: np.zeros_like(x) for name, x in gradients[0].items()}
    for step, before in enumerate([zeros, *gradients[:2]]):
        mean, state, metrics = delayed(gradients[step], state, step)
        wanted, expected, wanted_metrics = plain(before, expected, step)
        assert_bit_equal(host(mean), host(wanted))
        assert_bit_equal(host(metrics), host(wanted_metrics))
        pending = state["replica"]["pending"]
        for name, x in gradients[step].items():
            assert np.array_equal(np.asarray(pending[name]), x.astype(np.float32) / 4)
        others = {name: entry for name, entry in state["replica"].items() if name != "pending"}
        assert_bit_equal(host(others), host(expected.get("replica", {})))
    assert set(NAMED_SHAPES) == set(pending)


@pytest.mark.parametrize("exchange", CASES)
def test_what_is_sent_does_not_wait_for_the_gradients_of_the_step(exchange):
    delayed = late(exchange)
    _, state, _ = delayed(delayed.gradients(0), delayed.init(), 0)
    one, other = (delayed(delayed.gradients(seed), state, 1) for seed in (1, 2))
    assert_bit_equal(host((one[0], one[2])), host((other[0], other[2])))
    assert any(np.any(x) for x in jax.tree.leaves(host(one[0])))


@pytest.mark.parametrize("exchange", CASES)
def test_as_many_bytes(exchange):
    delayed, plain = late(exchange), run_of(exchange, PLACE)
    assert sent_bytes(delayed.lowered, delayed.mesh) == sent_bytes(plain.lowered, plain.mesh)


def test_gradient_descent_with_late_gradients_against_numpy():
    """Each replica r has the loss |w - target_r|^2 / 2; w moves by the mean gradient at the weights one step before."""
    run, rate = late("dense"), np.float32(0.3)
    targets = run.gradients(7)
    ours = {name: np.ones(shape, np.float32) for name, shape in NAMED_SHAPES.items()}
    path = [ours]
    state = run.init()
    for step in range(5):
        mean, state, _ = run({name: (w - targets[name]).astype(np.float32) for name, w in ours.items()}, state, step)
        ours = {name: ours[name] - rate * np.asarray(x) for name, x in by_name(mean).items()}
        if step == 0:
            path.append(path[0])
        else:
            path.append({n: w - rate * (path[step - 1][n] - targets[n].mean(axis=0)) for n, w in path[step].items()})
    for name, expected in path[-1].items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(path[-1]["odd/kernel"] - path[1]["odd/kernel"]).max() > 0.1


def batches_of(plan, num_steps):
    with TrainLoader(
        plan.splits.train,
        batch_size=plan.experiment.batch_size,
        seed=0,
        sharding=batch_sharding(plan.parts.layout.mesh),
        start=0,
        num_steps=num_steps,
    ) as loader:
        return list(loader)


@pytest.mark.slow
def test_a_skipped_step_changes_nothing_and_the_next_applies_what_was_pending():
    changes = {"exchange": Dense(delay_steps=1), "precision": Float16(initial_scale=2.0**10)}
    plan = make_plan(on(EXPERIMENT, 2, 2, 1).replaced(changes), jax.devices()[:4])
    step = compile_train_step(plan)
    *earlier, second, third = batches_of(plan, 5)
    state = make_initial_state(plan)
    for batch in earlier:  # The last layer begins with zeros, so that the first one has no gradient at first.
        state, _ = step(state, batch)
    before = jax.device_get(state)
    assert all(np.any(x) for x in before.exchange_state["replica"]["pending"].values())

    huge = jax.device_put(np.float32(1e30), state.loss_scale["scale"].sharding)
    state, metrics = step(dataclasses.replace(state, loss_scale=state.loss_scale | {"scale": huge}), second)
    assert int(metrics["skipped_steps"]) == 1
    skipped = jax.device_get(state)
    assert_bit_equal(skipped.params, before.params)
    assert_bit_equal(skipped.exchange_state, before.exchange_state)

    small = jax.device_put(np.float32(2.0**10), state.loss_scale["scale"].sharding)
    state, _ = step(dataclasses.replace(state, loss_scale=state.loss_scale | {"scale": small}), third)
    after = jax.device_get(state)
    pending, moved = before.exchange_state["replica"]["pending"], by_name(after.params)
    for name, old in by_name(before.params).items():
        np.testing.assert_allclose(moved[name], old - 0.5 * pending[name].sum(axis=0), rtol=1e-5, atol=1e-7)
    assert all(np.all(np.isfinite(x)) for x in after.exchange_state["replica"]["pending"].values())


def losses(workdir):
    return [row["train/loss"] for row in rows(workdir) if "train/loss" in row]


def train(workdir, experiment, *sizes):
    run = jaxdl.train(on(experiment, *sizes), workdir, devices=jax.devices()[: np.prod(sizes)])
    assert run.state is not None
    return run.state


@pytest.mark.slow
def test_resumed_bit_equal(tmp_path):
    experiment = EXPERIMENT.replaced({"exchange": TopK(density=0.1, min_elements=64, delay_steps=1)})
    whole = train(tmp_path / "whole", experiment, 2, 2, 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(step_dir(tmp_path / "resumed", 5))
    resumed = train(tmp_path / "resumed", experiment, 2, 2, 1)
    assert_bit_equal(host(resumed), host(whole))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_equal_losses_on_other_meshes_and_with_another_number_of_replicas(tmp_path, capsys):
    """What is pending is shares: their sum is the gradient, on 2 replicas as on 4."""
    experiment = EXPERIMENT.replaced({"exchange": Dense(delay_steps=1)})
    state = train(tmp_path / "whole", experiment, 2, 2, 1)
    assert all(np.any(x) for x in jax.tree.leaves(host(state.exchange_state)))
    expected = losses(tmp_path / "whole")
    assert expected[-1] < expected[0] - 0.02
    shutil.copytree(tmp_path / "whole", tmp_path / "elsewhere")
    shutil.rmtree(step_dir(tmp_path / "elsewhere", 5))
    capsys.readouterr()
    train(tmp_path / "elsewhere", experiment, 4, 1, 1)
    assert "the pending of 2 replicas is split over 4, the sum preserved" in capsys.readouterr().out
    train(tmp_path / "one", experiment, 1, 1, 1)
    for name in ("elsewhere", "one"):
        np.testing.assert_allclose(losses(tmp_path / name), expected, rtol=1e-5)


def test_settings():
    with pytest.raises(ConfigError, match=r"delay_steps=1: the run has 1 steps, so no gradient would be applied"):
        make_plan(on(EXPERIMENT, 2, 2, 1).replaced({"exchange": Dense(delay_steps=1), "steps": 1}), jax.devices()[:4])
    with pytest.raises(ConfigError, match="delay_steps"):
        Dense().replaced({"delay_steps": 2})
    auto = Auto(bandwidth_gbps=0.01, latency_us=100, delay_steps=1)
    plan = make_plan(on(EXPERIMENT, 2, 2, 1).replaced({"exchange": auto}), jax.devices()[:4])
    assert plan.experiment.exchange.delay_steps == 1
    assert "pending" in plan.parts.state_spec.shapes.exchange_state["replica"]
    alone = make_plan(on(EXPERIMENT, 1, 2, 1).replaced({"exchange": auto}), jax.devices()[:2])
    shapes = alone.parts.state_spec.shapes.exchange_state["replica"]["pending"]
    assert {x.dtype for x in shapes.values()} == {jnp.dtype("float32")}
