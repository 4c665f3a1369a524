"""Columns of DataFrames: in any order and of any name, and messages that name them as the user does.

These tests need pyspark (pip install 'jaxdl[spark]') and Java; they share one session and one trained model.
"""

import numpy as np
import pytest
from runs import ROOT

from jaxdl.config import ConfigError

pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")

from pyspark.errors import PythonException
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import functions as F
from spark_session import points_of, session

from jaxdl.spark import JaxdlClassifier, JaxdlClassifierModel, JaxdlFeaturizer

pytestmark = [pytest.mark.slow, pytest.mark.long("each Python stage of Spark starts processes")]


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """`points_of`, with a vector `v` of two of the numbers, and names with a dot and brackets."""
    with session(tmp_path_factory.mktemp("spark")) as spark:
        frame = VectorAssembler(inputCols=["a", "b"], outputCol="v").transform(points_of(spark))
        yield frame.withColumns({"c.x": F.col("c"), "v[0]": F.col("a")}).cache()


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
    return classifier(place / "run", ["v", "c.x"]).fit(points)


def predictions(model, frame):
    return np.array([row.prediction for row in model.transform(frame).collect()])


def test_a_vector_among_the_columns_is_found_by_its_name(fitted, place, points):
    wanted = predictions(fitted, points)
    assert 0 < wanted.mean() < 1
    turned = JaxdlClassifierModel(workdir=str(place / "run"), featuresCol=["c.x", "v"])
    np.testing.assert_array_equal(predictions(turned, points), wanted)
    alone = VectorAssembler(inputCols=["v", "c"], outputCol="any").transform(points)
    np.testing.assert_array_equal(predictions(turned.copy({turned.featuresCol: "any"}), alone), wanted)
    with pytest.raises(
        ConfigError, match=r"featuresCol=\['w', 'c.x'\]: the network of .* was trained on v, c\.x\. Give"
    ):
        turned.copy({turned.featuresCol: ["w", "c.x"]}).transform(points.withColumnRenamed("v", "w"))


def test_a_null_while_scoring_is_in_a_column_of_the_user(fitted, points):
    one = points.limit(1).withColumnRenamed("v", "w").withColumn("w", F.lit(None).cast(points.schema["v"].dataType))
    model = fitted.copy({fitted.featuresCol: "w"})
    with pytest.raises(PythonException, match=r"featuresCol: column 'w' is null in a row"):
        model.transform(one).collect()


@pytest.mark.parametrize(
    ("features", "changes", "columns", "problem"),
    [
        ([], {}, {}, r"featuresCol=\[\]: it names no column\. Give one"),
        (["a", "b", "a"], {}, {}, r"featuresCol=\['a', 'b', 'a'\]: 'a' is there twice"),
        (["v", "v[0]"], {}, {}, r"'v\[0\]' is also the name of a number of 'v'"),
        (["v", "c"], {}, {"v": "vector"}, r"column 'v': a row has null"),
        (["a"], {"overrides": {"data.label": "c"}}, {}, r"overrides: data\.label has no effect.*kind tabular"),
        (["a"], {"validationIndicatorCol": "mine"}, {"mine": "boolean"}, r"column 'mine': a row has null"),
    ],
)
def test_a_mistake_names_the_columns_of_the_user(place, points, features, changes, columns, problem):
    types = {"vector": points.schema["v"].dataType}
    frame = points.withColumns({name: F.lit(None).cast(types.get(kind, kind)) for name, kind in columns.items()})
    with pytest.raises(ConfigError, match=problem):
        classifier(place / "mistakes", features, **changes).fit(frame)


def test_no_column_is_overwritten(fitted, place, points):
    again = fitted.copy({fitted.probabilityCol: "", fitted.rawPredictionCol: "", fitted.predictionCol: "KIND"})
    with pytest.raises(ConfigError, match=r"predictionCol='KIND': there is a column of that name\. Choose another"):
        again.transform(points)
    with pytest.raises(ConfigError, match=r"probabilityCol='y': there is a column"):
        fitted.copy({fitted.probabilityCol: "y", fitted.rawPredictionCol: "y"}).transform(points)
    featurizer = JaxdlFeaturizer(workdir=str(place / "run"), layer="head", featuresCol=["v", "c.x"], outputCol="a")
    with pytest.raises(ConfigError, match=r"outputCol='a': there is a column of that name"):
        featurizer.transform(points)
    new = featurizer.setOutputCol("new.y").transform(points)
    assert new.columns == [*points.columns, "new.y"]
