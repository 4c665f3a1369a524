"""The runs as they are now. Of a run whose files are as they were, and that has ended, nothing is read again."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdl.core.errors import OptionError
from jaxdl.core.files import LEASE_FILE, METRICS_FILE, SEARCH_FILE, STATUS_FILE, SUMMARY_FILE, TRIALS_FOLDER, hang_file
from jaxdl.platform.page.files import JSON_BYTES, Signature, signature, why_not_read
from jaxdl.platform.page.scan import Found, address_of_folder, scan
from jaxdl.report.compare.curves import short_names
from jaxdl.report.status.record import State
from jaxdl.report.status.rows import UNKNOWN, Row, read_row
from jaxdl.report.status.table import sort_rows

STUCK_SEC = 600.0
"""A run that trains and has written no metrics for this long is called stuck."""
_READ = (STATUS_FILE, METRICS_FILE, SUMMARY_FILE, LEASE_FILE)
_LEAST_SEC, _MOST_SEC = 1.0, 5.0
"""After a look at the folders it is not looked again for so long, however many ask: four times what the look took."""

GROUPS: Mapping[str, str] = {
    "running": "it starts, trains, evaluates or saves",
    "stuck": "it says that it trains, and has reported no step for ten minutes; or its watchdog wrote stacks",
    "queued": "it is accepted, and has not begun",
    "finished": "it has made all of its steps",
    "stopped": "it ended before its last step as it was told to, and has saved",
    "failed": "it ended otherwise, or was refused",
    "lost": "it said that it runs, and its process is gone or silent",
    "unknown": "its files do not say how it stands",
}
"""The states that runs are filtered by, and what each means."""
_OF_STATE = {
    State.QUEUED: "queued",
    State.COMPLETED: "finished",
    State.STOPPED: "stopped",
    State.HALTED: "stopped",
    State.REFUSED: "failed",
    State.FAILED: "failed",
    UNKNOWN: "unknown",
}


@dataclass(frozen=True)
class Run:
    """One run in the tables."""

    id: str
    path: Path
    name: str
    """The workdir as `python -m jaxdl.status` writes it, as text that any page can show."""
    row: Row
    group: str
    """A key of `GROUPS`."""
    at: float
    """When it was read, seconds since 1970: the ages in `row` are those then."""
    search: str = ""
    """The address of the search that it is a trial of."""
    trial: str = ""
    stuck: str = ""
    """Why it is called stuck."""
    short: str = ""
    """Its name without the folder that all runs are in."""

    @property
    def is_live(self) -> bool:
        """Whether its page can still change by itself."""
        return self.group in ("running", "stuck", "queued")

    def since(self) -> float | None:
        """When it came into its state, seconds since 1970."""
        return None if self.row.since_sec is None else self.at - self.row.since_sec

    def seen(self) -> float | None:
        """When it was last heard of, seconds since 1970."""
        return None if self.row.seen_sec is None else self.at - self.row.seen_sec


@dataclass(frozen=True)
class Snapshot:
    """All runs at a time."""

    runs: Mapping[str, Run]
    found: Found
    at: float


def as_shown(text: str) -> str:
    """A text that can be written as UTF-8: names of files, and texts in JSON, may be none."""
    return text.encode(errors="backslashreplace").decode()


class Runs:
    """The runs in the given folders."""

    def __init__(self, given: Sequence[str]) -> None:
        self._given = tuple(given)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[Signature | None, ...], Run]] = {}
        self._snapshot: Snapshot | None = None
        self._until = -math.inf

    def snapshot(self) -> Snapshot:
        """The runs as they are now, or were a moment ago."""
        with self._lock:
            if self._snapshot is None or time.monotonic() >= self._until:
                start = time.monotonic()
                self._snapshot = self._look()
                took = time.monotonic() - start
                self._until = start + took + min(_MOST_SEC, max(_LEAST_SEC, 4 * took))
            return self._snapshot

    def forget(self) -> None:
        """The next look is a new one: something was changed."""
        with self._lock:
            self._until = -math.inf

    def _look(self) -> Snapshot:
        found, now = scan(self._given), time.time()
        known: dict[str, tuple[tuple[Signature | None, ...], Run]] = {}
        for run_id, path in found.workdirs.items():
            signatures = tuple(signature(path / name) for name in _READ)
            before = self._known.get(run_id)
            if before is not None and before[0] == signatures and _stays(before[1]):
                known[run_id] = signatures, _older(before[1], now)
            else:
                known[run_id] = signatures, _read(run_id, path, now)
        self._known = known
        return Snapshot(_named({run_id: run for run_id, (_, run) in known.items()}), found, now)


def _named(runs: dict[str, Run]) -> dict[str, Run]:
    """The runs with short names; those that have theirs already stay as they are."""
    shorts = map(as_shown, short_names([run.path for run in runs.values()])) if runs else ()
    return {
        run_id: run if run.short == short else dataclasses.replace(run, short=short)
        for (run_id, run), short in zip(runs.items(), shorts, strict=True)
    }


def _stays(run: Run) -> bool:
    """Whether a run whose files are as they were is as it was: no process lives that may have ended, or be stuck."""
    return not run.is_live or (run.row.alive is None and run.group == "queued")


def _older(run: Run, now: float) -> Run:
    """A run that was read before, with the ages of now."""
    ages = {
        name: None if (value := getattr(run.row, name)) is None else value + now - run.at
        for name in ("since_sec", "seen_sec")
    }
    return dataclasses.replace(run, row=dataclasses.replace(run.row, **ages), at=now)


def _read(run_id: str, path: Path, now: float) -> Run:
    problem = _why_not(path)
    row = Row(str(path), UNKNOWN, problem=problem) if problem else read_row(path)
    search = path.parent.parent
    is_trial = path.parent.name == TRIALS_FOLDER and os.path.exists(search / SEARCH_FILE)
    stuck = _why_stuck(path, row, now)
    return Run(
        run_id, path, as_shown(str(path)), row, "stuck" if stuck else group_of(row), now,
        address_of_folder(search) if is_trial else "", as_shown(path.name) if is_trial else "", stuck,
    )  # fmt: skip


def _why_not(path: Path) -> str:
    """Why the files of a workdir are not read for its row; empty if they are."""
    for name in _READ:
        most = None if name == METRICS_FILE else JSON_BYTES  # Of the metrics the end is read.
        if why := why_not_read(path / name, path, most):
            return f"{name}: {why}"
    return ""


def group_of(row: Row) -> str:
    """The key of `GROUPS` of a row, of one that is not stuck."""
    if (group := _OF_STATE.get(row.state)) is not None:
        return group
    return "lost" if row.alive is False else "running"


def _why_stuck(path: Path, row: Row, now: float) -> str:
    """Why a run that says that it trains is called stuck; empty if it is not."""
    if row.state != State.PROCESSING or row.alive is False or row.since_sec is None:
        return ""
    since = now - row.since_sec
    stacks = signature(path / hang_file(0))
    if stacks is not None and stacks[0] / 1e9 > since:
        return f"its watchdog wrote {hang_file(0)}"
    metrics = signature(path / METRICS_FILE)
    silent_sec = now - max(since, 0.0 if metrics is None else metrics[0] / 1e9)
    if row.doing == "training" and silent_sec > STUCK_SEC:
        return f"no metrics for {silent_sec / 60:.0f} min"
    return ""


def select(runs: Sequence[Run], text: str, group: str) -> list[Run]:
    """The runs of a group (all without one) whose name, state, note or hosts have all words of a text."""
    words = text.casefold().split()
    return [
        run
        for run in runs
        if (not group or run.group == group)
        and all(
            word in " ".join((run.name, run.row.state, run.group, run.row.reason, *run.row.hosts)).casefold()
            for word in words
        )
    ]


def in_order(runs: Sequence[Run], key: str, *, reverse: bool) -> list[Run]:
    """The runs by `recent`, by a key of `jaxdl.status --sort`, or by a metric; by `recent` for what none has.

    `recent`: those that live, by name, then the others, the last one that was heard of first.
    """
    if key != "recent":
        by_workdir = {run.row.workdir: run for run in runs}
        try:
            return [by_workdir[row.workdir] for row in sort_rows([run.row for run in runs], key, reverse=reverse)]
        except OptionError:
            pass
    ages = {run.id: math.inf if run.row.seen_sec is None else run.row.seen_sec for run in runs}
    return sorted(
        runs, key=lambda run: (not run.is_live, 0.0 if run.is_live else ages[run.id], run.name), reverse=reverse
    )
