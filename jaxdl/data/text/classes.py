"""Classes of labels: their names, in an order that the same labels always give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError

_SHOWN = 6


def find_classes(labels: Sequence[Any], given: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The names of the classes: those that were `given`, or that the files have, or else the labels that there are.

    Whole numbers are sorted as such, words by their characters.
    """
    if given or known:
        return tuple(given or known)
    values = set(labels)
    try:
        numbers = {int(value) for value in values}
        if len(numbers) == len(values):  # 01 and 1 are different words.
            return tuple(str(value) for value in sorted(values, key=int))
    except ValueError:
        pass
    return tuple(sorted(map(str, values)))


def class_indices(labels: Sequence[Any], classes: Sequence[str], what: str) -> np.ndarray:
    """The number of each label's class, int32. Raises ConfigError, beginning with `what`, for one without a class.

    A whole number that is no name of a class is the number of one.
    """
    number: dict[Any, int] = {name: place for place, name in enumerate(classes)}

    def index(label: Any) -> int:
        if str(label) in number:
            return number[str(label)]
        if str(label).isdecimal() and int(label) < len(classes):
            return int(label)
        shown = ", ".join(classes[:_SHOWN]) + (", ..." if len(classes) > _SHOWN else "")
        raise ConfigError(f"{what}: the label {label!r} is none of the {len(classes)} classes, {shown}. Correct it, or "
                          "--data.classes.")  # fmt: skip

    found = {label: index(label) for label in dict.fromkeys(labels)}
    return np.array([found[label] for label in labels], np.int32)


def check_classes_of(labels: np.ndarray, classes: Sequence[str], what: str) -> list[str]:
    """Warnings about classes without texts, and with names that are nearly alike. Raises ConfigError for no classes."""
    if len(set(classes)) < len(classes):
        twice = Counter(classes).most_common(1)[0][0]
        raise ConfigError(f"--data.classes: {twice!r} stands there twice. Name each class once.")
    if len(classes) < 2:
        raise ConfigError(f"{what}: all texts have the label {classes[0]!r}: a classifier learns nothing from fewer "
                          "than 2 classes. Give texts of others, or another --data.label.")  # fmt: skip
    counts = np.bincount(labels, minlength=len(classes))
    if len(labels) > 2 and (counts <= 1).all():
        raise ConfigError(
            f"{what}: each of its {len(labels):,} texts has a label of its own, such as {classes[0]!r}: these are no "
            "classes. Name another column with --data.label."
        )
    warnings = []
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        warnings.append(f"{_names(empty)}: no training text has this label, so it cannot be learnt")
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    warnings += [
        f"{_names(names)}: these classes differ in case or spaces alone. If they are one, correct the labels"
        for names in alike.values()
        if len(names) > 1
    ]
    return warnings


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
