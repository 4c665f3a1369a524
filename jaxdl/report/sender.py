"""The thread that writes the rows of a run to one tracker. Whatever happens there, the run trains on."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.report.trackers import State, TrackedModel, TrackedRun, Tracker, Writer

Rows = Sequence[Mapping[str, Any]]

PERIOD_SEC = 1.0
"""New rows are written once in this time, together."""
RETRY_SEC, LONGEST_RETRY_SEC = 2.0, 60.0
"""A tracker that failed is tried again after this time, which doubles with each failure."""
PART_ROWS = 100
MAX_WAITING_ROWS = 5_000
"""A tracker that is behind by more rows is worth a warning."""
MODEL_SEC = 300.0
"""And so long for one that gets the network of the run: whoever asked for that wants it there."""
FAILING_SEC = 3.0
"""At the end of a run, wait at most so long for a tracker that has just failed."""


def num_measured(rows: Rows) -> int:
    """How many of the rows are no events."""
    return sum("event" not in row for row in rows)


class Opening(NamedTuple):
    """A run as a tracker opens it."""

    rows: Rows
    """The rows of the history: the run appends to them."""
    num_cuts: int
    """How often the process has dropped rows so far."""
    run: TrackedRun
    """What the tracker is told."""


class Sender(threading.Thread):
    """Writes rows to a tracker, from the history of the run itself: the rows that wait take no further memory.

    Args:
      tracker: the tracker.
      rows: gives the rows of the history; another list after a rollback.
      num_earlier: how many rows, events not counted, earlier processes have left: the tracker has no others yet.
      opening: gives the rows and the run, as they are now.
      opened: is told the id of the run there, once it is open, and how often rows had been dropped before.
      warn: called once, when the tracker fails or is far behind.
    """

    def __init__(
        self,
        tracker: Tracker,
        rows: Callable[[], Rows],
        num_earlier: int,
        opening: Callable[[], Opening],
        opened: Callable[[str | None, int], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"tracker {tracker.kind}", daemon=True)  # The end of the process does not wait for it.
        self._tracker, self._warn = tracker, warn
        self._history, self._opening, self._opened = rows, opening, opened
        self._writer: Writer | None = None
        self._num_earlier: int | None = num_earlier
        self._rows: Rows = ()
        self._next = self._num_events = 0
        self._files: list[Path] = []
        self._model: TrackedModel | None = None
        self._ending, self._written = threading.Event(), False
        self._state: State = "failed"
        self._failing = self._warned = False

    @property
    def model_format(self) -> str:
        """`Tracker.model_format`; empty for none."""
        return self._tracker.model_format or ""

    def run(self) -> None:
        """Writes until `end`. Called by the thread."""
        wait_sec, failures = 0.0, 0
        while True:
            ending = self._ending.wait(wait_sec)
            try:
                self._send()
                if ending and self._writer is not None:
                    self._writer.close(self._state)
                wait_sec, failures, self._failing, self._written = PERIOD_SEC, 0, False, ending
            except BaseException as error:  # Also what would end a program: here it ends nothing.
                self._note_failure(error)
                wait_sec, failures = min(LONGEST_RETRY_SEC, RETRY_SEC * 2**failures), failures + 1
            if ending:
                return

    def look(self) -> None:
        """Warns, once, if the tracker is far behind. Takes no time."""
        behind = len(self._history()) - self._next
        if behind > MAX_WAITING_ROWS:
            self._say(f"{behind:,} rows wait to be written; the run does not wait for them")

    def end(self, state: State, files: Sequence[Path], model: TrackedModel | None = None) -> None:
        """Asks for the end, with the files and the network that the tracker gets; `wait` waits for it."""
        self._state, self._files, self._model = state, list(files), model
        self._ending.set()

    def wait(self, since: float) -> str | None:
        """Waits for the end, at most the time that the tracker has (from `since`, of time.monotonic); what is left.

        None when all is written and nothing was to be said before.
        """
        longest = self._tracker.wait_sec if self._model is None else max(self._tracker.wait_sec, MODEL_SEC)
        allowed = min(self._tracker.wait_sec, FAILING_SEC) if self._failing else longest
        self.join(max(0.0, since + allowed - time.monotonic()))
        if self._written:
            return f"tracker {self._tracker.kind}: all rows have been written after all" if self._warned else None
        self._warned = True  # What comes later interests nobody.
        rows = self._history()
        every, left = num_measured(rows), num_measured(rows[self._next :])
        if not left and self._model is not None:
            return f"tracker {self._tracker.kind}: the network of the run could not be logged there"
        if not left:
            return f"tracker {self._tracker.kind}: the end of the run could not be noted there"
        return f"tracker {self._tracker.kind}: {left:,} of {every:,} rows were not written"

    def _send(self) -> None:
        """Writes what is new, to the run as it is now."""
        if self._writer is None or self._history() is not self._rows:
            self._open()
        assert self._writer is not None
        while self._next < len(self._rows):
            part = self._rows[self._next : self._next + PART_ROWS]
            for row in part:
                if "event" not in row:
                    self._writer.write(row)
            self._writer.flush()
            self._note_events(part)
            self._next += len(part)
            if self._history() is not self._rows:
                return
        while self._files:
            self._writer.keep(self._files[0])
            del self._files[0]
        if self._model is not None:
            self._writer.keep_model(self._model)
            self._model = None

    def _open(self) -> None:
        """Opens the run there, and finds the first row that it lacks."""
        earlier, self._writer = self._writer, None
        if earlier is not None:
            earlier.close(None)
        rows, num_cuts, run = self._opening()
        num_rows = num_measured(rows) if self._num_earlier is None else self._num_earlier
        writer = self._tracker.open(run)
        if writer.num_rows > num_rows:  # It got a row that metrics.jsonl lost with the process.
            writer.close(None)
            writer = self._tracker.open(dataclasses.replace(run, run_id=writer.run_id, rows_changed=True))
        self._writer, self._rows, self._next, self._num_events = writer, rows, 0, 0
        self._num_earlier = None
        self._opened(writer.run_id, num_cuts)
        writer.flush()
        left = writer.num_rows
        while left:
            left -= "event" not in rows[self._next]
            self._next += 1
        self._note_events(rows[: self._next])

    def _note_events(self, rows: Rows) -> None:
        """Notes the events among these rows, the next ones, as tags, numbered from the first of the run."""
        events = [row for row in rows if "event" in row]
        if events:
            assert self._writer is not None
            numbered = enumerate(events, self._num_events + 1)
            self._writer.tag({f"event.{n}": f"step {row['step']}: {row['event']}" for n, row in numbered})
            self._num_events += len(events)

    def _note_failure(self, error: BaseException) -> None:
        self._failing = True
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(BaseException):
                writer.close(None)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        self._say(f"{said[:300]}{'...' * (len(said) > 300)}; the run continues, and it is tried again meanwhile")

    def _say(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"tracker {self._tracker.kind}: {text}")
