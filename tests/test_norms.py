"""Batch norm: over groups of examples, and with statistics estimated for the evaluation."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from runs import ONE_DEVICE, TinyResNet, assert_bit_equal, measured, saved_state, tiny_experiment
from test_parity import IMAGES, losses_and_params

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticImages, TrainLoader
from jaxdl.models import Network, ResNet, ViT
from jaxdl.models.functions import linen_network
from jaxdl.models.network import Call
from jaxdl.models.norm_rows import row_norms
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification

FOUR = jax.devices()[:4]


def network(span, model=ResNet):
    return Network(model(depth=8, width=4, norm_span=span).build(num_classes=3, channels=1, dtype=jnp.float32))


@pytest.mark.slow
def test_groups_are_batches_of_their_own():
    grouped, single = network(4, TinyResNet), network("replica", TinyResNet)
    apply_single = jax.jit(lambda x: single.apply(params, stats, x, train=True))
    params, stats = grouped.init(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    image = jax.random.normal(jax.random.key(1), (12, 8, 8, 1)) * jnp.arange(1.0, 13.0)[:, None, None, None]
    logits, after = jax.jit(lambda x: grouped.apply(params, stats, x, train=True))(image)
    parts = [apply_single(part) for part in jnp.split(image, 3)]
    expected = np.concatenate([part[0] for part in parts])
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
    means = jax.tree.map(lambda *each: np.mean(each, axis=0), *(part[1] for part in parts))
    for ours, theirs in zip(jax.tree.leaves(after), jax.tree.leaves(means), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    whole, _ = apply_single(image)
    assert np.abs(whole - expected).max() > 0.05 * np.abs(expected).max(), "one batch of all is something else"
    with pytest.raises(ConfigError, match="a batch of 6 examples cannot be divided into such groups"):
        grouped.apply(params, stats, image[:6], train=True)


@pytest.mark.slow
def test_groups_are_the_same_on_a_mesh():
    """Groups of 8 of 32 examples reach over devices and over replicas."""
    experiment = IMAGES.replaced({"model.norm_span": 8})
    reference, params = losses_and_params(experiment.replaced({"mesh": ONE_DEVICE}))
    losses, others = losses_and_params(experiment.replaced({"mesh": MeshConfig(replica=8, fsdp=1, tensor=1)}))
    np.testing.assert_allclose(losses, reference, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max() + 1e-6)


@pytest.mark.parametrize(
    ("span", "replica", "microbatches", "message"),
    [
        (3, 2, 1, r"norm_span=3: a batch of 16 .* A replica has 8"),
        (16, 2, 2, "norm_span=16"),  # Two replicas with 4 examples at a time have 8 together.
        (8, 2, 2, None),
        (32, 2, 1, "norm_span=32"),
        (12, 1, 1, "norm_span=12"),
    ],
)
def test_batches_that_cannot_be_divided_into_groups_are_refused(span, replica, microbatches, message):
    experiment = tiny_experiment(
        model=TinyResNet(depth=8, width=32, norm_span=span),
        mesh=MeshConfig(replica=replica, fsdp=-1, tensor=1),
        step=StepConfig(microbatches=microbatches),
    )
    if message is None:
        make_plan(experiment, FOUR)
    else:
        with pytest.raises(ConfigError, match=message):
            make_plan(experiment, FOUR)


class Widened(nnx.BatchNorm):
    """A batch norm of a user's own."""

    def __call__(self, x, train):
        return 2 * super().__call__(x=x, use_running_average=not train)


class Norms(nnx.Module):
    """Batch norms of a user's network over one value, over six, and over none."""

    def __init__(self, num_classes, channels, dtype, *, rngs):
        self.first, self.frozen = Widened(4, rngs=rngs), nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.image, self.last = nnx.BatchNorm(1, rngs=rngs), nnx.Linear(4, num_classes, rngs=rngs)

    def __call__(self, image, train):
        x = self.image(image, use_running_average=not train)
        return self.last(self.frozen(self.first(x.reshape(len(x), -1)[:, :4], train), use_running_average=True))


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.BatchNorm()(x, use_running_average=not train)


def test_norms_over_one_row_are_known_with_the_values_they_have():
    image = jax.ShapeDtypeStruct((1, 3, 2, 1), jnp.float32)
    of_user = Network(lambda rngs: Norms(4, 1, jnp.float32, rngs=rngs), "mine")
    assert row_norms(of_user, (image,), num_replicas=2) == {"first": 1, "image": 6}
    flat = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    assert row_norms(linen_network(LinenNorm(), (flat,), "mine"), (flat,), num_replicas=1) == {"BatchNorm_0": 1}
    found = row_norms(network("replica"), (jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32),), num_replicas=2)
    assert {found["stem_norm"], found["stage3_block1/norm2"]} == {64, 4}
    for span, num_replicas in (("mesh", 2), (4, 1)):
        assert not row_norms(
            network(span), (jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32),), num_replicas=num_replicas
        )


@pytest.mark.parametrize(
    ("replica", "microbatches", "advice"),
    [(1, 16, "fewer --step.microbatches"), (4, 4, "--mesh.fsdp in place of --mesh.replica"), (1, 8, None)],
)
def test_a_run_says_that_batch_norm_has_one_row(replica, microbatches, advice):
    experiment = tiny_experiment(
        model=jaxdl.FromModule(Norms),
        mesh=MeshConfig(replica=replica, fsdp=1, tensor=1),
        step=StepConfig(microbatches=microbatches),
    )
    lines = [one for one in make_plan(experiment, FOUR[:replica]).reasons if "batch norm over one row" in one]
    assert [("in first: each value" in one, advice in one) for one in lines] == ([(True, True)] if advice else [])


