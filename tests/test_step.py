"""One training step against oracles: gradients, micro-batches, clipping, moving average, batch norm, the exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import TinyResNet, tiny_experiment

from jaxdl.data import SyntheticImages, SyntheticText, TrainLoader
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.tasks import Classification, LanguageModelling

# Plain SGD with learning rate 1: the change of the parameters is minus the gradient that the optimizer saw.
TEXT = tiny_experiment(
    data=SyntheticText(vocab_size=16, length=8, num_train=64, num_test=16),
    model=Transformer(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=1.0, momentum=0.0),
    schedule=Constant(),
    step={},
    mesh=MeshConfig(replica=2, fsdp=2, tensor=2),
    batch_size=16,
)
IMAGES = tiny_experiment(
    data=SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=64, num_test=16),
    model=TinyResNet(depth=8, width=32, zero_init_residual=False),
    task=Classification(),
    optimizer=SGD(learning_rate=1.0, momentum=0.0),
    schedule=Constant(),
    step={},
    mesh=MeshConfig(replica=2, fsdp=4, tensor=1),
    batch_size=16,
)


def one_step(experiment, num_steps=1):
    """`(plan, host states before and after, host batches, metrics)` of the first steps."""
    plan = make_plan(experiment, jax.devices()[:8])
    step, state = compile_train_step(plan), make_initial_state(plan)
    states, batches, metrics = [jax.device_get(state)], [], []
    with TrainLoader(
        plan.splits.train,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        sharding=batch_sharding(plan.parts.layout.mesh),
        start=0,
        num_steps=num_steps,
    ) as loader:
        for batch in loader:
            batches.append(jax.device_get(batch))
            state, one = step(state, batch)
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(one))
    return plan, states, batches, metrics


def change(states):
    return jax.tree.map(
        lambda before, after: np.asarray(before) - np.asarray(after), states[0].params, states[1].params
    )


def oracle_gradient(plan, params, batch):
    """The gradient of the mean loss over the whole batch, on one device, by nothing but the network and the task."""
    parts = plan.parts

    def loss(params):
        outputs, _ = parts.network.apply(params, {}, *parts.task.inputs(batch, parts.data_spec), train=True)
        sums = parts.task.sums(outputs, batch, train=True)
        return sums["loss"] / sums["weight"]

    return jax.jit(jax.grad(loss))(params)


def assert_close(one, other, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max() + 2e-7)


@pytest.mark.slow
def test_the_optimizer_sees_the_gradient_of_the_mean_loss_and_a_moving_average_follows():
    """Of two micro-batches, with parameters that are kept whole; that of a batch at once is clipped below."""
    changes = {"step.microbatches": 2, "step.ema_decay": 0.15, "sharding.param_sharding": "replicated"}
    plan, states, batches, metrics = one_step(
        TEXT.replaced(changes | {"mesh": MeshConfig(replica=4, fsdp=2, tensor=1)}), num_steps=4
    )
    gradient = oracle_gradient(plan, states[0].params, batches[0])
    assert_close(change(states), gradient)
    np.testing.assert_allclose(metrics[0]["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert metrics[0]["sums/weight"] == 16 * 8
    assert metrics[0]["exchange/bytes_sent/fsdp"] > 0, "what is exchanged split comes back by an all-gather over fsdp"
    assert metrics[0]["exchange/density"] == 1

    average = states[0].params
    for step, state in enumerate(states[1:]):
        decay = min(0.15, (1 + step) / (10 + step))
        average = jax.tree.map(lambda old, new, d=decay: d * old + (1 - d) * new, average, state.params)
        assert_close(state.ema_params, average, rtol=1e-5)
        assert state.eval_params is state.ema_params
    assert [(1 + step) / (10 + step) > 0.15 for step in range(4)] == [False, True, True, True]


@pytest.mark.slow
def test_clipping_scales_the_global_gradient():
    plan, states, batches, metrics = one_step(TEXT.replaced({"step.clip_norm": 0.01}))
    gradient = oracle_gradient(plan, states[0].params, batches[0])
    norm = float(optax.tree.norm(gradient))
    assert norm > 0.02
    # What SGD subtracts is lost in the rounding of parameters that are a hundred times larger: hence the tolerance.
    clipped = jax.tree.map(lambda g: g * 0.01 / norm, gradient)
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (change(states), clipped)]
    np.testing.assert_allclose(*flat, atol=2e-7)
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm, rtol=1e-5)


@pytest.mark.slow
def test_batch_norm_over_one_replica_and_running_statistics_averaged_over_all():
    """Each replica normalizes with its own batch; the oracle runs the network on each half by itself."""
    plan, states, batches, _ = one_step(IMAGES)
    halves = [{name: x[part] for name, x in batches[0].items()} for part in (slice(0, 8), slice(8, 16))]
    parts, gradients, statistics = plan.parts, [], []
    before = jax.tree.map(jnp.asarray, states[0].model_state)
    for half in halves:

        def loss(params, half=half):
            image = parts.task.inputs(half, parts.data_spec)
            outputs, model_state = parts.network.apply(params, before, *image, train=True)
            return parts.task.sums(outputs, half, train=True)["loss"] / 8, model_state

        gradient, model_state = jax.jit(jax.grad(loss, has_aux=True))(jax.tree.map(jnp.asarray, states[0].params))
        gradients.append(gradient)
        statistics.append(model_state)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *gradients)
    assert_close(change(states), mean, rtol=1e-4)
    assert_close(states[1].model_state, jax.tree.map(lambda a, b: (a + b) / 2, *statistics), rtol=1e-4)
    differences = [
        np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(*map(jax.tree.leaves, statistics), strict=True)
    ]
    assert max(differences) > 1e-3, "the halves must differ, or it makes no difference over what is normalized"


def test_augmentation_changes_from_step_to_step_and_with_the_seed():
    task = Classification(augment="crop_flip")
    image = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)
    batch = {"image": jnp.asarray(image), "label": jnp.zeros(4, jnp.int32)}
    keys = [jax.random.fold_in(jax.random.key(seed), step) for seed in (0, 1) for step in (0, 1)]
    images = [np.asarray(task.augmented(batch, key)["image"]).tobytes() for key in keys]
    assert len(set(images)) == 4
