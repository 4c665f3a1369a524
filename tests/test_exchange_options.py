"""Options of the exchanges: warm-ups, what stays dense, momentum correction, buckets; and what they refuse."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import COMMON, NAMED_SHAPES, ORDER, SHAPES, STACKED, Place, Run, is_shape
from exchange_oracle import Oracle

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticImages
from jaxdl.exchange import Dense, PowerSGD, Quantized, Sign, TopK, backward_order, by_name, init_on_mesh
from jaxdl.exchange.buckets import make_buckets
from jaxdl.models import ResNet
from jaxdl.models.network import Network
from jaxdl.optim import SGD
from jaxdl.training.experiment import Experiment

PLACE = Place(2, 2)


@functools.cache
def run_of(config):
    return Run(config, PLACE)


def steps(config, number):
    """`(gradients, mean, state, metrics)` of each of so many steps, on the host."""
    run = run_of(config)
    state = run.init()
    for step in range(number):
        gradients = run.gradients(step)
        mean, state, metrics = run(gradients, state, step)
        yield gradients, by_name(jax.device_get(mean)), jax.device_get(state), jax.device_get(metrics)


def dense_means(number):
    return [mean for _, mean, _, _ in steps(Dense(), number)]


@pytest.mark.slow
def test_dense_first_then_the_density_falls_in_stages():
    config = TopK(density=0.01, method="block", dense_warmup_steps=2, density_warmup_steps=8, min_elements=2)
    run = Run(config, Place(2))
    num_elements = sum(math.prod(shape) for shape in NAMED_SHAPES.values()) - 1
    # A quarter, then four equal ratios down to the density.
    densities = [0.25 * (0.01 / 0.25) ** (stage / 4) for stage in range(5)]
    state = run.init()
    for step in range(12):
        _, state, metrics = run(run.gradients(step), state, step)
        k = math.ceil(densities[min((step - 2) // 2, 4)] * num_elements) if step >= 2 else num_elements
        np.testing.assert_allclose(float(metrics["density"]), (k + 1) / (num_elements + 1), rtol=1e-6)
        # A word an entry and one for the block of indices, against a ring all-reduce; and the scalar, dense.
        assert float(metrics["bytes_sent/replica"]) == (4 * (k + 1) if step >= 2 else 4 * k) + 4
    assert int(state["common"]["num_updates"]) == 12


@pytest.mark.parametrize(
    "config",
    [
        TopK(density=0.05, method="block", dense_warmup_steps=2, **COMMON),
        pytest.param(PowerSGD(rank=1, dense_warmup_steps=2, **COMMON), marks=pytest.mark.slow),
    ],
    ids=lambda config: config.kind,
)
def test_dense_at_first(config):
    expected = dense_means(3)
    for step, (_, mean, state, metrics) in enumerate(steps(config, 3)):
        same = [np.array_equal(mean[name], expected[step][name]) for name in mean]
        if step < 2:
            assert all(same)
            assert metrics["density"] == 1
            assert not any(np.any(x) for x in state["replica"]["residual"].values())
        else:
            assert sum(same) <= 3
            assert metrics["density"] < 1 or config.kind == "sign"
            assert all(np.any(x) for x in state["replica"]["residual"].values())


def test_small_and_named_gradients_stay_dense():
    config = TopK(density=0.05, method="block", min_elements=350, dense_names=("layers/*", "out/bias"))
    expected = dense_means(2)
    for step, (_, mean, state, _) in enumerate(steps(config, 2)):
        assert set(state["replica"]["residual"]) == {"embed/table", "out/kernel"}
        for name, x in mean.items():
            assert np.array_equal(x, expected[step][name]) == (name not in {"embed/table", "out/kernel"})


def test_min_elements_counts_all_shards():
    """A gradient is not small because a device has little of it."""
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), SHAPES, is_leaf=is_shape)
    place = Place(2, 2, 2)
    state = jax.eval_shape(
        lambda: init_on_mesh(TopK(min_elements=384).build(place.layout), shapes, place.specs, place.mesh)
    )
    assert set(state["replica"]["residual"]) == {"embed/table", "layers/kernel", "out/kernel"}


def test_momentum_correction_against_numpy():
    """Deep Gradient Compression: momentum adds up locally, and restarts at zero where it was sent."""
    config = TopK(density=0.1, method="exact", wire="plain", momentum_correction=0.5, **COMMON)
    oracle = Oracle(
        config,
        shapes=NAMED_SHAPES,
        specs=by_name(PLACE.specs),
        inner=PLACE.inner,
        order=ORDER,
        num_replicas=PLACE.replica,
        stacked=STACKED,
    )
    for step, (gradients, mean, state, metrics) in enumerate(steps(config, 4)):
        expected, expected_metrics = oracle.step(gradients, jax.random.key(step))
        for name, x in mean.items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=2e-6, err_msg=f"{name} at step {step}")
        for name, x in state["replica"]["residual"].items():
            np.testing.assert_allclose(x, oracle.residual[name], rtol=1e-5, atol=2e-6)
        for name, x in state["replica"]["momentum"].items():
            np.testing.assert_allclose(x, oracle.momentum[name], rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(metrics["bytes_sent/fsdp"], expected_metrics["bytes_sent/fsdp"])


def test_dense_gradients_have_momentum_too():
    """Its place is in the exchange for all parameters, for the optimizer must not have it a second time."""
    config = TopK(density=0.1, method="exact", wire="plain", momentum_correction=0.5, **COMMON)
    velocity = 0.0
    for (_, mean, _, _), dense in zip(steps(config, 4), dense_means(4), strict=True):
        velocity = 0.5 * velocity + dense["out/bias"]
        np.testing.assert_allclose(mean["out/bias"], velocity, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_momentum_in_a_dense_warm_up_is_that_of_sgd():
    config = TopK(density=0.1, method="block", momentum_correction=0.5, dense_warmup_steps=3, **COMMON)
    velocity = dict.fromkeys(NAMED_SHAPES, 0.0)
    for (_, mean, _, _), dense in zip(steps(config, 3), dense_means(3), strict=True):
        velocity = {name: 0.5 * velocity[name] + dense[name] for name in velocity}
        for name, x in mean.items():
            np.testing.assert_allclose(x, velocity[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        TopK(density=0.1, method="exact", wire="plain", error_feedback=False, **COMMON),
        pytest.param(PowerSGD(rank=1, error_feedback=False, **COMMON), marks=pytest.mark.slow),
        Quantized(**COMMON),
    ],
    ids=lambda config: config.kind,
)
def test_without_error_feedback_nothing_is_kept(config):
    gradients, mean, state, metrics = list(steps(config, 2))[-1]
    assert set(state) == ({"shard"} if config.kind == "powersgd" else set())
    assert metrics["residual_norm"] == 0
    if config.kind == "topk":
        # Of the second step nothing but its own gradients is sent: by both replicas, by one or by none.
        kernel, share = mean["out/kernel"], gradients["out/kernel"] / 2
        assert 0.02 < np.mean(kernel != 0) < 0.5
        sent = [kernel == 0, kernel == share[0] + share[1], kernel == share[0], kernel == share[1]]
        assert np.all(np.any(sent, axis=0))


def test_backward_order_of_two_layers():
    def loss(params, x):
        hidden = jnp.tanh(x @ params["a_first"]["kernel"] + params["a_first"]["bias"])
        return jnp.sum((hidden @ params["b_second"]["kernel"] + params["b_second"]["bias"]) ** 2)

    params = {
        "a_first": {"kernel": jax.ShapeDtypeStruct((3, 4), jnp.float32), "bias": jnp.zeros(4)},
        "b_second": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)},
        "unused": jnp.zeros(5),
    }
    order = backward_order(loss, params, jnp.zeros((6, 3)))
    assert set(order) == set(by_name(params))
    assert order[0] == "unused"
    assert set(order[1:3]) == {"b_second/kernel", "b_second/bias"}
    assert set(order[3:]) == {"a_first/kernel", "a_first/bias"}


def test_the_head_is_in_the_first_bucket():
    data = SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=8, num_test=8)
    spec = data.build().train.spec
    network = Network(ResNet(depth=8, width=8).build(**spec.sizes(), dtype=jnp.float32))

    def loss(params, images):
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(network.init, jax.random.key(0))[1])
        return jnp.sum(network.apply(params, blank, images, train=True)[0])

    order = backward_order(loss, network.param_shapes, jnp.zeros((2, 8, 8, 1)))
    shapes = {name: x.shape for name, x in by_name(network.param_shapes).items()}
    layout = PLACE.layout.__class__(order=order)
    for direction in ("backward", "forward"):
        config = Dense(bucket_mib=0.01, bucket_order=direction)
        names = config.ordered(list(shapes), layout)
        buckets = make_buckets(names, shapes, layout, max_elements=config.bucket_elements)
        assert len(buckets) > 3
        assert sorted(name for bucket in buckets for name in bucket.names) == sorted(shapes)
        assert all(bucket.num_elements <= config.bucket_elements or len(bucket.names) == 1 for bucket in buckets)
        ends = buckets[0].names, buckets[-1].names
        head, stem = ends if direction == "backward" else ends[::-1]
        assert any(name.startswith("head") for name in head), head
        assert any(name.startswith("stem") for name in stem), stem


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(density=0), ["density", "0"]),
        (lambda: TopK(density=1.5), ["density", "1.5"]),
        (lambda: TopK(density=0.5, density_warmup_steps=4), ["density_warmup_steps = 4", "0.25", "Set it to 0"]),
        (lambda: TopK(num_passes=20), ["num_passes = 20", "threshold", "Choose method mstopk"]),
        (lambda: TopK(method="best"), ["method", "best", "mstopk"]),
        (lambda: TopK(momentum_correction=1.0), ["momentum_correction", "1.0"]),
        (lambda: Quantized(bits=2, error_feedback=True), ["bits = 2", "error_feedback", "Use 4 or 8 bits"]),
        (lambda: Quantized(bits=3), ["bits", "3", "8, 4 or 2"]),
        (lambda: Quantized(block_size=4), ["block_size", "4"]),
        (lambda: Quantized(block_size=100), ["block_size", "100", "multiple of 8"]),
        (lambda: Sign(error_feedback=False), ["error_feedback = False", "Leave it on"]),
        (lambda: PowerSGD(rank=0), ["rank", "0"]),
        (lambda: Dense(bucket_mib=0), ["bucket_mib", "0"]),
        (
            lambda: Experiment(exchange=TopK(momentum_correction=0.9), optimizer=SGD(momentum=0.9)),
            ["exchange.momentum_correction = 0.9", "optimizer.momentum = 0.9", "optimizer.momentum=0"],
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ConfigError) as error:
        make()
    for word in words:
        assert word in str(error.value)
