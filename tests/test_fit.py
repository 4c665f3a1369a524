"""Runs from Python: a model and arrays in one call; a run predicts and is evaluated as it was trained."""

import os
import signal
import sys
import traceback
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import assert_bit_equal

import jaxdl
from jaxdl import Arrays, Experiment, FromModule, Loss
from jaxdl.data import SyntheticImages
from jaxdl.data.arrays.labels import class_numbers
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.fit import _data


@pytest.fixture
def run(tiny_run):
    return tiny_run


def test_a_run_predicts_as_its_checkpoint(run):
    images = run.plan.splits.test.batch(np.arange(13))["image"]
    restored = jaxdl.restore(run.workdir, mesh=run.plan.experiment.mesh)
    assert np.array_equal(run.predict(images), restored.predict(images))
    with pytest.raises(jaxdl.ConfigError, match=r"this network reads uint8 \[batch, 8, 8, 1\]"):
        run.predict(images[:, :4])


def test_a_run_is_evaluated_again_bit_by_bit(run):
    assert run.evaluate() == run.metrics
    assert run.plan.splits.test.batch(np.arange(1))["image"].shape == (1, 8, 8, 1), "its data can be read still"


def test_a_run_is_evaluated_on_other_data(run):
    """Against NumPy: 23 examples, which no mesh of 8 divides, normalized as in the training."""
    other = SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=8, num_test=23, seed=9)
    examples = other.build().test.batch(np.arange(23))
    chances = run.predict(examples["image"])
    found = run.evaluate(other)
    assert found["accuracy"] == np.mean(chances.argmax(axis=1) == examples["label"])
    loss = -np.log(chances[np.arange(23), examples["label"]]).mean(dtype=np.float64)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    assert run.evaluate(other, batch_size=8)["accuracy"] == found["accuracy"]
    with pytest.raises(jaxdl.ConfigError, match=r"num_classes 4.*num_classes 5"):
        run.evaluate(other.replaced({"num_classes": 5}))
    assert len(jax.devices()) == run.inference.parts.layout.mesh.size


class Net(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs, hidden=16, outputs=3):
        self.hidden = nnx.Linear(5, hidden, rngs=rngs)
        self.head = nnx.Linear(hidden, outputs, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


def squares(outputs, batch):
    return jnp.sum((outputs - batch["y"]) ** 2, axis=-1)


def mean_error(outputs, batch):
    return {"error": jnp.abs(outputs - batch["y"]).mean(axis=-1)}


def arrays(number, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(number, 5)).astype(np.float32)
    return x, np.tanh(x[:, :3] + x[:, 1:4])


TRAIN, TEST = arrays(90), arrays(19, seed=1)
SQUARES = {"train": TRAIN, "test": TEST, "loss": squares, "metrics": mean_error, "epochs": 3, "batch_size": 16,
           "quiet": True, "mesh.replica": 2, "mesh.fsdp": 4, "evaluation.every_steps": 8,
           "report.curves": False}  # fmt: skip


def labelled(number):
    """Training data for classification with one label that is this number."""
    y = np.zeros(90, np.int64)
    y[7] = number
    return {"train": (TRAIN[0], y), "test": (TRAIN[0], y), "loss": None, "metrics": None}


@pytest.fixture(scope="module")
def fitted():
    return jaxdl.fit(Net, **SQUARES)


def test_fit_is_the_training_of_an_experiment(fitted):
    """Bit by bit that of the experiment in full."""
    experiment = Experiment(
        model=FromModule(Net),
        data=Arrays(train=TRAIN, test=TEST),
        task=Loss(squares, metrics=mean_error),
        optimizer=AdamW(learning_rate=1e-3),
        epochs=3,
        batch_size=16,
        mesh=MeshConfig(replica=2, fsdp=4),
        evaluation={"every_steps": 8},
    )
    run = jaxdl.train(experiment, quiet=True)
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, fitted)))


