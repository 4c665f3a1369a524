"""SIGTERM, SIGINT and SIGHUP at any moment: noticed in training, evaluating and compiling, and made an exception.

So is a file `halt` in the workdir, where no signal can be sent (`jaxdl.training.run.status` looks for it). In a run of
several processes a signal to one stops all of them at the same poll: at once through the membership
(`jaxdl.parallel.cluster`), or else at the next poll at which they ask each other through a collective.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from jaxdl.parallel.cluster import Membership, current, heartbeat
from jaxdl.parallel.cluster.exits import stop_signals

Result = TypeVar("Result")

HALT = 64
"""Stands for the halt file where the number of a signal is expected. No signal that is handled here has it."""
_POLL_SEC = 0.05


class Stop(BaseException):
    """A signal asked the run to stop. Not an Exception, so that no handler of errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__("halt file" if signum == HALT else signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Context: while it is open the first SIGTERM, SIGINT or SIGHUP is noted, for `poll` to raise; a second one acts at
    once, but for SIGHUP: a terminal that is closed may send several. Who ignores SIGHUP (nohup) goes on doing so.

    Outside the main thread (where Python allows no handlers) it does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.stopping = False
        """Whether Stop has been raised: the run saves, and ends."""
        self._num_polls = 0
        self._shared_every: int | None = None
        self._member: Membership | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in stop_signals():
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(*self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signum in (None, signal.SIGPIPE):  # Ctrl-C ends `tee` too, whose end may be noticed first.
            self.signum = signum
        self._restore(signal.SIGTERM, signal.SIGINT)

    def halt(self) -> None:
        """The halt file has been found: as if a signal had come, unless one has. For any thread."""
        self.signum = self.signum or HALT

    def unread(self) -> None:
        """The run's output is not read any more (`| head`): as if a signal had come, unless one has."""
        self.signum = self.signum or signal.SIGPIPE

    def _restore(self, *signums: int) -> None:
        for signum in signums:
            if signum in self._before:
                signal.signal(signum, self._before.pop(signum))

    def share(self, every_polls: int) -> None:
        """For a run of several processes: from here on they all stop at the same poll when a signal has come to any.

        Each must poll equally often. Without a membership they ask each other at every `every_polls`-th poll. Returns
        when all have called it: one may take minutes longer to read its data, and a collective may follow.
        """
        self._shared_every, self._member = every_polls, current()
        self._num_polls = 0  # Those before depend on how long each process took to set up.
        if self._member is not None:
            self._member.wait_for_all()

    def poll(self, step: int | None = None) -> None:
        """Raises Stop if a signal has come. Also a heartbeat for the watchdog; `step` is the last one completed."""
        heartbeat.beat(step)
        self._check()

    def _check(self) -> None:
        self._num_polls += 1
        signum = self.signum or 0
        if self._member is not None:
            signum = self._member.poll(signum)
        elif self._shared_every is not None:
            if self._num_polls % self._shared_every:
                return
            from jax.experimental import multihost_utils

            signum = int(np.max(multihost_utils.process_allgather(np.int32(signum))))
        if signum:
            self.stopping = True
            raise Stop(signum)

    def run(self, function: Callable[[], Result]) -> Result:
        """Calls `function()` in a separate thread, so that a signal is noticed while it compiles; returns its result.

        On a signal the thread is abandoned. One of several processes cannot abandon the others: it continues to the
        next `poll`, after all have finished, because a collective may follow whose timeout is short. Exceptions of the
        function are raised here.
        """
        if self._member is not None:
            self._member.wait_for_all()
        outcome: Future[Result] = Future()

        def work() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name="jaxdl-setup", daemon=True)
        thread.start()
        while thread.is_alive():
            if self._shared_every is None:
                self._check()
            thread.join(_POLL_SEC)
        result = outcome.result()
        if self._member is not None:
            self._member.wait_for_all()
        return result
