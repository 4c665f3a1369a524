"""Rows that a network cannot score, `handleInvalid` of `pyspark.ml`: null, NaN or infinity. No pyspark here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.tables.arrow_numbers import is_list

HANDLING = ("error", "skip", "keep")
Form = Literal["images", "numbers", "table", "texts"]
"""What the features of rows are. A table has columns of words or dates, or values that are missing."""
NOT_USED: dict[str, str] = {
    "images": "null in {!r}",
    "numbers": "null, NaN or infinity in {!r}",
    "texts": "no text in {!r}",
    "table": "{!r}",
}
"""Form -> why a row is not used that `invalid_of` says a column has no value in."""
VECTOR = {"type", "size", "indices", "values"}
"""The fields of a vector of `pyspark.ml` in Arrow; type 1 is dense, and 0 sparse."""


def check_handling(handling: Any) -> str:
    """One of `HANDLING`. Raises ConfigError for another value."""
    if handling not in HANDLING:
        raise ConfigError(f"handleInvalid={handling!r}: give one of {', '.join(map(repr, HANDLING))}.")
    return handling


def plain_columns(columns: Sequence[Any]) -> list[Any]:
    """Columns of Arrow with vectors as lists of numbers."""
    return [_lists(column) if _is_vector(column.type) else column for column in columns]


def of_valid_rows(
    function: Callable[[Sequence[Any]], np.ndarray], columns: Sequence[Any], handling: str, form: Form = "numbers"
) -> tuple[np.ndarray, np.ndarray]:
    """(`function` of columns of Arrow, float32 [row, ...]; which rows are invalid, bool [row]).

    Unless `handling` is error, the function sees valid rows alone, and the others are NaN.
    """
    if handling == "error":
        return function(columns), np.zeros(len(columns[0]), bool)
    invalid = np.zeros(len(columns[0]), bool)
    for column in columns:
        invalid |= invalid_of(column, form)
    values = function([column.filter(_mask(~invalid)) for column in columns]) if invalid.any() else function(columns)
    whole = np.full((len(invalid), *values.shape[1:]), np.nan, np.float32)
    whole[~invalid] = values
    return whole, invalid


def invalid_of(column: Any, form: Form) -> np.ndarray:
    """In which rows a feature column of Arrow has nothing that a network reads, bool [row].

    That is null; of numbers also NaN and infinity, of texts one of blanks alone. A table may have missing values.
    """
    return _INVALID[form](column)


def _null(column: Any) -> np.ndarray:
    return column.is_null().to_numpy(zero_copy_only=False)


def _no_numbers(column: Any) -> np.ndarray:
    invalid = _null(column).copy()
    if is_list(column.type) and not is_list(column.type.value_type):
        import pyarrow.compute

        compute: Any = pyarrow.compute
        rows = compute.list_parent_indices(column).to_numpy(zero_copy_only=False)
        invalid[rows[is_missing(column.flatten())]] = True
        return invalid
    return invalid | is_missing(column)


def _no_text(column: Any) -> np.ndarray:
    return np.array([text is None or not text.strip() for text in column.to_pylist()], bool)


def _never(column: Any) -> np.ndarray:
    return np.zeros(len(column), bool)


_INVALID: dict[str, Callable[[Any], np.ndarray]] = {
    "images": _null,
    "numbers": _no_numbers,
    "texts": _no_text,
    "table": _never,
}


def is_missing(values: Any) -> np.ndarray:
    """Which values of an array of Arrow are null, NaN or infinity, bool [row]."""
    import pyarrow.types as types

    missing = values.is_null().to_numpy(zero_copy_only=False)
    if types.is_floating(values.type):
        missing = missing | ~np.isfinite(values.to_numpy(zero_copy_only=False))
    return missing


def _mask(chosen: np.ndarray) -> Any:
    import pyarrow

    return pyarrow.array(chosen)


def _is_vector(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_struct(kind) and {kind.field(place).name for place in range(kind.num_fields)} == VECTOR


def _lists(vectors: Any) -> Any:
    """Vectors as lists of float64; null stays null."""
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute
    kinds, values = (compute.struct_field(vectors, name) for name in ("type", "values"))
    if not compute.any(compute.equal(kinds, 0)).as_py():
        return values
    rows = []
    for vector in vectors.to_pylist():
        if vector is None or vector["type"]:
            rows.append(None if vector is None else vector["values"])
            continue
        row = np.zeros(vector["size"])
        row[vector["indices"]] = vector["values"]
        rows.append(row)
    return pyarrow.array(rows, pyarrow.list_(pyarrow.float64()))
