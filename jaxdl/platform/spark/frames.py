"""DataFrames: which of their columns are images or numbers, and their rows as Parquet files in a workdir."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from jaxdl.core.config import ConfigError
from jaxdl.core.runs import check_run
from jaxdl.data import ColumnsSpec
from jaxdl.inference.predictor import data_spec_of
from jaxdl.platform.spark.invalid import Form
from jaxdl.platform.spark.older import for_pandas
from jaxdl.platform.spark.rows import LABEL, SPLITS, WEIGHT, Columns, PartitionWriter, Written
from jaxdl.platform.spark.scoring import form_of_spec, plain, table_columns, training_columns

IMAGE = "image"
IMAGE_GROUP_ROWS, TABLE_GROUP_ROWS = 16, 4096
"""Rows of a row group by default. One image is read with its row group, so those of images are small."""
_APPEAR_SEC = 60.0
"""How long the driver waits for a file that an executor wrote: NFS clients may cache that it is missing."""
_OUTCOME = "split string, file string, num_rows long, num_classes long, digest string, problem string, left_out string"


def check_columns(frame: DataFrame, names: Sequence[str], param: str) -> None:
    """Raises ConfigError, which begins with the parameter's name, for a column that the frame does not have."""
    for name in names:
        if name not in frame.columns:
            raise ConfigError(f"{param}={name!r}: the DataFrame has no such column; it has {', '.join(frame.columns)}.")


def check_new(frame: DataFrame, outputs: Mapping[str, str]) -> None:
    """Raises ConfigError for an output column, given by parameter, that would replace a column or another output."""
    exact = frame.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    taken = {name if exact else name.lower() for name in frame.columns}
    for param, name in outputs.items():
        key = name if exact else name.lower()
        if key in taken:
            raise ConfigError(f"{param}={name!r}: there is a column of that name. Choose another, or drop that column.")
        taken |= {key} if key else set()


def form_of(frame: DataFrame, names: Sequence[str], param: str = "featuresCol") -> Form:
    """Whether feature columns hold images, numbers, or words and dates too. Raises ConfigError for anything else."""
    check_columns(frame, names, param)
    _check_distinct(frame, names, param)
    forms = [_form(frame.schema[name].dataType) for name in names]
    for name, form in zip(names, forms, strict=True):
        if form is None:
            raise ConfigError(
                f"{param}={name!r}: its type is {frame.schema[name].dataType.simpleString()}. Give images (files as "
                "binary, Spark's image rows, arrays of arrays of grey levels), numbers (numeric columns, a vector, an "
                "array), or columns of words and dates."
            )
    if "images" in forms and len(forms) > 1:
        raise ConfigError(f"{param}={list(names)}: images are one column alone. Give that.")
    return "images" if forms == ["images"] else "table" if "table" in forms else "numbers"


def _check_distinct(frame: DataFrame, names: Sequence[str], param: str) -> None:
    """Raises ConfigError for no column, one that is named twice, and columns whose numbers would have one name."""
    if not names:
        raise ConfigError(f"{param}=[]: it names no column. Give one, or several.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{param}={list(names)}: {twice[0]!r} is given twice. Give each column once.")
    lists = [name for name in names if _is_list(frame, name)]
    for name in names:
        if (vector := plain(name)) != name and vector in lists:
            raise ConfigError(
                f"{param}={list(names)}: {name!r} is also the name of a number of {vector!r}. Rename one."
            )


def _form(kind: DataType) -> Form | None:
    if isinstance(kind, BinaryType) or (isinstance(kind, StructType) and {"height", "data"} <= set(kind.names)):
        return "images"
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, ArrayType):
        return "images"
    if isinstance(kind, StringType | DateType | TimestampType | TimestampNTZType):
        return "table"
    inner = kind.elementType if isinstance(kind, ArrayType) else kind
    return "numbers" if isinstance(inner, NumericType | BooleanType | VectorUDT) else None


