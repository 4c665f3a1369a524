"""Optimizers of optax and of the user: the updates of plain optax on every mesh, whole runs, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.core.modules import import_file
from jaxdl.core.options import parse
from jaxdl.data import SyntheticImages
from jaxdl.exchange import Dense, TopK
from jaxdl.models import Model, Network
from jaxdl.optim import SGD, Constant, Optax, Optimizer, Rates, average_params, make_optimizer, scale_by_learning_rate
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.precision import Float32
from jaxdl.parallel.sharding import Layout, ShardingConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.guard import GuardConfig
from jaxdl.training.state import make_state_spec

EIGHT = MeshConfig(replica=2, fsdp=2, tensor=2)
RATES = np.float32([0.01, 0.02, 0.005])


class Weights(nnx.Module):
    """A table, a matrix, two stacked layers and a bias; it is never applied."""

    def __init__(self, rngs):
        def param(shape, *axes):
            return nnx.Param(jax.random.normal(rngs.params(), shape), axes=axes)

        self.table = param((16, 32), "vocab", "embed")
        self.up = param((32, 64), "embed", "mlp")
        self.layers = param((2, 32, 32), "embed", "mlp")
        self.bias = param((64,), "norm")


def schedule(count, factor=1.0):
    return factor * jnp.asarray(RATES)[count]


def labels(params):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", params)


def mixed(learning_rate):
    """Adam for the matrices, and momentum at ten times the rate for the rest."""
    rest = optax.sgd(10 * learning_rate, momentum=0.9)
    return optax.multi_transform({"matrix": optax.adamw(learning_rate), "rest": rest}, labels)


@functools.cache
def network():
    return Network(Weights)


def gradients(step):
    def wave(x):
        return np.sin(np.arange(x.size, dtype=np.float32).reshape(x.shape) * (step + 1))

    return jax.tree.map(wave, network().param_shapes)


def ours(config):
    """(parameters, optimizer state, its specs) after the updates, sharded as in a run; and the initial parameters."""
    placed = make_mesh(EIGHT, jax.devices()[:8])
    optimizer = make_optimizer(config, network().axes, network().param_shapes)
    layout = Layout(ShardingConfig(), placed)
    spec = make_state_spec(
        layout, network(), optimizer, Dense().build(), Float32(), GuardConfig(), use_ema=False
    )  # fmt: skip
    state = jax.jit(lambda: spec.init(jax.random.key(0)), out_shardings=spec.shardings)()

    def update(params, opt_state, grads, rate):
        updates, opt_state = optimizer.update(grads, opt_state, params, rates=Rates(rate))
        return optax.apply_updates(params, updates), opt_state

    update = jax.jit(update, out_shardings=(spec.shardings.params, spec.shardings.opt_state))
    params, opt_state = state.params, state.opt_state
    for step, rate in enumerate(RATES):
        params, opt_state = update(params, opt_state, gradients(step), rate)
    return params, opt_state, spec.specs.opt_state, jax.tree.map(np.asarray, state.params)


def plain(transformation, params, unstacked=False):
    """The parameters after the updates of plain optax on one device; `unstacked`: each layer is a parameter."""
    apart = (lambda tree: tree | {"layers": list(tree["layers"])}) if unstacked else lambda tree: tree
    params = apart(params)
    state, update = transformation.init(params), jax.jit(transformation.update)
    for step in range(len(RATES)):
        updates, state = update(apart(gradients(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params | {"layers": np.stack(params["layers"])}


FACTORED = {"min_dim_size_to_factor": 8, "momentum": 0.9, "weight_decay_rate": 1e-3}
THEIRS = {
    "adafactor": (Optax("adafactor", **FACTORED), optax.adafactor(schedule, **FACTORED)),
    "muon": (
        Optax("contrib.muon", learning_rate=0.02, adam_learning_rate=0.002),
        optax.contrib.muon(schedule, adam_learning_rate=functools.partial(schedule, factor=0.1)),
    ),
    "multi_transform": (
        Optax(mixed),
        optax.multi_transform(
            {
                "matrix": optax.adamw(schedule),
                "rest": optax.sgd(functools.partial(schedule, factor=10), momentum=0.9),
            },
            labels,
        ),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_updates_are_those_of_plain_optax(name):
    """On a mesh, against one device."""
    config, theirs = THEIRS[name]
    params, _, specs, initial = ours(config)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6),
        params,
        plain(theirs, initial, unstacked=name == "muon"),
    )
    kept = set(jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, PartitionSpec)))
    assert kept >= {PartitionSpec("fsdp", "tensor"), PartitionSpec()}, "state like a matrix is sharded like it"


def test_schedule_free_averages_as_its_paper_says():
    """z moves by the gradient at y; x is the mean of z weighted by the squared largest rate; y is between both."""
    params, opt_state, _, initial = ours(Optax("contrib.schedule_free_sgd", b1=0.8))
    x = y = z = initial
    total = 0.0
    for step, rate in enumerate(RATES):
        weight = max(RATES[: step + 1]) ** 2
        total += weight
        share, slope = weight / total, gradients(step)
        z = jax.tree.map(lambda z, g, rate=rate: z - rate * g, z, slope)
        x = jax.tree.map(lambda x, z, share=share: (1 - share) * x + share * z, x, z)
        y = jax.tree.map(lambda x, z: 0.8 * x + 0.2 * z, x, z)
    for found, wanted in ((params, y), (average_params(opt_state, params), x)):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6), found, wanted)


# Whole runs.

OWN = """
import jax
import optax
import jaxdl
from jaxdl.optim import scale_by_learning_rate

