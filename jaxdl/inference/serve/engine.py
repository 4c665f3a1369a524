"""The thread that writes texts: requests join and leave between its calls of the device (continuous batching).

Yu et al., Orca, OSDI 2022, section 4: the programs of a call have as many rows as texts are being written, whatever
request these are of.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np

from jaxdl.inference.decoding.loop import row_keys, sample_key
from jaxdl.inference.decoding.settings import Sampling, row_settings
from jaxdl.inference.serve.drawing import NO_PENALTIES, Drawn, Penalties, Settings
from jaxdl.inference.serve.programs import MOST, NUM_STOP, Programs, Rows, blank_rows, blank_settings

_row_keys = jax.jit(row_keys)
_CALL_SEC = 0.06
"""How long a call of the device should take: new texts wait for its end, and clients for its tokens."""

Finish = Literal["length", "stop", "cancelled", "failed"]


class Token(NamedTuple):
    """A token that was written, and if it was asked for how likely it was by the network."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""


class Written(NamedTuple):
    """What a call has written of a text."""

    tokens: list[Token]
    finish: Finish | None


@dataclass(eq=False)
class Job:
    """A text to write.

    Attributes:
      prompt: its tokens, at least one.
      how: how tokens are drawn. Its `num_tokens` are the most that are written, 1 or more; `stop_tokens` are at most
        `NUM_STOP`; and `stop` and `samples` are the client's business.
      number, sample: which text of which prompt it is, see `jaxdl.inference.decoding.loop.Place`.
      penalties: those of tokens that the text has already.
      num_top: of so many likeliest tokens log-probabilities are given; None: of none, nor of the token itself.
      deliver: called in the thread of the engine with what has been written.
      cancelled: nobody wants it any more.
    """

    prompt: list[int]
    how: Sampling
    deliver: Callable[[Written], None]
    number: int = 0
    sample: int = 0
    penalties: Penalties = NO_PENALTIES
    num_top: int | None = None
    cancelled: bool = field(default=False, init=False)


class Full(Exception):
    """More texts wait than may."""


class Stopped(Exception):
    """The engine takes no texts any more."""