def as_trained(frame: DataFrame, names: Sequence[str], workdir: str) -> list[str]:
    """The feature columns in the order in which the network of a run reads them.

    Raises ConfigError for columns that are missing, and for others than the network was trained on.
    """
    spec = data_spec_of(check_run(workdir))
    wanted = form_of_spec(spec)
    if wanted == "table":
        return _as_table(frame, names, table_columns(spec), workdir)
    if wanted == "texts":
        return _as_texts(frame, names, getattr(spec, "num_types", 1))
    form = form_of(frame, names)
    if form != wanted:
        held = "words or dates" if form == "table" else form
        raise ConfigError(
            f"featuresCol={list(names)}: they hold {held}; the network of {workdir} reads {spec.modality}."
        )
    if form == "images" or (len(names) == 1 and _is_list(frame, names[0])):
        return list(names)  # A vector alone has all numbers in their order, whatever its name.
    columns = training_columns(getattr(spec, "columns", names), names)
    if sorted(names) != sorted(columns):
        raise ConfigError(
            f"featuresCol={list(names)}: the network of {workdir} was trained on {', '.join(columns)}. Give these."
        )
    return columns


def _as_texts(frame: DataFrame, names: Sequence[str], most: int) -> list[str]:
    """One column of texts, or two, of pairs, where the network reads such. Raises ConfigError for others."""
    check_texts(frame, names)
    if len(names) > most:
        raise ConfigError(f"featuresCol={list(names)}: the network reads single texts. Give one column.")
    return list(names)


def check_texts(frame: DataFrame, names: Sequence[str], param: str = "featuresCol") -> None:
    """Raises ConfigError for other columns than one of texts, or two of them."""
    check_columns(frame, names, param)
    _check_distinct(frame, names, param)
    if len(names) > 2:
        raise ConfigError(f"{param}={list(names)}: give one column of texts, or two, of pairs.")
    for name in names:
        if not isinstance(kind := frame.schema[name].dataType, StringType):
            raise ConfigError(f"{param}={name!r}: it holds {kind.simpleString()}, not texts. Give a column of strings.")


def takes_gaps(workdir: str) -> bool:
    """Whether the network of a run reads a table, in which values may be missing."""
    return data_spec_of(check_run(workdir)).modality == ColumnsSpec.modality


def _as_table(frame: DataFrame, names: Sequence[str], columns: list[str], workdir: str) -> list[str]:
    """The columns of a table in the order of training; others may be among the names. Raises ConfigError."""
    check_columns(frame, names, "featuresCol")
    if missing := [name for name in columns if name not in names]:
        raise ConfigError(
            f"featuresCol={list(names)}: the network of {workdir} was trained on {', '.join(columns)}. Give "
            f"{', '.join(missing)} too."
        )
    return columns


def _is_list(frame: DataFrame, name: str) -> bool:
    return isinstance(frame.schema[name].dataType, ArrayType | VectorUDT)


def feature_columns(frame: DataFrame, names: Sequence[str]) -> list[Column]:
    """The feature columns as Arrow can hold them: vectors as arrays."""
    typed = [(_column(frame, name), frame.schema[name].dataType) for name in names]
    return [_array_of(column) if isinstance(kind, VectorUDT) else column for column, kind in typed]


def scored_columns(frame: DataFrame, names: Sequence[str]) -> list[Column]:
    """The feature columns as functions that score get them: exact also where these get pandas."""
    columns = zip(feature_columns(frame, names), names, strict=True)
    return [for_pandas(column, frame.schema[name].dataType) for column, name in columns]


