"""A Spark session: fit with two processes, transform, pipelines, features, UDFs, and what the driver sees of failures.

These tests need pyspark (pip install 'jaxdl[spark]') and Java. Each Python stage of Spark takes seconds to start, so
they share one session and one trained model.
"""

import contextlib
import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import ROOT, Started

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import SUMMARY_FILE
from jaxdl.data import Digits

pytest.importorskip("pyspark", reason="needs pyspark and Java: pip install 'jaxdl[spark]'")

from pyspark.errors import PythonException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F
from spark_session import points_of, session

from jaxdl.platform.spark import (
    JaxDistributor,
    JaxdlClassifier,
    JaxdlClassifierModel,
    JaxdlFeaturizer,
    ProcessFailed,
    predictor_udf,
)

pytestmark = [pytest.mark.slow, pytest.mark.long("each Python stage of Spark starts processes")]

CONFIG = """
from jaxdl.data import ParquetImages
from jaxdl.training.experiment import Experiment
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.models import ResNet
from jaxdl.optim import SGD, Cosine
from jaxdl.report import ReportConfig


def config():
    return Experiment(
        data=ParquetImages(),
        model=ResNet(depth=8, width=8),
        optimizer=SGD(learning_rate=0.2, momentum=0.9),
        schedule=Cosine(warmup_epochs=1),
        batch_size=64,
        epochs=3,
        mesh=MeshConfig(replica=-1, fsdp=1, cpu_devices=1),
        report=ReportConfig(every_steps=10, tensorboard=False, curves=False),
    )
"""


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    with session(tmp_path_factory.mktemp("spark")) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a config file."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "small.py").write_text(CONFIG)
    return folder


def png(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0]).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def digits(spark):
    """The digits as PNG files with their names as labels, a fifth of them held out."""
    splits, rows = Digits().build(), []
    for is_test, source in enumerate((splits.train, splits.test)):
        batch = source.batch(np.arange(len(source)))
        rows += [
            (png(image), f"digit {label}", int(label), bool(is_test))
            for image, label in zip(batch["image"], batch["label"], strict=True)
        ]
    return spark.createDataFrame(rows, "image binary, name string, number int, test boolean").repartition(3).cache()


def classifier(place, name, **changes):
    values = {"config": str(place / "small.py"), "featuresCol": "image", "labelCol": "number", "numProcesses": 2}
    return JaxdlClassifier(**(values | {"validationIndicatorCol": "test", "workdir": str(place / name)} | changes))


@pytest.fixture(scope="module")
def fitted(place, digits):
    """A pipeline that was fitted in two processes."""
    indexer = StringIndexer(inputCol="name", outputCol="label", stringOrderType="alphabetAsc")
    return Pipeline(stages=[indexer, classifier(place, "first", labelCol="label")]).fit(digits)


def test_metrics_are_those_of_the_command_on_the_same_rows(fitted, place):
    metrics = fitted.stages[-1].metrics
    assert metrics["accuracy"] > 0.9
    config, workdir = place / "first" / "spark" / "experiment.json", place / "command"
    process = Started("-m", "jaxdl.train", "--config", str(config), "--workdir", str(workdir), "--devices", "2")
    process.communicate(timeout=300)
    summary = json.loads((workdir / SUMMARY_FILE).read_text())
    assert summary["metrics"] == metrics
    again = [json.loads((place / name / "examples.json").read_text()) for name in ("first", "command")]
    assert again[0] == again[1]


def test_transform_and_a_pipeline_that_is_saved_and_loaded(fitted, place, digits, spark):
    held = digits.filter("test")
    scored = fitted.transform(held).cache()
    assert scored.columns == [*digits.columns, "label", "rawPrediction", "probability", "prediction"]
    rows = scored.orderBy("image").collect()
    accuracy = np.mean([row.prediction == row.number for row in rows])
    assert accuracy == pytest.approx(fitted.stages[-1].metrics["accuracy"], abs=1e-6)
    predictor = jaxdl.restore(place / "first")
    images = np.stack([np.array(Image.open(io.BytesIO(row.image)))[..., None] for row in rows])
    np.testing.assert_allclose([row.probability.toArray() for row in rows], predictor.predict(images), atol=1e-5)
    np.testing.assert_allclose([row.rawPrediction.toArray() for row in rows], predictor.logits(images), atol=1e-4)

    fitted.write().overwrite().save(str(place / "saved"))
    again = PipelineModel.load(str(place / "saved"))
    found = again.transform(held).orderBy("image").select("probability").collect()
    assert [row.probability for row in found] == [row.probability for row in rows]

    udf = predictor_udf(place / "first", batch_size=100)
    found = held.orderBy("image").select(udf("image").alias("y")).collect()
    np.testing.assert_allclose([row.y for row in found], predictor.predict(images), atol=1e-5)

    # The workers of this session have run JAX: training beside them is in processes of its own.
    assert JaxDistributor(2, local_mode=False, use_gpu=False).run(count_processes, 3) == (2, 6, [0, 1])


