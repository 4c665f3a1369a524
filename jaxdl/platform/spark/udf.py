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
from pyspark.sql import functions as F

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.core.runs import Which, check_which
from jaxdl.platform.spark.invalid import check_handling, of_valid_rows, plain_columns
from jaxdl.platform.spark.older import HAS_ARROW, pandas_udf
from jaxdl.platform.spark.scoring import CheckpointId, lists_of, newest, number_batches, score_batches, scorer

SCORED = "rawPrediction array<float>, probability array<float>, prediction double"


@without_frames
def predictor_udf(
    workdir: str | Path, batch_size: int = 256, *, handleInvalid: str = "error", checkpoint: Which = "newest"
) -> Callable[..., Column]:
    """A function of columns whose value is the prediction of a trained network, an array of floats for each row.

        df.withColumn("y", predictor_udf("/shared/runs/leo", batch_size=256)("image"))

    For a classifier these are the probabilities of the classes, for a regression it is one number. It takes one column
    of images, texts, vectors or arrays, or the numeric columns that the network was trained on, in their order; of a
    table with words its columns, in which nulls are missing values. Else a null, NaN, infinity or a text of blanks
    ends the job, unless `handleInvalid` is skip (null for such a row, since a function cannot leave it out) or keep (an
    array of NaN). The network is that of the newest checkpoint now, or with `checkpoint="best"` the one with the best
    evaluation. Raises ConfigError for a workdir without one.
    """
    trained = newest(workdir, check_which(checkpoint, "checkpoint"))
    size, handling = check_batch_size(batch_size), check_handling(handleInvalid)

    def predictions(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        network = scorer(trained, size)
        for batch in batches:
            values, invalid = of_valid_rows(network.predictions, columns_of(batch), handling, network.form)
            yield lists_of(values, invalid if handling == "skip" else None)

    return _iterator_udf(predictions, "array<float>", with_times=False)


def score_udf(
    trained: CheckpointId, names: Sequence[str], batch_size: int, handling: str = "error"
) -> Callable[..., Column]:
    """A function of feature columns whose value is a struct of rawPrediction, probability and prediction.

    `names` is what messages call the columns; `handling` is what is done with invalid rows: error or keep.
    """

    def scores(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        yield from score_batches(trained, batch_size, map(columns_of, batches), names, handling)

    return _iterator_udf(scores, SCORED)


def number_udf(
    trained: CheckpointId, names: Sequence[str], batch_size: int, handling: str = "error"
) -> Callable[..., Column]:
    """A function of feature columns whose value is the number that is predicted, a double; arguments as above."""

    def numbers(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        yield from number_batches(trained, batch_size, map(columns_of, batches), names, handling)

    return _iterator_udf(numbers, "double")


def feature_udf(
    trained: CheckpointId, names: Sequence[str], layer: str, batch_size: int, handling: str = "error", *, pool: bool
) -> Callable[..., Column]:
    """A function of feature columns whose value is the output of a layer, an array of floats; `names` as above."""

    def features(batches: Iterator[Any]) -> Iterator[Any]:
        use_own_gpus()
        network = scorer(trained, batch_size)
        for batch in batches:
            of_layer = functools.partial(network.features, layer=layer, names=names, pool=pool)
            yield lists_of(of_valid_rows(of_layer, columns_of(batch), handling, network.form)[0])

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


def _iterator_udf(
    function: Callable[[Iterator[Any]], Iterator[Any]], result: str, *, with_times: bool = True
) -> Callable[..., Column]:
    """An Arrow UDF of one or more columns that reads its batches one after the other; see `pandas_udf` for Spark 3.5.

    Spark tells a function that iterates over one column from one of several by its type hints, so there is one each.
    """
    if not HAS_ARROW:
        return pandas_udf(function, result, with_times=with_times)
    import pyarrow

    def of_one(batches: Any) -> Any:
        return function(batches)

    def of_several(batches: Any) -> Any:
        return function(batches)

    of_one.__annotations__ = {"batches": Iterator[pyarrow.Array], "return": Iterator[pyarrow.Array]}
    of_several.__annotations__ = {"batches": Iterator[tuple[pyarrow.Array, ...]], "return": Iterator[pyarrow.Array]}
    of_column, several = F.arrow_udf(of_one, result), F.arrow_udf(of_several, result)

    def called(*columns: Any) -> Column:
        return (of_column if len(columns) == 1 else several)(*columns)

    return called
