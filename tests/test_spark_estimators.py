"""Regressions, classifiers of texts, weights, rows that are not used, tuned and saved Pipelines, in one Spark session.

These tests need pyspark (pip install 'jaxdl[spark]') and Java. What is scored in Spark is compared with
`jaxdl.restore(...)` on the same rows, and metrics with Spark's evaluators.
"""

import datetime
import json
import os
import time

import numpy as np
import pyarrow.parquet
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.inference.score.__main__ import main as score

pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")

from pyspark.errors import PythonException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import functions as F
from spark_session import session

from jaxdl.platform.spark import (
    JaxdlClassifier,
    JaxdlClassifierModel,
    JaxdlFeaturizer,
    JaxdlRegressionModel,
    JaxdlRegressor,
    JaxdlTextClassifier,
    JaxdlTextClassifierModel,
    predictor_udf,
)

pytestmark = [pytest.mark.slow, pytest.mark.long("each Python stage of Spark starts processes")]

CONFIG = """
from jaxdl.data import LabelledTexts, Table, Tabular
from jaxdl.models import Encoder, Perceptron, TableMLP
from jaxdl.optim import AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification, TableTask


def made(data, model, task, **changes):
    return Experiment(
        data=data, model=model, task=task, optimizer=AdamW(learning_rate=1e-2), schedule=Constant(), batch_size=32,
        mesh=MeshConfig(replica=-1, fsdp=1, cpu_devices=1), report=ReportConfig(tensorboard=False, curves=False),
        **({"steps": 60} | changes),
    )


def table():
    return made(Table(), TableMLP(units=(16,), frequencies=4), TableTask())


def numbers():
    return made(Tabular(), Perceptron(units=(8,)), Classification())


def texts():
    model = Encoder(num_layers=1, embed_dim=16, num_heads=2, max_length=48, dropout=0.0)
    return made(LabelledTexts(length=48), model, Classification())
"""
ROWS = 160
FEATURES = ["street", "area", "built", "sold", "rooms", "code"]


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    # Another zone than that of the driver: times are the same moments in both.
    zone, os.environ["TZ"] = os.environ.get("TZ"), "America/New_York"
    time.tzset()
    with session(tmp_path_factory.mktemp("spark")) as found:
        found.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
        yield found
    os.environ.pop("TZ")
    os.environ |= {} if zone is None else {"TZ": zone}
    time.tzset()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "small.py").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def houses(spark):
    """Houses: words, numbers with gaps, a date, a moment; their price follows from these, and so does the kind."""
    random = np.random.default_rng(0)
    streets = np.array(["Main Street", "Park Lane", "Short Way"])[random.integers(0, 3, ROWS)]
    area, rooms = random.uniform(30, 200, ROWS), random.integers(1, 9, ROWS)
    start, moment = datetime.date(1950, 1, 1), datetime.datetime(2020, 3, 28, 22, 30, tzinfo=datetime.UTC)
    rows = []
    for i in range(ROWS):
        price = 1000 + 20 * area[i] + 300 * (streets[i] == "Park Lane")
        rows.append((
            i, str(streets[i]) if i % 11 else None, float(area[i]) if i % 7 else None,
            start + datetime.timedelta(days=int(random.integers(0, 20000))),
            moment + datetime.timedelta(minutes=int(random.integers(0, 600000))) if i % 13 else None,
            int(rooms[i]) if i % 5 else None, bool(random.integers(0, 2)) if i % 6 else None, float(price),
            "dear" if price > 3300 else "cheap", float(random.integers(0, 4)), i % 4 == 0,
        ))  # fmt: skip
    kinds = "i int, street string, area double, built date, sold timestamp, rooms int, code boolean, price double, "
    return spark.createDataFrame(rows, kinds + "kind string, w double, held boolean").repartition(2).cache()


def of_config(place, name, workdir, **changes):
    values = {"config": f"{place}/small.py:{name}", "workdir": str(place / workdir)}
    return values | {"validationIndicatorCol": "held"} | changes


