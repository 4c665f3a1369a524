"""Spark before 4.1, whose functions of columns get pandas: what Arrow would keep is kept on the way there and back."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegralType, TimestampType

from jaxdl.core.errors import ConfigError
from jaxdl.platform.spark.invalid import VECTOR

HAS_ARROW = hasattr(F, "arrow_udf")
"""Whether functions of columns may get Arrow: since Spark 4.1."""


def for_pandas(column: Column, kind: DataType) -> Column:
    """A column whose values pandas holds exactly, where a function gets it as pandas.

    There whole numbers among nulls become floating-point ones, and times lose their time zone.
    """
    if HAS_ARROW:
        return column
    if isinstance(kind, IntegralType):
        return column.cast("decimal(20,0)")
    return _in_utc(column) if isinstance(kind, TimestampType) else column


def _in_utc(time: Column) -> Column:
    """A time as its date and time in UTC, without a time zone."""
    seconds = F.floor(F.unix_micros(time) / F.lit(1_000_000)).cast("long")
    start = F.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    rest = (F.unix_micros(time) - seconds * 1_000_000).cast("decimal(18,6)") / F.lit(1_000_000)
    days, of_day = F.floor(seconds / 86400).cast("int"), F.pmod(seconds, F.lit(86400))
    return start + F.make_dt_interval(days=days, secs=of_day.cast("decimal(18,6)") + rest.cast("decimal(18,6)"))


def pandas_udf(function: Callable[[Iterator[Any]], Iterator[Any]], result: str, *, with_times: bool) -> Any:
    """A function of columns as Spark 3.5 has it, from one of iterators over batches of Arrow.

    A batch is one array, or a tuple of several. Of pandas null and NaN are one: both become null. Without `with_times`
    times end the job: they have no time zone here.
    """
    try:
        import pandas
    except ImportError:
        raise ConfigError(
            "jaxdl.spark: with this version of Spark it needs the package pandas, which is not installed. Install it "
            "with pip install pandas, here and for the executors."
        ) from None

    def of_one(batches: Any) -> Any:
        return map(_pandas_of, function(_arrow_of(batch, with_times) for batch in batches))

    def of_several(batches: Any) -> Any:
        arrays = (tuple(_arrow_of(one, with_times) for one in batch) for batch in batches)
        return map(_pandas_of, function(arrays))

    made = pandas.DataFrame if " " in result else pandas.Series
    of_one.__annotations__ = {"batches": Iterator[pandas.Series], "return": Iterator[made]}
    of_several.__annotations__ = {"batches": Iterator[tuple[pandas.Series, ...]], "return": Iterator[made]}
    one, several = F.pandas_udf(of_one, result), F.pandas_udf(of_several, result)

    def called(*columns: Any) -> Column:
        return (one if len(columns) == 1 else several)(*columns)

    return called


def _arrow_of(values: Any, with_times: bool) -> Any:
    """A series, or the data frame of a column of structs, as an array of Arrow."""
    import pyarrow

    if hasattr(values, "columns"):  # A row of which nothing is known is null.
        rows = values.astype(object).where(values.notna(), None).to_dict("records")
        known = [row if any(x is not None for x in row.values()) else None for row in rows]
        if set(values.columns) != VECTOR:
            return pyarrow.array(known)
        # Among nulls whole numbers are floating-point ones here, and a batch of nulls has no type of its own.
        kinds = {"type": pyarrow.int8(), "size": pyarrow.int32()}
        lists = {"indices": pyarrow.list_(pyarrow.int32()), "values": pyarrow.list_(pyarrow.float64())}
        whole = [row and row | {name: None if row[name] is None else int(row[name]) for name in kinds} for row in known]
        return pyarrow.array(whole, pyarrow.struct(list((kinds | lists).items())))
    if not with_times and values.dtype.kind == "M":
        raise ConfigError(
            f"{values.name}: times have no time zone in this version of Spark. Use transform, or cast them to strings."
        )
    if values.dtype == object:
        return pyarrow.array([_plain(value) for value in values])
    return pyarrow.Array.from_pandas(values)


def _plain(value: Any) -> Any:
    """A value of a series as Arrow takes it: arrays as lists."""
    return [_plain(item) for item in value] if isinstance(value, np.ndarray) and value.dtype == object else value


def _pandas_of(array: Any) -> Any:
    """An array of Arrow as a series; of structs a data frame."""
    import pandas
    import pyarrow.types as types

    if not types.is_struct(array.type):
        return array.to_pandas()
    names = [array.type.field(place).name for place in range(array.type.num_fields)]
    return pandas.DataFrame({name: array.field(name).to_pandas() for name in names})