class Sign(jaxdl.Optimizer):
    b1: float = 0.9

    def build(self, axes):
        return optax.chain(optax.scale_by_lion(self.b1), scale_by_learning_rate())

def free(learning_rate, b1):
    return optax.chain(optax.clip(1.0), optax.contrib.schedule_free_sgd(learning_rate, b1=b1))
"""


with forgotten():  # The kinds that other tests list are those of jaxdl.

    class Small(Model):
        """Two linear layers."""

        def build(self, num_classes):
            class Module(nnx.Module):
                def __init__(self, rngs):
                    normal = jax.nn.initializers.normal(0.1)
                    self.stem = nnx.Param(normal(rngs.params(), (16, 32)), axes=("embed", "mlp"))
                    self.scale = nnx.Param(jnp.ones(32), axes=("norm",))
                    self.head = nnx.Param(normal(rngs.params(), (32, num_classes)), axes=("mlp", "classes"))

                def __call__(self, image, train):
                    x = jax.nn.relu(image.reshape(len(image), -1) @ self.stem[...]) * self.scale[...]
                    return x @ self.head[...]

            return Module


def small(**changes):
    values = {
        "model": Small(),
        "data": SyntheticImages(height=4, width=4, channels=1, num_classes=4, num_train=64, num_test=16),
        "optimizer": SGD(),
        "schedule": Constant(),
        "batch_size": 16,
        "steps": 6,
        "mesh": MeshConfig(replica=1, fsdp=1),
        "evaluation": {"every_steps": 3},
        "checkpoint": {"every_steps": 3},
        "report": {"every_steps": 1, "tensorboard": False, "curves": False},
    }
    return Experiment(**(values | changes))


def train(experiment, workdir=None, **arguments):
    count = experiment.mesh.replica * experiment.mesh.fsdp * experiment.mesh.tensor
    return jaxdl.train(experiment, workdir, quiet=True, devices=jax.devices()[:count], **arguments)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A user's file outside the repository, imported."""
    file = tmp_path_factory.mktemp("user") / "mine.py"
    file.write_text(OWN)
    with forgotten():
        yield import_file(file, "the optimizer")


def test_an_optimizer_of_five_lines_in_a_file_outside_trains(own):
    assert len(OWN[OWN.index("class Sign") : OWN.index("def free")].strip().splitlines()) == 5
    run = train(small(optimizer=own.Sign(learning_rate=0.01)))
    losses = [loss for loss in run.history["train/loss"] if np.isfinite(loss)]  # Evaluations have rows of their own.
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_an_own_schedule_free_function_resumes_bit_equal_and_evaluates_its_average(own, tmp_path):
    experiment = small(
        optimizer=Optax(own.free, learning_rate=0.5, b1=0.9),
        schedule=Constant(warmup_steps=2),
        exchange=TopK(density=0.1, min_elements=64),
        mesh=EIGHT,
    )
    whole = train(experiment, tmp_path / "whole")
    train(experiment, tmp_path / "parts", max_steps=4)
    resumed = train(experiment, tmp_path / "parts")
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    state = jax.tree.map(np.asarray, whole.state)
    wanted = optax.contrib.schedule_free_eval_params(state.opt_state.inner[1], state.params)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), state.eval_params, wanted)
    assert np.abs(state.eval_params["head"] - state.params["head"]).max() > 1e-3
    # A run that begins with these parameters has them in the optimizer's copy too.
    begun = train(experiment.replaced({"seed": 1}), tmp_path / "begun", max_steps=1, init_from=tmp_path / "whole")
    assert np.abs(begun.state.params["stem"] - state.eval_params["stem"]).max() < 0.05, "other ones differ by 0.4"
    predictor = jaxdl.restore(tmp_path / "whole")
    pictures = np.arange(32, dtype=np.uint8).reshape(2, 4, 4, 1)
    probabilities = predictor.predict(pictures)
    spec = predictor.parts.data_spec
    (image,) = predictor.parts.task.inputs({"image": pictures}, spec)
    hidden = np.maximum(np.asarray(image).reshape(2, -1) @ wanted["stem"], 0) * wanted["scale"]
    np.testing.assert_allclose(probabilities, jax.nn.softmax(hidden @ wanted["head"]), rtol=1e-4)


