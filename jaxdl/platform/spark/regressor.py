"""`JaxdlRegressor` and `JaxdlRegressionModel`: an Estimator of `pyspark.ml` that learns a number, and its Model."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, ClassVar

from pyspark import keyword_only
from pyspark.sql import Column, DataFrame

from jaxdl.core.config import ConfigError
from jaxdl.data import Data
from jaxdl.platform.spark.estimator import ESTIMATOR_DEFAULTS, JaxdlEstimator
from jaxdl.platform.spark.frames import form_of
from jaxdl.platform.spark.invalid import Form
from jaxdl.platform.spark.model import MODEL_DEFAULTS, JaxdlModel, number_of
from jaxdl.platform.spark.udf import number_udf


class JaxdlRegressionModel(JaxdlModel):
    """A trained regression: `transform` adds prediction, a double in the units of the label.

    Its features are the columns of a table: numbers, vectors, words and dates, in which a null is a missing value. It
    can be made for the workdir of any network that jaxdl trained to predict one number.
    """

    @keyword_only
    def __init__(
        self,
        *,
        workdir: str | None = None,
        featuresCol: str | list[str] = "features",
        batchSize: int = 256,
        predictionCol: str = "prediction",
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(**MODEL_DEFAULTS)
        self._set(**self._input_kwargs)

    def _score(self, trained: Any, features: list[str], batch_size: int, handling: str) -> Any:
        return number_udf(trained, features, batch_size, handling)

    def _columns(self, scores: Column) -> dict[str, Column]:
        return {"predictionCol": number_of(scores)}


class JaxdlRegressor(JaxdlEstimator):
    """Trains a regression on a DataFrame, as `JaxdlClassifier` trains a classifier.

        JaxdlRegressor(featuresCol=["area", "street", "built"], labelCol="price", workdir="/shared/runs/p").fit(df)

    The features are read as a table ("Tables with words, dates and gaps" in the documentation): nulls are missing
    values, vectors are columns of numbers. `labelCol` is a column of numbers. The config, `tabular` by default, must
    have a task that learns a number. The metrics are `rmse`, `mae` (both in the units of the label) and `r2`.
    """

    _model = JaxdlRegressionModel
    _number: ClassVar[bool] = True

    @keyword_only
    def __init__(
        self,
        *,
        config: str = "tabular",
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
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(**ESTIMATOR_DEFAULTS, config="tabular")
        self._set(**self._input_kwargs)

    def _form(self, dataset: DataFrame, data: Data) -> Form:
        del data
        if form_of(dataset, self.features) == "images":
            raise ConfigError(
                f"featuresCol={self.features}: it holds images, of which JaxdlRegressor reads none. Give numbers, "
                "words and dates; the output of a JaxdlFeaturizer is a vector of numbers."
            )
        return "table"
