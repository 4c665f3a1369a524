"""Emulated staleness: gradients at earlier parameters, in one program, against the same in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import TinyPerceptron, assert_bit_equal, saved_state, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import TrainLoader
from jaxdl.exchange import Dense, TopK
from jaxdl.exchange.agreement import EmulatedStaleness, EveryStep
from jaxdl.models import FromModule
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.compiler.groups import KINDS, axes_of
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import Float16, Float32
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.state import PAST
from jaxdl.training.step import make_train_step
from jaxdl.training.tasks import Classification

FOUR = MeshConfig(replica=2, fsdp=2, tensor=1)
NUM_STEPS = 9


class Line(nnx.Module):
    """Multinomial logistic regression, whose gradient has a closed form."""

    def __init__(self, num_classes, channels, rngs, *, dtype=None):
        del channels
        self.layer = nnx.Linear(64, num_classes, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.layer(x.reshape(len(x), -1))


def line_experiment(agreement, num_replicas=3, **changes):
    values = {
        "model": FromModule(Line),
        "task": Classification(),
        "optimizer": SGD(learning_rate=0.3, momentum=0.8),
        "schedule": Constant(),
        "batch_size": 24,
        "steps": NUM_STEPS,
        "mesh": MeshConfig(replica=num_replicas, fsdp=1, tensor=1),
        "agreement": agreement,
        "step": {},
    }
    return tiny_experiment(**(values | changes))


def steps_of(plan):
    """(the state before each step and after the last, the metrics of each, its inputs and labels)."""
    step, state = make_train_step(plan.parts), make_initial_state(plan)
    states, metrics, batches = [jax.tree.map(np.asarray, state)], [], []
    sharding = batch_sharding(plan.parts.layout.mesh)
    size = plan.experiment.batch_size
    with TrainLoader(plan.splits.train, batch_size=size, seed=0, sharding=sharding, start=0, num_steps=100) as loader:
        for _ in range(NUM_STEPS):
            batch = next(loader)
            (inputs,) = plan.parts.task.inputs(batch, plan.parts.data_spec)
            batches.append((np.asarray(inputs, np.float64).reshape(size, -1), np.asarray(batch["label"])))
            state, found = step(state, batch)
            states.append(jax.tree.map(np.asarray, state))
            metrics.append(jax.device_get(found))
    return states, metrics, batches


def drawn(agreement, state, num_replicas, num_kept):
    """The staleness of a step, of each replica."""
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(state.key)), jnp.asarray(state.step))
    return np.asarray(agreement.staleness(jax.random.fold_in(key, 3), jnp.int32(num_kept), num_replicas))


def gradient(weights, inputs, labels):
    """Of the mean cross entropy, at float64 `{kernel, bias}`."""
    logits = inputs @ weights["kernel"] + weights["bias"]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return {"kernel": inputs.T @ shares / len(labels), "bias": shares.mean(axis=0)}


CASES = {
    "uniform": EmulatedStaleness(max_staleness=3),
    "remedies": EmulatedStaleness(max_staleness=3, rate_over_staleness=True, delay_compensation=0.5),
    "fixed": EmulatedStaleness(max_staleness=2, distribution="fixed", rate_over_staleness=True),
}


@pytest.mark.parametrize(
    ("name", "precision", "atol"),
    # A compensation of gradients times the loss scale would be 32,768 times as large.
    [
        pytest.param("remedies", Float32(), 2e-5, marks=pytest.mark.slow),
        ("fixed", Float32(), 2e-5),
        pytest.param("remedies", Float16(), 5e-3, marks=pytest.mark.slow),
    ],
)
def test_it_is_momentum_sgd_on_gradients_at_earlier_parameters(name, precision, atol):
    agreement = CASES[name]
    plan = make_plan(line_experiment(agreement, precision=precision), jax.devices()[:3])
    states, metrics, batches = steps_of(plan)
    weights = {key: np.asarray(x, np.float64) for key, x in states[0].params["layer"].items()}
    versions, momentum, seen = [], dict.fromkeys(weights, 0.0), set()
    for number, (inputs, labels) in enumerate(batches):
        versions.append(weights)
        staleness = drawn(agreement, states[number], 3, number)
        seen |= {*staleness.tolist()}
        assert staleness.max() <= min(number, agreement.max_staleness)
        np.testing.assert_allclose(metrics[number]["agreement/staleness"], staleness.mean(), rtol=1e-6)
        total, factors = dict.fromkeys(weights, 0.0), []
        for replica, late in enumerate(staleness):
            past, rows = versions[number - late], slice(8 * replica, 8 * replica + 8)
            found = gradient(past, inputs[rows], labels[rows])
            factors.append(1 / (1 + late) if agreement.rate_over_staleness else 1)
            for key, g in found.items():
                late_by = weights[key] - past[key]
                total[key] = total[key] + factors[-1] * (g + agreement.delay_compensation * g * g * late_by) / 3
        # The rate, as any optimizer has it, is outside of the momentum.
        rate = np.mean(factors)
        momentum = {key: 0.8 * momentum[key] + total[key] / rate for key in weights}
        np.testing.assert_allclose(metrics[number]["learning_rate"], 0.3 * rate, rtol=1e-6)
        weights = {key: x - 0.3 * rate * momentum[key] for key, x in weights.items()}
        for key, x in states[number + 1].params["layer"].items():
            np.testing.assert_allclose(x, weights[key], atol=atol, err_msg=f"{key} after step {number + 1}")
    assert seen == {*range(agreement.max_staleness + 1)}
    kept = states[-1].past.versions["layer"]["kernel"]
    assert len(kept) == agreement.max_staleness
    for age in range(1, agreement.max_staleness + 1):
        number = NUM_STEPS - age
        assert (kept[number % len(kept)] == states[number].params["layer"]["kernel"]).all()


def lowered(agreement):
    mesh = MeshConfig(replica=4, fsdp=2, tensor=1)
    experiment = tiny_experiment(model=TinyPerceptron(), mesh=mesh, agreement=agreement)
    plan = make_plan(experiment, jax.devices())
    batch = plan.splits.train.batch_shapes(16, evaluating=False)
    return plan, make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch)


def over_replica(plan, program):
    """How many collectives of each kind a compiled program has between replicas."""
    shape = dict(plan.parts.layout.mesh.shape)
    lines = [line for line in program.compile().as_text().splitlines() if any(f" {kind}" in line for kind in KINDS)]
    return sorted(kind for line in lines for kind in KINDS if f" {kind}(" in line and "replica" in axes_of(line, shape))


def test_without_staleness_the_program_is_that_of_every_step():
    (_, every), (_, none) = lowered(EveryStep()), lowered(EmulatedStaleness(max_staleness=0))
    assert every.as_text() == none.as_text()
    assert lowered(EmulatedStaleness(max_staleness=2))[1].as_text() != every.as_text()


@pytest.mark.slow
def test_staleness_sends_nothing_more_and_its_versions_are_sharded_as_parameters():
    plan, stale = lowered(CASES["remedies"])
    assert over_replica(plan, stale) == over_replica(*lowered(EveryStep()))
    for one, versions in zip(
        jax.tree.leaves(plan.parts.state_spec.shardings.params),
        jax.tree.leaves(plan.parts.state_spec.shardings.past.versions),
        strict=True,
    ):
        assert tuple(versions.spec) == (None, *one.spec)


def test_each_replica_and_step_draws_its_own_and_all_meshes_draw_the_same():
    agreement = EmulatedStaleness(max_staleness=3)
    keys = [jax.random.key(number) for number in range(400)]
    of_four, of_two = (jax.jit(lambda key, n=n: agreement.staleness(key, jnp.int32(100), n)) for n in (4, 2))
    four, two = np.array([of_four(key) for key in keys]), np.array([of_two(key) for key in keys[:50]])
    assert (four[:50, :2] == two).all()
    shares = np.stack([(four == late).mean(axis=0) for late in range(4)])
    np.testing.assert_allclose(shares, 0.25, atol=0.09)
    assert np.abs(np.corrcoef(four.T) - np.eye(4)).max() < 0.2


@pytest.mark.slow
def test_a_stopped_run_ends_bit_equal_and_another_mesh_restores_the_same_versions(tmp_path):
    """With a moving average, clipping, micro-batches and a residual."""
    experiment = tiny_experiment(
        model=TinyPerceptron(),
        mesh=FOUR,
        agreement=CASES["remedies"],
        exchange=TopK(density=0.1, min_elements=64),
        steps=8,
    ).replaced({"step.clip_norm": 1.0, "step.microbatches": 2})
    devices = jax.devices()[:4]
    with shared_programs():
        whole = jaxdl.train(experiment, tmp_path / "whole", devices=devices, quiet=True)
        jaxdl.train(experiment, tmp_path / "parts", devices=devices, max_steps=5, quiet=True)
        parts = jaxdl.train(experiment, tmp_path / "parts", devices=devices, quiet=True)
    assert whole.history["train/agreement/staleness"][0] == 0
    assert max(whole.history["train/agreement/staleness"]) > 1
    state = jax.tree.map(np.asarray, whole.state)
    assert_bit_equal(state, jax.tree.map(np.asarray, parts.state))
    assert_bit_equal(state.past, saved_state(tmp_path / "whole", experiment).past)


def test_versions_age_in_skipped_steps_too():
    """So a bad one, at which all gradients are bad, is gone after `max_staleness` steps."""
    agreement = EmulatedStaleness(max_staleness=2, distribution="fixed")
    plan = make_plan(line_experiment(agreement, num_replicas=1), jax.devices()[:1])
    step, batch = make_train_step(plan.parts), plan.splits.train.batch(np.arange(24))
    state, _ = step(make_initial_state(plan), batch)
    kernel = np.asarray(state.params["layer"]["kernel"])
    bad = dataclasses.replace(state.past, versions=jax.tree.map(lambda x: x * jnp.nan, state.past.versions))
    state, found = state.replace(agreement_state={PAST: bad}), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append((int(metrics["bad_steps"]), int(state.past.num_kept)))
    assert found == [(1, 2), (2, 3), (2, 4)]
    assert (state.past.versions["layer"]["kernel"] == kernel[None]).all()
    assert (state.params["layer"]["kernel"] != kernel).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 0, "rate_over_staleness": True}, "rate_over_staleness = True has no effect"),
        ({"max_staleness": 0, "delay_compensation": 0.1}, "delay_compensation = 0.1 has no effect"),
        ({"max_staleness": 0, "distribution": "fixed"}, "distribution = fixed has no effect"),
    ],
)
def test_settings_without_effect(changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        EmulatedStaleness(**changes)


def test_what_does_not_go_together():
    with pytest.raises(ConfigError, match="Choose 8 at most"):
        make_plan(line_experiment(EmulatedStaleness(max_staleness=NUM_STEPS)), jax.devices()[:3])
    with pytest.raises(ConfigError, match="delay_steps=1: with agreement emulated_staleness"):
        make_plan(line_experiment(EmulatedStaleness(), exchange=Dense(delay_steps=1)), jax.devices()[:3])
    spanning = tiny_experiment(mesh=FOUR, agreement=EmulatedStaleness()).replaced({"model.norm_span": "mesh"})
    with pytest.raises(ConfigError, match="each replica has other parameters"):
        make_plan(spanning, jax.devices()[:4])
