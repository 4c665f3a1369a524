"""A loss of the user's own: its two forms, padding, weights, metrics, meshes, and what it can do wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.data import ArraySpec, TrainLoader
from jaxdl.data.array_spec import ArrayInfo
from jaxdl.models import Model
from jaxdl.models.layers import Linear
from jaxdl.optim import AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment, identity
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.plan.validate import fit_task
from jaxdl.training.tasks import Classification, Loss

random = np.random.default_rng(0)
X = random.normal(size=(37, 4)).astype(np.float32)
Y = (X @ np.array([1, -2, 3, 0.5])).astype(np.float32)
COUNTS = random.integers(1, 5, 37).astype(np.float32)
SPEC = ArraySpec((ArrayInfo("x", (4,), "float32"), ArrayInfo("y", (), "float32"), ArrayInfo("n", (), "float32")))

with forgotten():

    class Line(Model):
        """One layer."""

        def build(self, num_features):
            """The module."""
            return lambda rngs: LineModule(num_features, rngs)


class LineModule(nnx.Module):
    def __init__(self, num_features, rngs):
        axes = {"kernel_metadata": {"axes": ("channel_in", "mlp")}, "bias_metadata": {"axes": ("mlp",)}}
        self.line = Linear(num_features, 8, dtype="float32", rngs=rngs, **axes)

    def __call__(self, x, *, train):
        return self.line(x)


def squared(outputs, batch):
    """The loss of each example."""
    return jnp.square(outputs[:, 0] - batch["y"])


def weighted(outputs, batch):
    """Sums, over the mask, with a weight of its own."""
    counts = jnp.where(batch["mask"], batch["n"], 0)
    errors = jnp.abs(outputs[:, 0] - batch["y"])
    return {"loss": jnp.sum(counts * errors**2), "weight": counts, "error": jnp.sum(counts * errors)}


def close(outputs, batch):
    """A further metric."""
    return {"close": jnp.abs(outputs[:, 0] - batch["y"]) < 1}


def rows(count, mask=None):
    batch = {"x": X[:count], "y": Y[:count], "n": COUNTS[:count]}
    return batch if mask is None else batch | {"mask": mask}


def outputs_of(count):
    return lambda batch: jax.ShapeDtypeStruct((len(batch["x"]), count), jnp.float32)


def fitted(task, outputs=2, spec=SPEC):
    return task.fitted(spec, outputs_of(outputs))


# Forms


def test_losses_of_examples_are_masked_and_summed():
    task = fitted(Loss(squared, metrics=close))
    mask = np.arange(6) < 4
    outputs = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
    outputs[5] = np.nan  # Padding may hold anything.
    errors = np.abs(outputs[:, 0] - Y[:6])
    sums = task.sums(outputs, rows(6, mask), train=False)
    assert sums["loss"] == pytest.approx((errors[:4] ** 2).sum(), rel=1e-6)
    assert sums["weight"] == task.weight(rows(6, mask)) == 4
    metrics = task.metrics({name: float(value) for name, value in sums.items()}, SPEC)
    assert metrics == {"loss": pytest.approx((errors[:4] ** 2).mean()), "close": (errors[:4] < 1).mean()}


def test_sums_have_a_weight_of_their_own():
    task = fitted(Loss(fn=weighted, best_metric="error"))
    outputs = np.zeros((6, 2), np.float32)
    sums = task.sums(outputs, rows(6), train=True)
    counts, errors = COUNTS[:6], np.abs(Y[:6])
    assert sums["weight"] == task.weight(rows(6)) == counts.sum()
    metrics = task.metrics({name: float(value) for name, value in sums.items()}, SPEC)
    assert metrics["error"] == pytest.approx((counts * errors).sum() / counts.sum(), rel=1e-6)
    assert (task.best_metric, task.resolved_mode) == ("error", "min")


def test_the_best_value_is_the_highest_or_the_lowest_as_is_known_or_said():
    def mode(metric, **given):
        return Loss(squared, best_metric=metric, **given).resolved_mode

    names = ("loss", "perplexity", "error", "accuracy", "accuracy_top5", "auc", "bleu")
    assert [mode(name) for name in names] == ["min"] * 3 + ["max"] * 4
    assert mode("accuracy", best_mode="min") == "min"
    with pytest.raises(ConfigError, match="best_metric = 'close': whether a higher or a lower value is better"):
        fit_task(Loss(squared, metrics=close, best_metric="close"), SPEC, outputs_of(2))
    experiment = Experiment(task=Loss(squared)).replaced({"task.best_metric": "accuracy"})
    assert experiment.task.resolved_mode == "max"


def test_a_task_class_has_the_mode_of_its_own_metric():
    def own(**members):
        with forgotten():
            return type("Own", (Classification,), members)()

    assert own(best_metric="loss").resolved_mode == "min"
    assert own().resolved_mode == "max"
    assert own(best_metric="mine", best_mode="max").resolved_mode == "max"
    with pytest.raises(ConfigError, match="Give best_mode too"):
        _ = own(best_metric="mine").resolved_mode


def test_a_run_from_before_its_mode_was_known_of_the_name_resumes_with_it_given():
    def stored(**changes):
        return identity({"task": json.loads(Loss(squared, **changes).to_json())})["task"]

    assert stored() == stored(best_mode="min")
    assert stored(best_metric="accuracy") == stored(best_metric="accuracy", best_mode="max")
    assert stored(best_metric="accuracy") != stored(best_metric="accuracy", best_mode="min")


def test_inputs_are_named():
    batch = rows(3)
    assert Loss(squared).inputs(batch, SPEC)[0] is batch["x"]
    first, second = Loss(squared, inputs=("n", "x")).inputs(batch, SPEC)
    assert first is batch["n"]
    assert second is batch["x"]
    found = Loss(squared, inputs=("n", "x")).to_predict((COUNTS, X), SPEC)
    assert list(found) == ["n", "x"]
    assert Loss(squared, inputs="n").to_predict(COUNTS.astype(np.float64), SPEC)["n"].dtype == np.float32
    with pytest.raises(ConfigError, match=r"predict: n is float32 \[37, 4\]; this network reads float32 \[batch\]"):
        Loss(squared, inputs="n").to_predict(X, SPEC)


def test_the_json_names_the_functions():
    task = Loss(squared, inputs="x", metrics=close)
    assert task.model_dump(mode="json")["fn"] == {"name": "squared", "class": f"{__file__}:squared"}
    assert Loss.from_json(task.to_json()) == task


# Whole runs

MESHES = {
    "one device": MeshConfig(replica=1, fsdp=1, tensor=1),
    "replica 2 x fsdp 2 x tensor 2": MeshConfig(replica=2, fsdp=2, tensor=2),
}


def experiment(**changes):
    values = {
        "model": Line(),
        "data": jaxdl.Arrays(train={"x": X, "y": Y, "n": COUNTS}, test={"x": X, "y": Y, "n": COUNTS}),
        "task": Loss(weighted, inputs="x", metrics=close, best_metric="close", best_mode="max"),
        "optimizer": AdamW(learning_rate=0.3),
        "schedule": Constant(),
        "batch_size": 16,
        "steps": 8,
        "sharding": ShardingConfig(min_shard_elements=1),
        "report": ReportConfig(every_steps=1, tensorboard=False, curves=False),
    }
    return jaxdl.Experiment(**(values | changes))


def losses(mesh):
    plan = make_plan(experiment(mesh=mesh), jax.devices()[: mesh.replica * mesh.fsdp * mesh.tensor])
    step, state, found = compile_train_step(plan), make_initial_state(plan), []
    settings = {"batch_size": 16, "seed": 0, "start": 0, "num_steps": 8}
    with TrainLoader(plan.splits.train, sharding=batch_sharding(plan.parts.layout.mesh), **settings) as loader:
        for batch in loader:
            state, metrics = step(state, batch)
            found.append([float(metrics[f"sums/{name}"]) for name in ("loss", "weight", "error", "close")])
    return np.array(found)


@pytest.mark.slow
def test_losses_are_equal_on_meshes():
    """A weight that differs between examples: the mean is over all of them, not over each replica's."""
    one, other = (losses(mesh) for mesh in MESHES.values())
    means = one[:, 0] / one[:, 1]
    assert means[-1] < 0.5 * means[0], "it should have learnt something, or equality proves nothing"
    np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.slow
