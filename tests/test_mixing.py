"""Mixup and CutMix: pixels and labels in equal shares, on the device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import stats

from jaxdl.core.config import ConfigError
from jaxdl.training.tasks import Classification

BATCH, SIDE = 400, 16


def batch():
    """Each image is of one grey level, so that a mixture shows its shares."""
    levels = jnp.where(jnp.arange(BATCH) % 2 == 0, 0, 200).astype(jnp.uint8)
    image = jnp.broadcast_to(levels[:, None, None, None], (BATCH, SIDE, SIDE, 3))
    return {"image": image, "label": jnp.arange(BATCH) % 10}


def mixed(**fields):
    return jax.jit(Classification(**fields).augmented)(batch(), jax.random.key(0))


def shown_shares(found):
    """The share of the own image that the pixels show."""
    level = np.asarray(found["image"], np.float64).mean((1, 2, 3)) / 200
    return np.where(np.arange(BATCH) % 2 == 0, 1 - level, level)


@pytest.mark.parametrize("fields", [{"mixup": 0.3}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_labels_have_the_shares_of_the_pixels(fields):
    found = mixed(**fields)
    assert found["image"].dtype == jnp.uint8
    np.testing.assert_allclose(found["share"], shown_shares(found), atol=0.006)
    assert np.array_equal(found["other"], np.asarray(found["label"]).reshape(-1, 2)[:, ::-1].ravel())
    assert np.array_equal(found["share"][::2], found["share"][1::2]), "both of a pair alike"


@pytest.mark.parametrize("alpha", [pytest.param(0.4, marks=pytest.mark.slow), 1.0])
def test_shares_of_mixup_are_beta_distributed(alpha):
    many = {"image": jnp.zeros((20_000, 1, 1, 1), jnp.uint8), "label": jnp.zeros(20_000, jnp.int32)}
    shares = np.asarray(Classification(mixup=alpha).augmented(many, jax.random.key(0))["share"])[::2]
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_devices_mix_without_each_other():
    """No loop, such as one until all have drawn their numbers, waits for other devices."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("replica",)), PartitionSpec("replica"))
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in batch().items()}
    augmented = jax.jit(Classification(mixup=0.2, cutmix=1.0).augmented)
    text = augmented.lower(shapes, jax.random.key(0)).compile().as_text()
    assert not re.search(r"all-reduce|all-gather|collective-permute|all-to-all", text)


def test_cutmix_takes_rectangles():
    found = mixed(cutmix=1.0)
    assert set(np.unique(found["image"])) == {0, 200}, "no pixel is blended"
    foreign = np.asarray(found["image"])[::2, ..., 0] == 200
    for one in foreign:
        rows, columns = one.any(1), one.any(0)
        assert np.array_equal(one, rows[:, None] & columns)
    areas = foreign.mean((1, 2))
    assert (areas == 0).mean() < 0.1
    assert areas.max() > 0.6


def test_with_both_each_pair_gets_one():
    found = np.asarray(mixed(mixup=1.0, cutmix=1.0)["image"])[::2]
    cut = np.array([set(np.unique(one)) <= {0, 200} for one in found])
    assert 0.3 < cut.mean() < 0.7
    assert all(len(np.unique(one)) == 1 for one in found[~cut])


@pytest.mark.slow
def test_the_loss_is_the_mean_over_both_labels():
    task = Classification(mixup=0.5, label_smoothing=0.1)
    found = task.augmented(batch(), jax.random.key(1))
    logits = np.random.default_rng(2).normal(size=(BATCH, 10)).astype(np.float32)
    sums = jax.jit(task.sums, static_argnames="train")
    shifted = logits.astype(np.float64)
    log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    one, two = (
        -((0.9 * np.eye(10)[np.asarray(labels)] + 0.01) * log_probability).sum(axis=1)
        for labels in (found["label"], found["other"])
    )
    share = np.asarray(found["share"], np.float64)
    wanted = share * one + (1 - share) * two
    assert float(sums(logits, found, train=True)["loss"]) == pytest.approx(wanted.sum(), rel=1e-5)
    assert not np.isclose(one.sum(), two.sum())
    evaluated = [float(sums(logits, batch, train=False)["loss"]) for batch in (found, {"label": found["label"]})]
    assert evaluated[0] == pytest.approx(evaluated[1]), "in training only"


def test_an_odd_batch_is_refused():
    odd = {name: value[:3] for name, value in batch().items()}
    with pytest.raises(ConfigError, match="batch of 3: mixup and cutmix pair the examples, so it must be even"):
        Classification(mixup=0.2).augmented(odd, jax.random.key(0))
