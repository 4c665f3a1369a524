"""Class numbers, out of the forms in which labels are kept."""

from __future__ import annotations

import numpy as np

from jaxdl.config import ConfigError
from jaxdl.data.arrays import ALWAYS_CLASSES
from jaxdl.data.examples import Examples
from jaxdl.data.spec import LABELS, ArrayInfo, ArraySpec


def with_class_numbers(examples: Examples, what: str) -> tuple[Examples, int | None]:
    """(the examples with their labels as class numbers, the number of classes if the form of the labels has it).

    Labels are the array y or label. If all examples are in memory, they may be booleans, have a dimension of size 1
    more, or be one-hot: what they mean is certain, and their class numbers take their place. All others stay as they
    are. `what` names the data in messages.
    """
    rows = examples.rows(what)
    name = next((one for one in LABELS if one in (rows.arrays or ())), None)
    if rows.arrays is None or name is None:
        return examples, None
    labels = rows.arrays[name]
    numbers, num_classes = class_numbers(labels)
    return (examples if numbers is labels else Examples({**rows.arrays, name: numbers})), num_classes


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


def check_class_numbers(examples: Examples, what: str) -> None:
    """Raises ConfigError for examples without an array y (or label) of class numbers; `what` names them.

    Of examples that are not in memory the first one is looked at.
    """
    rows = examples.rows(what)
    first = rows.read(np.zeros(1, np.int64))
    labels = next((one for name, one in (rows.arrays or first).items() if name in LABELS), None)
    if (
        labels is not None
        and labels.ndim == 1
        and labels.dtype.kind in "iu"
        and (rows.arrays is None or (labels.min() >= 0 and labels.max() < max(len(labels), ALWAYS_CLASSES)))
    ):
        return
    spec = ArraySpec(tuple(ArrayInfo(name, one.shape[1:], str(one.dtype)) for name, one in first.items()))
    raise ConfigError(
        f"loss: it is not given, and {what} is not for classification. {spec.why_no_classes()} For another task give a "
        "function that returns the loss of each example: def loss(outputs, batch): return "
        'jnp.sum((outputs - batch["y"]) ** 2, axis=-1).'
    )
