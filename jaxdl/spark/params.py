"""The parameters that the Estimator, its Model and the featurizer share, in Spark's names."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasLabelCol,
    HasOutputCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasValidationIndicatorCol,
)

from jaxdl.config import ConfigError

__all__ = [
    "ClassifierParams",
    "HasFeatures",
    "HasLabelCol",
    "HasOutputCol",
    "HasPredictionCol",
    "HasProbabilityCol",
    "HasRawPredictionCol",
    "HasValidationIndicatorCol",
    "HasWorkdir",
    "ScoringParams",
]


def _one_or_several(value: Any) -> Any:
    """A name, or a list of them."""
    return value if isinstance(value, str) else TypeConverters.toListString(value)


def _overrides(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"overrides={value!r}: give a dictionary of dotted fields, {{'optimizer.learning_rate': 0.1}}.")
    return dict(value)


class HasFeatures(Params):
    """The parameter `featuresCol`."""

    featuresCol: Param[Any] = Param(
        Params._dummy(),
        "featuresCol",
        "column of images (files as binary, Spark's image rows, arrays of arrays) or of numbers (a vector, an array); "
        "or the list of numeric columns",
        typeConverter=_one_or_several,
    )

    def getFeaturesCol(self) -> Any:
        """The name, or the list of names."""
        return self.getOrDefault(self.featuresCol)

    @property
    def features(self) -> list[str]:
        """The names of the feature columns."""
        given = self.getFeaturesCol()
        return [given] if isinstance(given, str) else list(given)


class HasWorkdir(Params):
    """The parameters `workdir` and `batchSize`."""

    workdir: Param[str] = Param(
        Params._dummy(),
        "workdir",
        "folder of the run, on a file system that the driver and all executors share",
        typeConverter=TypeConverters.toString,
    )
    batchSize: Param[int] = Param(
        Params._dummy(), "batchSize", "rows that the network gets at a time", typeConverter=TypeConverters.toInt
    )

    def getWorkdir(self) -> str:
        """The folder of the run. Raises ConfigError when it is not set."""
        if not self.isSet(self.workdir):
            raise ConfigError("workdir is not set. Give a folder that the driver and all executors share.")
        return self.getOrDefault(self.workdir)

    def getBatchSize(self) -> int:
        """Rows that the network gets at a time."""
        return self.getOrDefault(self.batchSize)


class ScoringParams(HasFeatures, HasWorkdir, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """What the Estimator and its Model share."""


class ClassifierParams(ScoringParams, HasLabelCol, HasValidationIndicatorCol):
    """The parameters of the Estimator."""

    config: Param[str] = Param(
        Params._dummy(),
        "config",
        "config file of the experiment, or the name of one that comes with jaxdl; the DataFrame replaces its data",
        typeConverter=TypeConverters.toString,
    )
    overrides: Param[dict[str, Any]] = Param(
        Params._dummy(), "overrides", "dotted fields of the experiment with other values", typeConverter=_overrides
    )
    numProcesses: Param[int] = Param(
        Params._dummy(), "numProcesses", "processes that train, a barrier task each", typeConverter=TypeConverters.toInt
    )
    gpusPerProcess: Param[int] = Param(
        Params._dummy(), "gpusPerProcess", "GPUs of each process; 0 trains on CPUs", typeConverter=TypeConverters.toInt
    )
    rowGroupRows: Param[int] = Param(
        Params._dummy(),
        "rowGroupRows",
        "rows of a row group of the Parquet files in the workdir; 0: 16 for images, 4096 for numbers",
        typeConverter=TypeConverters.toInt,
    )

    def checked(self, name: str, least: int) -> int:
        """The whole number of a parameter. Raises ConfigError when it is too small."""
        value = self.getOrDefault(self.getParam(name))
        if value < least:
            raise ConfigError(f"{name}={value}: give a whole number, {least} or more.")
        return value
