"""User-defined functions of Spark that run a trained network. The network is loaded once in each Python worker."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Column
from pyspark.sql.functions import arrow_udf

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.platform.spark.invalid import check_handling, of_valid_rows, plain_columns
from jaxdl.platform.spark.scoring import lists_of, newest, score_batches, scorer

SCORED = "rawPrediction array<float>, probability array<float>, prediction double"


@without_frames
def predictor_udf(workdir: str | Path, batch_size: int = 256, *, handleInvalid: str = "error") -> Callable[..., Column]:
    """A function of columns whose value is the prediction of a trained network, an array of floats for each row.

        df.withColumn("y", predictor_udf("/shared/runs/leo", batch_size=256)("image"))

    For a classifier these are the probabilities of the classes. It takes one column of images, vectors or arrays, or
    the numeric columns that the network was trained on, in their order; of a table with words its columns, in which
    nulls are missing values. Else a null, NaN or infinity ends the job, unless
    `handleInvalid` is skip (null for such a row, since a function cannot leave it out) or keep (an array of NaN). The
    network is that of the newest checkpoint now. Raises ConfigError for a workdir without one.
    """
    trained, size, handling = newest(workdir), check_batch_size(batch_size), check_handling(handleInvalid)

    def predictions(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        network = scorer(trained, size)
        for batch in batches:
            how = "error" if network.takes_gaps else handling
            values, invalid = of_valid_rows(network.predictions, columns_of(batch), how)
            yield lists_of(values, invalid if handling == "skip" else None)

    return _iterator_udf(predictions, "array<float>")


def score_udf(workdir: str, names: Sequence[str], batch_size: int, handling: str = "error") -> Callable[..., Column]:
    """A function of feature columns whose value is a struct of rawPrediction, probability and prediction.

    `names` is what messages call the columns; `handling` is what is done with invalid rows: error or keep.
    """
    trained = newest(workdir)

    def scores(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        yield from score_batches(trained, batch_size, map(columns_of, batches), names, handling)

    return _iterator_udf(scores, SCORED)


def feature_udf(
    workdir: str, names: Sequence[str], layer: str, batch_size: int, handling: str = "error", *, pool: bool
) -> Callable[..., Column]:
    """A function of feature columns whose value is the output of a layer, an array of floats; `names` as above."""
    trained = newest(workdir)

    def features(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        network = scorer(trained, batch_size)
        for batch in batches:
            how = "error" if network.takes_gaps else handling
            of_layer = functools.partial(network.features, layer=layer, names=names, pool=pool)
            yield lists_of(of_valid_rows(of_layer, columns_of(batch), how)[0])

    return _iterator_udf(features, "array<float>")


def check_batch_size(batch_size: Any) -> int:
    """The batch size. Raises ConfigError when it is none."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r}: give a whole number, 1 or more.")
    return batch_size


def columns_of(batch: Any) -> Sequence[Any]:
    """The columns of a batch, vectors as lists: one array for one column, a tuple of them for several."""
    return plain_columns(batch if isinstance(batch, tuple) else (batch,))


def use_own_gpus() -> None:
    """Restricts this Python worker to the GPUs of its task, before JAX starts; Spark gives some if told to."""
    import os

    context = TaskContext.get()
    gpus = None if context is None else context.resources().get("gpu")
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)


def _iterator_udf(function: Callable[[Iterator[Any]], Iterator[Any]], result: str) -> Callable[..., Column]:
    """An Arrow UDF of one or more columns that reads its batches one after the other.

    Spark tells a function that iterates over one column from one of several by its type hints, so there is one each.
    """
    import pyarrow

    def of_one(batches: Any) -> Any:
        return function(batches)

    def of_several(batches: Any) -> Any:
        return function(batches)

    of_one.__annotations__ = {"batches": Iterator[pyarrow.Array], "return": Iterator[pyarrow.Array]}
    of_several.__annotations__ = {"batches": Iterator[tuple[pyarrow.Array, ...]], "return": Iterator[pyarrow.Array]}
    of_column, several = arrow_udf(of_one, result), arrow_udf(of_several, result)

    def called(*columns: Any) -> Column:
        return (of_column if len(columns) == 1 else several)(*columns)

    return called
