"""The status of runs that wait in a fleet: `status.json` in their workdirs, until they write it themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxdl.core.startup import training_options
from jaxdl.parallel.cluster.exits import MISTAKE
from jaxdl.report.status import Action, Reason, Record, State, read_record, utc_now, write_record
from jaxdl.report.status.rows import MARKS

_AGAIN = (State.QUEUED, State.STOPPED, State.HALTED, State.REFUSED, State.FAILED)
"""States from which a run that is accepted again waits: its step stays."""
_NEXT = {
    State.COMPLETED: Action.NONE, State.HALTED: Action.RESUME, State.REFUSED: Action.FIX, State.FAILED: Action.FIX,
}  # fmt: skip


def queue(command: Sequence[str], workdir: Path | None, doing: str = "") -> None:
    """Says in the status of a training run that a fleet has accepted it, or starts it again. Raises nothing.

    A workdir whose run lives or is complete, or that cannot be read, stays as it is.
    """
    if workdir is None or "{nodes}" in str(workdir) or training_options(command) is None:
        return
    with contextlib.suppress(OSError, ValueError):
        earlier, now = read_record(workdir), utc_now()
        if earlier is None:
            if any((workdir / mark).exists() for mark in MARKS):
                return  # A run of an older version, of which its other files tell more.
            earlier = Record(State.QUEUED, now, now)
        elif earlier.state not in _AGAIN:
            return
        waits = dataclasses.replace(
            earlier, state=State.QUEUED, since=now, seen=now, doing=doing, hosts=(), process=None,
            next_action=Action.WAIT, next_text="",
        )  # fmt: skip
        workdir.mkdir(parents=True, exist_ok=True)
        write_record(workdir, waits)


def unqueue(workdir: Path | None, state: State, reason: str, code: int | None) -> None:
    """How a run has ended in its fleet that has written no status of its own. Raises nothing."""
    if workdir is None:
        return
    with contextlib.suppress(OSError, ValueError):
        record, now = read_record(workdir), utc_now()
        if record is None or record.state != State.QUEUED:
            return
        if state == State.FAILED and code == MISTAKE:
            state = State.REFUSED  # It ended before it wrote a status, hence before a step.
        why = None if state == State.COMPLETED else Reason(f"fleet: {reason}", code, now)
        ended = dataclasses.replace(record, state=state, since=now, seen=now, reason=why, next_action=_NEXT[state])
        write_record(workdir, ended)
