"""Class numbers, out of the forms in which labels are kept."""

from __future__ import annotations

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.array_spec import LABELS, ArrayInfo, ArraySpec
from jaxdl.data.arrays.rows import Rows

ALWAYS_CLASSES = 1000
"""Whole numbers below this are class numbers even if there are fewer examples."""


def are_class_numbers(smallest: int, largest: int, num_train: int) -> bool:
    """Whether whole numbers, of which these are two, are class numbers where there are so many training examples.

    Numbers larger than there are examples to learn them from are something else, such as prices.
    """
    return smallest >= 0 and largest < max(num_train, ALWAYS_CLASSES)


def class_numbers(labels: np.ndarray) -> tuple[np.ndarray, int | None]:
    """(class numbers [example] if it is certain that the labels mean them, the labels as they are if not; classes).

    The number of classes is None where the form of the labels does not have it.
    """
    kind = labels.dtype.kind
    if labels.ndim == 2 and labels.shape[1] > 1 and _is_one_hot(labels):
        return labels.argmax(axis=1).astype(np.int32), labels.shape[1]
    flat = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if kind == "b" and flat.ndim == 1:
        return flat.astype(np.int32), 2
    return (flat if kind in "iu" else labels), None


def _is_one_hot(labels: np.ndarray) -> bool:
    return bool(((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all())


def check_class_numbers(rows: Rows, what: str, num_train: int) -> None:
    """Raises ConfigError for examples without an array y (or label) of class numbers; `what` names them.

    `num_train` is the number of training examples. Of examples that are not in memory the first one is looked at.
    """
    first = rows.read(np.zeros(1, np.int64))
    labels = next((array for name, array in (rows.arrays or first).items() if name in LABELS), None)
    if (
        labels is not None
        and labels.ndim == 1
        and labels.dtype.kind in "iu"
        and (rows.arrays is None or are_class_numbers(int(labels.min()), int(labels.max()), num_train))
    ):
        return
    spec = ArraySpec(tuple(ArrayInfo(name, array.shape[1:], str(array.dtype)) for name, array in first.items()))
    raise ConfigError(
        f"loss: it is not given, and {what} is not for classification. {spec.why_no_classes()} For another task give a "
        "function that returns the loss of each example: def loss(outputs, batch): return "
        'jnp.sum((outputs - batch["y"]) ** 2, axis=-1).'
    )