@pytest.fixture(scope="module")
def priced(place, houses):
    """A Pipeline with a regression, fitted with weights."""
    values = of_config(place, "table", "prices", featuresCol=FEATURES, labelCol="price", weightCol="w")
    return Pipeline(stages=[JaxdlRegressor(**values)]).fit(houses)


def files_of(place, workdir, split):
    """The files of a split that `fit` wrote."""
    experiment = json.loads((place / workdir / "spark" / "experiment.json").read_text())
    return experiment["data"][{"train": "file"}.get(split, split)]


def test_a_regression_is_measured_as_spark_does(priced, place, houses):
    model, held = priced.stages[0], houses.filter("held")
    scored = priced.transform(held).cache()
    assert scored.columns == [*houses.columns, "prediction"]
    for name in ("rmse", "mae"):
        evaluator = RegressionEvaluator(labelCol="price", metricName=name, weightCol="w")
        assert evaluator.evaluate(scored) == pytest.approx(model.metrics[name], rel=1e-4), name
        assert evaluator.setWeightCol("i").evaluate(scored) != pytest.approx(model.metrics[name], rel=1e-3)
    # Spark's weighted r2 is another one: it divides the variance by two different sums of weights.
    rows = scored.select("price", "prediction", "w").collect()
    price, prediction, weights = (np.array([row[name] for row in rows]) for name in ("price", "prediction", "w"))
    rest = np.average((price - prediction) ** 2, weights=weights)
    spread = np.average((price - np.average(price, weights=weights)) ** 2, weights=weights)
    assert 0.5 < model.metrics["r2"] == pytest.approx(1 - rest / spread, rel=1e-4)
    best = jaxdl.restore(place / "prices", step="best").step
    measured = [json.loads(line) for line in (place / "prices" / "metrics.jsonl").read_text().splitlines()]
    errors = {row["step"]: row["eval/rmse"] for row in measured if "eval/rmse" in row}
    assert len(errors) > 1
    assert model.copy({model.checkpoint: "best"}).metrics["rmse"] == errors[best]
    predictor = jaxdl.restore(place / "prices")
    assert model.rows["heldOut"] == ROWS // 4
    every = np.concatenate([predictor.predict(path) for path in files_of(place, "prices", "test")])
    np.testing.assert_allclose(sorted(row.prediction for row in scored.collect()), np.sort(every), rtol=1e-5)


def test_a_pipeline_with_a_regression_is_saved_and_loaded(priced, place, houses):
    few = houses.filter("i < 20").orderBy("i")
    wanted = [row.prediction for row in priced.transform(few).collect()]
    priced.write().overwrite().save(str(place / "saved"))
    again = PipelineModel.load(str(place / "saved"))
    assert isinstance(again.stages[0], JaxdlRegressionModel)
    assert [row.prediction for row in again.transform(few).collect()] == wanted
    assert again.stages[0].metrics == priced.stages[0].metrics
    with pytest.raises(PythonException, match=r"predicts classes|is no classifier"):
        JaxdlClassifierModel(workdir=str(place / "prices"), featuresCol=FEATURES).transform(few).collect()
    with pytest.raises(ConfigError, match="its network has no classes"):
        _ = JaxdlClassifierModel(workdir=str(place / "prices")).numClasses


def test_a_fit_with_words_is_what_score_says(place, houses, tmp_path):
    """Labels of words, as the command finds them in the files of the same rows."""
    clf = JaxdlClassifier(**of_config(place, "table", "kinds", featuresCol=FEATURES, labelCol="kind"))
    model = clf.fit(houses)
    assert model.labels == ("cheap", "dear")
    paths = files_of(place, "kinds", "test")
    found = [jaxdl.restore(place / "kinds").predict_probabilities(path) for path in paths]
    scored = model.transform(houses.filter("held")).select("probability", "prediction", "kind").collect()
    np.testing.assert_allclose(
        sorted(row.probability[0] for row in scored), np.sort(np.concatenate(found)[:, 0]), atol=1e-5
    )
    accuracy = np.mean([model.labels[int(row.prediction)] == row.kind for row in scored])
    assert accuracy == pytest.approx(model.metrics["accuracy"], abs=1e-6)
    tables = [word for path in paths for word in ("--table", path)]
    score(["--workdir", str(place / "kinds"), *tables, "--to", str(tmp_path / "scores.json")])
    results = list(json.loads((tmp_path / "scores.json").read_text())["table"].values())
    rows = [pyarrow.parquet.read_metadata(path).num_rows for path in paths]
    accuracies = [result["accuracy"] for result in results]
    assert np.average(accuracies, weights=rows) == pytest.approx(model.metrics["accuracy"])


