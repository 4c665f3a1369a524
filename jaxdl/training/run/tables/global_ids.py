"""Which examples the whole batches of a run have, and their ids: each process knows it without a message.

The order of the data is a pure function of (seed, position), and every process can read every example.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from jaxdl.data import Source
from jaxdl.data.tables.tabular import TabularSource, TabularSpec, check_ids
from jaxdl.training.step.parts import IDS


def training_batches(source: Source, *, batch_size: int, seed: int, start: int) -> Iterator[np.ndarray]:
    """The examples of each training batch, from `start` of the stream of examples on."""
    order = source.order(seed)
    return (order.rows(place, batch_size)[0] for place in itertools.count(start, batch_size))


def evaluation_batches(batch_size: int) -> Iterator[np.ndarray]:
    """The examples of each batch of an evaluation; those beyond the source's are padding."""
    return (np.arange(place, place + batch_size) for place in itertools.count(0, batch_size))


def ids_of(source: Source, indices: np.ndarray) -> np.ndarray:
    """The ids of examples, int32 `[example, ids]`; of padding zeros, as in `Source.eval_batch`.

    Raises ConfigError for ids that their feature does not have.
    """
    there = indices < len(source)
    known = source.ids(indices[there]) if isinstance(source, TabularSource) else source.batch(indices[there])[IDS]
    check_here(source, known, indices[there])
    ids = np.zeros((len(indices), known.shape[1]), known.dtype)
    ids[there] = known
    return ids


def check_here(source: Source, ids: np.ndarray, examples: np.ndarray) -> None:
    """Raises ConfigError for an id, of `[example, ids]`, that its feature does not have.

    A lookup has no error for it: the step would leave it out, as if it were -1.
    """
    if isinstance(source.spec, TabularSpec):
        check_ids(source.spec, ids, type(source).__name__, examples)
