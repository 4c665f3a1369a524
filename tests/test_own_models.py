"""Models of a user's own: flax modules and functions, dropout, parameters without logical axes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from runs import assert_bit_equal, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.core.options import choices_help
from jaxdl.exchange import TopK
from jaxdl.models import FromFunctions, FromModule, Network, ResNet
from jaxdl.models.network import Call
from jaxdl.optim import SGD, Constant, decay_mask
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.precision import BFloat16, cast_weights
from jaxdl.parallel.sharding import Layout, ShardingConfig
from jaxdl.report import explain
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.step import StepConfig, make_train_step
from jaxdl.training.tasks import Classification

ALL = MeshConfig(replica=2, fsdp=2, tensor=2, cpu_devices=8)
IMAGES = jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.float32)
SIZES = {"num_classes": 4, "channels": 1, "dtype": jnp.float32}


class Net(nnx.Module):
    """Stock layers, none of which has logical axes."""

    def __init__(self, hidden, num_classes, channels, rngs, *, dtype=None, rate=0.5, activation=nnx.relu):
        self.conv = nnx.Conv(channels, 4, (3, 3), dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, dtype=dtype, rngs=rngs)
        self.layers = nnx.Sequential(nnx.Linear(256, hidden, dtype=dtype, rngs=rngs), nnx.LayerNorm(hidden, rngs=rngs))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(hidden, num_classes, rngs=rngs)
        self.activation = activation

    def __call__(self, image):
        x = self.activation(self.norm(self.conv(image))).reshape(len(image), -1)
        return self.head(self.dropout(self.activation(self.layers(x))))


class LinenNet(linen.Module):
    """The same of linen, with a hidden layer that names its axes."""

    num_classes: int
    hidden: int = 8

    @linen.compact
    def __call__(self, image, train):
        x = linen.BatchNorm(use_running_average=not train)(image).reshape(len(image), -1)
        kernel = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        x = linen.relu(linen.Dense(self.hidden, kernel_init=kernel)(x))
        return linen.Dense(self.num_classes)(linen.Dropout(0.5, deterministic=not train)(x))


def two_layers(key, image, num_classes, hidden):
    """Parameters as a list of tuples."""
    sizes = (image[0].size, hidden, num_classes)
    keys = jax.random.split(key)
    return [
        (jax.random.normal(one, pair) / 8, jnp.zeros(pair[1:]))
        for one, pair in zip(keys, [sizes[:2], sizes[1:]], strict=True)
    ]


def run_layers(params, image, train, key, rate=0.5):
    (first, first_bias), (second, second_bias) = params
    halves = (image.reshape(len(image), 2, -1).swapaxes(0, 1), first.reshape(2, -1, first.shape[1]))
    product, _ = jax.lax.scan(lambda sums, half: (sums + half[0] @ half[1], None), jnp.zeros((len(image), 8)), halves)
    x = jax.nn.relu(product + first_bias)
    if train:
        x = jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)
    return x @ second + second_bias


class Probe(nnx.Module):
    """Its logits are one sum over parameters with dropout: the update shows which of them each mask kept."""

    def __init__(self, num_classes, rngs):
        self.weights, self.num_classes = nnx.Param(jnp.ones(64)), num_classes
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, image):
        return self.dropout(self.weights[...]).sum() * jax.nn.one_hot(jnp.zeros(len(image), int), self.num_classes)


def experiment(model, **changes):
    values = {
        "model": model,
        "task": Classification(),
        "optimizer": SGD(learning_rate=0.1, momentum=0),
        "schedule": Constant(),
    }
    return tiny_experiment(**(values | {"step": StepConfig(), "steps": 2} | changes))


def seen_params(made, **options):
    """The parameters after each step, of a run."""
    seen = []
    jaxdl.train(made, quiet=True, on_step=[lambda info: seen.append(jax.device_get(info.state.params))], **options)
    return seen


# Whole runs


@pytest.mark.parametrize(
    "model",
    [
        FromModule(Net, hidden=8),
        pytest.param(FromFunctions(two_layers, run_layers, hidden=8), marks=pytest.mark.slow),
    ],
)
def test_an_own_model_trains_on_all_axes_with_a_compressed_exchange_and_is_restored(tmp_path, model):
    made = experiment(model, steps=3, mesh=ALL, exchange=TopK(density=0.1, min_elements=64))
    assert jaxdl.Experiment.from_json(made.to_json()) == made
    run = jaxdl.train(made, tmp_path, quiet=True)
    losses = [one for one in run.history["train/loss"] if np.isfinite(one)]
    assert len(losses) == 3
    restored = jaxdl.restore(tmp_path)
    assert restored.experiment.model == model
    images = np.concatenate([run.plan.splits.test.batch(np.arange(40))["image"]])
    labels = run.plan.splits.test.batch(np.arange(40))["label"]
    accuracy = np.mean(restored.predict(images).argmax(axis=1) == labels)
    assert accuracy == pytest.approx(run.metrics["accuracy"])


@pytest.mark.slow
def test_dropout_and_stock_layers_give_the_same_losses_on_every_mesh():
    """Which also holds the key of a replica: it does not depend on how many devices a replica has."""
    losses = [
        jaxdl.train(
            experiment(FromModule(Net, hidden=8), mesh=MeshConfig(replica=2, fsdp=fsdp, tensor=1, cpu_devices=8)),
            quiet=True,
            devices=jax.devices()[: 2 * fsdp],
        ).history["train/loss"][:2]
        for fsdp in (1, 4)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


# Dropout

PROBE_MESH = MeshConfig(replica=2, fsdp=1, tensor=1, cpu_devices=8)


def kept(before, after):
    """The masks that an update of a Probe shows, as one number for each parameter."""
    change = np.round(before["weights"] - after["weights"], 4)
    assert np.abs(change).max() > 0
    return np.unique(change, return_inverse=True)[1]


@pytest.mark.slow
def test_masks_differ_between_replicas_steps_and_microbatches(tmp_path):
    made = experiment(FromModule(Probe), steps=4, mesh=PROBE_MESH, evaluation=EvaluationConfig(every_steps=4))
    seen = seen_params(made, devices=jax.devices()[:2])
    masks = [kept(one, other) for one, other in itertools.pairwise(seen)]
    # None, one or both of the replicas kept a parameter: with equal masks there would be two values.
    assert all(mask.max() >= 2 for mask in masks)
    assert not np.array_equal(masks[0], masks[1])
    # Stopped after two steps and resumed, in a workdir: the same bits.
    jaxdl.train(made, tmp_path, quiet=True, max_steps=2, devices=jax.devices()[:2])
    resumed = seen_params(made, workdir=tmp_path, devices=jax.devices()[:2])
    assert_bit_equal(resumed[-1], seen[-1])
    parts = experiment(FromModule(Probe), mesh=MeshConfig(replica=1, fsdp=1, tensor=1), step=StepConfig(microbatches=2))
    seen = seen_params(parts, devices=jax.devices()[:1])
    assert kept(*seen).max() >= 2


@pytest.mark.parametrize("model", [FromModule(Net, hidden=8), FromModule(LinenNet)])
def test_evaluation_draws_nothing_and_a_call_with_the_same_key_the_same(model):
    network = model.network([IMAGES], **SIZES)
    assert network.is_random
    params, state = network.init(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), IMAGES.shape)
    key, other = jax.random.key(2), jax.random.key(3)
    apply = functools.partial(network.apply, params, state, image)
    evaluated = [apply(train=False, key=one)[0] for one in (key, other, None)]
    assert_bit_equal(evaluated[0], evaluated[1])
    assert_bit_equal(evaluated[0], evaluated[2])
    trained = [apply(train=True, key=one) for one in (key, key, other)]
    assert_bit_equal(trained[0], trained[1])
    assert not np.array_equal(trained[0][0], trained[2][0])
    assert not np.array_equal(jax.tree.leaves(state)[0], jax.tree.leaves(trained[0][1])[0]), "batch statistics move"


def test_a_network_without_random_state_has_no_keys():
    network = FromModule(Net, hidden=8).network([IMAGES], **SIZES)
    plain = Network(lambda rngs: nnx.Linear(3, 4, rngs=rngs))
    assert (network.is_random, plain.is_random) == (True, False)


# The same numbers as Flax by itself


def test_a_network_computes_what_its_module_does():
    network = FromModule(Net, hidden=8).network([IMAGES], **SIZES)
    image = jax.random.normal(jax.random.key(1), IMAGES.shape)
    params, state = network.init(jax.random.key(0))
    module = Net(8, 4, 1, nnx.Rngs(jax.random.key(0)))
    module.eval()
    np.testing.assert_allclose(network.apply(params, state, image, train=False)[0], module(image), rtol=1e-6)
    assert params["layers"]["layers"]["0"]["kernel"].shape == (256, 8)

    network = FromModule(LinenNet).network([IMAGES], **SIZES)
    params, state = network.init(jax.random.key(0))
    assert network.axes["Dense_0"] == {"kernel": ("embed", "mlp"), "bias": ("",)}
    expected = LinenNet(4).apply({"params": params, **state}, image, train=False)
    np.testing.assert_array_equal(network.apply(params, state, image, train=False)[0], expected)


# Logical axes, and parameters without them


def test_names_of_with_partitioning_are_logical_axes():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
    network = Network(lambda rngs: nnx.Linear(3, 4, kernel_init=init, rngs=rngs))
    assert network.axes == {"kernel": ("embed", ""), "bias": ("",)}


def test_the_largest_dimension_that_divides_is_split_over_fsdp():
    layout = Layout(ShardingConfig(), make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2)))
    table = {
        (64, 128): (None, "fsdp"),
        (128, 33): ("fsdp",),
        (33, 65): (),
        (512,): (),
        (3, 3, 5, 64): (*[None] * 3, "fsdp"),
    }
    assert {shape: tuple(layout.param_spec(("",) * len(shape), shape)) for shape in table} == table


def test_explain_says_so_and_what_tensor_does():
    plan = make_plan(experiment(FromModule(Net, hidden=8), mesh=ALL))
    spec, network = plan.parts.state_spec, plan.parts.network
    rows = {row.name: row for row in explain(spec.shapes.params, spec.params, plan.parts.layout.mesh, network.axes)}
    assert (rows["layers/layers/0/kernel"].spec, rows["layers/layers/0/kernel"].by_size) == ("fsdp", True)
    assert (rows["head/bias"].spec, rows["head/bias"].by_size) == ("whole", False)
    assert any("--mesh.tensor 2: no parameter of model Net has logical axes" in one for one in plan.reasons)


def test_weights_are_known_by_their_rank():
    axes = {"kernel": ("", ""), "bias": ("",), "scalar": ()}
    assert decay_mask(axes) == {"kernel": True, "bias": False, "scalar": False}
    params = {name: jnp.ones((2,) * len(names)) for name, names in axes.items()}
    dtypes = {name: x.dtype.name for name, x in cast_weights(params, axes, jnp.bfloat16).items()}
    assert dtypes == {"kernel": "bfloat16", "bias": "float32", "scalar": "float32"}


# Arguments


def test_arguments_are_fields_and_options(tmp_path):
    model = FromModule(Net, hidden=8, rate=0, activation=nnx.gelu)
    made = experiment(model)
    again = jaxdl.Experiment.from_json(made.to_json())
    assert again == made
    assert again.model.arguments == {"hidden": 8, "rate": 0, "activation": nnx.gelu}
    assert made.replaced({"model.hidden": 16}).model == FromModule(Net, hidden=16, rate=0, activation=nnx.gelu)
    config = tmp_path / "config.json"
    config.write_text(made.to_json())
    changed = jaxdl.load(config, ["--model.hidden", "32", "--model.rate", "0.25"]).model
    assert "--model.hidden 8" in choices_help(made)
    assert changed.arguments == {"hidden": 32, "rate": 0.25, "activation": nnx.gelu}
    for arguments, said in (
        ({"hiden": 8}, r"Net takes no argument hiden\. Did you mean hidden"),
        ({"hidden": np.zeros(3)}, r"cannot be written to config.json"),
        ({"hidden": 8, "rngs": 0}, "rngs: jaxdl makes the random keys"),
        ({"kind": 8}, "jaxdl uses this name itself"),
    ):
        with pytest.raises(ConfigError, match=said):
            FromModule(Net, **arguments)
    with pytest.raises(ConfigError, match=r"FromModule needs module. Set it in Python: FromModule\(Net, hidden=32\)"):
        tiny_experiment().replaced({"model": "from_module"})
    with pytest.raises(ConfigError, match=r"dict is not a flax\.nnx or flax\.linen module"):
        FromModule(dict)


def test_a_precision_that_would_have_no_effect_is_refused():
    with pytest.raises(ConfigError, match=r"precision bfloat16: model LinenNet would compute in float32 all the same"):
        make_plan(experiment(FromModule(LinenNet), precision=BFloat16(), mesh=ALL))
    plan = make_plan(experiment(FromModule(Net, hidden=8), precision=BFloat16(), mesh=ALL))
    assert plan.parts.network.is_random


with forgotten():

    class OneBlock(ResNet):
        """A user's subclass of a model of jaxdl."""

        @property
        def blocks(self):
            return (1,)