def test_weights_count_as_in_sparks_evaluators(place, houses):
    rows = houses.withColumn("y", (F.col("kind") == "dear").cast("int")).na.fill(0.0)
    values = of_config(place, "numbers", "weighted", featuresCol=["area", "rooms"], labelCol="y", weightCol="w")
    model = JaxdlClassifier(**values).fit(rows.na.fill(0))
    scored = model.transform(rows.na.fill(0).filter("held")).cache()
    for name, of_spark in (("accuracy", "accuracy"), ("loss", "logLoss")):
        evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName=of_spark, weightCol="w")
        assert evaluator.evaluate(scored) == pytest.approx(model.metrics[name], rel=1e-5)
        assert evaluator.setWeightCol("i").evaluate(scored) != pytest.approx(model.metrics[name], rel=1e-4)


def test_rows_that_cannot_be_trained_on_are_counted_and_named(place, houses):
    rows = houses.withColumn("y", (F.col("kind") == "dear").cast("int"))
    rows = rows.withColumn("y", F.expr("if(i = 3, null, y)")).withColumn("w", F.expr("if(i = 4, null, w)"))
    values = of_config(place, "numbers", "skips", featuresCol=["area"], labelCol="y", weightCol="w")
    with pytest.raises(ConfigError, match=r"column 'area': a row has null"):
        JaxdlClassifier(**values).fit(rows)
    gaps = houses.filter("area is null").count()
    with pytest.warns(UserWarning, match=rf"fit: {gaps + 2} of {ROWS} rows are not used: .*'y'.*'w'.*'area'"):
        model = JaxdlClassifier(**values, handleInvalid="skip").fit(rows)
    assert model.rows["notUsed"] == {
        "null, NaN or infinity in 'area'": gaps, "no label in 'y'": 1, "no weight in 'w'": 1,
    }  # fmt: skip
    assert model.rows["train"] + model.rows["heldOut"] == ROWS - gaps - 2
    assert model.countInvalid(rows) == {"area": gaps}
    assert model.transform(rows).count() == ROWS - gaps
    kept = model.copy({model.handleInvalid: "keep"}).transform(rows).select("i", "area", "prediction").collect()
    assert [row.i for row in kept if np.isnan(row.prediction)] == [row.i for row in kept if row.area is None]


