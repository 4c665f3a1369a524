"""The parameters that the Estimator, its Model and the featurizer share, in Spark's names."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasLabelCol,
    HasOutputCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.core.runs import Which, parse_which
from jaxdl.platform.spark.invalid import check_handling

__all__ = [
    "EstimatorParams",
    "HasFeatures",
    "HasLabelCol",
    "HasOutputCol",
    "HasPredictionCol",
    "HasProbabilityCol",
    "HasRawPredictionCol",
    "HasValidationIndicatorCol",
    "HasWeightCol",
    "HasWorkdir",
    "ProbabilityParams",
    "ScoringParams",
]


def _one_or_several(value: Any) -> Any:
    """A name, or a list of them."""
    return value if isinstance(value, str) else TypeConverters.toListString(value)


def setter(name: str) -> Callable[..., Any]:
    """The method that sets a parameter, as `pyspark.ml` has one for each, and returns its object."""

    def set_value(self: Params, value: Any) -> Params:
        return self._set(**{name: value})

    set_value.__name__ = f"set{name[0].upper()}{name[1:]}"
    set_value.__doc__ = f"Sets `{name}`; itself."
    return set_value


def _overrides(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"overrides={value!r}: give a dictionary of dotted fields, {{'optimizer.learning_rate': 0.1}}.")
    return dict(value)


class HasFeatures(Params):
    """The parameter `featuresCol`, and what sets several parameters."""

    featuresCol: Param[Any] = Param(
        Params._dummy(),
        "featuresCol",
        "column of images (files as binary, Spark's image rows, arrays of arrays) or of numbers (a vector, an array); "
        "or the list of numeric columns",
        typeConverter=_one_or_several,
    )

    setFeaturesCol = setter("featuresCol")

    @keyword_only
    def setParams(self, **params: Any) -> Self:
        """Sets parameters by name; itself."""
        return self._set(**self._input_kwargs)

    def getFeaturesCol(self) -> Any:
        """The name, or the list of names."""
        return self.getOrDefault(self.featuresCol)

    @property
    def features(self) -> list[str]:
        """The names of the feature columns."""
        given = self.getFeaturesCol()
        return [given] if isinstance(given, str) else list(given)


class HasWorkdir(Params):
    """The parameters `workdir` and `batchSize`, and `handleInvalid` of what scores."""

    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        "what is done with a row whose features have null, NaN, infinity, or no text: error ends the job; skip leaves "
        "the row out; keep gives NaN for it in transform. fit leaves such rows out with skip and keep, also those "
        "without a label or a weight, and says how many",
        typeConverter=TypeConverters.toString,
    )

    workdir: Param[str] = Param(
        Params._dummy(),
        "workdir",
        "folder of the run, on a file system that the driver and all executors share",
        typeConverter=TypeConverters.toString,
    )
    batchSize: Param[int] = Param(
        Params._dummy(), "batchSize", "rows that the network gets at a time", typeConverter=TypeConverters.toInt
    )

    checkpoint: Param[str] = Param(
        Params._dummy(),
        "checkpoint",
        "which checkpoint of the run scores: newest, or best, the one with the best evaluation",
        typeConverter=TypeConverters.toString,
    )

    setCheckpoint = setter("checkpoint")
    setWorkdir = setter("workdir")
    setHandleInvalid = setter("handleInvalid")
    setBatchSize = setter("batchSize")

    def getHandleInvalid(self) -> str:
        """What is done with invalid rows. Raises ConfigError for what is none of error, skip and keep."""
        return check_handling(self.getOrDefault(self.handleInvalid))

    def getWorkdir(self) -> str:
        """The folder of the run, absolute: executors have another working directory. Raises ConfigError without one."""
        if not self.isSet(self.workdir) or not self.getOrDefault(self.workdir).strip():
            raise ConfigError("workdir is not set. Give a folder that the driver and all executors share.")
        return str(expand_home(self.getOrDefault(self.workdir)).absolute())

    def getCheckpoint(self) -> Which:
        """Which checkpoint scores. Raises ConfigError for what is neither newest, best nor the number of a step."""
        return parse_which(self.getOrDefault(self.checkpoint), "checkpoint")

    def getBatchSize(self) -> int:
        """Rows that the network gets at a time."""
        return self.getOrDefault(self.batchSize)


class ScoringParams(HasFeatures, HasWorkdir, HasPredictionCol):
    """What an Estimator and its Model share."""

    setPredictionCol = setter("predictionCol")


class ProbabilityParams(ScoringParams, HasProbabilityCol, HasRawPredictionCol):
    """What an Estimator of a classifier and its Model share."""

    setProbabilityCol = setter("probabilityCol")
    setRawPredictionCol = setter("rawPredictionCol")


class EstimatorParams(ScoringParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol):
    """The parameters of an Estimator."""

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

    workdirPerFit: Param[bool] = Param(
        Params._dummy(),
        "workdirPerFit",
        "train each fit in a folder of its own below workdir, which its settings and rows name",
        typeConverter=TypeConverters.toBoolean,
    )

    earlyStoppingRounds: Param[int] = Param(
        Params._dummy(),
        "earlyStoppingRounds",
        "end the training when so many evaluations in a row are no better than the best before them, and score with "
        "the best checkpoint; 0 trains to the end",
        typeConverter=TypeConverters.toInt,
    )
    initFrom: Param[str] = Param(
        Params._dummy(),
        "initFrom",
        "folder of a run, or of a converted network, whose parameters the training begins with",
        typeConverter=TypeConverters.toString,
    )

    setEarlyStoppingRounds = setter("earlyStoppingRounds")
    setInitFrom = setter("initFrom")
    setLabelCol = setter("labelCol")
    setWeightCol = setter("weightCol")
    setValidationIndicatorCol = setter("validationIndicatorCol")
    setConfig = setter("config")
    setOverrides = setter("overrides")
    setNumProcesses = setter("numProcesses")
    setGpusPerProcess = setter("gpusPerProcess")
    setRowGroupRows = setter("rowGroupRows")
    setWorkdirPerFit = setter("workdirPerFit")

    def getConfig(self) -> str:
        """The config file. Raises ConfigError when it is not set."""
        if not self.isSet(self.config):
            raise ConfigError("config is not set. Give a config file, or the name of one that comes with jaxdl.")
        return self.getOrDefault(self.config)

    def getEarlyStoppingRounds(self) -> int:
        """Evaluations without a better one that end the training; 0: none. Raises ConfigError for fewer."""
        return self._at_least("earlyStoppingRounds", 0)

    def getInitFrom(self) -> str | None:
        """The folder whose parameters the training begins with, absolute; None where it begins anew."""
        if not self.isSet(self.initFrom):
            return None
        return str(expand_home(self.getOrDefault(self.initFrom)).absolute())

    def getOverrides(self) -> dict[str, Any]:
        """Dotted fields of the experiment with other values."""
        return self.getOrDefault(self.overrides)

    def getNumProcesses(self) -> int:
        """Processes that train. Raises ConfigError when they are fewer than 1."""
        return self._at_least("numProcesses", 1)

    def getGpusPerProcess(self) -> int:
        """GPUs of each process. Raises ConfigError when they are fewer than 0."""
        return self._at_least("gpusPerProcess", 0)

    def getRowGroupRows(self) -> int:
        """Rows of a row group, 0 for the default. Raises ConfigError when they are fewer than 0."""
        return self._at_least("rowGroupRows", 0)

    def getWorkdirPerFit(self) -> bool:
        """Whether each fit has a folder of its own."""
        return self.getOrDefault(self.workdirPerFit)

    def _at_least(self, name: str, least: int) -> int:
        """The whole number of a parameter. Raises ConfigError when it is too small."""
        value = self.getOrDefault(self.getParam(name))
        if value < least:
            raise ConfigError(f"{name}={value}: give a whole number, {least} or more.")
        return value
