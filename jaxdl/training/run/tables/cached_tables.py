"""Tables with a cache in a run: batches get slots in place of ids, and rows are swapped before each step.

Every process makes the same plan for itself, of the ids of whole batches, which it reads from the source. Messages with
the ids of the processes would do too, but they would have to come in the same order on all processes as those of the
steps, from the thread that reads ahead; and planning takes the time of whole batches in any case.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import urllib.parse
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import DataSpec, Source
from jaxdl.data.source import Activity, TrainRows
from jaxdl.models import Model
from jaxdl.parallel.embedding import ROWS, Tables
from jaxdl.parallel.embedding.cache import Swap, Window
from jaxdl.parallel.embedding.store import Store
from jaxdl.training.checkpoint.stored_tables import aligned
from jaxdl.training.evaluation import EvalStep
from jaxdl.training.run.tables.global_ids import check_here, evaluation_batches, ids_of, training_batches
from jaxdl.training.state import TABLES, TrainState
from jaxdl.training.step.parts import IDS

Swaps = Mapping[str, Swap]
_EVAL_SIZE = "--evaluation.batch-size"


class Caches:
    """The tables of a run that the host holds, and the swaps of its batches to come."""

    def __init__(self, model: Model, tables: Tables, spec: DataSpec) -> None:
        """Raises ConfigError for what a cache does not work with."""
        features = spec.id_features()
        num_ids = {feature.name: feature.num_ids for feature in features}
        self._parent, self._folder = tables.config.cache.folder, None
        self.store = Store(tables, model.tables(features), num_ids, self._rows, self.allocate)
        self._queue: deque[Swaps] = deque()
        self.counted: Counter[str] = Counter()
        """Distinct rows of training batches that were in a slot (`device`), and that were not (`host`)."""

    def training(self, state: TrainState, source: Source, **where: int) -> Source:
        """The source with slots in place of ids in its training batches, for which all slots of the state are empty.

        `where` says which batches they are, see `training_batches`. The swaps of these batches wait for `swap`, in
        their order. Those of earlier batches are forgotten.
        """
        self.store.write_back(state.tables)
        self.store.reset()
        self._queue = deque()
        return _Planned(source, training_batches(source, **where), self.store.window(), self._queue, self.counted)

    def swap(self, state: TrainState, num_batches: int) -> TrainState:
        """The state before the next batches; it is donated."""
        for _ in range(num_batches):
            state = state.replace(tables=self.store.swapped(state.tables, self._queue.popleft()))
        return state

    def evaluating(
        self, state: TrainState, eval_step: EvalStep, source: Source, batch_size: int
    ) -> tuple[EvalStep, Source]:
        """(the evaluation step, the source with slots in place of ids), with rows of the state's tables.

        They come into slots of their own, which are as large as those of training, and are dropped at the end. Tables
        in buffers without a cache are those of the state.
        """
        self.store.write_back(state.tables)
        queue: deque[Swaps] = deque()
        window = self.store.window(_EVAL_SIZE)
        planned = _Planned(source, evaluation_batches(batch_size), window, queue, Counter())
        every = {name: table[ROWS] for name, table in state.tables.items()}
        rows = self.store.copied(every)

        def step(params: Any, model_state: Any, batch: Any) -> Any:
            nonlocal rows
            rows = self.store.with_rows(rows, queue.popleft())
            return eval_step(params, {**model_state, TABLES: {**every, **rows}}, batch)

        return step, planned

    def check_evaluation(self, source: Source, batch_size: int) -> None:
        """Raises ConfigError where the slots have no room for the first batch of an evaluation.

        Otherwise that would be seen at the end of the first epoch. Those after it are checked when they come.
        """
        window = self.store.window(_EVAL_SIZE)
        ids = ids_of(source, np.arange(min(batch_size, len(source))))
        window.add(ids, ids)
        window.planned()

    # What `Checkpoints` asks for.

    def abstract(self, state: TrainState) -> TrainState:
        """The shapes that a checkpoint has, of those of a state."""
        return state.replace(tables=self.store.abstract(state.tables))

    def stored(self, state: TrainState) -> TrainState:
        """The state as a checkpoint has it: with whole tables."""
        return state.replace(tables=self.store.stored(state.tables))

    def live(self, state: TrainState) -> TrainState:
        """The state for training, of one as a checkpoint has it."""
        return state.replace(tables=self.store.live(state.tables))

    def allocate(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for a part of a checkpoint, where the tables are: a file as large as theirs, or memory.

        Raises ConfigError for a folder that cannot have it.
        """
        return aligned(shape) if self._parent is None else self._map(name, ".checkpoint", shape)

    def _rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.float32) if self._parent is None else self._map(name, ".rows", shape)

    def _map(self, name: str, ending: str, shape: tuple[int, ...]) -> np.ndarray:
        """A file of zeros with its room on the disk. Raises ConfigError."""
        try:
            return self._make(name, ending, shape)
        except (OSError, RuntimeError) as error:  # The latter for a `~` without a home.
            reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
            raise ConfigError(
                f"--embedding.cache.folder {self._parent}: {reason}. Give a writable folder with room for the tables."
            ) from error

    def _make(self, name: str, ending: str, shape: tuple[int, ...]) -> np.ndarray:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="tables-", dir=expand_home(self._parent or ""))
        path = Path(self._folder) / f"{urllib.parse.quote(name, safe='')}{ending}"  # One file for each name.
        path.unlink(missing_ok=True)  # Whoever still reads the one before keeps its bytes.
        with path.open("wb") as file:  # Without room, writing to its pages would kill the process.
            os.posix_fallocate(file.fileno(), 0, max(1, 4 * math.prod(shape)))
        return np.memmap(path, np.float32, "r+", shape=shape)

    def close(self) -> None:
        """Removes the files."""
        self.store.rows = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def make_caches(model: Model, tables: Tables | None, spec: DataSpec) -> Caches | None:
    """The caches of a run; None without any. Raises ConfigError for settings that do not fit."""
    if tables is None or tables.config.cache.fraction is None:
        return None
    return Caches(model, tables, spec)


