"""`JaxdlClassifier` and `JaxdlClassifierModel`: an Estimator of `pyspark.ml`, and the Model that it fits."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, ClassVar

from pyspark import keyword_only
from pyspark.ml.functions import array_to_vector
from pyspark.sql import Column, DataFrame

from jaxdl.core.config import ConfigError
from jaxdl.core.runs import check_run
from jaxdl.data import Data, LabelledTexts, Table
from jaxdl.inference.predictor import data_spec_of
from jaxdl.platform.spark.estimator import ESTIMATOR_DEFAULTS, JaxdlEstimator
from jaxdl.platform.spark.frames import check_texts, form_of
from jaxdl.platform.spark.invalid import Form
from jaxdl.platform.spark.model import MODEL_DEFAULTS, JaxdlModel, number_of
from jaxdl.platform.spark.params import ProbabilityParams
from jaxdl.platform.spark.udf import score_udf

SCORE_DEFAULTS = {"probabilityCol": "probability", "rawPredictionCol": "rawPrediction"}


class ScoresClasses(JaxdlModel, ProbabilityParams):
    """A Model whose `transform` adds prediction, probability and rawPrediction, as those of `pyspark.ml` do.

    prediction is the class number as a double, probability and rawPrediction are vectors `[numClasses]` (`VectorUDT`),
    of the probabilities and of the logits. A column whose name is empty is left out.
    """

    _outputs: ClassVar[tuple[str, ...]] = ("rawPredictionCol", "probabilityCol", "predictionCol")

    @property
    def numClasses(self) -> int:
        """The number of classes. Raises ConfigError for a workdir without a run, and for a network of another task."""
        num_classes = data_spec_of(check_run(self.getWorkdir())).sizes().get("num_classes")
        if num_classes is None:
            raise ConfigError(f"workdir {self.getWorkdir()}: its network has no classes. Give that of a classifier.")
        return num_classes

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers, of texts and of a table with words; else empty."""
        return data_spec_of(check_run(self.getWorkdir())).class_names

    def _score(self, trained: Any, features: list[str], batch_size: int, handling: str) -> Any:
        return score_udf(trained, features, batch_size, handling)

    def _columns(self, scores: Column) -> dict[str, Column]:
        return {
            "rawPredictionCol": array_to_vector(scores["rawPrediction"]),
            "probabilityCol": array_to_vector(scores["probability"]),
            "predictionCol": number_of(scores["prediction"]),
        }


class JaxdlClassifierModel(ScoresClasses):
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
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(**MODEL_DEFAULTS, **SCORE_DEFAULTS)
        self._set(**self._input_kwargs)


class JaxdlClassifier(JaxdlEstimator, ProbabilityParams):
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

    _model = JaxdlClassifierModel

    @keyword_only
    def __init__(
        self,
        *,
        config: str | None = None,
        featuresCol: str | list[str] = "features",
        labelCol: str = "label",
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        numProcesses: int = 1,
        gpusPerProcess: int = 0,
        workdir: str | None = None,
        overrides: dict[str, Any] | None = None,
        initFrom: str | None = None,
        earlyStoppingRounds: int = 0,
        batchSize: int = 256,
        rowGroupRows: int = 0,
        workdirPerFit: bool = False,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(**ESTIMATOR_DEFAULTS, **SCORE_DEFAULTS)
        self._set(**self._input_kwargs)

    def _form(self, dataset: DataFrame, data: Data) -> Form:
        if data.kind == LabelledTexts.kind:
            check_texts(dataset, self.features)
            return "texts"
        form = form_of(dataset, self.features)
        return "table" if form == "numbers" and data.kind == Table.kind else form
