"""Weights of examples: a column of a table that says how much each row counts in the loss and in the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.tables.arrow_numbers import Where
from jaxdl.data.tables.cells import Cells, parse_number

EXAMPLE_WEIGHT = "example_weight"
"""The array of a batch with the weight of each example, float32 [batch], divided by the mean of training."""


def blank_weight(column: str | None) -> dict[str, np.ndarray]:
    """What a spec adds to the arrays of one example: a weight of 1, where the data have a column of weights."""
    return {EXAMPLE_WEIGHT: np.ones(1, np.float32)} if column else {}


def weight_numbers(column: Any, where: Where) -> np.ndarray:
    """The weights in a column of Arrow, float64 [row].

    Raises ConfigError for a weight that is missing, negative, infinite or no number.
    """
    cells, what = Cells.of(column), "the weight"
    if cells.form == "texts":
        values, unread = cells.read(lambda text: parse_number(text, "point"))
        if len(unread):
            text = cells.texts[int(unread[0])]
            raise where.error(np.isin(cells.places, unread[:1]), lambda _: f"is {text[:40]!r}", _ADVICE, what)
    elif cells.form in ("numbers", "booleans"):
        values = cells.values
    else:
        raise ConfigError(f"{where.table}: the weight {where.column!r} contains {cells.type_name}. Give numbers.")
    if (wrong := ~(values >= 0)).any():
        raise where.error(
            wrong,
            lambda place: "is missing or not finite" if np.isnan(values[place]) else f"is {values[place]:g}",
            _ADVICE,
            what,
        )
    return values


_ADVICE = ". Weights are numbers from 0, none missing: correct it, or leave the row out."


def mean_weight(weights: np.ndarray, option: str) -> float:
    """The mean of the weights of training rows, by which weights are divided. Raises ConfigError where all are 0."""
    mean = float(np.mean(weights, dtype=np.float64))
    if not mean > 0:
        raise ConfigError(f"{option}: the weight of every training row is 0, so there is nothing to learn.")
    return mean


def check_weight(weight: str | None, others: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raises ConfigError for a column of weights that another field names too; `others` are (field, columns)."""
    for field, columns in others:
        if weight in columns:
            raise ConfigError(
                f"--data.weight {weight}: --data.{field.replace('_', '-')} names it too. Name another column."
            )
