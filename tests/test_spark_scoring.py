"""The scores of a network in Spark, without a session."""

import numpy as np
import pyarrow
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.platform.spark.scoring import lists_of, newest, score_batches, scorer


def test_the_newest_checkpoint_is_found_from_any_working_directory(tiny_run, monkeypatch):
    wanted, workdir = newest(tiny_run.workdir), tiny_run.workdir
    monkeypatch.setenv("HOME", str(workdir.parent))
    monkeypatch.chdir(workdir.parent)
    assert newest(f"~/{workdir.name}") == newest(workdir.name) == wanted
    assert wanted.workdir == str(workdir)
    with pytest.raises(ConfigError, match="empty"):
        newest("")


def test_scores_are_those_of_the_predictor(tiny_run):
    images = tiny_run.plan.splits.test.batch(np.arange(11))["image"]
    column = pyarrow.array([one.tolist() for one in images])
    scorer.cache_clear()
    found = list(
        score_batches(newest(tiny_run.workdir), 4, iter([[column.slice(0, 7)], [column.slice(7)], [column.slice(11)]]))
    )
    assert [len(one) for one in found] == [7, 4, 0]
    predictor = jaxdl.restore(tiny_run.workdir)
    logits = np.concatenate([np.array(one.field("rawPrediction").to_pylist()).reshape(-1, 4) for one in found])
    np.testing.assert_allclose(logits, predictor.logits(images), rtol=1e-5, atol=1e-5)
    probability = np.concatenate([np.array(one.field("probability").to_pylist()).reshape(-1, 4) for one in found])
    np.testing.assert_allclose(probability, predictor.predict(images), rtol=1e-5, atol=1e-6)
    prediction = np.concatenate([one.field("prediction").to_numpy() for one in found])
    np.testing.assert_array_equal(prediction, logits.argmax(axis=1))
    network = scorer(newest(tiny_run.workdir), 4)
    assert network.predictor._logits._cache_size() == 1, "one program, for every batch is padded to one size"
    assert scorer.cache_info().misses == 1, "the network is loaded once"
    features = network.features([column], "stage1", pool=True)
    np.testing.assert_allclose(features, predictor.features(images, "stage1"), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="featuresCol: a row has null"):
        network.logits([pyarrow.array([images[0].tolist(), None])])
    with pytest.raises(ConfigError, match="an image is 2 x 2 x 1; the network was trained on 8 x 8 x 1"):
        network.logits([pyarrow.array([[[1, 2], [3, 4]]])])
    with pytest.raises(ConfigError, match="featuresCol: an image: it cannot be read"):
        network.logits([pyarrow.array([b"no image"])])


def test_lists_of_arrow():
    assert lists_of(np.arange(6).reshape(3, 2)).to_pylist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert lists_of(np.zeros((0, 2))).to_pylist() == []
    assert lists_of(np.arange(2)).to_pylist() == [[0.0], [1.0]]