def test_an_evaluation_counts_each_example_once(tmp_path):
    """37 examples in batches of 16, against NumPy on the predictions of the restored network."""
    run = jaxdl.train(
        experiment(steps=2, mesh=MeshConfig(replica=2, fsdp=2)), tmp_path, quiet=True, devices=jax.devices()[:4]
    )
    predicted = jaxdl.restore(tmp_path).predict(X)
    assert predicted.shape == (37, 8)
    errors = np.abs(predicted[:, 0] - Y)
    assert run.metrics["loss"] == pytest.approx((COUNTS * errors**2).sum() / COUNTS.sum(), rel=1e-5)
    assert run.metrics["close"] == pytest.approx((errors < 1).sum() / COUNTS.sum(), rel=1e-5)
    assert [line.get_label()[:4] for line in run.plot().axes[1].lines[-1:]] == ["best"], "the task says what is better"


# Mistakes


def no_mask(outputs, batch):
    return {"loss": jnp.sum(jnp.square(outputs[:, 0] - batch["y"])), "weight": jnp.sum(batch["mask"])}


def no_mask_in_the_weight(outputs, batch):
    return {"loss": jnp.square(outputs[:, 0] - batch["y"]), "weight": jnp.float32(len(batch["y"]))}


def mean(outputs, batch):
    losses = jnp.where(batch["mask"], jnp.square(outputs[:, 0] - batch["y"]), 0)
    return {"loss": jnp.sum(losses) / jnp.sum(batch["mask"]), "weight": jnp.sum(batch["mask"])}


