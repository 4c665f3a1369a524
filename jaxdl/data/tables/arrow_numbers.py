"""Columns of Arrow as what a network reads: float32 features, and class numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError

EXACT_WHOLE = 2**24
"""float32 has every whole number up to this magnitude, and beyond it not every one."""
_LARGEST_LABEL = 2**31 - 1


@dataclass(frozen=True)
class Where:
    """What messages say about a value: the table, the column, and the row."""

    table: str
    column: str
    row: str = "row {}"
    """With the row's number; "a row" where rows have none, as in Spark."""
    first: int = 0
    """The number of the first row."""
    width: int = 1
    """Values of a row."""

    def error(self, chosen: np.ndarray, text: Callable[[int], str], advice: str, what: str = "column") -> ConfigError:
        """The error about the first of the values that are `chosen`, whose place `text` gets."""
        place = int(np.flatnonzero(chosen)[0])
        row = self.row.format(self.first + place // self.width)
        return ConfigError(f"{self.table}: {what} {self.column!r} {text(place)} in {row}{advice}")


def feature_numbers(column: Any, where: Where) -> np.ndarray:
    """A column of numbers as float32 [row], or of lists of as many numbers as float32 [row, number].

    `column` is a `pyarrow.ChunkedArray` with at least one row, or a `pyarrow.Array`. Integers, booleans and decimals
    without fraction are exact. Floating-point numbers, and decimals with a fraction, are rounded to float32. Raises
    ConfigError for a null, NaN or infinity, an integer beyond `EXACT_WHOLE`, lists of different lengths, and for what
    is not a number: texts, dates, categories.
    """
    import pyarrow.compute

    compute: Any = pyarrow.compute  # It makes its functions when it is imported: type checkers do not see them.
    if str(column.type) == "null":  # Where all are, Arrow may not know what they would be.
        _check_null(column, where, "is null")
    if not holds_numbers(column.type):
        advice = _advice(column.type)
        raise ConfigError(
            f"{where.table}: column {where.column!r} contains {type_name(column.type)}, not numbers. {advice}"
        )
    parts, lengths, first = [], set(), where.first
    for chunk in getattr(column, "chunks", [column]):
        here = replace(where, first=first)
        _check_null(chunk, here, "is null")
        if is_list(chunk.type) and len(chunk):
            lengths.update(compute.unique(compute.list_value_length(chunk)).to_pylist())
            if len(lengths) > 1 or 0 in lengths:
                shown = _shown(sorted(lengths))
                raise ConfigError(
                    f"{where.table}: the lists of {where.column!r} have {shown} numbers. All must have as many."
                )
            here, flat = replace(here, width=max(lengths)), chunk.flatten()
            _check_null(flat, here, "has a null")
            parts.append(_float32(flat, here).reshape(len(chunk), -1))
        elif len(chunk):
            parts.append(_float32(chunk, here))
        first += len(chunk)
    return np.concatenate(parts) if parts else np.zeros((0, 0) if is_list(column.type) else 0, np.float32)


def type_name(kind: Any) -> str:
    """A type of Arrow in messages: text for what Arrow calls string."""
    import pyarrow.types as types

    return "text" if types.is_string(kind) or types.is_large_string(kind) else str(kind)


def holds_numbers(kind: Any) -> bool:
    """Whether a type of Arrow is of numbers, or of lists of them."""
    import pyarrow.types as types

    inner = kind.value_type if is_list(kind) else kind
    return types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner) or types.is_decimal(inner)


def label_numbers(column: Any, where: Where) -> np.ndarray:
    """The class numbers of a column, int32 [row].

    Raises ConfigError for a null, and for what is not a whole number from 0 to 2^31 - 1. Nothing is rounded: a
    decimal 0.99999999999999999999 is not 1.
    """
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.types as types

    what, advice = "the label", ". Labels are whole numbers from 0."
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        raise where.error(nulls, lambda _: "is null", ". Drop such rows.", what)
    if types.is_decimal(column.type):
        try:
            column = compute.cast(column, pyarrow.int64())
        except pyarrow.ArrowInvalid:  # Some have a fraction, or more digits than an int64.
            given = column.to_pylist()
            wrong = np.array([label != int(label) or not 0 <= label <= _LARGEST_LABEL for label in given])
            raise where.error(wrong, lambda place: f"is {given[place]}", advice, what) from None
    values = column.to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iufb":
        raise ConfigError(
            f"{where.table}: the label {where.column!r} contains {type_name(column.type)}, not whole numbers. Number "
            "the classes from 0 (in Spark StringIndexer does it), or take --data table (configs/tabular.py)."
        )
    wrong = (values < 0) | (values >= _LARGEST_LABEL + 1)  # In float32 2^31 - 1 is 2^31.
    if values.dtype.kind == "f":
        wrong |= ~np.isfinite(values) | (values != np.floor(values))
    if wrong.any():
        raise where.error(wrong, lambda place: f"is {values[place]}", advice, what)
    return values.astype(np.int32)


def check_exact(values: np.ndarray, where: Where) -> None:
    """Raises ConfigError for an integer [row] that float32 may not hold; other dtypes are not looked at."""
    if values.dtype.kind in "iu":
        _check_size((values > EXACT_WHOLE) | (values < -EXACT_WHOLE), where, lambda place: values[place])


def _check_size(beyond: np.ndarray, where: Where, value: Callable[[int], Any]) -> None:
    if beyond.any():
        advice = (
            f"; the network reads float32, exact up to {EXACT_WHOLE}. Scale it (divide, subtract a number), "
            "store it as floating point if 7 digits are enough, or leave it out: an id is not a quantity."
        )
        raise where.error(beyond, lambda place: f"has the integer {value(place)}", advice)


def _check_null(values: Any, where: Where, what: str) -> None:
    if values.null_count:
        nulls = values.is_null().to_numpy(zero_copy_only=False)
        raise where.error(nulls, lambda _: what, ". Fill it, or drop such rows.")


def _float32(flat: Any, where: Where) -> np.ndarray:
    """The numbers of an array without nulls as float32."""
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.types as types

    if types.is_decimal(flat.type):
        values = compute.cast(flat, pyarrow.float64()).to_numpy(zero_copy_only=False)
        if flat.type.scale <= 0:
            _check_size(np.abs(values) > EXACT_WHOLE, where, lambda place: flat[place].as_py())
    else:
        values = flat.to_numpy(zero_copy_only=False)
        check_exact(values, where)
    with np.errstate(over="ignore"):  # The next lines say so.
        numbers = values.astype(np.float32)
    if not (finite := np.isfinite(numbers)).all():
        raise where.error(~finite, lambda _: "is not finite", ". Fill it, or drop such rows.")
    return numbers


def _advice(kind: Any) -> str:
    import pyarrow.types as types

    if types.is_nested(kind):
        return "Encode it, or leave it out."
    return "--data table (configs/tabular.py) reads words, dates and missing values; or leave it out."


def is_list(kind: Any) -> bool:
    """Whether a type of Arrow is of lists."""
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _shown(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths[:5])) + (", ..." if len(lengths) > 5 else "")