def test_what_an_optimizer_that_averages_refuses(own):
    free = {"transformation": own.free, "b1": 0.9}
    for changes, message in (
        ({"step": {"ema_decay": 0.9}, "optimizer": Optax(**free)}, r"step.ema_decay=0.9: free averages the parameters"),
        (
            {"optimizer": Optax(**free, rate_factors={"head": 2.0})},
            r"optimizer.rate_factors: free averages the parameters",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            train(small(**changes))


# Mistakes.


def raising(learning_rate):
    raise RuntimeError(f"no rate like {learning_rate}")


def number(learning_rate):
    return learning_rate


def fixed(learning_rate):
    del learning_rate
    return optax.adam(1e-3)


def narrowing(learning_rate):
    return optax.stateless(lambda updates, params: {"up": updates["up"]})


def growing(learning_rate):
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda updates, state, params=None: (updates, jnp.zeros(2) + learning_rate)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (raising, r"raising: init\(\) \(.*test_own_optim.py:\d+\): RuntimeError: no rate like 0.001"),
        (number, "number returned float, not an optax transformation"),
        (fixed, "fixed: its updates do not depend on the learning rate"),
        (narrowing, "narrowing: the updates differ from the parameters: bias is missing"),
        (growing, r"growing: update\(\) returns another state than init\(\): inner is float32 \[2\], not float32 \[\]"),
        ("rprop", "optax.rprop: its updates do not depend on the learning rate"),
        ("contrib.momo", "'value'. An update gets the gradients, its state and the parameters, no loss"),
        ("noisy_sgd", "a random key .*, which no checkpoint can hold"),
    ],
)
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_transformations_that_cannot_be_used(make, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(Optax(make), network().axes, network().param_shapes)


with forgotten():

    class Broken(Optimizer):
        def build(self, axes):
            return axes["nothing"]

    class Returned(Optimizer):
        def build(self, axes):
            return 3

    class Uncounted(Optimizer):
        def build(self, axes):
            return optax.adam(1e-3)

    class Twice(Optimizer):
        def build(self, axes):
            return optax.chain(scale_by_learning_rate(), scale_by_learning_rate())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Broken, r"build\(\) \(.*test_own_optim.py:\d+\): KeyError: 'nothing'"),
        (Returned, r"build\(\) returned int, not an optax transformation"),
        (Uncounted, r"has no jaxdl.optim.scale_by_learning_rate\(\), and needs one"),
        (Twice, r"has 2 jaxdl.optim.scale_by_learning_rate\(\), and needs one"),
    ],
)
def test_own_classes_that_cannot_be_used(kind, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(kind(), network().axes, network().param_shapes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adem",), "optax has no optimizer adem. Did you mean adam"),
        (("muon",), "Did you mean contrib.muon"),
        (("multi_transform",), "has no argument learning_rate, so the schedule could not set it. Write a function"),
        (("adam", {"bb1": 0.9}), "takes no argument bb1. Did you mean b1"),
        (("adamw", {"mask": optax.adam(1.0)}), "mask is an optax transformation, which config.json cannot hold"),
        (("adam", {"b1": np.zeros(2)}), "b1 is an object of type ndarray"),
        ((lambda learning_rate: optax.sgd(learning_rate),), "has no name at the top level of a file"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    name, *more = arguments
    with pytest.raises(ConfigError, match=message):
        Optax(name, **dict(*more))


def test_momentum_is_not_applied_twice():
    with pytest.raises(ConfigError, match="momentum would be applied twice"):
        small(optimizer=Optax("sgd", momentum=0.9), exchange=TopK(momentum_correction=0.9))
    small(optimizer=Optax("sgd"), exchange=TopK(momentum_correction=0.9))


def test_optax_comes_back_from_json_and_is_an_option():
    config = Optax(optax.adamw, learning_rate=0.5, mask="matrices", mu_dtype="bfloat16")
    assert config == Optax("adamw", learning_rate=0.5, arguments={"mask": "matrices", "mu_dtype": "bfloat16"})
    for one in (config, Optax(mixed), Optax("contrib.muon", ns_coeffs=(3.0, -4.0, 2.0))):
        assert Optax.from_json(one.to_json()) == one
    args = ["--optimizer", "optax", "--optimizer.transformation", "lion", "--optimizer.arguments", "b1=0.5", "b2=1e-1"]
    assert parse(Experiment(), args).optimizer == Optax("lion", b1=0.5, b2=0.1)
    base = Experiment(optimizer=Optax("lion", b1=0.5))
    assert base.replaced({"optimizer.arguments.b1": 0.25}).optimizer == Optax("lion", b1=0.25)
    assert base.optimizer == Optax("lion", b1=0.5), "the original is as it was"


def test_a_mask_of_matrices_is_that_of_adamw():
    config = Optax("adamw", learning_rate=0.02, weight_decay=0.1, mask="matrices")
    decayed = [config, jaxdl.optim.AdamW(learning_rate=0.02, weight_decay=0.1)]
    found = [ours(one)[0] for one in decayed]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), *found)
