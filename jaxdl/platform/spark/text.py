"""`JaxdlTextClassifier` and `JaxdlTextClassifierModel`: texts with a class each, as SynapseML's DeepTextClassifier."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.sql import DataFrame

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CONFIG_FILE
from jaxdl.core.runs import check_run
from jaxdl.data import Data, LabelledTexts
from jaxdl.platform.spark.classifier import SCORE_DEFAULTS, ScoresClasses
from jaxdl.platform.spark.estimator import ESTIMATOR_DEFAULTS, JaxdlEstimator
from jaxdl.platform.spark.frames import check_texts
from jaxdl.platform.spark.invalid import Form
from jaxdl.platform.spark.model import MODEL_DEFAULTS
from jaxdl.platform.spark.params import ProbabilityParams, ScoringParams, setter
from jaxdl.training.experiment import load_experiment

_AT_ONCE = 64
"""Texts that the network gets at a time by default, as `Predictor.predict` gives it."""


class HasTexts(ScoringParams):
    """The parameters `textCol` and `textPairCol`, in place of `featuresCol`."""

    textCol: Param[str] = Param(
        Params._dummy(), "textCol", "column of the texts, strings", typeConverter=TypeConverters.toString
    )
    textPairCol: Param[str] = Param(
        Params._dummy(),
        "textPairCol",
        "column of the second texts, where the network reads pairs",
        typeConverter=TypeConverters.toString,
    )

    setTextCol = setter("textCol")
    setTextPairCol = setter("textPairCol")

    def getTextCol(self) -> str:
        """The name of the column of texts."""
        return self.getOrDefault(self.textCol)

    def getTextPairCol(self) -> str | None:
        """The name of the column of second texts; None where texts are single."""
        return self.getOrDefault(self.textPairCol) if self.isSet(self.textPairCol) else None

    @property
    def features(self) -> list[str]:
        """The names of the columns of texts."""
        if self.isSet(self.featuresCol):
            raise ConfigError(f"featuresCol={self.getFeaturesCol()!r}: give textCol, the column of texts, instead.")
        pair = self.getTextPairCol()
        return [self.getTextCol()] if pair is None else [self.getTextCol(), pair]


class JaxdlTextClassifierModel(ScoresClasses, HasTexts):
    """A trained classifier of texts: `transform` adds prediction, probability and rawPrediction.

    prediction is the number of a class as a double; `labels` has the names of the classes. Texts that are null, or
    blanks alone, are what `handleInvalid` is about.
    """

    @keyword_only
    def __init__(
        self,
        *,
        workdir: str | None = None,
        textCol: str = "text",
        textPairCol: str | None = None,
        batchSize: int = _AT_ONCE,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(**MODEL_DEFAULTS | SCORE_DEFAULTS | {"batchSize": _AT_ONCE, "textCol": "text"})
        self._set(**self._input_kwargs)


class JaxdlTextClassifier(JaxdlEstimator, ProbabilityParams, HasTexts):
    """Trains a classifier on a column of strings, and labels that are words or whole numbers.

        JaxdlTextClassifier(textCol="review", labelCol="stars", initFrom="runs/bert", maxTokenLen=128,
                            workdir="/shared/runs/reviews", numProcesses=2, gpusPerProcess=4).fit(df)

    `initFrom` is the folder of a converted checkpoint of Hugging Face (`python -m jaxdl.convert from-hf`), whose model,
    tokenizer and parameters are taken; without it the config says what is trained, `text_classification:small` a small
    network from random values. Longer texts than `maxTokenLen` are cut. The other parameters are those of
    `JaxdlClassifier`.
    """

    _model = JaxdlTextClassifierModel

    maxTokenLen: Param[int] = Param(
        Params._dummy(),
        "maxTokenLen",
        "the most tokens of a text, with those around it; 0: as many as the config says",
        typeConverter=TypeConverters.toInt,
    )

    @keyword_only
    def __init__(
        self,
        *,
        config: str = "text_classification",
        textCol: str = "text",
        textPairCol: str | None = None,
        labelCol: str = "label",
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        maxTokenLen: int = 0,
        numProcesses: int = 1,
        gpusPerProcess: int = 0,
        workdir: str | None = None,
        overrides: dict[str, Any] | None = None,
        initFrom: str | None = None,
        earlyStoppingRounds: int = 0,
        batchSize: int = _AT_ONCE,
        rowGroupRows: int = 0,
        workdirPerFit: bool = False,
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        own = {"config": "text_classification", "textCol": "text", "maxTokenLen": 0, "batchSize": _AT_ONCE}
        self._setDefault(**ESTIMATOR_DEFAULTS | SCORE_DEFAULTS | own)
        self._set(**self._input_kwargs)

    setMaxTokenLen = setter("maxTokenLen")

    def getMaxTokenLen(self) -> int:
        """The most tokens of a text, 0 for as many as the config says. Raises ConfigError for fewer than 0."""
        return self._at_least("maxTokenLen", 0)

    def _overrides(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if (initial := self.getInitFrom()) is not None:
            folder = check_run(initial, "initFrom")
            known = load_experiment(folder / CONFIG_FILE)
            tokenizer = getattr(known.data.within(folder), "tokenizer", None)
            fields = {"model": known.model, "data.tokenizer": tokenizer and str(Path(tokenizer).absolute())}
        if length := self.getMaxTokenLen():
            fields["data.length"] = length
        return fields | super()._overrides()

    def _form(self, dataset: DataFrame, data: Data) -> Form:
        if data.kind != LabelledTexts.kind:
            raise ConfigError(
                f"config={self.getConfig()!r}: its data are {data.kind}, not {LabelledTexts.kind}. Give a config for "
                "texts, such as text_classification."
            )
        check_texts(dataset, self.features, "textCol")
        return "texts"
