"""Weights of examples: weight 2 is a row that is there twice, in gradients, runs and metrics; what is no weight."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from runs import ONE_DEVICE
from sklearn.metrics import accuracy_score, log_loss, mean_absolute_error, mean_squared_error, r2_score

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import EXAMPLE_WEIGHT, LabelledTexts, Table, Tabular
from jaxdl.exchange.agreement import Periodic
from jaxdl.models import Encoder, Perceptron, TableMLP
from jaxdl.optim import SGD, AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification, Regression, TableTask

ROWS = 24
WEIGHTS = np.array([0, 1, 2, 3, 2, 0, 1, 3] * 3)
REPEATED = np.repeat(np.arange(ROWS), WEIGHTS)
"""The rows, each as often as its weight says: 36."""


def columns():
    """Rows whose class and amount follow from two numbers and a word."""
    random = np.random.default_rng(3)
    a, b = random.normal(size=(2, ROWS)).astype(np.float32)
    word = np.array(["red", "green", "blue"])[random.integers(0, 3, ROWS)]
    text = [f"{w} {'good' if x > 0 else 'bad'}" for w, x in zip(word, a, strict=True)]
    return {"a": a, "b": b, "word": word, "text": text, "label": (a + b > 0).astype(np.int64),
            "amount": 50 + 3 * a - b, "w": WEIGHTS.astype(np.float64) / 10}  # fmt: skip


def write(path, names, rows=None, **others):
    chosen = {name: np.asarray(columns()[name]) for name in names} | others
    rows = np.arange(ROWS) if rows is None else rows
    parquet.write_table(pyarrow.table({name: x[rows] for name, x in chosen.items()}), path)
    return (str(path),)


def train(data, model, rows, mesh=ONE_DEVICE, **changes):
    """Four steps of gradient descent on all training rows at once."""
    values = {
        "data": data, "model": model, "task": Classification(), "optimizer": SGD(learning_rate=0.5),
        "schedule": Constant(), "batch_size": rows, "steps": 4, "mesh": mesh,
        "report": ReportConfig(tensorboard=False, curves=False),
    }  # fmt: skip
    devices = jax.devices()[: 1 if mesh is ONE_DEVICE else 4]
    return jaxdl.train(Experiment(**(values | changes)), quiet=True, devices=devices)


def assert_alike(first, second, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=atol),
                 *(jax.device_get(run.state.params) for run in (first, second)))  # fmt: skip
    for name, value in first.metrics.items():
        assert value == pytest.approx(second.metrics[name], rel=1e-5), name


def summed(outputs, batch):
    """A loss of each example that knows nothing of weights."""
    return outputs.sum(axis=-1)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A run on numbers with weights, and its files."""
    folder = tmp_path_factory.mktemp("numbers")
    test = write(folder / "test.parquet", ["a", "b", "label", "w"])
    train_file = write(folder / "train.parquet", ["a", "b", "label", "w"])
    data = Tabular(train=train_file, test=test, weight="w", normalize=False)
    return folder, data, train(data, Perceptron(units=(8,)), ROWS)


def test_a_run_with_weights_is_that_on_repeated_rows(numbers):
    folder, data, run = numbers
    assert run.plan.parts.data_spec.columns == ("a", "b"), "the weight is no feature"
    files = [write(folder / f"{name}-repeated.parquet", ["a", "b", "label"], REPEATED) for name in ("train", "test")]
    repeated = Tabular(train=files[0], test=files[1], normalize=False)
    assert_alike(run, train(repeated, Perceptron(units=(8,)), len(REPEATED)))
    mesh = MeshConfig(replica=2, fsdp=2, tensor=1)
    assert_alike(run, train(data, Perceptron(units=(8,)), ROWS, mesh, step={"microbatches": 2}))
    without = train(data.replaced({"weight": None, "features": ("a", "b")}), Perceptron(units=(8,)), ROWS)
    assert abs(without.metrics["loss"] - run.metrics["loss"]) > 1e-3


def test_steps_in_which_no_weight_counts_are_no_updates(tmp_path):
    file = write(tmp_path / "x.parquet", ["a", "b", "label"], w=np.eye(1, ROWS)[0])
    data = Tabular(train=file, test=file, weight="w", normalize=False)
    run = train(data, Perceptron(units=(8,)), 1, steps=ROWS, report=ReportConfig(tensorboard=False, every_steps=ROWS))
    assert np.nanmax(run.history["train/empty_steps"]) == ROWS - 1


def test_what_does_not_take_weights_is_refused(numbers):
    _, data, _ = numbers
    with pytest.raises(ConfigError, match=r"agreement periodic: averages of replicas do not take weights"):
        train(data, Perceptron(units=(8,)), ROWS, MeshConfig(replica=4, fsdp=1), agreement=Periodic(every_steps=2))
    with pytest.raises(ConfigError, match=r"data\.weight with task loss"):
        train(data, Perceptron(units=(8,)), ROWS, task=jaxdl.Loss(summed))


def test_metrics_are_those_of_scikit_learn(numbers):
    _, _, run = numbers
    rows = columns()
    predicted = run.predict(np.stack([rows["a"], rows["b"]], axis=1))
    weights = {"sample_weight": rows["w"]}
    assert run.metrics["loss"] == pytest.approx(log_loss(rows["label"], predicted, **weights), rel=1e-5)
    right = accuracy_score(rows["label"], predicted.argmax(axis=1), **weights)
    assert run.metrics["accuracy"] == pytest.approx(right, rel=1e-6)


