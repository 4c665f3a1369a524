"""`JaxdlClassifier` and `JaxdlClassifierModel`: an Estimator of `pyspark.ml`, and the Model that it fits."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark import keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.core.files import SPARK_FOLDER
from jaxdl.core.runs import check_run
from jaxdl.data import Table
from jaxdl.inference.predictor import data_spec_of
from jaxdl.platform.spark.distributor import JaxDistributor
from jaxdl.platform.spark.fitting import (
    check_overrides,
    check_workdir,
    data_of,
    hold_workdir,
    metrics_of,
    workdir_of_fit,
    write_experiment,
)
from jaxdl.platform.spark.frames import (
    IMAGE,
    are_valid,
    as_trained,
    check_columns,
    check_new,
    feature_columns,
    form_of,
    takes_gaps,
    write_rows,
)
from jaxdl.platform.spark.params import ClassifierParams, ScoringParams
from jaxdl.platform.spark.rows import SPLITS
from jaxdl.platform.spark.udf import check_batch_size, score_udf
from jaxdl.training.experiment import load

_SCORES = "_jaxdl_scores"
"""The column of all that is scored, while it is taken apart."""
_OF_MODEL = (
    "featuresCol", "workdir", "batchSize", "predictionCol", "probabilityCol", "rawPredictionCol", "handleInvalid",
)  # fmt: skip
"""The parameters that a Model takes over from its Estimator."""
_DEFAULTS = {
    "featuresCol": "features",
    "batchSize": 256,
    "predictionCol": "prediction",
    "probabilityCol": "probability",
    "rawPredictionCol": "rawPrediction",
    "handleInvalid": "error",
}


class JaxdlClassifier(Estimator, ClassifierParams, DefaultParamsReadable, DefaultParamsWritable):
    """Trains an experiment of jaxdl on a DataFrame, in a barrier job of `numProcesses` tasks.

        clf = JaxdlClassifier(config="configs/leopards.py", featuresCol="image", labelCol="label", numProcesses=4,
                              gpusPerProcess=8, workdir="/shared/runs/leo", overrides={"epochs": 3})
        model = Pipeline(stages=[indexer, clf]).fit(train_df)

    `fit` writes the rows to Parquet files in the workdir and trains on these, so the order of the data is jaxdl's: a
    function of seed and step. The same `fit` again resumes a run that was stopped, and returns the model of one that
    has ended. Rows whose `validationIndicatorCol` is true are held out; without one it is a fifth of each class.

    The parameters are those of `explainParams()`, each with a setter and a getter. `workdir` must be the same folder
    for the driver and all executors. A workdir has one run: the fits of a list of parameter maps, and so those of
    `CrossValidator` and `TrainValidationSplit`, train in folders below it. When these tune a Pipeline, which hides the
    parameter maps, set `workdirPerFit`.
    """

    @keyword_only
    def __init__(
        self,
        *,
        config: str | None = None,
        featuresCol: str | list[str] = "features",
        labelCol: str = "label",
        validationIndicatorCol: str | None = None,
        numProcesses: int = 1,
        gpusPerProcess: int = 0,
        workdir: str | None = None,
        overrides: dict[str, Any] | None = None,
        batchSize: int = 256,
        rowGroupRows: int = 0,
        workdirPerFit: bool = False,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        handleInvalid: str = "error",
    ) -> None:
        super().__init__()
        self._setDefault(**_DEFAULTS, labelCol="label", numProcesses=1, gpusPerProcess=0, overrides={}, rowGroupRows=0)
        self._setDefault(workdirPerFit=False)
        self._set(**self._input_kwargs)

    @without_frames
    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """The Model; a list of them for a list of `params`. See the class.

        Raises ConfigError for columns, labels, settings and workdirs that cannot be trained with, and
        `jaxdl.platform.spark.ProcessFailed` when the training fails.
        """
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(place of a parameter map, Model) of each, trained in a folder of its own; see `Estimator.fitMultiple`."""
        return super().fitMultiple(
            dataset,
            [
                param_map if self.workdir in param_map else {self.workdirPerFit: True, **param_map}
                for param_map in paramMaps
            ],
        )

    def _fit(self, dataset: DataFrame) -> JaxdlClassifierModel:
        config, workdir = self.getConfig(), Path(self.getWorkdir())
        processes, gpus = self.getNumProcesses(), self.getGpusPerProcess()
        group_rows, features = self.getRowGroupRows(), self.features
        check_batch_size(self.getBatchSize())
        form = form_of(dataset, features)
        check_columns(dataset, [self.getLabelCol()], "labelCol")
        experiment = load(config, self.getOverrides(), gpus=gpus > 0)
        form = "table" if form == "numbers" and experiment.data.kind == Table.kind else form
        names = [IMAGE] if form == "images" else features
        check_overrides(self.getOverrides(), experiment, data_of(experiment.data, form, (), (), names, None))
        distributor = JaxDistributor(processes, local_mode=False, use_gpu=gpus > 0)
        distributor.check(gpus or None)
        if not self.getWorkdirPerFit():
            check_workdir(workdir, experiment, with_data=False)
        held_out = self.getValidationIndicatorCol() if self.isSet(self.validationIndicatorCol) else ""
        folder, written = write_rows(
            dataset, features, self.getLabelCol(), held_out, workdir / SPARK_FOLDER, group_rows or None, form
        )
        if held_out and not any(file.split == SPLITS[1] for file in written):
            raise ConfigError(
                f"validationIndicatorCol={held_out!r}: it is true in no row, so none would be held out. Choose some "
                "rows, or leave it out: then a fifth of each class is."
            )
        train, test = (sorted(map(str, folder.glob(f"{split}-*.parquet"))) for split in ("train", "test"))
        num_classes = max(2, *(file.num_classes for file in written))
        data = data_of(experiment.data, form, train, test, names, num_classes)
        experiment = experiment.replaced({"data": data})
        workdir = workdir_of_fit(workdir, experiment) if self.getWorkdirPerFit() else workdir
        with hold_workdir(workdir):
            check_workdir(workdir, experiment, with_data=True)
            distributor.run("jaxdl.train", "--config", write_experiment(workdir, experiment), "--workdir", workdir)
        model = JaxdlClassifierModel()
        self._copyValues(model._set(**{name: self.getOrDefault(name) for name in _OF_MODEL}))
        return model._set(workdir=str(workdir))  # Absolute: it may be saved, and loaded elsewhere.


