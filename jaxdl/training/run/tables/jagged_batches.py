"""What batches of a run with embedding tables have besides columns of ids: lengths, and the ids of the next batch.

All processes choose the same bucket for a batch, without a message: each counts the ids of the whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdl.data import Source
from jaxdl.data.source import Activity, TrainRows
from jaxdl.data.tables.tabular import TabularSource, count_ids
from jaxdl.parallel.embedding import Tables
from jaxdl.parallel.embedding.jagged import fitting, packed
from jaxdl.training.run.tables.global_ids import check_here, evaluation_batches, training_batches
from jaxdl.training.step.parts import IDS, LENGTHS, NEXT

Rows = dict[str, np.ndarray]
Request = TypeVar("Request")


def in_training(
    tables: Tables | None, source: Source, original: Source, *, batch_size: int, seed: int, start: int
) -> Source:
    """The source whose batches have what the tables' config asks for; they begin at `start` of the stream of examples.

    `source` may have slots in place of the ids of `original`.
    """
    if tables is None:
        return source
    every = training_batches(original, batch_size=batch_size, seed=seed, start=start)
    packing = _packing(tables, original, batch_size, every)
    return _Prepared(source, packing, ahead=tables.config.ids_ahead, check=source is original)


def in_evaluation(tables: Tables | None, source: Source, original: Source, batch_size: int) -> Source:
    """The same for the batches of an evaluation; none of them has the next one's ids."""
    if tables is None:
        return source
    packing = _packing(tables, original, batch_size, evaluation_batches(batch_size))
    return _Prepared(source, packing, ahead=False, check=source is original)


def shapes_of(tables: Tables | None, shapes: Mapping[str, Any], *, evaluating: bool) -> dict[str, Any]:
    """The shapes of such a batch in the first bucket, of those of a batch of the source."""
    changed = dict(shapes)
    if tables is None:
        return changed
    batch_size, _ = shapes[IDS].shape
    if tables.config.jagged:
        capacity = tables.buckets(batch_size)[0]
        changed[IDS] = jax.ShapeDtypeStruct((batch_size, sum(capacity)), np.int32)
        changed[LENGTHS] = jax.ShapeDtypeStruct((batch_size, len(capacity)), np.int32)
    if tables.config.ids_ahead and not evaluating:
        changed |= {NEXT + name: changed[name] for name in (IDS, LENGTHS) if name in changed}
    return changed


class _Packing:
    """Makes values and lengths of columns of ids, batch by batch."""

    def __init__(self, tables: Tables, source: TabularSource, batch_size: int, every: Iterator[np.ndarray]) -> None:
        self._buckets, self._examples = tables.buckets(batch_size), batch_size // tables.mesh.size
        self._features, self._source, self._every = source.spec.id_features(), source, every

    def __call__(self, batch: Rows) -> Rows:
        ids, whole = batch[IDS], next(self._every)
        if "mask" in batch:  # Rows of padding have ids like any others.
            ids = np.where(batch["mask"][:, None], ids, -1)
        counts = mine = count_ids(ids, self._features)
        if len(mine) < len(whole):  # Other processes have the rest.
            there = whole < len(self._source)
            counts = np.zeros((len(whole), mine.shape[1]), np.int32)
            counts[there] = self._source.id_counts(whole[there])
        capacity = fitting(self._buckets, counts, self._examples)
        return {**batch, IDS: packed(ids, self._features, capacity, self._examples), LENGTHS: mine}


def _packing(tables: Tables, source: Source, batch_size: int, every: Iterator[np.ndarray]) -> _Packing | None:
    if not tables.config.jagged:
        return None
    assert isinstance(source, TabularSource)
    return _Packing(tables, source, batch_size, every)


class _Prepared(Source):
    """A source whose batches follow each other; `ahead` ones have the ids of the batch after them, the last its own.

    With `check`, ids that are out of range raise ConfigError; slots of a cache are checked where the ids are read.
    """

    def __init__(self, source: Source, packing: _Packing | None, *, ahead: bool, check: bool) -> None:
        self._source, self._packing, self._ahead, self._check = source, packing, ahead, check
        self.spec = source.spec
        self.reuses_memory = source.reuses_memory

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> Rows:
        """With columns of ids."""
        return self._source.batch(indices)

    def order(self, seed: int) -> Any:
        """That of the source."""
        return self._source.order(seed)

    def activity(self) -> Activity | None:
        """That of the source."""
        return self._source.activity()

    def train_batches(self, requests: Iterator[TrainRows]) -> Iterator[Rows]:
        """The training batches of the source, with lengths, and the ids of the next one."""
        asked: deque[np.ndarray] = deque()
        noted = _note(requests, asked, lambda request: request.indices)
        return self._prepare(self._source.train_batches(noted), asked)

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Iterator[Rows]:
        """The evaluation batches of the source, with lengths."""
        asked: deque[np.ndarray] = deque()
        return self._prepare(self._source.eval_batches(_note(requests, asked, lambda request: request)), asked)

    def _prepare(self, batches: Iterator[Rows], asked: deque[np.ndarray]) -> Iterator[Rows]:
        if self._check:
            batches = self._checked(batches, asked)
        made = batches if self._packing is None else map(self._packing, batches)
        return _with_next(made, copy=self.reuses_memory) if self._ahead else made

    def _checked(self, batches: Iterator[Rows], asked: deque[np.ndarray]) -> Iterator[Rows]:
        for batch in batches:
            check_here(self._source, batch[IDS], asked.popleft())
            yield batch


def _note(
    requests: Iterator[Request], asked: deque[np.ndarray], indices: Callable[[Request], np.ndarray]
) -> Iterator[Request]:
    """The requests; the examples of each are appended to `asked`, since a source may ask for some ahead of time."""
    for request in requests:
        asked.append(indices(request))
        yield request


def _with_next(batches: Iterator[Rows], *, copy: bool) -> Iterator[Rows]:
    """`copy`: their memory is used again for later ones."""
    last: Rows | None = None
    for batch in batches:
        if last is not None:
            yield _add_next(last, batch)
        last = {name: x.copy() for name, x in batch.items()} if copy else batch
    if last is not None:
        yield _add_next(last, last)


def _add_next(batch: Rows, following: Rows) -> Rows:
    return batch | {NEXT + name: following[name] for name in (IDS, LENGTHS) if name in following}