def test_a_batch_of_some_rows_has_their_share_of_the_whole_gradient(numbers):
    """A weight counts in a batch of one row too: the mean of the gradients of all batches is that of all rows."""
    _, _, run = numbers
    task, splits = run.plan.parts.task, run.plan.splits

    def gradient(rows):
        batch = {name: jnp.asarray(x) for name, x in splits.train.batch(rows).items()}
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 2)), jnp.float32)

        def loss(logits):
            return task.sums(logits[rows], batch, train=True)["loss"] / task.weight(batch)

        return np.asarray(jax.grad(loss)(logits))

    parts = np.mean([gradient(np.array([row])) for row in range(ROWS)], axis=0)
    np.testing.assert_allclose(parts, gradient(np.arange(ROWS)), atol=1e-7)


def test_texts_with_weights(tmp_path):
    files = [write(tmp_path / f"{name}.parquet", ["text", "label", "w"]) for name in ("train", "test")]
    made = LabelledTexts(train=files[0], test=files[1], weight="w", length=16)
    again = [write(tmp_path / f"{name}-2.parquet", ["text", "label"], REPEATED) for name in ("train", "test")]
    model = Encoder(num_layers=1, embed_dim=8, num_heads=2, max_length=16, dropout=0.0)
    assert_alike(
        train(made, model, ROWS),
        train(made.replaced({"train": again[0], "test": again[1], "weight": None}), model, len(REPEATED)),
        atol=2e-5,
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A run on a table with words and weights, whose label is a number; its file and workdir."""
    folder = tmp_path_factory.mktemp("table")
    file = write(folder / "rows.parquet", ["a", "word", "amount", "w"])
    data = Table(file=file, test=file, label="amount", weight="w")
    run = jaxdl.train(
        Experiment(data=data, model=TableMLP(units=(8,)), task=TableTask(), optimizer=AdamW(learning_rate=0.02),
                   batch_size=8, steps=30, mesh=ONE_DEVICE, report=ReportConfig(tensorboard=False, curves=False)),
        folder / "run", quiet=True, devices=jax.devices()[:1],
    )  # fmt: skip
    return file[0], run


def test_a_table_with_weights_is_measured_as_scikit_learn_does(table):
    file, run = table
    rows, predictor = columns(), jaxdl.restore(run.workdir)
    predicted, weights = predictor.predict(file), {"sample_weight": rows["w"]}
    wanted = {
        "rmse": np.sqrt(mean_squared_error(rows["amount"], predicted, **weights)),
        "mae": mean_absolute_error(rows["amount"], predicted, **weights),
        "r2": r2_score(rows["amount"], predicted, **weights),
    }
    for found in (run.metrics, predictor.evaluate(), predictor.evaluate(file)):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert [column.name for column in run.plan.parts.data_spec.columns] == ["a", "word"]
    recorded = json.loads((run.workdir / "data.json").read_text())
    assert (recorded["weight"], recorded["mean_weight"]) == ("w", pytest.approx(0.15))
    unweighted = {name: list(rows[name]) for name in ("a", "word", "amount")}
    with pytest.warns(UserWarning, match=r"no column 'w' of weights: all rows count alike"):
        found = predictor.evaluate(unweighted)
    assert found["mae"] == pytest.approx(mean_absolute_error(rows["amount"], predicted), rel=1e-4)


def test_gradients_of_a_table_of_numbers_are_those_of_repeated_rows(table):
    _, run = table
    task, batch = run.plan.parts.task, run.plan.splits.train.batch(np.arange(ROWS))
    assert isinstance(task.task, Regression)
    outputs = np.random.default_rng(1).normal(size=(ROWS, 1)).astype(np.float32)

    def gradient(batch, rows):
        def loss(outputs):
            return task.sums(outputs[rows], batch, train=True)["loss"] / task.weight(batch)

        return jax.grad(loss)(jnp.asarray(outputs))

    twice = {name: x[REPEATED] for name, x in batch.items() if name != EXAMPLE_WEIGHT}
    every = np.arange(ROWS)
    np.testing.assert_allclose(gradient(batch, every), gradient(twice, REPEATED), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([-1.0], r"the weight 'w' is -1"),
        ([float("nan")], r"the weight 'w' is missing or not finite"),
        ([0.0] * ROWS, r"data\.weight w: the weight of every training row is 0"),
        (["heavy"] * ROWS, r"'heavy'"),
    ],
)
def test_what_is_no_weight(tmp_path, weights, problem):
    given = np.array([*weights, *[1.0] * (ROWS - len(weights))])
    file = write(tmp_path / "x.parquet", ["a", "label", "text"], w=given)
    for data in (Tabular(train=file, test=file, features=("a",), weight="w"),
                 Table(file=file, test=file, features=("a",), weight="w")):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            data.build()
    with pytest.raises(ConfigError, match=r"data\.weight|its weight 'w'"):
        LabelledTexts(train=file, test=file, weight="w").build()


def test_a_column_of_weights_has_no_other_use(tmp_path):
    file = write(tmp_path / "x.parquet", ["a", "label", "text", "w"])
    cases = [Tabular(train=file, weight="w", features=("a", "w")), Table(file=file, weight="w", numbers=("w",)),
             Table(file=file, weight="label"), LabelledTexts(train=file, weight="text")]  # fmt: skip
    for data in cases:
        with pytest.raises(ConfigError, match=r"data\.weight (w|label|text): data\.\w+ names it too"):
            data.build()
    for data in (Tabular(train=file, features=("a",), weight="v"), Table(file=file, weight="v"),
                 LabelledTexts(train=file, weight="v")):  # fmt: skip
        with pytest.raises(ConfigError, match="'v'"):
            data.build()
