"""The watchdog: dumps the stacks of all threads and exits when the run stops making progress."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from jaxdl.parallel.cluster.exits import BROKEN, end_process
from jaxdl.parallel.cluster.heartbeat import Heartbeat, heartbeat
from jaxdl.parallel.cluster.membership import current

_LOG_SEC = 10.0
"""Longest wait for the stacks to be written: a file system that hangs would block it."""


class Watchdog:
    """Context that ends the process (code 75) after `timeout_sec` without a heartbeat; None turns it off.

    The stacks go to stderr and to the file that `open_log` opens, if given. In a run of several processes all write
    theirs, and the last line names the process that the others wait for.
    """

    def __init__(
        self,
        timeout_sec: float | None,
        open_log: Callable[[], IO[str]] | None = None,
        *,
        watched: Heartbeat = heartbeat,
    ) -> None:
        self._timeout_sec, self._open_log, self._heartbeat = timeout_sec, open_log, watched
        self._over = threading.Event()
        self._once = threading.Lock()
        self._writer: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        member = current()
        if member is not None:
            member.write_stacks = self.write_stacks  # Another process may notice the hang first.
        if self._timeout_sec is not None:
            threading.Thread(target=self._watch, args=(self._timeout_sec,), name="jaxdl-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._heartbeat.disarm()

    def _watch(self, timeout_sec: float) -> None:
        tick = min(1.0, timeout_sec / 5)
        last = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            if now - last > tick + 1:  # The whole process was suspended (Ctrl-Z, a suspended machine): no hang.
                self._heartbeat.forgive(now - last - tick)
            last = now
            idle_sec = self._heartbeat.idle_sec()
            if idle_sec is not None and idle_sec > timeout_sec:
                self._end(idle_sec)

    def _end(self, idle_sec: float) -> None:
        self.write_stacks()
        member = current()
        if member is not None:
            member.report_hang(idle_sec)
        step, phase = self._heartbeat.where()
        end_process(
            f"no progress for {idle_sec:.0f} s (last step {step}, phase {phase}); the stacks of all threads are above. "
            "If steps may take longer, raise --cluster.hang-timeout-sec.",
            BROKEN,
        )

    def write_stacks(self) -> None:
        """Writes the stacks of all threads, once."""
        with self._once:  # A second caller waits until they are written; then the process may exit.
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, daemon=True)
                self._writer.start()
        self._writer.join(_LOG_SEC)

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # The stream may have no file descriptor.
            faulthandler.dump_traceback(sys.__stderr__ or 2)
        if self._open_log is not None:
            with contextlib.suppress(OSError), self._open_log() as log:
                log.write(time.strftime("%Y-%m-%d %H:%M:%S: no progress; stacks of all threads:\n"))
                log.flush()
                faulthandler.dump_traceback(log)
