"""Columns of a table that are not features: the index of pandas, and numbers that give the label away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.data.array_spec import LABELS

_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: \d+(?:\.\d+|_level_\d+)*")
"""Names of an index that has none: pandas writes "" into CSV, reads it as `Unnamed: 0`, and has its own in Parquet."""
_FEW_ROWS = 8
"""In so few rows numbers are sorted by chance."""
_AT_ONCE = 64
"""Columns that are looked at together."""


def index_columns(names: Sequence[str], metadata: Any = None) -> tuple[str, ...]:
    """Those of the columns that are an index of pandas, by their names or by the metadata of an Arrow schema.

    The metadata name the columns of an index in `index_columns`; a range is a dictionary there, and no column.
    """
    try:
        said = json.loads((metadata or {}).get(b"pandas", b"{}")).get("index_columns", [])
    except (ValueError, AttributeError):
        said = []
    listed = said if isinstance(said, list) else []
    return tuple(name for name in names if _INDEX.fullmatch(name) or name in listed)


def frame_notes(frames: Mapping[str, Any], arrays: Mapping[str, np.ndarray], what: str) -> list[str]:
    """Notes on the columns of data frames in memory: on an index among them, and on those that `suspects` names.

    `frames` are values that may be data frames, `arrays` the numbers of them, each by the names that they have in the
    examples. The columns stay: whoever gives a frame chose them, and the network was made for as many.
    """
    notes: list[str] = []
    labels = next((arrays[name] for name in LABELS if name in arrays), None)
    for name, frame in frames.items():
        columns, x = [str(column) for column in getattr(frame, "columns", ())], arrays[name]
        if x.ndim != 2 or x.shape[1] != len(columns) or name in LABELS or x.dtype.kind not in "biuf":
            continue
        index = index_columns(columns)
        notes += [f"{what}: {name} has the column {column!r}, an index that pandas wrote, and the network reads it. "
                  f"Leave it out: {name}.drop(columns=[{column!r}])." for column in index]  # fmt: skip
        if labels is not None and labels.dtype.kind in "biu" and labels.shape == x.shape[:1]:
            notes += [f"{what}: column {column!r} of {name} {why}. If it is not a measurement, leave it out."
                      for column, why in suspects(x, columns, labels) if column not in index]  # fmt: skip
    return notes


def suspects(
    x: np.ndarray, names: Sequence[str], labels: np.ndarray, starts: Sequence[int] = (0,)
) -> list[tuple[str, str]]:
    """(name, why) of columns that number the rows, or are the same in all rows of a class: they give the label away.

    `x` is float32 [row, column]; `labels` int [row]; `starts` are the first rows of the files.
    """
    if len(x) < _FEW_ROWS:
        return []
    counts = np.unique(labels, return_counts=True)[1]
    order = np.argsort(labels, kind="stable")
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    telling = [False] * len(names)
    if len(counts) > 1 and counts.min() > 1:
        for first in range(0, len(names), _AT_ONCE):
            sorted_x = x[order, first : first + _AT_ONCE]
            least, most = (reduce.reduceat(sorted_x, firsts) for reduce in (np.minimum, np.maximum))
            telling[first : first + _AT_ONCE] = ((least == most).all(axis=0) & (least != least[0]).any(axis=0)).tolist()
    return list(_reasons(x, names, telling, starts))


def _reasons(
    x: np.ndarray, names: Sequence[str], telling: Sequence[bool], starts: Sequence[int]
) -> Iterator[tuple[str, str]]:
    for place, name in enumerate(names):
        why = ""
        if telling[place]:
            why = "has one number for all rows of a class, so it tells the label"
        elif numbers_rows(x[:, place], starts):
            why = "numbers the rows, so where these are sorted it tells the label"
        if why:
            yield name, why


def numbers_rows(column: np.ndarray, starts: Sequence[int] = (0,)) -> bool:
    """Whether a column has whole numbers that grow from row to row of each file, or all of a range, each once."""
    if len(column) < _FEW_ROWS or (column != np.floor(column)).any():
        return False
    steps = np.diff(column)
    steps = np.delete(steps, [start - 1 for start in starts if 0 < start < len(column)])
    if (steps > 0).all():
        return True
    return column.max() - column.min() == len(column) - 1 and len(np.unique(column)) == len(column)
