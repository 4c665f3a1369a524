"""`JaxdlFeaturizer`: the output of a layer of a trained network as a column of vectors, for other estimators."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from pyspark import keyword_only
from pyspark.ml import Transformer
from pyspark.ml.functions import array_to_vector
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.platform.spark.frames import are_valid, as_trained, check_new, scored_columns, takes_gaps
from jaxdl.platform.spark.params import HasFeatures, HasOutputCol, HasWorkdir, setter
from jaxdl.platform.spark.scoring import newest
from jaxdl.platform.spark.udf import check_batch_size, feature_udf


class JaxdlFeaturizer(Transformer, HasFeatures, HasWorkdir, HasOutputCol, DefaultParamsReadable, DefaultParamsWritable):
    """Adds a column of vectors: what a layer of a trained network makes of each row.

        JaxdlFeaturizer(workdir="/shared/runs/leo", layer="stage4", featuresCol="image", outputCol="features")

    The output of a layer of images, `[height, width, channel]`, is averaged over the places, unless `pool` is False.
    """

    layer: Param[str] = Param(
        Params._dummy(),
        "layer",
        "name of a layer of the network, such as stage4 or head; one that does not exist is a message with the names",
        typeConverter=TypeConverters.toString,
    )
    pool: Param[bool] = Param(
        Params._dummy(), "pool", "average over the places of an image", typeConverter=TypeConverters.toBoolean
    )

    @keyword_only
    def __init__(
        self,
        *,
        workdir: str | None = None,
        layer: str | None = None,
        featuresCol: str | list[str] = "image",
        outputCol: str = "features",
        batchSize: int = 256,
        pool: bool = True,
        handleInvalid: str = "error",
        checkpoint: str = "newest",
    ) -> None:
        super().__init__()
        self._setDefault(featuresCol="image", outputCol="features", batchSize=256, pool=True, handleInvalid="error")
        self._setDefault(checkpoint="newest")
        self._set(**self._input_kwargs)

    setOutputCol = setter("outputCol")
    setLayer = setter("layer")
    setPool = setter("pool")

    def getLayer(self) -> str:
        """The name of the layer. Raises ConfigError when it is not set."""
        if not self.isSet(self.layer):
            raise ConfigError("layer is not set. Name a layer of the network, such as stage4.")
        return self.getOrDefault(self.layer)

    def getPool(self) -> bool:
        """Whether it averages over the places of an image."""
        return self.getOrDefault(self.pool)

    @without_frames
    def transform(self, dataset: DataFrame, params: Any = None) -> DataFrame:
        """The DataFrame with the column. Raises ConfigError for columns and workdirs that do not fit."""
        return super().transform(dataset, params)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_new(dataset, {"outputCol": self.getOutputCol()})
        layer, features = self.getLayer(), as_trained(dataset, self.features, self.getWorkdir())
        handling, batch_size = self.getHandleInvalid(), check_batch_size(self.getBatchSize())
        skips = handling == "skip" and not takes_gaps(self.getWorkdir())
        dataset = dataset.filter(are_valid(dataset, features)) if skips else dataset
        trained = newest(self.getWorkdir(), self.getCheckpoint())
        feature = feature_udf(trained, features, layer, batch_size, handling, pool=self.getPool())
        return dataset.withColumn(self.getOutputCol(), array_to_vector(feature(*scored_columns(dataset, features))))
