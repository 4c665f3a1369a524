"""Made-up clicks: functions of their number alone, Zipf's law, a permutation, the AUC of the teacher."""

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from jaxdl.core.config import ConfigError
from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks
from jaxdl.data.tables.clicks import auc_and_loss, shuffle_ids, zipf_rank
from jaxdl.performance.planner.zipf import distinct_rows

SMALL = Clicks(rows=(1000, 50, 3), num_ids=(1, 4, 1), train_examples=3000, test_examples=500)


def test_examples_do_not_depend_on_their_batch():
    source = SMALL.build().train
    whole, some = source.batch(np.arange(3000)), source.batch(np.array([2999, 5, 5, 17]))
    for name, values in some.items():
        np.testing.assert_array_equal(values, whole[name][[2999, 5, 5, 17]])
    assert whole["ids"].shape == (3000, 6)
    np.testing.assert_array_equal(source.ids(np.arange(3000)), whole["ids"])
    assert len(np.unique(whole["ids"][:, 0])) > 100


def test_held_out_examples_and_other_seeds_are_others():
    splits, other = SMALL.build(), SMALL.replaced({"made_seed": 1}).build()
    first = np.arange(100)
    assert not np.array_equal(splits.train.batch(first)["numbers"], splits.test.batch(first)["numbers"])
    assert not np.array_equal(splits.train.batch(first)["ids"], other.train.batch(first)["ids"])
    assert splits.train.content() != other.train.content()


@pytest.mark.parametrize("skew", [0.8, 1.05, 1.2])
def test_ranks_follow_zipf(skew):
    rows, draws = 1000, 400_000
    ranks = zipf_rank((np.arange(draws) + 0.5) / draws, rows, skew)
    count = np.bincount(ranks, minlength=rows)
    edges = np.arange(1, rows + 2, dtype=np.float64)
    expected = np.diff(edges ** (1 - skew)) / (edges[-1] ** (1 - skew) - 1) * draws
    np.testing.assert_allclose(count, expected, atol=1.01)


@pytest.mark.parametrize("rows", [1, 2, 3, 50, 1000, 65_537])
def test_the_permutation_is_one(rows):
    found = shuffle_ids(np.arange(rows), rows, seed=3)
    np.testing.assert_array_equal(np.sort(found), np.arange(rows))
    if rows > 3:
        assert not np.array_equal(found, shuffle_ids(np.arange(rows), rows, seed=4))


def test_the_expected_number_of_distinct_ids():
    draws = 20_000
    drawn = np.random.default_rng(0).random(draws)
    for rows, skew in ((5000, 1.05), (40_000_000, 1.2)):
        assert distinct_rows(rows, draws, skew) == pytest.approx(len(np.unique(zipf_rank(drawn, rows, skew))), rel=0.03)


def test_the_teacher_is_about_as_good_as_models_of_real_clicks():
    area, loss = Clicks(test_examples=40_000).build().test.best(40_000)
    assert 0.78 < area < 0.82
    assert 0.4 < loss < 0.5


@pytest.mark.slow
def test_large_tables_cost_no_memory():
    source = Clicks(rows=CRITEO_ROWS, num_ids=CRITEO_NUM_IDS).build().train
    ids = source.batch(np.arange(200))["ids"]
    assert ids.shape == (200, sum(CRITEO_NUM_IDS))
    assert ids.max() > 10_000_000


def test_auc_and_loss_are_those_of_scikit_learn():
    draw = np.random.default_rng(0)
    predicted, label = draw.integers(1, 20, 500) / 20, draw.integers(0, 2, 500)
    area, loss = auc_and_loss(predicted, label)
    assert area == pytest.approx(roc_auc_score(label, predicted), abs=1e-12)
    assert loss == pytest.approx(log_loss(label, predicted), abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ids": (1, 1)}, "3 features have rows, and 2"),
        ({"rows": (0, 1, 1)}, "each feature has from 1"),
        ({"skew": 1.0}, "the formula fails"),
    ],
)
def test_features_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        SMALL.replaced(changes).build()