def test_group_norm_has_no_span():
    with pytest.raises(ValueError, match="norm_span = 8"):
        ResNet(norm="group", norm_span=8)


ESTIMATED = tiny_experiment(
    data=SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=96, num_test=40),
    evaluation=EvaluationConfig(every_steps=4, norm_batches=3),
    task=Classification(),
    mesh=MeshConfig(replica=2, fsdp=2),
)


@pytest.fixture(scope="module")
def estimated(tmp_path_factory):
    """A whole run whose evaluations estimate the statistics."""
    return jaxdl.train(ESTIMATED, tmp_path_factory.mktemp("estimated"), quiet=True, devices=FOUR)


@pytest.mark.slow
def test_estimated_statistics_are_the_means_over_the_last_batches(estimated):
    run = estimated
    plan, state = run.plan, jax.device_get(run.state)
    with TrainLoader(
        plan.splits.train, batch_size=16, seed=ESTIMATED.seed, sharding=batch_sharding(plan.parts.layout.mesh),
        start=9 * 16, num_steps=3,
    ) as batches:  # fmt: skip
        images = [plan.parts.task.inputs(jax.device_get(batch), plan.parts.data_spec)[0] for batch in batches]
    per_batch = []

    @jax.jit
    def statistics(model_state, image):
        return plan.parts.network.apply(state.ema_params, model_state, image, train=True)[1]

    for image in images:
        zeros, ones = (jax.tree.map(lambda x, v=v: np.full_like(x, v), state.model_state) for v in (0, 1))
        # From running statistics of 0 a step of momentum 0.9 leaves a tenth of the batch's; from 1, 0.9 more.
        low, high = statistics(zeros, image), statistics(ones, image)
        per_batch.append(jax.tree.map(lambda a: np.asarray(a) * 10, low))
        np.testing.assert_allclose(jax.tree.leaves(high)[0] - jax.tree.leaves(low)[0], 0.9, rtol=1e-4)
    wanted = jax.tree.map(lambda *each: np.mean(each, axis=0), *per_batch)
    for ours, theirs in zip(jax.tree.leaves(state.model_state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert_bit_equal(saved_state(run.workdir, ESTIMATED).model_state, state.model_state)


@pytest.mark.slow
def test_estimation_changes_the_evaluation_and_not_the_training(estimated):
    plain = jaxdl.train(ESTIMATED.replaced({"evaluation.norm_batches": None}), quiet=True, devices=FOUR)
    assert_bit_equal(jax.device_get(estimated.state.params), jax.device_get(plain.state.params))
    np.testing.assert_array_equal(estimated.history["train/loss"], plain.history["train/loss"])
    assert estimated.metrics["loss"] != plain.metrics["loss"]


@pytest.mark.slow
def test_a_signal_during_the_last_estimation_changes_nothing(tmp_path, estimated):
    """The state is saved without the estimates; when the run resumes they are made, and saved."""

    def stop(info):
        if info.step == ESTIMATED.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(jaxdl.Interrupted):
        jaxdl.train(ESTIMATED, tmp_path / "cut", quiet=True, devices=FOUR, on_step=[stop])
    assert measured(tmp_path / "cut")[-1]["step"] == ESTIMATED.steps
    assert "eval/loss" not in measured(tmp_path / "cut")[-1], "the signal came before the evaluation"
    for _ in range(2):
        jaxdl.train(ESTIMATED, tmp_path / "cut", quiet=True, devices=FOUR)
    assert_bit_equal(saved_state(tmp_path / "cut", ESTIMATED), jax.device_get(estimated.state))


@pytest.mark.slow
def test_micro_batches_are_estimated_one_by_one():
    parts = ESTIMATED.replaced({"step.microbatches": 2, "steps": 4})
    run = jaxdl.train(parts, quiet=True, devices=FOUR)
    plan, state = run.plan, jax.device_get(run.state)
    with TrainLoader(
        plan.splits.train, batch_size=16, seed=parts.seed, sharding=batch_sharding(plan.parts.layout.mesh),
        start=16, num_steps=3,
    ) as batches:  # fmt: skip
        images = [plan.parts.task.inputs(jax.device_get(batch), plan.parts.data_spec)[0] for batch in batches]
    how, net = Call(train=True, reset_batch_stats=True), plan.parts.network
    statistics = jax.jit(lambda kept, part: net.call(how, state.ema_params, kept, part)[1])
    every = [statistics(state.model_state, image[part::2]) for image in images for part in (0, 1)]
    wanted = jax.tree.map(lambda *each: np.mean(each, axis=0), *every)
    for ours, theirs in zip(jax.tree.leaves(state.model_state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_without_batch_norm_there_is_nothing_to_estimate():
    for model in (ViT(size="tiny", patch=4), ResNet(depth=8, width=8, norm="group")):
        with pytest.raises(ConfigError, match=r"norm_batches=3: model .* has no batch norm"):
            make_plan(ESTIMATED.replaced({"model": model}), FOUR)