class Engine:
    """Writes the texts of jobs in a thread of its own.

    Attributes:
      num_written, num_read: tokens that were written, and those of prompts that were read.
      failure: what ended it, None while it works.
      failed: called in its thread when an error has ended it.
    """

    def __init__(self, programs: Programs, *, max_waiting: int) -> None:
        """`max_waiting` texts may wait for a slot."""
        self._programs, self._max_waiting = programs, max_waiting
        self.failed: Callable[[], None] = lambda: None
        self._waiting: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._jobs: list[Job | None] = [None] * programs.num_slots
        self._reading: dict[Job, list[int]] = {}
        """The jobs whose prompts are being read, with where the pieces begin that are left."""
        self._rows = blank_rows(programs.num_slots)
        self._blank = blank_settings(1)
        self._step_sec: dict[int, float] = {}
        self.num_written, self.num_read = 0, 0
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts its thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends its thread; texts that are not written are cancelled."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def num_live(self) -> int:
        """Texts that are being written."""
        return sum(job is not None for job in self._jobs)

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a slot."""
        return len(self._waiting)

    @property
    def most_texts(self) -> int:
        """How many texts one request can have."""
        return self._programs.num_slots + self._max_waiting

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs, all or none. Raises Full and Stopped."""
        with self._changed:
            if self._stopping or self.failure is not None:
                raise Stopped
            free = self._programs.num_slots - self.num_live
            if len(self._waiting) + len(jobs) > self._max_waiting + free:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Gives up jobs: those that wait leave the queue now, and others their slots after the call that is running."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._waiting = collections.deque(job for job in self._waiting if not job.cancelled)

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except Exception:  # Of the device, such as memory that ran out: the cache may be lost.
            self.failure = traceback.format_exc()
            print(self.failure, file=sys.stderr, flush=True)
        with self._changed:
            self._stopping = True
            left = [*self._waiting, *filter(None, self._jobs)]
            self._waiting.clear()
        for job in left:
            job.deliver(Written([], "failed" if self.failure else "cancelled"))
        if self.failure:
            self.failed()

    def _wait(self) -> bool:
        """Waits until there is something to do; False when that is to end."""
        with self._changed:
            while not self._stopping and not self._waiting and not self.num_live:
                self._changed.wait()
            return not self._stopping

    def _turn(self) -> None:
        """Lets texts leave and join, then writes some tokens of each."""
        for slot, job in enumerate(self._jobs):
            if job is not None and job.cancelled:
                self._end(slot)
        while (slot := self._free_slot()) is not None and (job := self._next_job()) is not None:
            self._admit(job, slot)
        if self._reading:  # One piece, of the first that came: then the others' texts go on.
            self._read(next(iter(self._reading)))
        if self.num_live > len(self._reading):
            self._write(self._close_ranks())

    def _free_slot(self) -> int | None:
        return next((slot for slot, job in enumerate(self._jobs) if job is None), None)

    def _next_job(self) -> Job | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _admit(self, job: Job, slot: int) -> None:
        """Gives a job a slot. A prompt of one piece is read now, and the first token is written."""
        self._jobs[slot], self._reading[job] = job, self._programs.pieces(len(job.prompt))
        if len(self._reading[job]) == 1:
            self._read(job)

    def _read(self, job: Job) -> None:
        """Reads the next piece of the prompt of a job, and after the last one writes the first token."""
        slot, stop = self._jobs.index(job), job.how.stop_tokens
        keys, sampling = _key(job)[None], row_settings([job.how])
        penalties = Penalties(*(np.asarray([value], np.float32) for value in job.penalties))
        settings = Settings(keys, sampling, penalties, np.asarray([job.num_top is not None]))
        # What a text that is not written yet leaves in the cache lies where the next piece is read.
        self._rows.positions[slot], drawn = self._programs.read(job.prompt, slot, settings, self._reading[job].pop(0))
        if self._reading[job]:
            return
        del self._reading[job]
        self.num_read += len(job.prompt)
        of_row = Rows(
            np.asarray(drawn.token), np.int32(len(job.prompt)), np.int32(1), np.int32(job.how.num_tokens - 1),
            np.asarray([*stop, *[-1] * (NUM_STOP - len(stop))], np.int32), settings,
        )  # fmt: skip
        jax.tree.map(lambda whole, x: _set(whole, slot, x), self._rows, of_row)
        self._deliver(slot, jax.tree.map(lambda x: np.asarray(x)[:, None], drawn), 0, [int(drawn.token[0])])

    def _close_ranks(self) -> int:
        """The number of rows of the smallest program that takes all texts, which are moved to the first rows."""
        size = next(size for size in self._programs.sizes if size >= self.num_live)
        for slot in range(size, self._programs.num_slots):
            if (job := self._jobs[slot]) is not None:
                target = self._jobs.index(None)
                self._programs.move(slot, target)
                for rows in jax.tree.leaves(self._rows):
                    rows[target] = rows[slot]
                self._jobs[target], self._jobs[slot] = job, None
                self._rows.left[slot] = 0
        return size

    def _write(self, size: int) -> None:
        """Writes some tokens of the texts in the first `size` rows."""
        sec = self._step_sec.get(size)
        num = 4 if sec is None else max(1, min(MOST, int(_CALL_SEC / max(sec, 1e-6))))
        rows = jax.tree.map(lambda x: x[:size], self._rows)
        num = min(num, int(np.max(rows.left)))
        start = time.perf_counter()
        drawn = self._programs.write(rows, num)
        taken = (time.perf_counter() - start) / num
        # The first calls compile; a slow one says nothing of the next.
        self._step_sec[size] = taken if sec is None else min(taken, 0.8 * sec + 0.2 * taken)
        for slot in range(size):
            if (job := self._jobs[slot]) is not None and job not in self._reading:
                tokens = [token for token in drawn.token[slot].tolist() if token >= 0]
                self._rows.tokens[slot] = tokens[-1]
                for counted in (self._rows.positions, self._rows.counts):
                    counted[slot] += len(tokens)
                self._rows.left[slot] -= len(tokens)
                self._deliver(slot, drawn, slot, tokens)

    def _deliver(self, slot: int, drawn: Drawn, row: int, tokens: list[int]) -> None:
        """Gives a job the tokens that were written of it, and frees its slot if that was all."""
        job = self._jobs[slot]
        assert job is not None
        self.num_written += len(tokens)
        finish: Finish | None = "length" if self._rows.left[slot] <= 0 else None
        if tokens[-1] in job.how.stop_tokens:
            finish = "stop"
        job.deliver(Written([_token(drawn, row, at, job.num_top) for at in range(len(tokens))], finish))
        if finish is not None:
            self._end(slot)

    def _end(self, slot: int) -> None:
        if (job := self._jobs[slot]) is not None:
            self._reading.pop(job, None)
        self._jobs[slot], self._rows.left[slot], self._rows.positions[slot] = None, 0, 0
        jax.tree.map(lambda whole, x: _set(whole, slot, x), self._rows.settings, self._blank)


def _token(drawn: Drawn, row: int, at: int, num_top: int | None) -> Token:
    token = int(drawn.token[row, at])
    if num_top is None:
        return Token(token)
    top = zip(drawn.top_tokens[row, at].tolist(), drawn.top_logprobs[row, at].tolist(), strict=True)
    return Token(token, float(drawn.logprob[row, at]), tuple(top)[:num_top])


def _key(job: Job) -> np.ndarray:
    """The data of the random key of a text, on the host."""
    return np.asarray(_row_keys(sample_key(job.how.seed, job.sample), np.asarray([job.number])))[0]


def _set(rows: np.ndarray, index: int, value: np.ndarray) -> None:
    rows[index : index + 1] = value
