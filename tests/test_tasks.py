import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.data import ImageSpec, TextSpec
from jaxdl.training.tasks import Classification, LanguageModelling, Task

IMAGES = ImageSpec(8, 8, 3, num_classes=6, mean=(100.0, 120.0, 140.0), std=(50.0, 60.0, 70.0))
TEXT = TextSpec(vocab_size=50, length=8, bytes_per_token=3.5)


def image_batch(batch=6, size=5, masked=True):
    rng = np.random.default_rng(0)
    made = {
        "image": rng.integers(0, 256, (batch, size, size, 3), np.uint8),
        "label": rng.integers(0, 8, batch, np.int32),
    }
    return made | ({"mask": np.arange(batch) % 3 != 0} if masked else {})


def numpy_log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_both_tasks_have_the_interface():
    for task in (Classification(), LanguageModelling()):
        assert isinstance(task, Task)
        assert type(task).from_json(task.to_json()) == task


def test_a_task_needs_only_sums():
    with forgotten():

        class Least(Task):
            def sums(self, outputs, batch, *, train):
                return {}

        class Fields(Task):
            best_metric: str = "right"

            def sums(self, outputs, batch, *, train):
                return {}

    task, batch = Least(), image_batch()
    assert (task.best_metric, task.best_mode, task.unit, task.units_per_example(IMAGES)) == (
        "loss", "min", "examples", 1
    )  # fmt: skip
    assert task.augmented(batch, jax.random.key(0)) is batch
    assert task.weight(batch) == batch["mask"].sum()
    assert task.metrics({"loss": 3.0, "right": 1.0, "weight": 2.0}, IMAGES) == {"loss": 1.5, "right": 0.5}
    assert task.reads(IMAGES) == ("image",)
    assert Fields().best_metric == "right"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_classification_sums(masked, train):
    batch = image_batch(masked=masked)
    logits = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32) * 3
    counts = batch.get("mask", np.ones(6, bool))
    target = np.eye(8)[batch["label"]]
    if train:
        target = 0.7 * target + 0.3 / 8
    losses = -(target * numpy_log_softmax(logits)).sum(-1)
    order = np.argsort(-logits, axis=-1)
    task = Classification(label_smoothing=0.3)
    sums = jax.jit(lambda o, b: task.sums(o, b, train=train))(logits, batch)
    assert {leaf.dtype for leaf in sums.values()} == {jnp.dtype("float32")}
    assert sums["loss"] == pytest.approx(losses[counts].sum(), rel=1e-5)
    assert sums["weight"] == counts.sum() == task.weight(batch)
    assert sums["correct"] == (order[:, 0] == batch["label"])[counts].sum()
    assert sums["correct_top5"] == (order[:, :5] == batch["label"][:, None]).any(-1)[counts].sum()
    metrics = task.metrics({name: float(value) for name, value in sums.items()}, IMAGES)
    assert metrics["loss"] == pytest.approx(losses[counts].mean(), rel=1e-5)
    assert metrics[task.best_metric] == float(sums["correct"]) / counts.sum()


@pytest.mark.parametrize("num_classes", [3, 5, 6])
def test_top_5_is_reported_only_where_there_are_more_classes(num_classes):
    sums = {"loss": 1.0, "weight": 4.0, "correct": 1.0, "correct_top5": 4.0}
    metrics = Classification().metrics(sums, dataclasses.replace(IMAGES, num_classes=num_classes))
    assert set(metrics) == {"loss", "accuracy"} | ({"accuracy_top5"} if num_classes > 5 else set())


def test_what_the_training_loss_has_that_of_the_evaluation_lacks():
    assert Classification(augment="flip").objective == LanguageModelling().objective == ""
    assert Classification(label_smoothing=0.1, mixup=0.2).objective == "with label smoothing 0.1, mixup 0.2"
    assert LanguageModelling(z_loss=1e-4).objective == "with z-loss 0.0001"


@pytest.mark.slow
def test_ties_go_to_the_lower_class():
    """A constant output is right for label 0, and among the first five for labels 0 to 4: chance, not 100 %."""
    batch = {"label": jnp.arange(8, dtype=jnp.int32)}
    task = jax.jit(functools.partial(Classification().sums, train=False))
    sums = task(jnp.zeros((8, 8)), batch)
    assert (sums["correct"], sums["correct_top5"]) == (1, 5)
    tied = jnp.array([[1.0, 2, 2, 2, 2, 2, 0, 3]])  # Order of classes: 7, 1, 2, 3, 4, 5, 0, 6.
    for label, in_top5 in [(7, 1), (4, 1), (5, 0), (0, 0), (6, 0)]:
        sums = task(tied, {"label": jnp.array([label], jnp.int32)})
        assert sums["correct_top5"] == in_top5, label
        assert sums["correct"] == (label == 7)


def test_diverged_outputs_are_not_correct():
    for bad in (np.full((2, 8), np.nan), np.where(np.arange(8) == 3, np.nan, 1.0)[None].repeat(2, 0)):
        sums = Classification().sums(jnp.asarray(bad), {"label": jnp.array([0, 3], jnp.int32)}, train=False)
        assert sums["correct"] == 0
        assert np.isnan(sums["loss"])


def test_masked_rows_may_hold_anything():
    logits = jnp.zeros((3, 4)).at[1].set(jnp.nan)
    batch = {"label": jnp.zeros(3, jnp.int32), "mask": jnp.array([True, False, True])}
    assert Classification().sums(logits, batch, train=False)["loss"] == pytest.approx(2 * math.log(4))