class _Planned(Source):
    """A source whose batches have slots in place of ids; the swap of each is in a queue before it is yielded."""

    def __init__(
        self,
        source: Source,
        every: Iterator[np.ndarray],
        window: Window,
        queue: deque[Swaps],
        counted: Counter[str],
    ) -> None:
        """`every` has the examples of each whole batch."""
        self._source, self._every, self._window = source, every, window
        self._queue, self.counted = queue, counted
        self.spec = source.spec

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """With ids."""
        return self._source.batch(indices)

    def order(self, seed: int) -> Any:
        """That of the source."""
        return self._source.order(seed)

    def activity(self) -> Activity | None:
        """Rows that were in slots, and those that came from the host."""
        return Activity(Counter(self.counted), {}, Counter())

    def train_batches(self, requests: Iterator[TrainRows]) -> Iterator[dict[str, np.ndarray]]:
        """The training batches of the source, with slots in place of ids."""
        return self._plan(self._source.train_batches(requests))

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """The evaluation batches of the source, with slots in place of ids."""
        return self._plan(self._source.eval_batches(requests))

    def _plan(self, batches: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        waiting: deque[dict[str, np.ndarray]] = deque()
        for batch in batches:
            waiting.append({name: x.copy() for name, x in batch.items()} if self._source.reuses_memory else batch)
            mine, whole = batch[IDS], next(self._every)
            # Other processes have the rest.
            if len(mine) == len(whole):
                check_here(self._source, mine, whole)
            self._window.add(mine, mine if len(mine) == len(whole) else ids_of(self._source, whole))
            if self._window.is_full:
                yield self._next(waiting.popleft())
        while waiting:
            yield self._next(waiting.popleft())

    def _next(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        slots, swaps = self._window.planned()
        self._queue.append(swaps)
        self.counted["device"] = self._window.num_hits
        self.counted["host"] = self._window.num_lookups - self._window.num_hits
        return {**batch, IDS: slots}


def no_inference() -> ConfigError:
    """The error of predicting with the last state of a run with a cache."""
    return ConfigError(
        "this run has a cache of embedding tables, so its last state does not have them whole. Use "
        "jaxdl.restore(WORKDIR).predict(x), which reads them from the newest checkpoint."
    )
