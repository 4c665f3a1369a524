"""`JaxdlModel`: what the Models of a classifier, a regression and a classifier of texts have in common."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, ClassVar

from pyspark.ml import Model
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from jaxdl.core.errors import without_frames
from jaxdl.platform.spark.fitting import counts_of, metrics_of
from jaxdl.platform.spark.frames import are_valid, as_trained, check_new, scored_columns, takes_gaps
from jaxdl.platform.spark.params import ScoringParams
from jaxdl.platform.spark.scoring import newest
from jaxdl.platform.spark.udf import check_batch_size

_SCORES = "_jaxdl_scores"
"""The column of all that is scored, while it is taken apart."""
MODEL_DEFAULTS: dict[str, Any] = {
    "featuresCol": "features",
    "batchSize": 256,
    "predictionCol": "prediction",
    "handleInvalid": "error",
    "checkpoint": "newest",
}


def number_of(prediction: Column) -> Column:
    """A predicted number, NaN of an invalid row; through pandas it comes as null."""
    return F.coalesce(prediction, F.lit(float("nan")))


class JaxdlModel(Model, ScoringParams, DefaultParamsReadable, DefaultParamsWritable):
    """A trained network, which stays in the workdir: `save` keeps the parameters of this object alone."""

    _outputs: ClassVar[tuple[str, ...]] = ("predictionCol",)
    """The parameters that name the columns which `transform` adds, in their order."""

    @property
    def metrics(self) -> dict[str, Any]:
        """The evaluation of the checkpoint that scores: loss, accuracy... on the held-out rows; empty without one."""
        return metrics_of(self.getWorkdir(), self.getCheckpoint())

    @property
    def rows(self) -> dict[str, Any]:
        """How many rows `fit` had: "train", "heldOut" (0: a part of those), and "notUsed", by reason.

        Empty for a run that was not trained by `fit`.
        """
        return counts_of(self.getWorkdir())

    @without_frames
    def countInvalid(self, dataset: DataFrame) -> dict[str, int]:
        """Feature column -> how many rows have null, NaN, infinity or no text there; of a table there are none.

        One job of Spark. With `handleInvalid="skip"` these rows are left out by `transform`.
        """
        features = as_trained(dataset, self.features, self.getWorkdir())
        if takes_gaps(self.getWorkdir()):
            return dict.fromkeys(features, 0)
        numbers = [F.sum((~are_valid(dataset, [name])).cast("long")).alias(f"c{i}") for i, name in enumerate(features)]
        return {name: count or 0 for name, count in zip(features, dataset.agg(*numbers).first(), strict=True)}

    @without_frames
    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """The DataFrame with the columns of the scores. Raises ConfigError for columns and workdirs that do not fit."""
        return super().transform(dataset, params)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        outputs = {name: self.getOrDefault(name) for name in self._outputs}
        check_new(dataset, outputs)
        workdir = self.getWorkdir()
        features = as_trained(dataset, self.features, workdir)
        handling, batch_size = self.getHandleInvalid(), check_batch_size(self.getBatchSize())
        if handling == "skip" and not takes_gaps(workdir):
            dataset = dataset.filter(are_valid(dataset, features))
        score = self._score(newest(workdir, self.getCheckpoint()), features, batch_size, handling)
        scored = dataset.withColumn(_SCORES, score(*scored_columns(dataset, features)))
        columns = self._columns(F.col(_SCORES))
        return scored.withColumns({outputs[name]: columns[name] for name in outputs if outputs[name]}).drop(_SCORES)

    def _score(self, trained: Any, features: list[str], batch_size: int, handling: str) -> Any:
        """The function of feature columns whose value has all scores."""
        raise NotImplementedError

    def _columns(self, scores: Column) -> dict[str, Column]:
        """The columns of the scores, by the parameters that name them."""
        raise NotImplementedError