def test_what_was_fitted_predicts_and_is_evaluated(fitted):
    """Against NumPy, also on other arrays, whose number no mesh divides."""
    for data, found in ((TEST, fitted.metrics), (arrays(7, seed=2), fitted.evaluate(arrays(7, seed=2)))):
        differences = fitted.predict(data[0]) - data[1]
        np.testing.assert_allclose(found["loss"], (differences**2).sum(axis=1).mean(), rtol=1e-5)
        np.testing.assert_allclose(found["error"], np.abs(differences).mean(), rtol=1e-5)
    assert fitted.metrics["loss"] < fitted.history["train/loss"][0], "it has learned"
    assert repr(fitted).startswith(f"Run(finished step 17 of 17, error {fitted.metrics['error']:.4g}, loss ")
    assert len(repr(fitted)) < 120, "it is what a cell shows that ends with it"


def test_class_numbers_make_a_classifier_and_a_tenth_is_held_out(capsys):
    x, y = TRAIN[0], TRAIN[1].argmax(axis=1)
    run = jaxdl.fit(Net, train=(x, np.eye(3)[y]), steps=1, optimizer="adam", learning_rate=0.01)
    assert "test is not given: 9 of the 90 training examples, chosen at random, are held out" in capsys.readouterr().out
    assert set(run.metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(run.predict(x).sum(axis=1), 1, rtol=1e-5)
    experiment = run.plan.experiment
    assert (experiment.batch_size, experiment.optimizer.label) == (8, "optax.adam")
    assert experiment.optimizer.learning_rate == 0.01
    found = run.evaluate((x, np.eye(3)[y]))
    assert found == run.evaluate((x, y)) == run.evaluate((x, y[:, None]))
    assert found["accuracy"] == np.mean(run.predict(x).argmax(axis=1) == y)
    for wrong, message in (((x, y), r"a tuple of 2\. Give the input alone, without labels: predict\(x\)"),
                           ([[1, 2], [3]], "differ in shape")):  # fmt: skip
        with pytest.raises(jaxdl.ConfigError, match=message):
            run.predict(wrong)


def test_a_quiet_run_prints_its_warnings_alone(capsys):
    """Also those that are known before the run begins."""
    x = TRAIN[0].copy()
    x[3, 1] = np.nan
    jaxdl.fit(Net, **SQUARES | {"train": (x, TRAIN[1]), "epochs": None, "steps": 1})
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("train: x has NaN in 1 of 90 rows\n")


NUMBERS = np.array([2, 0, 1, 2])


@pytest.mark.parametrize(
    ("labels", "numbers", "num_classes"),
    [
        (NUMBERS, NUMBERS, None),
        (NUMBERS[:, None], NUMBERS, None),
        (np.eye(4)[NUMBERS], NUMBERS, 4),
        (np.eye(4, dtype=bool)[NUMBERS], NUMBERS, 4),
        (NUMBERS > 1, [1, 0, 0, 1], 2),
        (NUMBERS[:, None] > 1, [1, 0, 0, 1], 2),
        (NUMBERS.astype(float), NUMBERS.astype(float), None),
        (np.eye(4)[NUMBERS] * 0.9, np.eye(4)[NUMBERS] * 0.9, None),
        (np.ones((4, 2), int), np.ones((4, 2), int), None),
    ],
)
def test_labels_become_class_numbers_where_that_is_certain(labels, numbers, num_classes):
    found, count = class_numbers(labels)
    assert np.array_equal(found, numbers)
    assert count == num_classes
    assert (found is labels) == (labels.shape == np.shape(numbers) and labels.dtype != bool)


def one_hot():
    return np.zeros((40, 5), np.float32), np.eye(3, dtype=bool)[np.arange(40) % 3]


def test_a_function_of_one_hot_labels_is_named_in_the_config():
    """So that the data can be read again from the JSON alone."""
    data, num_train = _data(one_hot, None, classifies=True, quiet=True)
    assert num_train == 36
    again = Arrays.from_json(data.to_json())
    assert again.to_json() == data.to_json()
    assert again.to_json().count(f"{__file__}:one_hot") == 1
    assert again.build().content() == data.build().content()
    assert again.build().train.spec.sizes() == {"num_classes": 3, "num_features": 5}


def test_classes_are_counted_against_the_training_examples():
    """A few test examples may have any class of the many training examples; both ways have the same rule."""
    x, y = np.zeros((1500, 2)), np.arange(1500)
    data, _ = _data((x, y), (x[:2], y[-2:]), classifies=True, quiet=True)
    assert data.build().train.spec.sizes()["num_classes"] == 1500
    for largest, is_class in ((1349, True), (1350, False)):  # A tenth is held out.
        given = x, np.minimum(y, largest)
        if is_class:
            data, _ = _data(given, None, classifies=True, quiet=True)
            assert data.build().train.spec.sizes()["num_classes"] == 1350
        else:
            with pytest.raises(jaxdl.ConfigError, match="larger than there are examples"):
                _data(given, None, classifies=True, quiet=True)


@pytest.mark.slow
def test_an_interrupted_cell_gives_the_run_so_far_and_goes_on(tmp_path, fitted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: True))

    def interrupt(info):
        if info.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    run = jaxdl.fit(Net, **SQUARES, workdir=tmp_path, on_step=interrupt)
    assert int(run.state.step) == 5
    assert run.predict(TEST[0]).shape == (19, 3)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("SIGINT: stopped at step 5; saved in "), "it is quiet otherwise"
    run = jaxdl.fit(Net, **SQUARES, workdir=tmp_path)
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, fitted)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": Net(nnx.Rngs(0))}, r"model: an object of Net; give its class, or FromModule\(Net"),
        ({"loss": None, "metrics": None}, r"loss: it is not given, .* y float32 \[3\] contains no class numbers"),
        ({"train": {"x": TRAIN[0]}, "loss": None, "metrics": None}, r"Class numbers are an array y \(or label\)"),
        (labelled(-1), r"y int64 \[\] contains no class numbers\. It has numbers below 0"),
        (labelled(10**9), r"y int64 \[\] contains no class numbers\. It has numbers below 0, or larger"),
        ({"loss": None}, "metrics: they are those of the task"),
        ({"train": SyntheticImages()}, "test: data synthetic_images has its own held-out examples"),
        ({"optimizer": "adamm"}, "adamm"),
        ({"optimizer.learning_rat": 1.0}, r"Did you mean optimizer\.learning_rate"),
        ({"batch_sizes": 1}, r"batch_sizes: there is no such argument.* Did you mean batch_size\?"),
        ({"learning_rte": 1}, r"Did you mean learning_rate\?"),
        ({"dropout": 1}, r"dropout: there is no such argument.* fit takes train, test"),
        ({"loss": lambda outputs, batch: 0}, r"^loss: \S*<lambda> has no name at the top level"),
        ({"metrics": lambda outputs, batch: {}}, r"^metrics: \S*<lambda> has no name at the top level"),
        ({"model": lambda rngs: Net(rngs)}, r"^model: \S*<lambda> has no name at the top level"),
        ({"optimizer": lambda learning_rate: None}, r"^optimizer: \S*<lambda> has no name at the top level"),
        ({"devices": 4}, r"^devices: 4 is not a list of devices\. Give one, such as jax\.devices\(\)\[:4\]"),
        ({"validation": TEST}, r"Did you mean test\?"),
        ({"weight_decay": 0.1}, r"Did you mean optimizer\.weight_decay\?"),
        ({"hidden": 8}, r"hidden: an argument of the model\. Give model FromModule\(Net, hidden=8\)"),
        ({"init_from": "nowhere"}, "init_from nowhere: there is no run in this folder"),
    ],
)
def test_mistakes(changes, message):
    given = {"model": Net} | SQUARES | changes
    with pytest.raises(jaxdl.ConfigError, match=message) as it:
        jaxdl.fit(given.pop("model"), **given)
    shown = "".join(traceback.format_exception(it.value))
    assert shown.count("Traceback") == 1
    assert shown.count("  File ") == 2, "the user's line and the call: none of the lines inside jaxdl"