def count_processes(num_devices):
    import jax
    from jax.experimental import multihost_utils

    from jaxdl.parallel.cluster import start_devices
    from jaxdl.parallel.mesh import MeshConfig

    start_devices(MeshConfig(cpu_devices=num_devices))
    gathered = multihost_utils.process_allgather(np.int32(jax.process_index()))
    return jax.process_count(), jax.device_count(), gathered.tolist()


# Otherwise its pickle names this module, which the processes cannot import.
count_processes.__module__ = "__main__"


def test_features_of_a_layer_feed_another_estimator(fitted, place, digits):
    featurizer = JaxdlFeaturizer(
        workdir=str(place / "first"), layer="stage3", featuresCol="image", outputCol="features"
    )
    train, held = (featurizer.transform(digits.filter(one)) for one in ("not test", "test"))
    first = held.orderBy("image").first()
    image = np.array(Image.open(io.BytesIO(first.image)))[None, ..., None]
    np.testing.assert_allclose([first.features], jaxdl.restore(place / "first").features(image, "stage3"), atol=1e-5)
    model = LogisticRegression(labelCol="number", maxIter=20).fit(train)
    assert model.evaluate(held).accuracy > 0.8
    featurizer.write().overwrite().save(str(place / "featurizer"))
    assert JaxdlFeaturizer.load(str(place / "featurizer")).extractParamMap().values()


def test_params_as_those_of_spark(fitted, place):
    clf = classifier(place, "params", overrides={"epochs": 1})
    other = clf.copy({clf.predictionCol: "p"})
    assert (clf.getPredictionCol(), other.getPredictionCol()) == ("prediction", "p")
    assert "numProcesses: processes that train" in clf.explainParams()
    clf.write().overwrite().save(str(place / "estimator"))
    loaded = JaxdlClassifier.load(str(place / "estimator"))
    assert loaded.getOrDefault("overrides") == {"epochs": 1}
    model = JaxdlClassifierModel(workdir=str(place / "first"), featuresCol="image", probabilityCol="")
    assert model.getProbabilityCol() == ""
    with pytest.raises(TypeError, match="overrides"):
        classifier(place, "params", overrides=[1])


def test_a_table_of_columns_and_of_vectors(place, spark):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    names = [f"c{place}" for place in range(x.shape[1])]
    frame = spark.createDataFrame(
        [(*row.tolist(), float(label)) for row, label in zip(x, y, strict=True)], [*names, "y"]
    )
    values = {"config": "tabular_mlp", "labelCol": "y", "overrides": {"epochs": 5, "schedule.warmup_epochs": 1}}
    columns = JaxdlClassifier(workdir=str(place / "columns"), featuresCol=names, **values).fit(frame)
    assert columns.metrics["accuracy"] > 0.9
    assert columns.getWorkdir() == str(place / "columns")
    turned = JaxdlClassifierModel(workdir=str(place / "columns"), featuresCol=names[::-1])
    few = frame.limit(20)
    assert [row.prediction for row in turned.transform(few).collect()] == [
        row.prediction for row in columns.transform(few).collect()
    ], "columns are found by their names"
    for others, problem in ((names[1:], "was trained on c0, c1"), (["picture"], "they hold images")):
        wrong = JaxdlClassifierModel(workdir=str(place / "columns"), featuresCol=others)
        with pytest.raises(ConfigError, match=problem):
            wrong.transform(few.withColumn("picture", F.lit(b"x")))
    named = frame.withColumnRenamed("c0", "label")
    with pytest.raises(ConfigError, match="that name is for another column"):
        JaxdlClassifier(workdir=str(place / "named"), featuresCol=["label", "c1"], **values).fit(named)
    with pytest.raises(ConfigError, match="it is true in no row"):
        JaxdlClassifier(workdir=str(place / "none"), featuresCol=names, validationIndicatorCol="held", **values).fit(
            frame.withColumn("held", F.lit(False))
        )
    vectors = VectorAssembler(inputCols=names, outputCol="features").transform(frame).select("features", "y")
    model = JaxdlClassifier(workdir=str(place / "vectors"), **values).fit(vectors)
    assert model.metrics == columns.metrics
    scores = [one.transform(rows).agg(F.avg((F.col("prediction") == F.col("y")).cast("double"))).first()[0]
              for one, rows in ((columns, frame), (model, vectors))]  # fmt: skip
    assert scores[0] == scores[1] > 0.9