def test_sums_of_parts_are_the_sum_of_the_whole():
    batch = image_batch()
    logits = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)
    task = Classification()
    sums = jax.jit(functools.partial(task.sums, train=False))
    whole = sums(logits, batch)
    parts = [sums(logits[rows], {name: x[rows] for name, x in batch.items()}) for rows in (slice(0, 1), slice(1, 6))]
    for name in whole:
        assert whole[name] == pytest.approx(float(parts[0][name] + parts[1][name]), rel=1e-6)


def test_classification_inputs_are_normalized():
    batch = image_batch()
    (image,) = Classification().inputs(batch, IMAGES)
    assert image.dtype == jnp.float32
    np.testing.assert_allclose(
        image, (batch["image"] - np.array(IMAGES.mean)) / np.array(IMAGES.std), rtol=1e-5, atol=1e-6
    )


def test_flip_mirrors_about_half_of_the_images():
    batch = image_batch(batch=200)
    images = np.asarray(Classification(augment="flip").augmented(batch, jax.random.key(0))["image"])
    mirrored = (images == batch["image"][:, :, ::-1]).all((1, 2, 3))
    assert (mirrored | (images == batch["image"]).all((1, 2, 3))).all()
    assert 70 < mirrored.sum() < 130
    assert images.dtype == np.uint8


def test_crop_flip_gives_every_shift_of_the_padded_image():
    image = image_batch(batch=1)["image"]
    batch = {"image": image.repeat(400, 0), "label": np.zeros(400, np.int32)}
    task = Classification(augment="crop_flip", crop_padding=1)
    made = np.asarray(task.augmented(batch, jax.random.key(0))["image"])
    expected = {}
    for flip in (1, -1):
        padded = np.pad(image[0][:, ::flip], ((1, 1), (1, 1), (0, 0)))
        for top, left in np.ndindex(3, 3):
            expected[padded[top : top + 5, left : left + 5].tobytes()] = (flip, top, left)
    assert {expected[one.tobytes()] for one in made} == set(expected.values())


@pytest.mark.slow
def test_augmentation_is_a_function_of_key_and_row():
    task, key = Classification(augment="crop_flip"), jax.random.key(0)
    batch = image_batch(batch=16, size=8)
    whole = task.augmented(batch, key)
    shorter = task.augmented({name: x[:5] for name, x in batch.items()}, key)
    np.testing.assert_array_equal(whole["image"][:5], shorter["image"])
    assert not np.array_equal(whole["image"], task.augmented(batch, jax.random.key(1))["image"])
    assert Classification().augmented(batch, key) is batch


def test_classification_errors():
    with pytest.raises(ValueError, match="crop_padding = 2: nothing is cropped"):
        Classification(augment="flip", crop_padding=2)
    with pytest.raises(ValueError, match="label_smoothing"):
        Classification(label_smoothing=1.0)
    with pytest.raises(ConfigError, match="no example was counted"):
        Classification().metrics({"loss": 0.0, "weight": 0.0, "correct": 0.0, "correct_top5": 0.0}, IMAGES)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_language_sums_and_metrics(masked, train):
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 9, (3, 7), np.int32)}
    if masked:
        batch["mask"] = rng.random((3, 6)) < 0.6
    counts = batch.get("mask", np.ones((3, 6), bool))
    logits = rng.normal(size=(3, 6, 9)).astype(np.float32) * 2
    target = batch["tokens"][:, 1:]
    picked = np.take_along_axis(numpy_log_softmax(logits), target[..., None], -1)[..., 0]
    losses = -picked
    if train:
        losses = losses + 0.1 * np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    task = LanguageModelling(z_loss=0.1)
    np.testing.assert_array_equal(task.inputs(batch, TEXT)[0], batch["tokens"][:, :6])
    sums = jax.jit(lambda o, b: task.sums(o, b, train=train))(logits, batch)
    assert sums["loss"] == pytest.approx(losses[counts].sum(), rel=1e-5)
    assert sums["weight"] == counts.sum() == task.weight(batch)
    assert sums["correct"] == (logits.argmax(-1) == target)[counts].sum()
    metrics = task.metrics({name: float(value) for name, value in sums.items()}, TEXT)
    mean = losses[counts].mean()
    assert metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(mean * counts.sum() / math.log(2) / (3.5 * counts.sum()), rel=1e-5)
    assert metrics["accuracy"] == float(sums["correct"]) / counts.sum()


def test_uniform_bytes_take_eight_bits_each():
    """256 equally likely tokens of one byte: the closed form of bits per byte."""
    batch = {"tokens": jnp.zeros((1, 5), jnp.int32)}
    task = LanguageModelling()
    sums = task.sums(jnp.zeros((1, 4, 256)), batch, train=False)
    metrics = task.metrics(
        {name: float(value) for name, value in sums.items()}, dataclasses.replace(TEXT, bytes_per_token=1.0)
    )
    assert metrics["bits_per_byte"] == pytest.approx(8)
    assert metrics["perplexity"] == pytest.approx(256, rel=1e-5)


def test_perplexity_of_a_diverged_model_does_not_overflow():
    metrics = LanguageModelling().metrics({"loss": 1e6, "weight": 1.0, "correct": 0.0}, TEXT)
    assert math.isfinite(metrics["perplexity"])
    assert math.isnan(
        LanguageModelling().metrics({"loss": math.nan, "weight": 1.0, "correct": 0.0}, TEXT)["perplexity"]
    )


def test_predictions_are_probabilities():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5))
    for task in (Classification(), LanguageModelling()):
        made = task.predictions(jnp.asarray(logits, jnp.bfloat16))
        assert made.dtype == jnp.float32
        np.testing.assert_allclose(made, np.exp(numpy_log_softmax(logits)), atol=5e-3)
