"""Columns of DataFrames: in any order and of any name, and messages that name them as the user does.

These tests need pyspark (pip install 'jaxdl[spark]') and Java; they share one session and one trained model.
"""

import numpy as np
import pytest
from runs import ROOT

from jaxdl.core.config import ConfigError

pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")

from pyspark.errors import PythonException
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, IntegerType, StructField, StructType
from spark_session import points_of, session

from jaxdl.platform.spark import JaxdlClassifier, JaxdlClassifierModel, JaxdlFeaturizer, predictor_udf

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
        (["a", "b", "a"], {}, {}, r"featuresCol=\['a', 'b', 'a'\]: 'a' is given twice"),
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


@pytest.fixture(scope="module")
def some_invalid(points):
    """Rows of `v`, `c.x` and both in one vector `all`; of six rows every second one has null, NaN or infinity."""
    a, b, x = points.select("a", "b", "c").first()
    vectors = [Vectors.dense(a, b), None, Vectors.sparse(2, {0: a}), Vectors.dense(float("nan"), b),
               Vectors.dense(a, b), Vectors.dense(a, b)]  # fmt: skip
    numbers = [x, x, x, x, x, float("inf")]
    whole = [None if v is None else Vectors.dense(*v.toArray(), n) for v, n in zip(vectors, numbers, strict=True)]
    whole[2] = Vectors.sparse(3, {0: a, 2: x})
    rows = [(i, v, n, w) for i, (v, n, w) in enumerate(zip(vectors, numbers, whole, strict=True))]
    schema = StructType([StructField("i", IntegerType()), StructField("v", VectorUDT()),
                         StructField("c.x", DoubleType()), StructField("all", VectorUDT())])  # fmt: skip
    return points.sparkSession.createDataFrame(rows, schema).coalesce(1)


def test_rows_that_cannot_be_scored(fitted, place, some_invalid):
    """As `handleInvalid` says, in a Model and a featurizer, alike for a vector and for columns."""
    wanted = {row.i: list(row.probability) for row in fitted.transform(some_invalid.filter("i % 2 = 0")).collect()}
    with pytest.raises(PythonException, match=r"is (null|not finite) in a row"):
        fitted.transform(some_invalid).collect()
    for features in (["v", "c.x"], "all"):
        model = fitted.copy({fitted.featuresCol: features})
        skipped = model.setHandleInvalid("skip").transform(some_invalid).collect()
        assert {row.i: list(row.probability) for row in skipped} == wanted
        kept = {row.i: row for row in model.setHandleInvalid("keep").transform(some_invalid).collect()}
        assert {i: list(kept[i].probability) for i in (0, 2, 4)} == wanted
        for i in (1, 3, 5):
            assert np.isnan([*kept[i].probability, *kept[i].rawPrediction, kept[i].prediction]).all()
    featurizer = JaxdlFeaturizer(workdir=str(place / "run"), layer="head", featuresCol="all", handleInvalid="keep")
    found = featurizer.transform(some_invalid).orderBy("i").collect()
    assert [bool(np.isnan(row.features.toArray()).all()) for row in found] == [False, True] * 3
    with pytest.raises(ConfigError, match=r"handleInvalid='drop': give one of 'error', 'skip', 'keep'"):
        model.setHandleInvalid("drop").transform(some_invalid)


def test_a_udf_of_the_vector_that_the_network_was_trained_on(fitted, place, some_invalid):
    wanted = {row.i: list(row.probability) for row in fitted.transform(some_invalid.filter("i % 2 = 0")).collect()}
    run = place / "run"

    def found(columns, **options):
        rows = some_invalid.withColumn("y", predictor_udf(run, **options)(*columns)).collect()
        return {row.i: row.y for row in rows}

    for columns in (["all"], ["v", "`c.x`"]):
        skipped, kept = (found(columns, handleInvalid=how) for how in ("skip", "keep"))
        for i, probabilities in wanted.items():
            np.testing.assert_allclose([skipped[i], kept[i]], [probabilities] * 2, rtol=1e-6)
        assert [skipped[i] for i in (1, 3, 5)] == [None] * 3
        assert np.isnan([kept[i] for i in (1, 3, 5)]).all()
    with pytest.raises(PythonException, match=r"is (null|not finite) in a row"):
        found(["all"])


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