@pytest.fixture(scope="module")
def points(spark):
    return points_of(spark)


@pytest.fixture(scope="module")
def tuned(place, points):
    """(estimator, parameter maps, evaluator, what TrainValidationSplit found)."""
    changes = {"batch_size": 32, "epochs": 2, "schedule.warmup_epochs": 1, "report.curves": False}
    clf = JaxdlClassifier(config=f"{ROOT}/configs/tabular_mlp.py:logistic", workdir=str(place / "tuned"))
    clf.setFeaturesCol(["a", "b", "c"]).setLabelCol("kind")
    every = [changes | {"optimizer.learning_rate": rate} for rate in (1e-9, 0.5)]
    maps = ParamGridBuilder().addGrid(clf.overrides, every).build()
    loss = MulticlassClassificationEvaluator(labelCol="kind", metricName="logLoss")
    tuning = TrainValidationSplit(estimator=clf, estimatorParamMaps=maps, evaluator=loss, seed=1)
    return clf, maps, loss, tuning.fit(points)


def test_settings_are_tuned_as_those_of_sparks_estimators(tuned, place, points):
    (clf, maps, loss, found), workdir = tuned, place / "tuned"
    assert found.validationMetrics[0] == pytest.approx(np.log(2), abs=1e-3)
    assert found.validationMetrics[1] < 0.5
    assert found.bestModel.getWorkdir() == str(workdir), "the best one is trained on all rows"
    configs = [json.loads(path.read_text()) for path in workdir.glob("fits/*/config.json")]
    assert {one["optimizer"]["learning_rate"] for one in configs} == {1e-9, 0.5}
    again = clf.fit(points, [maps[1] | {clf.workdir: str(workdir)}])
    assert again[0].metrics == found.bestModel.metrics, "a workdir in the parameter map is that of the fit"

    scored = found.bestModel.transform(points)
    rows = scored.collect()
    probability = np.array([row.probability.toArray() for row in rows])
    assert probability.shape == (300, found.bestModel.numClasses) == (300, 2)
    chosen = [p[row.kind] for p, row in zip(probability, rows, strict=True)]
    np.testing.assert_allclose(loss.evaluate(scored), -np.mean(np.log(chosen)), rtol=1e-9)
    accuracy = MulticlassClassificationEvaluator(labelCol="kind", metricName="accuracy")
    assert accuracy.evaluate(scored) == np.mean([row.prediction == row.kind for row in rows]) > 0.9
    assert BinaryClassificationEvaluator(labelCol="kind").evaluate(scored) > 0.95

    pipeline = Pipeline(stages=[clf.copy().setWorkdir(str(place / "crossed")).setWorkdirPerFit(True)])
    crossed = CrossValidator(estimator=pipeline, estimatorParamMaps=maps[1:], evaluator=loss, numFolds=2).fit(points)
    assert crossed.avgMetrics[0] < 0.5
    assert len([*(place / "crossed" / "fits").iterdir()]) == 3, "two folds, and all rows"


