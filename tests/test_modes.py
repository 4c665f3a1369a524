"""Networks of users are evaluated in evaluation mode, however they are told; where that cannot be, they are refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from runs import tiny_experiment

from jaxdl import FromFunctions, FromModule
from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import depends_on, sources
from jaxdl.models.mode_check import check_evaluation, idle_dropout
from jaxdl.training.run.plan.validate import check_network

IMAGES = jax.ShapeDtypeStruct((4, 3, 2, 1), jnp.float32)
SIZES = {"num_classes": 4, "channels": 1, "dtype": jnp.float32}
ROWS = np.random.default_rng(0).normal(size=IMAGES.shape).astype(np.float32)


class Layers(nnx.Module):
    """Batch norm, dropout and a product, all trained if `mode` is."""

    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(6, 4, use_bias=False, rngs=rngs)

    def layers(self, image, train):
        x = self.norm(image.reshape(len(image), -1), use_running_average=not train)
        return self.head(self.dropout(x, deterministic=not train))


class IsTrain(Layers):
    def __call__(self, image, is_train=True):
        return self.layers(image, is_train)


class Inference(Layers):
    def __call__(self, image, *, inference: bool = False):
        return self.layers(image, not inference)


class Field(Layers):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.training = True

    def __call__(self, image):
        return self.layers(image, self.training)


class Noisy(Layers):
    """Its argument has a name that says nothing."""

    def __call__(self, image, noisy=True):
        return self.layers(image, noisy)


class Pixels(nnx.Module):
    """A sampled model: it draws random numbers in evaluation too."""

    def __init__(self, rngs):
        self.head, self.rngs = nnx.Linear(64, 4, rngs=rngs), rngs

    def __call__(self, image, train):
        logits = self.head(image.reshape(len(image), -1))
        return logits + jax.random.normal(self.rngs.noise(), logits.shape)


def linen_layers(image, train):
    x = linen.BatchNorm(use_running_average=not train)(image.reshape(len(image), -1))
    return linen.Dense(4, use_bias=False)(linen.Dropout(0.5, deterministic=not train)(x))


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, image, enable_dropout=True):
        return linen_layers(image, enable_dropout)


class LinenField(linen.Module):
    deterministic: bool = False

    @linen.compact
    def __call__(self, image):
        return linen_layers(image, not self.deterministic)


class Flat(linen.Module):
    @linen.compact
    def __call__(self, image):
        return image.reshape(len(image), -1)


def stacked_layers():
    """A linen module whose layers have the mode as a field, each."""
    norm, dropout = linen.BatchNorm(use_running_average=False), linen.Dropout(0.5, deterministic=False)
    return linen.Sequential([Flat(), norm, dropout, linen.Dense(4, use_bias=False)])


class LinenNoisy(linen.Module):
    @linen.compact
    def __call__(self, image, clean=False):
        return linen_layers(image, not clean)


def init(key):
    return {"kernel": jax.random.normal(key, (6, 4))}, {"mean": jnp.zeros(6)}


def run(params, state, image, key, testing=False):
    x = image.reshape(len(image), -1)
    after = state if testing else {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}
    x = jnp.where(testing, x, x * jax.random.bernoulli(key, 0.5, x.shape))
    return (x - state["mean"]) @ params["kernel"], after


def always_random(params, image, key):
    return image.reshape(len(image), -1) @ params["kernel"] + jax.random.normal(key, (len(image), 4))


def init_kernel(key):
    return init(key)[0]


def network_of(model):
    return model.network([IMAGES], **SIZES)


def random_in(network, train):
    """Whether the outputs depend on the key."""
    trace = jax.make_jaxpr(lambda key, *given: network.apply(*given, train=train, key=key)[0])
    return depends_on(trace(jax.random.key(0), network.param_shapes, network.state_shapes, IMAGES), 0)


@pytest.mark.parametrize(
    "model",
    [
        *map(FromModule, (IsTrain, Inference, Field, LinenDropout, LinenField, stacked_layers)),
        FromFunctions(init, run),
    ],
    ids=lambda model: model.users_name,
)
def test_a_mode_is_found_by_its_name(model):
    """Arguments and fields, of either meaning: in evaluation the outputs are those of NumPy, in training random."""
    network = network_of(model)
    params, state = network.init(jax.random.key(1))
    state = jax.tree.map(lambda x: x + 0.5, state)
    outputs, after = network.apply(params, state, ROWS, train=False, key=jax.random.key(2))
    kernel = next(x for x in jax.tree.leaves(params) if x.ndim == 2)
    x = ROWS.reshape(4, 6) - 0.5
    if len(jax.tree.leaves(state)) == 2:  # Mean and variance of batch norm.
        x /= np.sqrt(1.5 + 1e-5)
    np.testing.assert_allclose(outputs, x @ kernel, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert check_evaluation(network, [IMAGES]).shape == (4, 4)
    assert random_in(network, train=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FromModule(Noisy), "its outputs depend on a random key and what it keeps changes, as in training"),
        (FromModule(Noisy), "With noisy=False of Noisy.__call__ it is not so.* rename the argument train,"),
        (FromModule(Noisy), "add random and state to evaluation.allows"),
        (FromModule(LinenNoisy), "With clean=True of LinenNoisy.__call__ .* rename the argument deterministic,"),
        (FromFunctions(init_kernel, always_random), "its outputs depend on a random key, .* give always_random an "),
    ],
)
def test_a_network_that_is_evaluated_as_it_is_trained_is_refused(model, message):
    """Before anything is compiled, as `check_network` does; unless that is allowed."""
    network = network_of(model)
    with pytest.raises(ConfigError) as error:
        check_evaluation(network, [IMAGES])
    assert re.search(message, str(error.value)), error.value
    assert check_evaluation(network, [IMAGES], ("random", "state")).shape == (4, 4)


class Quiet(Layers):
    """Nobody gives its argument, so it is never trained with dropout."""

    def __call__(self, image, noisy=False):
        return self.layers(image, noisy)


class Undropped(nnx.Module):
    """A rate of 0, and a rate that is handed to nobody."""

    def __init__(self, rngs):
        self.dropout, self.head = nnx.Dropout(0.0, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, image, train):
        return self.head(self.dropout(image.reshape(len(image), -1), deterministic=not train))


class LinenQuiet(linen.Module):
    @linen.compact
    def __call__(self, image, clean=True):
        return linen_layers(image, not clean)


def quiet(params, image, key, noisy=False):
    x = image.reshape(len(image), -1)
    x = jnp.where(noisy, x * jax.random.bernoulli(key, 0.5, x.shape), x)
    return x @ params["kernel"]


def switched(params, image, key, use_dropout):
    return quiet(params, image, key, use_dropout)


@pytest.mark.parametrize(
    ("given", "trained"), [({}, True), ({"use_dropout": True}, True), ({"use_dropout": False}, False)]
)
def test_a_switch_of_functions_is_on_in_training_unless_the_user_gave_it(given, trained):
    """Without a default it need not be given; in evaluation it is off in any case."""
    network = network_of(FromFunctions(init_kernel, switched, **given))
    assert (random_in(network, train=True), random_in(network, train=False)) == (trained, False)


@pytest.mark.parametrize(
    ("model", "names", "advice"),
    [
        (FromModule(Quiet), ["dropout"], "With noisy=True of Quiet.__call__ .* rename the argument train,"),
        (
            FromModule(LinenQuiet),
            ["Dropout_0"],
            "With clean=False of LinenQuiet.__call__ .* rename the argument deterministic,",
        ),
        (FromFunctions(init_kernel, quiet), [], "With noisy=True of quiet "),
        (FromModule(Undropped), [], ""),
        (FromModule(IsTrain), [], ""),
        (FromModule(LinenDropout), [], ""),
        (FromFunctions(init_kernel, always_random), [], ""),
    ],
    ids=lambda value: getattr(value, "users_name", ""),
)
def test_dropout_that_is_off_in_training_is_named(model, names, advice):
    """Also functions that take a key and do not use it; not a rate of 0, nor a network that is random in training."""
    found, text = idle_dropout(network_of(model), [IMAGES])
    assert found == names
    assert bool(advice) == bool(text)
    assert re.search(advice, text)


def test_the_plan_of_a_run_refuses_it():
    experiment = tiny_experiment(model=FromModule(Pixels), task={"kind": "classification"})
    spec = experiment.data.build().train.spec
    network = experiment.model.network([jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)], **SIZES)
    with pytest.raises(ConfigError, match="its outputs depend on a random key"):
        check_network(experiment, network, spec, 1)
    check_network(experiment.replaced({"evaluation.allows": ("random",)}), network, spec, 1)


def test_what_a_result_depends_on():
    """Loops, branches and constants are looked into: a key that is carried along plays no part."""

    def of(function):
        closed = jax.make_jaxpr(function)(jax.random.key(0), jnp.ones(3))
        return sources(closed, [1, 2])

    def noise(key):
        return jax.random.normal(key, (3,))

    assert of(lambda key, x: jnp.where(True, x, noise(key))) == [2]
    assert of(lambda key, x: jnp.where(False, x, noise(key))) == [1]
    assert of(lambda key, x: jax.lax.cond(True, lambda: x, lambda: noise(key))) == [2]
    assert of(lambda key, x: jax.lax.cond(x[0] > 0, lambda: x, lambda: noise(key))) == [3]
    assert of(lambda key, x: jax.lax.scan(lambda c, k: (2 * c, c), x, jax.random.split(key))) == [2, 2]
    assert of(lambda key, x: jax.lax.scan(lambda c, k: (c + noise(k), c), x, jax.random.split(key))) == [3, 3]
    turned = lambda key, x: jax.lax.fori_loop(0, 3, lambda _, c: (c[1], c[2], c[2]), (x, x, noise(key)))  # noqa: E731
    assert of(turned) == [3, 3, 1]
    assert of(jax.checkpoint(lambda key, x: (x, x * jax.random.uniform(key)))) == [2, 3]
    assert of(lambda key, x: jax.lax.while_loop(lambda c: c[0] < noise(key)[0], lambda c: 2 * c, x)) == [3]