def are_valid(frame: DataFrame, names: Sequence[str]) -> Column:
    """Whether a row has no null, NaN, infinity or text of blanks alone in the feature columns."""
    valid = F.lit(True)
    for column, name in zip(feature_columns(frame, names), names, strict=True):
        kind = frame.schema[name].dataType
        inner = DoubleType() if isinstance(kind, VectorUDT) else getattr(kind, "elementType", kind)
        valid &= column.isNotNull()
        if isinstance(kind, StringType):
            valid &= column.rlike(r"(?U)\S")
            continue
        missing = _missing_test(inner)
        has_numbers = isinstance(kind, ArrayType | VectorUDT) and not isinstance(inner, ArrayType)
        valid &= ~(F.exists(column, missing) if has_numbers else missing(column))
    return valid


def _missing_test(kind: DataType) -> Callable[[Column], Column]:
    """A function of a value of this type: whether it is null, NaN or infinity."""

    def is_missing(value: Column) -> Column:  # Spark counts the parameters, so there is one.
        if isinstance(kind, DoubleType | FloatType):
            return value.isNull() | F.isnan(value) | (F.abs(value) == float("inf"))
        return value.isNull()

    return is_missing


def _array_of(vector: Column) -> Column:
    """A column of vectors as arrays; null stays null, which `vector_to_array` would end the job about."""
    return F.when(vector.isNotNull(), vector_to_array(vector))


def _column(frame: DataFrame, name: str) -> Column:
    """A column by its whole name, which may have dots."""
    return frame["`" + name.replace("`", "``") + "`"]


def check_roles(frame: DataFrame, columns: Columns) -> None:
    """Raises ConfigError for a label, weight or validation indicator of a wrong type, and for names used twice."""
    label, held_out, weight = columns.label, columns.held_out, columns.weight
    check_columns(frame, [label], "labelCol")
    kind = frame.schema[label].dataType
    if not isinstance(kind, NumericType | BooleanType):
        if columns.predicts_number:
            raise ConfigError(f"labelCol={label!r}: it holds {kind.simpleString()}, not numbers. Give what to predict.")
        if columns.needs_class_numbers:
            raise ConfigError(
                f"labelCol={label!r}: it holds {kind.simpleString()}, not whole numbers from 0. Number the classes "
                f"first: StringIndexer(inputCol={label!r}, outputCol='label')."
            )
    if weight:
        check_columns(frame, [weight], "weightCol")
        if not isinstance(kind := frame.schema[weight].dataType, NumericType):
            raise ConfigError(f"weightCol={weight!r}: it holds {kind.simpleString()}, not numbers.")
        if columns.form == "images":
            raise ConfigError(f"weightCol={weight!r}: images have no weights. Repeat rows, or leave it out.")
    if held_out:
        check_columns(frame, [held_out], "validationIndicatorCol")
        if not isinstance(kind := frame.schema[held_out].dataType, BooleanType):
            raise ConfigError(f"validationIndicatorCol={held_out!r}: it holds {kind.simpleString()}, not booleans.")
    others = [label, held_out, LABEL, *([weight, WEIGHT] if weight else [])]
    taken = [name for name in columns.features if name in others]
    if taken and columns.form != "images":
        raise ConfigError(f"featuresCol={taken[0]!r}: that name is for another column of the rows. Rename the feature.")
    if weight and weight in (label, held_out):
        raise ConfigError(f"weightCol={weight!r}: it is another column of the rows. Give a column of weights alone.")


