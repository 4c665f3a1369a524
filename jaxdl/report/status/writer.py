"""Keeps `status.json` of a live run up to date, from a thread of its own: a slow disk does not slow the run."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxdl.report.status.record import BEAT_SEC, Record, status_path, utc_now, write_record

TICK_SEC = 1.0
"""How often the thread looks at the run."""
DOING_SEC = 5.0
"""Least time between two writes of which the second says only that the run does something else within its state."""
LAST_WORD_SEC = 5.0
"""How long a run that ends waits for its last status to be written."""


class StatusWriter:
    """Writes the records that `observe` returns, in a thread: when the state changes, and at least every `BEAT_SEC`.

    What cannot be written (a full disk, a read-only one) is tried again at the next beat; it never raises.

    Args:
      workdir: the folder of the run.
      observe: returns the present record, called in the thread; `since` and `seen` are filled in here where empty.
      tick: called in the thread before each look.
    """

    def __init__(self, workdir: Path, observe: Callable[[], Record], tick: Callable[[], None] = lambda: None) -> None:
        self._workdir, self._observe, self._tick = workdir, observe, tick
        self._over = threading.Event()
        self._lock = threading.Lock()  # Guards the file, and what was written last.
        self._written: Record | None = None
        self._written_sec = -BEAT_SEC
        self._thread = threading.Thread(target=self._run, name="jaxdl-status", daemon=True)

    def start(self) -> None:
        """Starts the thread, which removes what killed processes have left of their last write first."""
        self._thread.start()

    def stop(self) -> None:
        """Writes nothing any more: the workdir is another run's, or the last word is said."""
        self._over.set()

    def move(self, workdir: Path) -> None:
        """The workdir has another name."""
        self._workdir = workdir

    def finish(self, last: Callable[[], Record]) -> None:
        """Writes the last record, and waits for that at most `LAST_WORD_SEC`."""
        self._over.set()
        thread = threading.Thread(target=lambda: self._write(last()), name="jaxdl-status-last", daemon=True)
        thread.start()
        thread.join(LAST_WORD_SEC)

    def _run(self) -> None:
        for left in self._workdir.glob(f".{status_path(self._workdir).name}.*.tmp"):
            with contextlib.suppress(OSError):
                left.unlink(missing_ok=True)
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                self._tick()
            self._look()
            self._over.wait(TICK_SEC)

    def _look(self) -> None:
        record, before = self._observe(), self._written
        changed = before is None or record.state != before.state
        period_sec = BEAT_SEC if before is not None and record.doing == before.doing else DOING_SEC
        if changed or time.monotonic() - self._written_sec >= period_sec:
            self._write(record, unless_over=True)

    def _write(self, record: Record, *, unless_over: bool = False) -> None:
        with self._lock:
            if unless_over and self._over.is_set():
                return
            now, before = utc_now(), self._written
            same = before is not None and before.state == record.state
            since = record.since or (before.since if before and same else now)
            record = dataclasses.replace(record, seen=record.seen or now, since=since)
            self._written, self._written_sec = record, time.monotonic()
            with contextlib.suppress(OSError):
                write_record(self._workdir, record)