def test_a_subclass_of_a_stock_model_is_traced_in_16_bits():
    """In its steps types do not say what varies between replicas, and the gradients of convolutions manage without."""
    mesh = MeshConfig(replica=2, fsdp=2, tensor=1, cpu_devices=8)
    plan = make_plan(experiment(OneBlock(depth=8), precision=BFloat16(), mesh=mesh), jax.devices()[:4])
    batch = plan.splits.train.batch_shapes(16, evaluating=False)
    state, _ = jax.eval_shape(make_train_step(plan.parts), plan.parts.state_spec.abstract(), batch)
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, state.params))


class Remembers(nnx.Module):
    """It keeps the mean of its inputs, beside batch statistics."""

    def __init__(self, num_classes, rngs):
        self.norms = nnx.List([nnx.BatchNorm(1, momentum=0.9, rngs=rngs)])
        self.seen = nnx.Variable(jnp.zeros(()))
        self.head = nnx.Linear(64, num_classes, rngs=rngs)

    def __call__(self, image):
        self.seen[...] = 0.5 * self.seen[...] + 0.5 * image.mean()
        return self.head(self.norms[0](image).reshape(len(image), -1))


def test_only_the_statistics_of_batch_norm_are_estimated_anew():
    network = FromModule(Remembers).network([IMAGES], **SIZES)
    image = jax.random.normal(jax.random.key(1), IMAGES.shape)
    params, state = network.init(jax.random.key(0))
    assert network.norms == {("norms", "0", "mean"), ("norms", "0", "var")}
    _, trained = network.apply(params, state, image, train=True)
    _, estimated = network.call(Call(train=True, reset_batch_stats=True), params, trained, image)
    np.testing.assert_allclose(estimated["norms"]["0"]["mean"], [image.mean()], rtol=1e-5)
    assert estimated["seen"] == trained["seen"] == pytest.approx(image.mean() / 2)
    made = experiment(FromModule(LinenNet), mesh=ALL, evaluation=EvaluationConfig(norm_batches=2))
    with pytest.raises(ConfigError, match=r"norm_batches=2: model LinenNet has no batch norm \(nnx.BatchNorm\)"):
        make_plan(made)
