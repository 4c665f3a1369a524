"""The specification of a table with columns of numbers, dates and words: all that a network needs to read such rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.spec import DataSpec
from jaxdl.data.tables.arrow_numbers import Where
from jaxdl.data.tables.cells import MISSING, Cells, cells_of, columns_of_rows
from jaxdl.data.tables.column_kinds import FIRST_ID, MISSING_ID, UNKNOWN_ID, Column, Surprises
from jaxdl.data.tables.dates import FORMS
from jaxdl.data.tables.row_groups import check_columns
from jaxdl.data.tables.row_weights import EXAMPLE_WEIGHT, blank_weight, weight_numbers
from jaxdl.data.tables.table_files import Format, parts_of_list, read_tables
from jaxdl.data.tables.table_label import Label

_CLIP = 3.0
_NAMED = 12


@dataclasses.dataclass(frozen=True)
class ColumnsSpec(DataSpec):
    """Columns of numbers, dates and words, fitted on training rows: numbers are scaled, words have ids.

    A batch has "numbers", float32 `[batch, number]` in the units of the columns, NaN where missing; "words", int32
    `[batch, column]`; "label"; and `EXAMPLE_WEIGHT` where there is a column of weights. The network gets the numbers
    scaled: (number - center) / scale, of which nothing goes far beyond 3 (as RealMLP does it: Holzmüller et al. 2024,
    arXiv 2407.04491), 0 where missing; and behind them, for each column that lacks values in training, 1 where it does.
    """

    columns: tuple[Column, ...]
    label: Label
    left_out: tuple[str, ...] = ()
    """Columns of the training data that are not read."""
    center: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    lacks: tuple[bool, ...] = ()
    """Of each number, whether it is missing in training rows."""
    format: tuple[str | None, str] = (None, "utf-8")
    """Delimiter and encoding of CSV files."""
    num_rows: int | None = None
    """Rows that it was fitted on; None in runs of earlier versions."""
    weight: str | None = None
    """The column of the weights of rows, which `mean_weight` divides."""
    mean_weight: float = 1.0
    modality: ClassVar[str] = "columns"

    def __post_init__(self) -> None:
        columns = tuple(Column.from_json(x) if isinstance(x, Mapping) else x for x in self.columns)
        object.__setattr__(self, "columns", columns)
        if isinstance(label := self.label, Mapping):
            fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in label.items()}
            object.__setattr__(self, "label", Label(**fields))

    def to_json(self) -> dict[str, Any]:
        """The fields as `spec_to_json` writes them; each column with its kind."""
        return dataclasses.asdict(self) | {"columns": [column.to_json() for column in self.columns]}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers of a row, in their order."""
        return tuple(name for column in self.columns for name in column.numbers)

    @property
    def word_columns(self) -> tuple[Column, ...]:
        """The columns of words, in their order."""
        return tuple(column for column in self.columns if column.num_words is not None)

    def sizes(self) -> dict[str, Any]:
        """`num_numbers` that the network gets, ids of each column of words, training rows, and classes, if any."""
        words = tuple(column.num_words for column in self.word_columns)
        sizes: dict[str, Any] = {"num_numbers": len(self.numbers) + sum(self.lacks), "word_sizes": words}
        sizes |= {} if self.num_rows is None else {"num_rows": self.num_rows}
        return sizes | ({"num_classes": len(self.label.classes)} if self.label.classes else {})

    def blank(self) -> dict[str, np.ndarray]:
        """One row of zeros; without "numbers" or "words" where there are none."""
        numbers, words = len(self.numbers), len(self.word_columns)
        batch = {"numbers": np.zeros((1, numbers), np.float32)} if numbers else {}
        batch |= {"words": np.zeros((1, words), np.int32)} if words else {}
        return batch | {"label": np.zeros(1, self.label.dtype)} | blank_weight(self.weight)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The scaled numbers, float32 `[batch, num_numbers]`, and the ids of words, int32 `[batch, column]`."""
        import jax.numpy as jnp

        rows = next(batch[name].shape[0] for name in ("numbers", "words") if name in batch)
        numbers, words = jnp.zeros((rows, 0), jnp.float32), batch.get("words", jnp.zeros((rows, 0), jnp.int32))
        if "numbers" in batch:
            given = batch["numbers"]
            missing = jnp.isnan(given)
            x = (given - jnp.asarray(self.center, jnp.float32)) / jnp.asarray(self.scale, jnp.float32)
            x = jnp.where(missing, 0, x)
            x = x / jnp.sqrt(1 + (x / _CLIP) ** 2)
            lacking = [place for place, lacks in enumerate(self.lacks) if lacks]
            numbers = jnp.concatenate([x, missing[:, jnp.asarray(lacking, jnp.int32)].astype(x.dtype)], axis=1)
        return numbers, words

    def described(self) -> tuple[str, str]:
        """The columns, by kind, and the label."""
        kinds = [(kind, [column for column in self.columns if column.kind == kind]) for kind in
                 dict.fromkeys(column.kind for column in self.columns)]  # fmt: skip
        plural = {"number": "numbers", "date": "dates"}
        shown = "; ".join(f"{len(columns)} of {plural.get(kind, kind)}" for kind, columns in kinds)
        return "rows", f"{len(self.columns)} columns ({shown}), label {self.label.described()}"

    def listed(self) -> str:
        """The names of the columns, by kind."""
        texts = []
        for kind in dict.fromkeys(column.kind for column in self.columns):
            names = [column.described() for column in self.columns if column.kind == kind]
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            texts.append(
                f"{ {'number': 'numbers', 'date': 'dates'}.get(kind, kind) }: {', '.join(names[:_NAMED])}{more}"
            )
        return "; ".join(texts)

    def example(self) -> dict[str, np.ndarray]:
        """The arrays of one row, without the label and the weight."""
        return {name: x for name, x in self.blank().items() if name not in ("label", EXAMPLE_WEIGHT)}

    def user_example(self) -> dict[str, list[Any]]:
        """One row, by column."""
        return {column.name: [column.example()] for column in self.columns}

    def example_text(self) -> str:
        """What the numbers and ids of a row are."""
        words = ", ".join(column.name for column in self.word_columns)
        parts = []
        if self.numbers:
            parts.append(f"numbers are {', '.join(self.numbers)}, less their offset, NaN where missing")
        if words:
            parts.append(f"words are the ids of {words}: 0 where missing, 1 for an unknown word, then in the order")
        return f"{'; '.join(parts)} that columns.json has" if words else "; ".join(parts)

    def preparation(self) -> dict[str, Any]:
        """How rows become the arrays of an exported function: of "numbers" each with its column, of "words" the ids."""
        numbers = [
            {"name": name} | {"column" if key == "name" else key: x for key, x in column.to_json().items()}
            for column in self.columns
            for name in column.numbers
        ]
        words = [{"column": column.name, "missing": MISSING_ID, "unknown": UNKNOWN_ID}
                 | {"ids": {word: FIRST_ID + number for number, word in enumerate(column.to_json()["words"])}}
                 for column in self.word_columns]  # fmt: skip
        label = {"name": self.label.name, "classes": self.label.classes, "form": self.label.form}
        for number in numbers:  # So that a program without jaxdl reads dates as the network does.
            if (form := FORMS.get(number.get("form", ""))) is not None:
                number["pattern"] = form.pattern
        cells = {"missing": sorted(MISSING), "delimiter": self.format[0], "encoding": self.format[1]}
        return {"numbers": numbers, "words": words, "label": label, "left_out": self.left_out, "cells": cells}

    def class_counts(self) -> tuple[int, ...]:
        """How many training rows have each class; empty where the label is a number."""
        return self.label.counts

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers; empty where the label is a number."""
        return self.label.classes

    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the label, which is standardized in batches."""
        return self.label.mean, self.label.std

    # Rows that users give

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """The batch of rows: a dictionary (one row, or columns), a list of dictionaries, a data frame, or a path.

        Warns of unknown words and of columns that training did not have. Raises ConfigError for missing columns, and
        for values that are no numbers or no dates where training has such.
        """
        import warnings

        del names
        wanted = self.example()
        if isinstance(values, Mapping) and values.keys() == wanted.keys() and _are_arrays(values, wanted):
            return {name: np.asarray(values[name], wanted[name].dtype) for name in wanted}
        columns = self.columns_of(values, what)
        batch, surprises = self._encoded(columns, what)
        others = [name for name in columns if name not in self.known]
        lines = surprises.lines({}) + (
            [f"not read, since training had no such columns: {_some(others)}"] if others else []
        )
        for line in lines:
            warnings.warn(f"{what}: {line}", stacklevel=_users_level())
        return batch

    def _encoded(self, columns: Mapping[str, Any], what: str) -> tuple[dict[str, np.ndarray], Surprises]:
        """As `encode`. Raises ConfigError for cells that are no numbers, or no dates, where training has such."""
        batch, surprises = self.encode(columns)
        if surprises.unread:
            line = Surprises(unread=surprises.unread).lines({x.name: x.kind for x in self.columns})[0]
            raise ConfigError(
                f"{what}: {line.partition(', so there')[0]}. Correct it, or give None where it is missing."
            )
        return batch, surprises

    def of_columns(self, columns: Mapping[str, Any], what: str) -> dict[str, np.ndarray]:
        """The batch of columns of Arrow, by name. Raises ConfigError as `to_predict`."""
        parts: dict[str, Any] = {}
        for name, array in columns.items():
            vector = name not in self.known and f"{name}[0]" in self.known
            parts |= parts_of_list(name, array) if vector else {name: array}
        return self._encoded(parts, what)[0]

    def labelled(self, values: Any, what: str) -> dict[str, np.ndarray] | None:
        """The arrays of rows with labels; those without are left out. Raises ConfigError where none has one.

        Warns where the network was trained with a column of weights that these rows do not have: all count alike then.
        """
        import warnings

        columns = self.columns_of(values, what)
        labels = self.label_numbers(columns, what)
        known = self.label.known(labels)
        if not known.any():
            raise ConfigError(f"{what}: no row has a value of {self.label.name!r}. Give rows with labels.")
        batch, _ = self.encode(columns)
        batch |= {"label": labels}
        if self.weight is not None and self.weight in columns:
            batch |= self.weights_of(columns, what, known)
        elif self.weight is not None:
            batch |= {EXAMPLE_WEIGHT: np.ones(len(labels), np.float32)}
            warnings.warn(
                f"{what}: no column {self.weight!r} of weights: all rows count alike", stacklevel=_users_level()
            )
        return {name: array[known] for name, array in batch.items()}

    def weights_of(self, columns: Mapping[str, Any], what: str, known: np.ndarray) -> dict[str, np.ndarray]:
        """The array of the weights of rows, by its name; empty without a column of weights.

        Those of rows that are not `known` are 0, whatever the column has. Raises ConfigError for what is no weight.
        """
        import pyarrow

        if self.weight is None:
            return {}
        weights = np.zeros(len(known))
        chosen = columns[self.weight].filter(pyarrow.array(known))
        weights[known] = weight_numbers(chosen, Where(what, self.weight, "a row"))
        return {EXAMPLE_WEIGHT: (weights / self.mean_weight).astype(np.float32)}

    def label_numbers(self, columns: Mapping[str, Any], what: str) -> np.ndarray:
        """The labels of columns as `Label.read` gives them. Raises ConfigError where there is no column of labels."""
        check_columns(list(columns), [self.label.name], what)
        return self.label.read(Cells.of(columns[self.label.name]), what)

    @property
    def known(self) -> frozenset[str]:
        """The names of all columns of the training data."""
        others = () if self.weight is None else (self.weight,)
        return frozenset([*(column.name for column in self.columns), *self.left_out, self.label.name, *others])

    def columns_of(self, values: Any, what: str) -> dict[str, Any]:
        """The columns of rows that a user gave, as arrays of Arrow. Raises ConfigError for what has none."""
        if isinstance(values, str | Path):
            return dict(read_tables([str(values)], what, Format(*self.format)).columns)
        if hasattr(values, "column_names") and hasattr(values, "column"):  # A table of Arrow.
            given = {name: values.column(name) for name in values.column_names}
        elif hasattr(values, "columns") and hasattr(values, "__getitem__"):
            given = {str(name): values[name] for name in values.columns}
        elif isinstance(values, Mapping):
            given = {str(name): x for name, x in values.items()} if _has_columns(values) else columns_of_rows([values])
        elif isinstance(values, Sequence) and values and all(isinstance(row, Mapping) for row in values):
            given = columns_of_rows(values)
        else:
            raise ConfigError(
                f"{what}: got {type(values).__name__}. Give rows as a dictionary, a list of dictionaries, a data "
                f"frame, or the path of a file, with the columns {_some([x.name for x in self.columns])}."
            )
        arrays: dict[str, Any] = {}
        for name, x in given.items():
            array = cells_of(x).arrow
            arrays |= (
                parts_of_list(name, array) if f"{name}[0]" in self.known and name not in self.known else {name: array}
            )
        if len({len(array) for array in arrays.values()}) > 1:
            raise ConfigError(f"{what}: the columns have different numbers of rows.")
        return arrays

    def encode(self, columns: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Surprises]:
        """(the batch of columns, without the label; what was not expected of them).

        Raises ConfigError for columns that are missing.
        """
        if missing := [column.name for column in self.columns if column.name not in columns]:
            raise ConfigError(
                f"the columns {_some(missing)} are missing; the network reads {_some([x.name for x in self.columns])}. "
                "Give them, with None for values that are not known."
            )
        surprises, numbers, words = Surprises(), [], []
        for column in self.columns:
            encoded = column.encode(Cells.of(columns[column.name]), surprises)
            (words if column.num_words is not None else numbers).append(encoded)
        batch: dict[str, np.ndarray] = {}
        if numbers:
            batch["numbers"] = np.ascontiguousarray(np.concatenate(numbers, axis=1), np.float32)
        if words:
            batch["words"] = np.ascontiguousarray(np.stack(words, axis=1), np.int32)
        return batch, surprises

    def answers(self, predictions: Any, values: Any) -> Any:
        """The predictions of a task as users read them: the class of each row as it was in the file, or the number.

        Of one row that was given as a dictionary it is a value, of others an array [row].
        """
        one = isinstance(values, Mapping) and not _has_columns(values)
        if isinstance(values, Mapping) and values.keys() == self.example().keys():
            return predictions
        found = self.label.values(np.asarray(predictions).argmax(axis=1)) if self.label.classes else predictions
        return found[0].item() if one else found


def _are_arrays(values: Mapping[str, Any], wanted: Mapping[str, np.ndarray]) -> bool:
    return all(getattr(x, "shape", (0,))[1:] == wanted[name].shape[1:] for name, x in values.items())


def _has_columns(values: Mapping[str, Any]) -> bool:
    """Whether a dictionary has columns, not one row."""
    return bool(values) and all(
        hasattr(x, "__len__") and not isinstance(x, str | bytes | Mapping) and getattr(x, "shape", (1,)) != ()
        for x in values.values()
    )


def _users_level() -> int:
    """The `stacklevel` of a warning of the caller that names the line outside of jaxdl which has led to it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("jaxdl.") and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")


def scales_of(numbers: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...], tuple[bool, ...]]:
    """(center, scale, whether values are missing) of numbers float [row, number], by quantiles, which outliers leave.

    The median and the distance of the quartiles; where these are equal half the range, else 1.
    """
    center, scale, lacks = [], [], []
    for column in numbers.T.astype(np.float64):
        known = column[~np.isnan(column)]
        lacks.append(len(known) < len(column))
        low, middle, high = np.quantile(known, (0.25, 0.5, 0.75)) if len(known) else (0.0, 0.0, 0.0)
        width = high - low or (np.ptp(known) / 2 if len(known) else 0.0) or 1.0
        center.append(float(middle))
        scale.append(float(width))
    return tuple(center), tuple(scale), tuple(lacks)
