"""Rows that a network cannot score, `handleInvalid` of `pyspark.ml`: null, NaN or infinity. No pyspark here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.tables.arrow_numbers import is_list

HANDLING = ("error", "skip", "keep")
_VECTOR = {"type", "size", "indices", "values"}
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
    function: Callable[[Sequence[Any]], np.ndarray], columns: Sequence[Any], handling: str
) -> tuple[np.ndarray, np.ndarray]:
    """(`function` of columns of Arrow, float32 [row, ...]; which rows are invalid, bool [row]).

    Unless `handling` is error, the function sees valid rows alone, and the others are NaN.
    """
    if handling == "error":
        return function(columns), np.zeros(len(columns[0]), bool)
    invalid = invalid_rows(columns)
    values = function([column.filter(_mask(~invalid)) for column in columns]) if invalid.any() else function(columns)
    whole = np.full((len(invalid), *values.shape[1:]), np.nan, np.float32)
    whole[~invalid] = values
    return whole, invalid


def invalid_rows(columns: Sequence[Any]) -> np.ndarray:
    """Which rows have null, NaN or infinity in one of the columns, bool [row]."""
    invalid = np.zeros(len(columns[0]), bool)
    for column in columns:
        invalid |= column.is_null().to_numpy(zero_copy_only=False)
        if is_list(column.type) and not is_list(column.type.value_type):
            import pyarrow.compute

            compute: Any = pyarrow.compute
            rows = compute.list_parent_indices(column).to_numpy(zero_copy_only=False)
            invalid[rows[_not_finite(column.flatten())]] = True
        else:
            invalid |= _not_finite(column)
    return invalid


def _not_finite(values: Any) -> np.ndarray:
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

    return types.is_struct(kind) and {kind.field(place).name for place in range(kind.num_fields)} == _VECTOR


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