def test_a_run_stops_early_and_its_best_checkpoint_scores(place, houses):
    """Its rate is far too high for the network with which it begins: it soon gets worse."""
    rows = houses.withColumn("y", (F.col("kind") == "dear").cast("int")).na.fill(0.0).na.fill(0)
    columns = {"featuresCol": ["area", "rooms"], "labelCol": "y"}
    first = JaxdlClassifier(**of_config(place, "numbers", "first", **columns)).fit(rows)
    begun = of_config(place, "numbers", "begun", **columns, initFrom=str(place / "first"))
    still = JaxdlClassifier(**begun, overrides={"steps": 1, "optimizer.learning_rate": 1e-9}).fit(rows)
    assert still.metrics["loss"] == pytest.approx(first.metrics["loss"], rel=1e-4)
    overrides = {"steps": 500, "evaluation.every_steps": 5, "optimizer.learning_rate": 0.3}
    values = begun | {"workdir": str(place / "stops"), "earlyStoppingRounds": 3, "overrides": overrides}
    model = JaxdlClassifier(**values).fit(rows)
    measured = [json.loads(line) for line in (place / "stops" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in measured if "eval/accuracy" in row]
    best = int(np.argmax([row["eval/accuracy"] for row in evaluated]))
    assert len(evaluated) == best + 4, "three evaluations after the best"
    assert measured[-1]["step"] < 500
    held = rows.filter("held").orderBy("i")
    scores = {}
    for which in ("best", "newest"):
        given = JaxdlClassifierModel(workdir=str(place / "stops"), featuresCol=["area", "rooms"], checkpoint=which)
        scores[which] = [row.probability for row in given.transform(held).collect()]
    assert [row.probability for row in model.transform(held).collect()] == scores["best"] != scores["newest"]
    assert model.metrics["accuracy"] == pytest.approx(evaluated[best]["eval/accuracy"])
    truth = [row.y for row in held.select("y").collect()]
    found = -np.mean(np.log([p[y] for p, y in zip(scores["best"], truth, strict=True)]))
    assert found == pytest.approx(evaluated[best]["eval/loss"], rel=1e-4)


@pytest.fixture(scope="module")
def reviews(spark):
    words, random = ["good", "bad", "film", "book", "long", "short"], np.random.default_rng(1)
    rows = []
    for i in range(120):
        text = " ".join(random.choice(words[2:], size=random.integers(1, 6)))
        rows.append((i, f"{text} {words[i % 2]}", words[i % 2], i % 5 == 0, 1.0 + i % 2))
    return spark.createDataFrame(rows, "i int, review string, mood string, held boolean, w double").coalesce(1).cache()


def test_texts(place, reviews, spark):
    values = of_config(place, "texts", "reviews", textCol="review", labelCol="mood", weightCol="w", maxTokenLen=32)
    fitted = Pipeline(stages=[JaxdlTextClassifier(**values)]).fit(reviews)
    model, held = fitted.stages[0], reviews.filter("held").orderBy("i")
    assert (model.labels, model.getTextCol(), model.numClasses) == (("bad", "good"), "review", 2)
    scored, predictor = fitted.transform(held).collect(), jaxdl.restore(place / "reviews")
    assert predictor.experiment.data.length == 32
    texts = [row.review for row in scored]
    wanted = [one.probabilities for one in predictor.predict(texts)]
    np.testing.assert_allclose([row.probability.toArray() for row in scored], wanted, atol=1e-6)
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in scored], predictor.logits(texts), atol=1e-5)
    truth = [model.labels[int(row.prediction)] == row.mood for row in scored]
    weights = [row.w for row in scored]
    assert np.average(truth, weights=weights) == pytest.approx(model.metrics["accuracy"], abs=1e-6)
    fitted.write().overwrite().save(str(place / "texts"))
    again = PipelineModel.load(str(place / "texts"))
    assert isinstance(again.stages[0], JaxdlTextClassifierModel)
    assert [row.probability for row in again.transform(held).collect()] == [row.probability for row in scored]
    udf = predictor_udf(place / "reviews")
    np.testing.assert_allclose([row.y for row in held.select(udf("review").alias("y")).collect()], wanted, atol=1e-6)

    some = spark.createDataFrame([(0, "a good film"), (1, None), (2, "  "), (3, "a bad book")], "i int, review string")
    with pytest.raises(PythonException, match=r"column 'review': a row has no text"):
        model.transform(some).collect()
    assert model.countInvalid(some) == {"review": 2}
    assert [row.i for row in model.copy({model.handleInvalid: "skip"}).transform(some).collect()] == [0, 3]
    kept = model.copy({model.handleInvalid: "keep"}).transform(some).collect()
    assert [bool(np.isnan(row.prediction)) for row in kept] == [False, True, True, False]
    with pytest.raises(ConfigError, match=r"textCol='i': it holds int, not texts"):
        JaxdlTextClassifier(**values | {"textCol": "i"}).fit(reviews)
    # The classifier takes a column of strings where the config is one for texts: the same run, found in its workdir.
    plain = of_config(place, "texts", "reviews", featuresCol="review", labelCol="mood", weightCol="w")
    other = JaxdlClassifier(**plain, overrides={"data.length": 32}, batchSize=64).fit(reviews)
    assert other.metrics == model.metrics
    assert [row.probability for row in other.transform(held).collect()] == [row.probability for row in scored]