class JaxdlClassifierModel(Model, ScoringParams, DefaultParamsReadable, DefaultParamsWritable):
    """A trained classifier: `transform` adds prediction, probability and rawPrediction.

    As the classifiers of `pyspark.ml` do, and as its evaluators expect: prediction is the class number as a double,
    probability and rawPrediction are vectors `[numClasses]` (`VectorUDT`), of the probabilities and of the logits. In
    Spark a row has no number, so an error about a null, NaN or damaged image ends the job and names column and value.
    With `handleInvalid="skip"` rows with null, NaN or infinity are left out, with "keep" their scores are NaN.

    Its network stays in the workdir, and `save` keeps the parameters of this object alone. It can be made for any
    workdir of a classifier that jaxdl trained: `JaxdlClassifierModel(workdir=..., featuresCol="image")`. A column whose
    name is empty is left out.
    """

    @keyword_only
    def __init__(
        self,
        *,
        workdir: str | None = None,
        featuresCol: str | list[str] = "features",
        batchSize: int = 256,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        handleInvalid: str = "error",
    ) -> None:
        super().__init__()
        self._setDefault(**_DEFAULTS)
        self._set(**self._input_kwargs)

    @property
    def numClasses(self) -> int:
        """The number of classes. Raises ConfigError for a workdir without a run, and for a network of another task."""
        num_classes = data_spec_of(check_run(self.getWorkdir())).sizes().get("num_classes")
        if num_classes is None:
            raise ConfigError(f"workdir {self.getWorkdir()}: its network has no classes. Give that of a classifier.")
        return num_classes

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers, of a table with words; else empty."""
        return data_spec_of(check_run(self.getWorkdir())).class_names

    @property
    def metrics(self) -> dict[str, Any]:
        """The last evaluation of the run: loss, accuracy... on the held-out rows."""
        return metrics_of(self.getWorkdir())

    @without_frames
    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """The DataFrame with the columns of the scores. Raises ConfigError for columns and workdirs that do not fit."""
        return super().transform(dataset, params)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        made = {name: self.getOrDefault(name) for name in ("rawPredictionCol", "probabilityCol", "predictionCol")}
        check_new(dataset, made)
        features = as_trained(dataset, self.features, self.getWorkdir())
        handling, batch_size = self.getHandleInvalid(), check_batch_size(self.getBatchSize())
        skips = handling == "skip" and not takes_gaps(self.getWorkdir())
        dataset = dataset.filter(are_valid(dataset, features)) if skips else dataset
        score = score_udf(self.getWorkdir(), features, batch_size, handling)
        scored = dataset.withColumn(_SCORES, score(*feature_columns(dataset, features)))
        raw, probability, prediction = made.values()
        columns = {
            raw: array_to_vector(F.col(f"{_SCORES}.rawPrediction")),
            probability: array_to_vector(F.col(f"{_SCORES}.probability")),
            prediction: F.col(f"{_SCORES}.prediction"),
        }
        return scored.withColumns({name: column for name, column in columns.items() if name}).drop(_SCORES)