def scalar(outputs, batch):
    return jnp.mean(outputs)


def every_output(outputs, batch):
    return jnp.square(outputs - batch["y"][:, None])


def missing(outputs, batch):
    return outputs[:, 0] - batch["target"]


def broadcast(outputs, batch):
    return outputs @ batch["y"]


def no_loss(outputs, batch):
    return {"error": outputs[:, 0]}


def text(outputs, batch):
    return {"loss": outputs[:, 0], "note": "fine"}


def weight_of_outputs(outputs, batch):
    return {"loss": outputs[:, 0], "weight": outputs[:, 1]}


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (no_mask, "'loss' depends on examples that batch['mask'] leaves out"),
        (no_mask_in_the_weight, "'weight' depends on examples that batch['mask'] leaves out"),
        (mean, "'loss' is not a sum over the examples"),
        (scalar, "'loss' is a scalar. Return one number for each example, [4] here"),
        (every_output, "'loss' is of shape [4, 2]. Return one number for each example"),
        (
            missing,
            "KeyError: 'target'. It got the outputs float32 [4, 2] and a batch of x float32 [4, 4], y float32 [4], n",
        ),
        (broadcast, "TypeError: dot_general requires contracting dimensions to have the same shape"),
        (no_loss, 'it returns a dictionary with error, without "loss"'),
        (text, "'note' is an object of type str, not an array"),
        (weight_of_outputs, "'weight' depends on the outputs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mistakes_of_a_loss(fn, message):
    with pytest.raises(ConfigError) as error:
        fitted(Loss(fn))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{fn.__name__} ({__file__}:")
    assert "\n" not in str(error.value)
    if fn is missing:
        assert f":{fn.__code__.co_firstlineno + 1})" in str(error.value)


def over_all(outputs, batch):
    return jnp.mean(jnp.square(outputs - batch["y"]), axis=1)


def of_the_next(outputs, batch):
    return jnp.square(outputs[:, 0] - jnp.roll(batch["y"], 1))


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_an_example_s_loss_may_not_depend_on_other_labels(dtype):
    """Outputs [N, 1] and labels [N] broadcast to [N, N]. Labels of two classes may be the same in both halves."""
    spec = ArraySpec((ArrayInfo("x", (4,), "float32"), ArrayInfo("y", (), dtype)))
    for fn in (over_all, of_the_next):
        with pytest.raises(ConfigError, match=r"'loss' depends on .* make \[4, 4\]: take outputs\[:, 0\]"):
            fitted(Loss(fn), outputs=1, spec=spec)
    fitted(Loss(squared), outputs=1, spec=spec)


def test_a_loss_of_many_outputs_is_only_traced():
    fitted(Loss(no_mask), outputs=1_000_001)
    with pytest.raises(ConfigError, match="KeyError: 'target'"):
        fitted(Loss(missing), outputs=1_000_001)


def test_mistakes_of_a_config():
    for task, message in [
        (Loss(), "its function is not set"),
        (Loss(squared, inputs="image"), "inputs = 'image': the data has x, y, n"),
        (Loss(squared, best_metric="accuracy"), "best_metric = 'accuracy': the metrics are loss"),
        (Loss(squared, metrics=squared), "squared .* it returns an array, not a dictionary of metrics"),
        (Loss(weighted, metrics=weighted), "is what the loss returns. Rename it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            fitted(task)
    with pytest.raises(ConfigError, match="no name at the top level"):
        Loss(lambda outputs, batch: outputs)