def test_scoring_no_rows_and_nulls(fitted, tuned, digits, points):
    model = fitted.stages[-1]
    assert model.transform(digits.limit(0)).select("prediction").collect() == []
    with pytest.raises(PythonException, match=r"featuresCol: a row has null\. Fill it, or drop such rows"):
        model.transform(digits.limit(1).withColumn("image", F.lit(None).cast("binary"))).collect()
    table = tuned[-1].bestModel
    assert table.transform(points.limit(0)).collect() == []
    with pytest.raises(PythonException, match=r"featuresCol: column 'b' is null in a row\. Fill it"):
        table.transform(points.limit(1).withColumn("b", F.lit(None).cast("double"))).collect()
    decimals = points.limit(5).select(*(F.col(name).cast("decimal(12,6)") for name in "abc"))
    found = [
        [row.probability.toArray() for row in table.transform(one).collect()] for one in (decimals, points.limit(5))
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "columns", "problem"),
    [
        ({"featuresCol": "picture"}, {}, r"featuresCol='picture': the DataFrame has no such column; it has image"),
        ({"labelCol": "class"}, {}, r"labelCol='class': the DataFrame has no such column"),
        ({"labelCol": "name"}, {}, r"labelCol='name': it holds string, not whole numbers from 0.*StringIndexer"),
        (
            {"featuresCol": "name"},
            {},
            r"featuresCol=name: it holds words or dates, but model resnet .* reads images",
        ),
        ({}, {"number": "if(number = 3, null, number)"}, r"labelCol: the label 'number' is null in a row"),
        ({}, {"number": "number + 0.5"}, r"labelCol: the label 'number' is \d\.5 in a row"),
        ({}, {"image": "if(number = 3, null, image)"}, r"column 'image': a row has null"),
        ({"workdir": "/proc/no/folder"}, {}, r"workdir /proc/no/folder: .*Choose a writable folder"),
        ({"numProcesses": 3}, {}, r"3 processes: master local\[2\] runs 2 tasks at a time"),
        ({"gpusPerProcess": 1}, {}, r"spark\.task\.resource\.gpu\.amount is not set"),
        ({"config": "nowhere"}, {}, r"nowhere: no such file"),
        ({"overrides": {"batch_sice": 1}}, {}, r"batch_sice: there is no such field.*Did you mean batch_size"),
    ],
)
def test_a_mistake_is_one_message(place, digits, changes, columns, problem):
    frame = digits.selectExpr(*(f"{columns.get(name, name)} as {name}" for name in digits.columns))
    with pytest.raises(ConfigError, match=problem) as error:
        classifier(place, "mistakes", **changes).fit(frame)
    assert "\n" not in str(error.value)


def test_a_workdir_of_another_fit(fitted, place, digits):
    with pytest.raises(ConfigError, match=r"run of another config: batch_size was 64, is 32"):
        classifier(place, "first", labelCol="number", overrides={"batch_size": 32}).fit(digits)
    with pytest.raises(ConfigError, match="has other rows"):
        classifier(place, "first").fit(digits.filter("number < 5"))
    # The same rows, in another order and number of partitions, are the run that is there.
    model = classifier(place, "first").fit(digits.orderBy(F.desc("image")).coalesce(1))
    assert model.metrics == fitted.stages[-1].metrics


def test_a_failing_process_is_one_message_and_not_retried(spark, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('there is no such file', file=sys.stderr); sys.exit(2)\n")
    with pytest.raises(ProcessFailed) as error:
        JaxDistributor(2, local_mode=False, use_gpu=False).run(str(script))
    assert error.value.code == 2
    assert str(error.value).splitlines()[1:] == ["  there is no such file"]
    with pytest.raises(ProcessFailed, match=r"exit code 1 \(an unexpected error\)"):
        JaxDistributor(2, local_mode=True, use_gpu=False).run(lambda: 1 / 0)


def kill_the_task(workdir):
    """Kills the Python process of a task, as Spark or the system does: the parent of what supervises its process."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"jaxdl.platform.spark.supervise" in words and any(str(workdir).encode() in word for word in words):
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                return os.kill(parent, signal.SIGKILL)
    raise AssertionError("no process of a task was found")


def test_a_killed_task_and_a_cancelled_job_save_and_the_next_fit_resumes(place, digits, spark):
    workdir, history = place / "killed", place / "killed" / "metrics.jsonl"

    def fails(end, problem, *, after):
        """A fit that is ended when `after` rows are there; how many steps are saved, as soon as `fit` has raised."""

        def wait_and_end():
            deadline = time.monotonic() + 240
            while not (history.exists() and len(history.read_text().splitlines()) >= after):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)
            end()

        thread = threading.Thread(target=wait_and_end)
        thread.start()
        with pytest.raises(RuntimeError, match=problem) as error:
            classifier(place, "killed", overrides={"epochs": 200}).fit(digits)
        thread.join()
        print(error.value)
        return max(int(path.name.partition("_")[2]) for path in workdir.glob("checkpoints/step_*"))

    told = r"Its processes were told to save: process \d ended with exit code 143"
    first = fails(lambda: kill_the_task(workdir), told, after=1)
    rows = len(history.read_text().splitlines())
    second = fails(spark.sparkContext.cancelAllJobs, rf"cancel.*{told}", after=rows + 5)
    assert 0 < first < second < 4494
    shorter = {"epochs": (second + 30) / (1438 / 64)}
    model = classifier(place, "killed", overrides=shorter).fit(digits)
    assert model.metrics["accuracy"] > 0.5
    resumed = [line for line in history.read_text().splitlines() if "resumed" in str(json.loads(line).get("event"))]
    assert len(resumed) >= 2
