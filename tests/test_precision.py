"""Precision: the loss scale against plain Python, a float16 run that overflows on purpose, dtypes of products."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TinyResNet

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticImages, SyntheticText, TrainLoader
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import BFloat16, Float16, Float32, TensorFloat32, cast_weights, float32_matmul
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.step import StepConfig, make_train_step
from jaxdl.training.tasks import LanguageModelling

IMAGES = Experiment(
    model=ResNet(depth=8, width=8),
    data=SyntheticImages(height=8, width=8, channels=3, num_classes=4, num_train=128, num_test=8),
    optimizer=SGD(learning_rate=0.1),
    schedule=Constant(),
    step=StepConfig(ema_decay=0.9),
    mesh=MeshConfig(replica=2, fsdp=2, tensor=2),
    batch_size=32,
    steps=20,
)
TEXT = Experiment(
    model=Transformer(num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64),
    data=SyntheticText(vocab_size=32, length=16, num_train=64, num_test=8),
    task=LanguageModelling(),
    mesh=MeshConfig(replica=2, fsdp=4),
    batch_size=16,
    steps=3,
)


def batches(plan, num_steps):
    return TrainLoader(
        plan.splits.train,
        batch_size=plan.experiment.batch_size,
        seed=0,
        sharding=batch_sharding(plan.parts.layout.mesh),
        start=0,
        num_steps=num_steps,
    )


def lowered(experiment, platform="cpu"):
    """The StableHLO of the train step for a platform."""
    plan = make_plan(experiment)
    rows = plan.splits.train.batch(np.arange(experiment.batch_size))
    traced = make_train_step(plan.parts).trace(plan.parts.state_spec.abstract(), rows)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def equal_bits(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), one, other))


# The loss scale


@pytest.mark.parametrize(
    "config",
    [
        Float16(initial_scale=8, growth_interval_steps=3, factor=2, min_scale=1, max_scale=64),
        Float16(initial_scale=9, growth_interval_steps=1, factor=4, min_scale=2, max_scale=100),
        Float16(initial_scale=5, growth_interval_steps=2, factor=1.5, min_scale=5, max_scale=5),
    ],
)
def test_loss_scale_against_plain_python(config):
    random = np.random.default_rng(0)
    # Long runs of good and of bad steps, so that both ends are reached.
    finite = np.concatenate([np.ones(30), np.zeros(12), np.ones(30), random.random(100) < 0.6]).astype(bool)
    step = jax.jit(config.next_loss_scale)
    state = config.init_loss_scale()
    scale, good, skipped, scales = config.initial_scale, 0, 0, set()
    for ok in finite:
        state = step(state, jnp.asarray(ok))
        if ok:
            good += 1
            if good == config.growth_interval_steps:
                scale, good = min(scale * config.factor, config.max_scale), 0
        else:
            scale, good, skipped = max(scale / config.factor, config.min_scale), 0, skipped + 1
        assert float(state["scale"]) == scale
        assert (int(state["good_steps"]), int(state["skipped_steps"])) == (good, skipped)
        assert {name: x.dtype.name for name, x in state.items()} == {
            "scale": "float32",
            "good_steps": "int32",
            "skipped_steps": "int32",
        }
        scales.add(scale)
    assert {config.min_scale, config.max_scale} <= scales, "both clamps were reached"


def test_a_static_scale_stays():
    config = Float16(initial_scale=1024, static=True)
    state = config.init_loss_scale()
    for ok in (True, False, False, True):
        state = jax.jit(config.next_loss_scale)(state, jnp.asarray(ok))
        assert float(state["scale"]) == 1024
    assert int(state["skipped_steps"]) == 2
    assert config.lowest_scale == 1024, "an overflow cannot be the scale's fault, which cannot fall"
    with pytest.raises(ConfigError, match="factor, max_scale: no effect on a static scale"):
        Float16(static=True, factor=4, max_scale=2.0**20)


def test_the_initial_scale_is_between_the_clamps():
    with pytest.raises(ConfigError, match=r"initial_scale 0\.5 must be between min_scale 1"):
        Float16(initial_scale=0.5)
    with pytest.raises(ConfigError, match=r"initial_scale 1.09951e\+12 must be .* max_scale 1.67772e\+07"):
        Float16(initial_scale=2.0**40)


@pytest.mark.parametrize("config", [Float32(), BFloat16(), TensorFloat32()])
def test_other_precisions_have_no_loss_scale(config):
    assert config.init_loss_scale() == {}
    assert config.next_loss_scale({}, jnp.asarray(False)) == {}


def test_tensorfloat32_is_for_gpus():
    TensorFloat32().check(SimpleNamespace(platform="gpu"))
    with pytest.raises(ConfigError, match=r"cpu devices have no TF32.*precision float32"):
        TensorFloat32().check(jax.devices()[0])


# A float16 run


@pytest.mark.slow
def test_float16_overflows_on_purpose_skips_and_recovers():
    precision = Float16(initial_scale=2.0**40, max_scale=2.0**40, factor=2.0**8)
    changes = {"precision": precision, "schedule.warmup_steps": 4, "model": TinyResNet(depth=8, width=32)}
    plan = make_plan(IMAGES.replaced(changes))
    step, state = make_train_step(plan.parts), make_initial_state(plan)
    num_steps, losses, skipped = 20, [], []
    before = jax.device_get(state)
    with batches(plan, num_steps) as loader:
        for number, batch in enumerate(loader, start=1):
            state, metrics = step(state, batch)
            after, metrics = jax.device_get((state, metrics))
            overflowed = int(after.loss_scale["skipped_steps"]) - int(before.loss_scale["skipped_steps"])
            skipped.append(overflowed)
            losses.append(metrics["sums/loss"] / metrics["sums/weight"])
            assert int(after.step) == number
            unchanged = [
                equal_bits(getattr(before, name), getattr(after, name))
                for name in ("params", "model_state", "opt_state", "exchange_state", "ema_params")
            ]
            if overflowed:
                assert all(unchanged)
                assert after.loss_scale["scale"] == before.loss_scale["scale"] / 2**8
                assert after.loss_scale["good_steps"] == 0
            else:
                assert unchanged == [False, False, False, True, False]  # The dense exchange has no state.
                assert after.loss_scale["scale"] == before.loss_scale["scale"]
            assert equal_bits(before.key, after.key)
            assert metrics["loss_scale"] == after.loss_scale["scale"]
            assert metrics["skipped_steps"] == sum(skipped)
            assert np.isfinite(metrics["grad_norm"]) == (not overflowed), "a skipped step has no norm made up"
            # And it leaves the schedule where it was.
            good_steps = number - 1 - sum(skipped[:-1])
            np.testing.assert_allclose(metrics["learning_rate"], 0.1 * min(1, (good_steps + 1) / 4), rtol=1e-6)
            before = after
    assert 1 <= sum(skipped) <= 4
    assert skipped == sorted(skipped, reverse=True), "after the overflows every step is a good one"
    assert all(np.isfinite(losses)), "the loss itself is not scaled"
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((before.params, before.ema_params)))


@pytest.mark.slow
def test_float16_follows_float32():
    """One step from equal parameters moves them about equally: the scale is taken out of the gradients again."""
    moved = {}
    for precision in (Float32(), Float16()):
        # Not Adam, whose first step has the size of the learning rate however large the gradient.
        changes = {"precision": precision, "mesh": MeshConfig(), "optimizer": IMAGES.optimizer}
        changes |= {"model.scan_layers": False}
        plan = make_plan(TEXT.replaced(changes), jax.devices()[:1])
        state = make_initial_state(plan)
        start = jax.device_get(state.params)
        with batches(plan, 1) as loader:
            end, _ = make_train_step(plan.parts)(state, next(iter(loader)))
        moved[precision.kind] = jax.tree.map(lambda a, b: np.asarray(b) - a, start, end.params)
    for ours, exact in zip(*(jax.tree.leaves(tree) for tree in (moved["float16"], moved["float32"])), strict=True):
        np.testing.assert_allclose(ours, exact, atol=0.03 * np.abs(exact).max() + 1e-7)


# What is computed in what


def test_cast_weights_leaves_vectors_alone():
    params = {
        "kernel": jnp.ones((4, 8)),
        "bias": jnp.ones(8),
        "stack": {"kernel": jnp.ones((3, 4, 8)), "scale": jnp.ones((3, 4))},
    }
    axes = {
        "kernel": ("embed", "mlp"),
        "bias": ("mlp",),
        "stack": {"kernel": ("layers", "embed", "mlp"), "scale": ("layers", "norm")},
    }
    cast = cast_weights(params, axes, jnp.bfloat16)
    assert jax.tree.map(lambda x: x.dtype.name, cast) == {
        "kernel": "bfloat16",
        "bias": "float32",
        "stack": {"kernel": "bfloat16", "scale": "float32"},
    }


def products(text):
    """(operand types, result type, precision) of each matrix product and convolution in StableHLO."""
    found = []
    for line in text.splitlines():
        if "stablehlo.dot_general" in line or "stablehlo.convolution" in line:
            ((operands, result),) = re.findall(r": \((.*)\) -> (.*)$", line)
            dtypes = tuple(part.split("x")[-1].rstrip(">") for part in operands.split(", "))
            found.append((dtypes, result.split("x")[-1].rstrip(">"), line))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [IMAGES, TEXT], ids=["resnet", "transformer"])
def test_float32_has_the_highest_precision_everywhere(experiment):
    found = products(lowered(experiment))
    assert len(found) > 10
    for operands, result, line in found:
        assert (*operands, result) == ("f32", "f32", "f32")
        assert len(re.findall(r"\bHIGHEST\b", line)) == 2, line


@pytest.mark.parametrize(
    "experiment",
    [IMAGES, TEXT, TEXT.replaced({"model.remat": "block", "model.scan_layers": False})],
    ids=["resnet", "transformer", "transformer with remat, unrolled"],
)
def test_bfloat16_multiplies_in_bfloat16_forward_and_backward(experiment):
    # On CPUs the gradients of weights are products of widened operands, which XLA would widen itself.
    found = products(lowered(experiment.replaced({"precision": "bfloat16"}), platform="cuda"))
    assert len(found) > 10
    for operands, _, line in found:
        # The backward products of attention scores, kept in float32, name the algorithm that rounds their operands.
        rounds = "lhs_precision_type = bf16, rhs_precision_type = bf16" in line and operands == ("f32", "bf16")
        # Moments behind a 1x1 convolution: products of matrices [channel, channel].
        moments = operands == ("f32", "f32") and len(re.findall(r"\bHIGHEST\b", line)) == 2
        assert operands == ("bf16", "bf16") or rounds or moments, line
    assert "f32" in {result for _, result, _ in found}, "logits come out in float32"


def gradients(product, x, kernel, weight):
    """Those of sum(weight x kernel) in float32 by x and kernel."""
    return jax.jit(jax.grad(lambda *operands: jnp.sum(weight * product(*operands)), argnums=(0, 1)))(x, kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(7, 16), (3, 5, 16)])
def test_float32_matmul(dtype, shape):
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], shape, dtype), jax.random.normal(keys[1], (16, 9), dtype)
    weight = jax.random.normal(keys[2], (*shape[:-1], 9))

    def plain(x, kernel):
        return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)

    assert float32_matmul(x, kernel).dtype == jnp.float32
    np.testing.assert_array_equal(float32_matmul(x, kernel), plain(x, kernel))
    ours, theirs = gradients(float32_matmul, x, kernel, weight), gradients(plain, x, kernel, weight)
    assert [g.dtype for g in ours] == [x.dtype, kernel.dtype]
    if dtype == "float32":
        assert equal_bits(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        one, other = (np.asarray(g, np.float32) for g in (one, other))
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_bfloat16_gathers_weights_in_bfloat16():
    text = lowered(TEXT.replaced({"precision": "bfloat16"}))
    # Weights are cast before they are made whole, so that half the bytes travel.
    whole = re.findall(r"sdy.sharding_constraint .*<@mesh, \[\{\}, \{\}\]> : tensor<(?:32x64|64x32)x(\w+)>", text)
    assert set(whole) == {"bf16"}
