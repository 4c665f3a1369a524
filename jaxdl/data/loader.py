"""Batches on the devices, prefetched by a background thread.

Each process reads only the rows that its devices hold; the rows of a step depend on (seed, step) alone.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.source import Source, TrainRows

if TYPE_CHECKING:  # Workers of the image pipeline import this package without JAX.
    import jax
    from jax.sharding import NamedSharding

Batch = dict[str, "jax.Array"]
"""Global arrays whose leading dimension is the batch, sharded over the devices."""

Rows = dict[tuple[int, int], slice]
"""Range of rows of the global batch -> their slice of the rows that this process reads."""


class _Buffer:
    """A bounded queue that either side can close at any time; no thread waits on a closed one."""

    def __init__(self, capacity: int):
        self._items: collections.deque[Batch] = collections.deque()
        self._capacity, self._closed = capacity, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, item: Batch) -> bool:
        """Adds an item once there is room; returns False if the consumer has closed the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def get(self) -> Batch:
        """The next item; after the last one, raises the producer's error or StopIteration."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._items)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
            raise StopIteration if error is None else error

    def finish(self, error: BaseException | None) -> None:
        """Called by the producer at its end: queued items remain available. An error after `close` is discarded."""
        with self._changed:
            self._error = None if self._closed else error
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Called by the consumer at its end: queued items are dropped."""
        with self._changed:
            self._closed, self._error = True, None
            self._items.clear()
            self._changed.notify_all()


def _produce(batches: Iterator[Batch], buffer: _Buffer) -> None:
    error: BaseException | None = None
    try:
        for batch in batches:
            if not buffer.put(batch):
                return
            del batch  # The consumer may free it while the next one is made.
    except BaseException as raised:  # The consumer raises it.
        error = raised
    finally:
        buffer.finish(error)


def _end(buffer: _Buffer, thread: threading.Thread) -> None:
    buffer.close()
    # The garbage collector may run this in the thread itself. The wait has a limit, so that a read that hangs (a dead
    # network disk) does not also hang the end of the run; the thread is a daemon.
    if thread is not threading.current_thread():
        thread.join(timeout=10)


class Batches(Iterator[Batch]):
    """An iterator of batches that a thread prefetches; a context manager that ends the thread on exit.

    `next` raises an exception of the thread after the batches made before it.
    """

    def __init__(self, batches: Iterator[Batch], prefetch: int = 2):
        if prefetch < 1:
            raise ConfigError(f"prefetch = {prefetch}: the loader must prefetch 1 batch or more.")
        self._buffer = _Buffer(prefetch)
        # The thread refers to the buffer and not to this object, so an iterator that is dropped without `close` is
        # collected; its finalizer, which also runs at the interpreter's exit, ends the thread.
        thread = threading.Thread(target=_produce, args=(batches, self._buffer), name="jaxdl-loader", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _end, self._buffer, thread)

    def __next__(self) -> Batch:
        """Waits for the next batch. Raises an exception of the thread."""
        return self._buffer.get()

    def close(self) -> None:
        """Drops prefetched batches and ends the thread, waiting for its current batch (10 seconds at most)."""
        self._finalizer()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TrainLoader(Batches):
    """The global batches of `num_steps` steps, starting at position `start` of the stream of the source's `order`."""

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        sharding: NamedSharding,
        start: int,
        num_steps: int,
        prefetch: int = 2,
    ):
        """`batch_size` is the global one; `sharding` splits the leading dimension of every array.

        Raises ConfigError if the batch cannot be split evenly or the source is empty.
        """
        _check(source, batch_size, sharding)
        source = source.in_batches(batch_size)
        order = source.order(seed)
        rows = local_rows(sharding.addressable_devices_indices_map((batch_size,)), batch_size)

        def requests() -> Iterator[TrainRows]:
            for place in range(start, start + num_steps * batch_size, batch_size):
                indices, epochs = zip(*(order.rows(place + first, last - first) for first, last in rows), strict=True)
                read, whole = np.concatenate(indices), None
                if source.num_shapes > 1 and len(read) < batch_size:  # The shape is that of all processes.
                    whole = order.rows(place, batch_size)[0]
                yield TrainRows(read, np.concatenate(epochs), seed, whole)

        made = source.train_batches(requests())
        super().__init__(_placed(made, batch_size, rows, sharding, reused=source.reuses_memory), prefetch)


def eval_batches(source: Source, *, batch_size: int, sharding: NamedSharding, prefetch: int = 2) -> Batches:
    """Every example of the source exactly once, in order, with "mask"; the last batch is padded to `batch_size`.

    The result is an iterator and a context manager. Raises ConfigError as `TrainLoader` does.
    """
    _check(source, batch_size, sharding)
    source = source.in_batches(batch_size)
    rows = local_rows(sharding.addressable_devices_indices_map((batch_size,)), batch_size)
    requests = (
        np.concatenate([np.arange(start + first, start + last) for first, last in rows])
        for start in range(0, len(source), batch_size)
    )
    made = source.eval_batches(requests)
    return Batches(_placed(made, batch_size, rows, sharding, reused=source.reuses_memory), prefetch)


def local_rows(index_map: Mapping[Any, tuple[slice, ...] | None], batch_size: int) -> Rows:
    """The rows of the global batch that the devices of `index_map` hold, each range once, in order."""
    ranges = {index[0].indices(batch_size)[:2] for index in index_map.values() if index is not None}
    rows, read = {}, 0
    for start, stop in sorted(ranges):
        rows[start, stop] = slice(read, read + stop - start)
        read += stop - start
    return rows


def _placed(
    batches: Iterator[dict[str, np.ndarray]], batch_size: int, rows: Rows, sharding: NamedSharding, *, reused: bool
) -> Iterator[Batch]:
    """Global arrays of this process's rows; if their memory is `reused`, yielded only once they no longer need it."""
    import jax

    on_cpu = next(iter(sharding.device_set)).platform == "cpu"  # There an array may share the memory of its source.
    for values in batches:
        if reused and on_cpu:
            values = {name: local.copy() for name, local in values.items()}
        placed = {name: _global_array(local, rows, batch_size, sharding) for name, local in values.items()}
        if reused:
            jax.block_until_ready(placed)
        yield placed


def _global_array(local: np.ndarray, rows: Rows, batch_size: int, sharding: NamedSharding) -> jax.Array:
    import jax

    # Measured on 8 virtual devices: a callback costs 0.1 ms, less than device_put of the whole array. Also works with
    # many processes.
    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return local[rows[index[0].indices(batch_size)[:2]]]

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)


def _check(source: Source, batch_size: int, sharding: NamedSharding) -> None:
    assert len(sharding.spec) <= 1, f"batches are sharded over their leading dimension only, not {sharding.spec}"
    if len(source) == 0:
        raise ConfigError("The data set has no examples: choose another split, or add data.")
    ways = sharding.mesh.size // sharding.shard_shape((sharding.mesh.size,))[0]
    if batch_size < 1 or batch_size % ways:
        raise ConfigError(
            f"batch size {batch_size}: it cannot be split evenly over the {ways} data-parallel parts of the mesh. "
            f"Choose a multiple of {ways}."
        )
