"""Texts that a user gives to a trained classifier: a few at a time, those of similar length together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.data.text.labelled_spec import is_text

_AT_ONCE = 64
"""Texts of a batch."""
_SHOWN = 60


def as_texts(values: Any) -> Sequence[Any] | None:
    """The texts, or pairs, that were given, one or a list; None for what is neither."""
    given = [values] if is_text(values) else values
    return given if isinstance(given, list | tuple) and given and all(map(is_text, given)) else None


def shown(text: Any) -> str:
    """The beginning of a text, or of the first of a pair, in one line."""
    words = " ".join((text if isinstance(text, str) else text[0]).split())
    return words if len(words) <= _SHOWN else words[: _SHOWN - 1] + "…"


def outputs_of_texts(
    function: Callable[[Any], Any],
    batch_of: Callable[[Sequence[Any]], Mapping[str, np.ndarray]],
    texts: Sequence[Any],
    at_once: int = _AT_ONCE,
) -> Any:
    """What `function` gives for the batches that `batch_of` makes of texts, `at_once` of them: [text, ...]."""
    sizes = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    order = np.argsort(sizes, kind="stable")
    outputs: np.ndarray | None = None
    for first in range(0, len(texts), at_once):
        rows = order[first : first + at_once]
        batch = batch_of([texts[row] for row in rows])
        # As many rows in each batch: few programs are compiled.
        size = min(at_once, 1 << (len(texts) - 1).bit_length())
        filled = {name: np.concatenate([x, np.repeat(x[:1], size - len(x), axis=0)]) for name, x in batch.items()}
        made = np.asarray(function(filled))[: len(rows)]
        outputs = np.zeros((len(texts), *made.shape[1:]), made.dtype) if outputs is None else outputs
        outputs[rows] = made
    return outputs
