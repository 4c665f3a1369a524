"""jaxdl in Spark: Estimators and Models for pipelines, features of a layer, a UDF, and barrier jobs for scripts.

Training never reads from Spark: `fit` writes the rows to Parquet files in the workdir, and jaxdl reads those by its own
index. Needs pyspark: `pip install 'jaxdl[spark]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.lazy import lazy_names

if TYPE_CHECKING:
    from jaxdl.platform.spark.classifier import JaxdlClassifier, JaxdlClassifierModel
    from jaxdl.platform.spark.distributor import JaxDistributor, ProcessFailed
    from jaxdl.platform.spark.featurizer import JaxdlFeaturizer
    from jaxdl.platform.spark.regressor import JaxdlRegressionModel, JaxdlRegressor
    from jaxdl.platform.spark.text import JaxdlTextClassifier, JaxdlTextClassifierModel
    from jaxdl.platform.spark.udf import predictor_udf

__all__ = [
    "JaxDistributor",
    "JaxdlClassifier",
    "JaxdlClassifierModel",
    "JaxdlFeaturizer",
    "JaxdlRegressionModel",
    "JaxdlRegressor",
    "JaxdlTextClassifier",
    "JaxdlTextClassifierModel",
    "ProcessFailed",
    "predictor_udf",
]

_load = lazy_names("jaxdl.platform.spark")  # The processes that a job starts need no pyspark.


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pyspark", "py4j", "pyarrow"):
            raise
        raise ConfigError(
            f"jaxdl.spark: it needs the package {error.name}, which is not installed. Install it with pip install "
            "'jaxdl[spark]', here and for the executors."
        ) from None