def test_a_tuned_pipeline_is_saved_and_loaded(place, houses):
    indexer = StringIndexer(inputCol="kind", outputCol="y")
    clf = JaxdlClassifier(**of_config(place, "table", "tuned", featuresCol=FEATURES, labelCol="y", workdirPerFit=True))
    clf.clear(clf.validationIndicatorCol)
    grid = ParamGridBuilder().addGrid(clf.overrides, [{"steps": 1}, {"steps": 60}]).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="y", metricName="logLoss")
    crossed = CrossValidator(
        estimator=Pipeline(stages=[indexer, clf]), estimatorParamMaps=grid[1:], evaluator=evaluator, numFolds=2, seed=1
    )
    crossed.write().overwrite().save(str(place / "validator"))
    fitted = CrossValidator.load(str(place / "validator")).fit(houses)
    fitted.write().overwrite().save(str(place / "crossed"))
    again = CrossValidatorModel.load(str(place / "crossed"))
    assert again.avgMetrics == fitted.avgMetrics
    found = [[row.probability for row in one.transform(houses).orderBy("i").collect()] for one in (fitted, again)]
    assert found[0] == found[1]
    assert isinstance(again.bestModel.stages[1], JaxdlClassifierModel)
    options = {"estimator": crossed.getEstimator(), "estimatorParamMaps": grid[1:], "evaluator": evaluator, "seed": 1}
    split = TrainValidationSplit(**options).fit(houses)
    split.write().overwrite().save(str(place / "split"))
    loaded = TrainValidationSplitModel.load(str(place / "split"))
    assert loaded.validationMetrics == split.validationMetrics
    assert loaded.bestModel.stages[1].getWorkdir() == fitted.bestModel.stages[1].getWorkdir(), "it is the same fit"


@pytest.mark.parametrize(
    ("made", "changes", "problem"),
    [
        (JaxdlRegressor, {"labelCol": "kind"}, r"labelCol='kind': it holds string, not numbers"),
        (JaxdlRegressor, {"weightCol": "kind"}, r"weightCol='kind': it holds string, not numbers"),
        (JaxdlRegressor, {"weightCol": "price"}, r"weightCol='price': it is another column of the rows"),
        (JaxdlRegressor, {"weightCol": "area"}, r"featuresCol='area': that name is for another column"),
        (JaxdlRegressor, {"weightCol": "heavy"}, r"weightCol='heavy': the DataFrame has no such column"),
        (JaxdlRegressor, {"featuresCol": "image"}, r"it holds images, of which JaxdlRegressor reads none"),
        (JaxdlClassifier, {"featuresCol": "image", "labelCol": "i", "weightCol": "w"}, r"images have no weights"),
        (JaxdlTextClassifier, {"labelCol": "kind", "textCol": "street"}, r"its data are table, not labelled_texts"),
        (JaxdlRegressor, {"checkpoint": "worst", "overrides": {"data.weight": "w"}}, r"data\.weight has no effect"),
    ],
)
def test_a_mistake_is_one_message(place, houses, made, changes, problem):
    features = {} if made is JaxdlTextClassifier else {"featuresCol": ["area", "street"]}
    values = of_config(place, "table", "mistakes", labelCol="price", **features) | changes
    with pytest.raises(ConfigError, match=problem) as error:
        made(**values).fit(houses.withColumn("image", F.lit(b"x")))
    assert "\n" not in str(error.value)


def test_features_of_a_table_with_words(priced, place, houses):
    featurizer = JaxdlFeaturizer(workdir=str(place / "prices"), layer="head", featuresCol=FEATURES)
    rows = featurizer.transform(houses.filter("i < 5")).collect()
    assert {len(row.features) for row in rows} == {1}
