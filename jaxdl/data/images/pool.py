"""Worker processes that make image batches in shared memory.

The memory is anonymous, so it vanishes with the processes, even if they are killed. A worker that dies is replaced and
its work is repeated: rows depend only on the request, so the batches stay the same.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.images.maker import Made, Maker, PipelinePlan, Work
from jaxdl.data.images.memfd import nameless_file, write_shared

_AT_ONCE = 2
"""Pieces of work per worker: one in progress, one waiting."""
_DEATHS = 3
"""Deaths of workers over one piece of work, or in a row at their start, that are an error."""
_END_SEC = 3.0
"""Seconds for a worker to exit; it may have to finish a piece of work."""


class WorkerError(ConfigError):
    """Replacement workers die, too."""


class Area:
    """Anonymous memory that this process shares with its workers; allocates and frees pieces."""

    def __init__(self) -> None:
        self.file = nameless_file("jaxdl-batches")
        self._size, self._taken = 0, dict[int, int]()
        self._maps: dict[tuple[int, int], np.ndarray] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[int, np.ndarray]:
        """Allocates a piece: (offset, uint8 array of `size`, rounded up to pages)."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            offset = 0
            for start, length in sorted(self._taken.items()):
                if start - offset >= size:
                    break
                offset = start + length
            self._taken[offset] = size
            if offset + size > self._size:
                self._size = offset + size
                os.ftruncate(self.file, self._size)
            if (offset, size) not in self._maps:  # A new mapping would fault in every page of every batch.
                self._maps = {piece: memory for piece, memory in self._maps.items() if piece[0] in self._taken}
                self._maps[offset, size] = np.frombuffer(mmap.mmap(self.file, size, offset=offset), np.uint8)
            return offset, self._maps[offset, size]

    def give_back(self, offset: int) -> None:
        """Frees the piece at `offset`."""
        with self._lock:
            self._taken.pop(offset, None)

    def close(self) -> None:
        """Closes the file; mapped pieces remain valid while they are used."""
        os.close(self.file)


class _Piece:
    """A piece of work, queued or in progress."""

    def __init__(self, offset: int, shape: tuple[int, ...], work: Work) -> None:
        self.offset, self.shape, self.work = offset, shape, work
        self.future: Future[Made] = Future()
        self.deaths = 0


class _Worker:
    """A worker process and its pieces of work."""

    def __init__(self, plan: int, area: int) -> None:
        ours, theirs = socket.socketpair()
        folder = str(Path(__file__).parents[3])
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxdl.data.images.worker", str(theirs.fileno()), str(plan), str(area)],
                pass_fds=(theirs.fileno(), plan, area),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.connection = Connection(ours.detach())
        self.pieces: dict[int, _Piece] = {}
        self.ready = False

    def send(self, message: Any) -> None:
        """Sends a message; a dead worker is noticed when its connection is next read."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def end(self) -> None:
        """Closes the connection, so that the process exits, and waits for it; kills it if it is stuck."""
        self.connection.close()
        try:
            self.process.wait(_END_SEC)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Pool:
    """Workers that make rows according to a plan; with 0 workers, the caller's thread makes them.

    Its workers end when it is closed or garbage-collected.
    """

    def __init__(self, plan: PipelinePlan, num_workers: int) -> None:
        self.area = Area()
        self._maker = None if num_workers else Maker(plan)
        self._making = threading.Lock()
        self._dispatch = _Dispatch(plan, num_workers, self.area.file) if num_workers else None
        self._finalizer = weakref.finalize(self, _end, self._dispatch, self._maker, self.area)

    def submit(self, offset: int, images: np.ndarray, work: Work) -> Future[Made]:
        """Starts to make rows in `images`, at `offset` of the area. The future raises errors of the workers."""
        if self._dispatch is not None:
            return self._dispatch.submit(_Piece(offset, images.shape, work))
        assert self._maker is not None
        done: Future[Made] = Future()
        with self._making:
            done.set_result(self._maker.make(work, images))
        return done

    def worker_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._dispatch.workers] if self._dispatch else []

    def close(self) -> None:
        """Ends the workers."""
        self._finalizer()


def _end(dispatch: _Dispatch | None, maker: Maker | None, area: Area) -> None:
    if dispatch is not None:
        dispatch.close()
    if maker is not None:
        maker.close()
    area.close()


class _Dispatch:
    """A thread that distributes work to the workers in order, and replaces workers that die."""

    def __init__(self, plan: PipelinePlan, num_workers: int, area: int) -> None:
        self._plan, self._area, self._number = plan, area, 0
        self._queue: deque[_Piece] = deque()
        self._wake, self._woken = Pipe(duplex=False)[::-1]
        self._lock, self._closed, self._deaths = threading.Lock(), False, 0
        self._shared = write_shared(plan)
        self.workers = [_Worker(self._shared, area) for _ in range(num_workers)]
        self._thread = threading.Thread(target=self._run, name="jaxdl-pool", daemon=True)
        self._thread.start()

    def submit(self, piece: _Piece) -> Future[Made]:
        """Queues a piece."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._queue.append(piece)
        self._wake.send(None)
        return piece.future

    def close(self) -> None:
        """Ends the thread and the workers; unfinished work is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.send(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._give_out()
                for connection in wait([self._woken, *(worker.connection for worker in self.workers)]):
                    if connection is self._woken:
                        self._woken.recv()
                    else:
                        self._hear(next(worker for worker in self.workers if worker.connection is connection))
        except Exception as error:
            self._fail(error)
        finally:
            with self._lock:
                self._closed = True
            for worker in self.workers:
                worker.connection.close()
            for worker in self.workers:
                worker.end()
            os.close(self._shared)
            self._fail(RuntimeError("the pool is closed"))

    def _give_out(self) -> None:
        while True:
            worker = min(self.workers, key=lambda worker: len(worker.pieces))
            with self._lock:
                if not self._queue or len(worker.pieces) >= _AT_ONCE:
                    return
                piece = self._queue.popleft()
            self._number += 1
            worker.pieces[self._number] = piece
            worker.send((self._number, piece.offset, piece.shape, piece.work))

    def _hear(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        worker.ready, self._deaths = True, 0
        if message is not None:
            number, made = message
            worker.pieces.pop(number).future.set_result(made)

    def _replace(self, worker: _Worker) -> None:
        worker.end()
        if not worker.ready:
            self._deaths += 1
            if self._deaths >= _DEATHS:
                raise WorkerError(
                    f"workers of the image pipeline exit with code {worker.process.returncode} at their start; see "
                    "the output above."
                )
        pieces = [worker.pieces[number] for number in sorted(worker.pieces)]
        if pieces and worker.ready:
            pieces[0].deaths += 1  # The one in progress.
            if pieces[0].deaths >= _DEATHS:
                piece = pieces.pop(0)
                records = self._plan.splits[piece.work.split].records
                names = ", ".join(records.name(index) for index in piece.work.indices if index >= 0)
                piece.future.set_exception(
                    WorkerError(
                        f"{_DEATHS} workers died (code {worker.process.returncode}) over {names}. Either memory ran "
                        "out (use fewer workers), or a file crashes its decoder (remove it)."
                    )
                )
        with self._lock:
            self._queue.extendleft(reversed(pieces))
        self.workers[self.workers.index(worker)] = _Worker(self._shared, self._area)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            pieces = [*self._queue, *(piece for worker in self.workers for piece in worker.pieces.values())]
            self._queue.clear()
        for piece in pieces:
            if not piece.future.done():
                piece.future.set_exception(error)
