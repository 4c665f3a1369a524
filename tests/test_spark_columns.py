"""Columns of DataFrames: in any order and of any name, and messages that name them as the user does.

These tests need pyspark (pip install 'jaxdl[spark]') and Java; they share one session and one trained model.
"""

import numpy as np
import pytest
from runs import ROOT

from jaxdl.config import ConfigError

pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")

from pyspark.ml.feature import VectorAssembler
from spark_session import points_of, session

from jaxdl.spark import JaxdlClassifier, JaxdlClassifierModel

pytestmark = [pytest.mark.slow, pytest.mark.long("each Python stage of Spark starts processes")]


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """`points_of` with a vector `v` of two of the numbers."""
    with session(tmp_path_factory.mktemp("spark")) as spark:
        yield VectorAssembler(inputCols=["a", "b"], outputCol="v").transform(points_of(spark)).cache()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


def classifier(workdir, features, **changes):
    values = {"config": f"{ROOT}/configs/tabular_mlp.py:logistic", "workdir": str(workdir), "featuresCol": features}
    overrides = {"batch_size": 32, "epochs": 2, "schedule.warmup_epochs": 1, "report.curves": False}
    return JaxdlClassifier(**(values | {"labelCol": "kind", "overrides": overrides} | changes))


@pytest.fixture(scope="module")
def fitted(place, points):
    """A model of a vector and a number."""
    return classifier(place / "run", ["v", "c"]).fit(points)


def predictions(model, frame):
    return np.array([row.prediction for row in model.transform(frame).collect()])


def test_a_vector_among_the_columns_is_found_by_its_name(fitted, place, points):
    wanted = predictions(fitted, points)
    assert 0 < wanted.mean() < 1
    turned = JaxdlClassifierModel(workdir=str(place / "run"), featuresCol=["c", "v"])
    np.testing.assert_array_equal(predictions(turned, points), wanted)
    alone = VectorAssembler(inputCols=["v", "c"], outputCol="any").transform(points)
    np.testing.assert_array_equal(predictions(turned.copy({turned.featuresCol: "any"}), alone), wanted)
    with pytest.raises(ConfigError, match=r"featuresCol=\['w', 'c'\]: the network of .* was trained on v, c\. Give"):
        turned.copy({turned.featuresCol: ["w", "c"]}).transform(points.withColumnRenamed("v", "w"))