def write_rows(
    frame: DataFrame, columns: Columns, folder: Path, group_rows: int | None = None
) -> tuple[Path, list[Written], Counter[str]]:
    """Writes features and labels as Parquet files below `folder`: (the folder with the files, what is in it, why rows
    are left out -> how many).

    The folder is named by the digest of the rows; if it is there already, from an earlier call on the same rows, it
    stays as it is. Raises ConfigError for columns that are missing or have wrong values, and for a folder that is not
    the same for the driver and the executors.
    """
    check_roles(frame, columns)
    given = [*feature_columns(frame, columns.features), _column(frame, columns.label)]
    given += [_column(frame, columns.weight)] if columns.weight else []
    given.append(_column(frame, columns.held_out) if columns.held_out else F.lit(False))
    # Spark looks for the names once more, and would take a dot in one for a field: the executors do not need them.
    numbered = [column.alias(f"c{place}") for place, column in enumerate(given)]
    partial = folder / f"writing-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"workdir {folder.parent}: {error.strerror}. Choose a writable folder.") from None
    try:
        rows = group_rows or (IMAGE_GROUP_ROWS if columns.form == "images" else TABLE_GROUP_ROWS)
        write = functools.partial(_write, str(partial), rows, columns)
        outcomes = frame.select(*numbered).mapInArrow(write, _OUTCOME).collect()
        if problem := next((row.problem for row in outcomes if row.problem), None):
            raise ConfigError(problem)
        left_out: Counter[str] = Counter()
        for row in outcomes:
            left_out.update(json.loads(row.left_out))
        written = [Written(row.split, row.file, row.num_rows, row.num_classes, int(row.digest))
                   for row in outcomes if row.file]  # fmt: skip
        written.sort(key=lambda file: file.file)
        if not any(file.split == SPLITS[0] for file in written):
            why = f" ({told(left_out)})" if left_out else ""
            raise ConfigError(f"fit: the DataFrame has no rows to train on{why}.")
        _check_there(partial, written)
        return _keep_rows(partial, folder, written, columns.written, rows), written, left_out
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def told(left_out: Mapping[str, int]) -> str:
    """How many rows are not used, and why, in words."""
    why = ", ".join(f"{count:,} with {why}" for why, count in sorted(left_out.items()))
    return f"not used: {why}"


def _write(folder: str, group_rows: int, columns: Columns, batches: Iterator[Any]) -> Iterator[Any]:
    """What an executor does with a partition; a problem comes back as a text, since Spark would retry a failure."""
    import pyarrow

    context = TaskContext.get()
    assert context is not None
    writer = PartitionWriter(Path(folder), context.partitionId(), group_rows, columns)
    rows, problem = [], None
    try:
        rows = writer.write(batches)
    except ConfigError as error:
        problem = " ".join(str(error).split())
    outcomes = [{**vars(file), "digest": str(file.digest), "problem": None, "left_out": "{}"} for file in rows]
    if problem is not None or writer.left_out:
        empty = {"split": "", "file": "", "num_rows": 0, "num_classes": 0, "digest": "0"}
        outcomes.append({**empty, "problem": problem, "left_out": json.dumps(writer.left_out)})
    if outcomes:
        schema = pyarrow.schema([("split", pyarrow.string()), ("file", pyarrow.string()), ("num_rows", pyarrow.int64()),
                                 ("num_classes", pyarrow.int64()), ("digest", pyarrow.string()),
                                 ("problem", pyarrow.string()), ("left_out", pyarrow.string())])  # fmt: skip
        yield pyarrow.RecordBatch.from_pylist(outcomes, schema=schema)


def _check_there(folder: Path, written: Sequence[Written]) -> None:
    deadline = time.monotonic() + _APPEAR_SEC
    for file in written:
        while not (folder / file.file).is_file():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"workdir {folder.parent.parent}: the executors wrote {file.file} there, and the driver does not "
                    "see it. Give a folder on a file system that the driver and all executors share."
                )
            time.sleep(0.2)


def _keep_rows(partial: Path, folder: Path, written: Sequence[Written], names: Sequence[str], group_rows: int) -> Path:
    """The folder with the name of these rows; what was written becomes it, if it is not there yet."""
    digests = [sum(file.digest for file in written if file.split == split) % 2**64 for split in SPLITS]
    known = hashlib.blake2b(repr((list(names), digests, group_rows)).encode(), digest_size=8)
    target = folder / f"rows-{known.hexdigest()}"
    try:
        partial.rename(target)
    except OSError:  # It is there: from an earlier fit, or one beside this.
        if not target.exists():
            raise
    return target
