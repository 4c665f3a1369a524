"""The label of a table: classes (words, booleans, whole numbers), or a number that is predicted in its units."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.source import check_classes
from jaxdl.data.tables.cells import FALSE, TRUE, Cells, Style, cells_of, number_style, parse_number

MOST_NUMBERED = 20
"""A label of whole numbers has classes if so many values differ, or fewer."""
_SHOWN = 5

Target = Literal["auto", "classes", "number"]


@dataclasses.dataclass(frozen=True)
class Label:
    """The column that is predicted. With `classes` these are numbered in their order; else it is a number.

    `counts` are the training rows of each class; `mean` and `std` are those of the training rows' numbers, which the
    network learns as (number - mean) / std.
    """

    name: str
    classes: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    form: str = "texts"
    """What the classes were in the file: texts, numbers or booleans."""
    style: Style = "point"
    mean: float = 0.0
    std: float = 1.0

    @property
    def dtype(self) -> np.dtype:
        """That of the labels in a batch: class numbers, or standardized numbers."""
        return np.dtype(np.int32 if self.classes else np.float32)

    def read(self, cells: Cells, what: str) -> np.ndarray:
        """Class numbers int32 [row], -1 where missing; or standardized numbers float32 [row], NaN where missing.

        Raises ConfigError, which begins with `what`, for a class that the network does not know.
        """
        if not self.classes:
            numbers = _numbers(cells, self.style, f"{what}: the label {self.name!r}")
            return ((numbers - self.mean) / self.std).astype(np.float32)
        if self.form == "numbers":  # 3 and 3.0 are one class.
            values = _numbers(cells, self.style, f"{what}: the label {self.name!r}")
            cells = cells_of([None if np.isnan(value) else value for value in values.tolist()])
        numbers = {text: number for number, text in enumerate(self.classes)}
        for text in cells.texts:
            if text not in numbers:
                known = ", ".join(map(repr, self.classes[:_SHOWN])) + (", ..." if len(self.classes) > _SHOWN else "")
                raise ConfigError(f"{what}: the label {self.name!r} has {text!r}; its classes are {known}.")
        ids = np.array([numbers[text] for text in cells.texts] or [-1], np.int32)
        return np.where(cells.places < 0, np.int32(-1), ids[np.maximum(cells.places, 0)])

    def known(self, labels: np.ndarray) -> np.ndarray:
        """Which of the labels that `read` gave are not missing, bool [row]."""
        return labels >= 0 if self.classes else ~np.isnan(labels)

    def values(self, classes: np.ndarray) -> np.ndarray:
        """Class numbers as the classes were in the file: texts, whole numbers, or booleans."""
        if self.form == "booleans":
            return np.array([text == TRUE for text in self.classes])[classes]
        if self.form == "numbers":
            values = [float(text) for text in self.classes]
            return np.array([int(x) for x in values] if all(map(float.is_integer, values)) else values)[classes]
        return np.array(self.classes)[classes]

    def described(self) -> str:
        """The name, and the number of classes."""
        return f"{self.name!r}: {f'{len(self.classes):,} classes' if self.classes else 'a number'}"


def fit_label(name: str, cells: Cells, rows: np.ndarray, target: Target, *, comma: bool) -> Label:
    """The label of a table: classes as they are in all rows, counts and statistics of those in `rows`, of training.

    Raises ConfigError for a label that cannot be predicted.
    """
    if cells.form in ("times", "other"):
        raise ConfigError(f"--data.label {name}: it contains {cells.type_name}. Give a column of words or numbers.")
    style: Style = "boolean" if cells.form == "booleans" else "point"
    is_number = cells.form == "numbers"
    if cells.form == "texts":
        style, count = number_style(cells.texts, comma=comma)
        is_number = bool(count) and count == len(cells.texts) and style != "boolean"
    if not (cells.texts if cells.form == "texts" else (~np.isnan(cells.values)).any()):
        raise ConfigError(f"--data.label {name}: no row has a value. Name another column, or give its values.")
    if target == "auto":
        target = "number" if is_number and not _are_classes(cells, style) else "classes"
    if target == "number":
        return _number_label(name, cells, rows, style)
    return _class_label(name, cells, rows, is_number=is_number, style=style)


def _are_classes(cells: Cells, style: Style) -> bool:
    """Whether numbers are few whole ones, each in several rows."""
    numbers = _numbers(cells, style, "")
    known = numbers[~np.isnan(numbers)]
    different = np.unique(known)
    return len(different) <= min(MOST_NUMBERED, len(known) // 2) and (different == np.floor(different)).all()


def _numbers(cells: Cells, style: Style, what: str) -> np.ndarray:
    if cells.form in ("numbers", "booleans"):
        return cells.values
    numbers, unread = cells.read(lambda text: parse_number(text, style))
    if len(unread):
        text = cells.texts[int(unread[0])]
        raise ConfigError(f"{what} has {text[:40]!r}, which is no number. Correct it, or --data.target classes.")
    return numbers


def _number_label(name: str, cells: Cells, rows: np.ndarray, style: Style) -> Label:
    numbers = _numbers(cells, style, f"--data.label {name}: it")[rows]
    known = numbers[~np.isnan(numbers)]
    if not len(known):
        raise ConfigError(f"--data.label {name}: no training row has a value. Give more rows.")
    mean, std = float(known.mean()), float(known.std())
    if std <= 1e-9 * abs(mean):
        raise ConfigError(f"--data.label {name}: all training rows have {mean:g}, so there is nothing to learn.")
    return Label(name, style=style, mean=mean, std=std)


def _class_label(name: str, cells: Cells, rows: np.ndarray, *, is_number: bool, style: Style) -> Label:
    given, given_style = cells, style
    if is_number:
        values = _numbers(cells, style, f"--data.label {name}: it")
        cells = cells_of([None if np.isnan(value) else value for value in values.tolist()])
        style = "point"
    different, known = len(cells.texts), int((cells.places >= 0).sum())
    check_classes(different, f"--data.label {name}")
    if different > known / 2 and known > 2 * MOST_NUMBERED:
        raise ConfigError(
            f"--data.label {name}: {known:,} rows have {different:,} different values, too many for classes. Name the "
            "column that is to be predicted" + (", or --data.target number." if is_number else ".")
        )
    order = sorted(cells.texts, key=(lambda text: (parse_number(text, style) or 0.0, text)) if is_number else str)
    form = "booleans" if set(cells.texts) <= {TRUE, FALSE} else "numbers" if is_number else "texts"
    label: Any = Label(name, tuple(order), form=form, style=given_style)
    numbers = label.read(given, "data")[rows]
    counts = np.bincount(numbers[numbers >= 0], minlength=different)
    return dataclasses.replace(label, counts=tuple(counts.tolist()))
