"""What `status.json` says about a run: its state, since when, its step, why it ended, and what happens next."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxdl.core.files import STATUS_FILE, replace_file
from jaxdl.parallel.lease import Holder, is_alive
from jaxdl.report.status.parsing import check_types, parse_json

BEAT_SEC = 15.0
"""A live run writes its status at least this often."""
SILENT_SEC = 4 * BEAT_SEC
"""A run that has not written its status for this long is taken for lost, if nothing better is known."""


class State(enum.StrEnum):
    """The states of a run. The names are those of FfDL (Jayaram et al., arXiv 1909.06526), where it has the state."""

    QUEUED = "QUEUED"
    """A program that starts runs has accepted it; none of its processes has begun. Written by such programs alone."""
    DEPLOY = "DEPLOY"
    """Its processes have begun, and there was no step yet: they meet, read data and checkpoint, compile."""
    DOWNLOADING = "DOWNLOADING"
    """The data are being copied to the disk of each node (`--stage-data`)."""
    PROCESSING = "PROCESSING"
    """It trains, evaluates, and writes checkpoints meanwhile."""
    STORING = "STORING"
    """It makes no more steps, and saves what it has: at its end, after a signal or a halt file."""
    COMPLETED = "COMPLETED"
    """It has made all of its steps."""
    STOPPED = "STOPPED"
    """It ended where it was told to, before its last step, with exit code 0: `--max-steps`, a hook."""
    HALTED = "HALTED"
    """It was interrupted, and has saved: a signal, a halt file."""
    REFUSED = "REFUSED"
    """The command was refused before its first step, with exit code 2: nothing was trained by it."""
    FAILED = "FAILED"
    """It ended otherwise; `reason` says why."""

    @property
    def is_final(self) -> bool:
        """Whether no process of the run lives."""
        return self in (State.COMPLETED, State.STOPPED, State.HALTED, State.REFUSED, State.FAILED)


class Action(enum.StrEnum):
    """What happens next with a run, or has to."""

    WAIT = "wait"
    """It goes on by itself."""
    NONE = "none"
    """Nothing: it is complete."""
    RESTART = "restart"
    """Its launcher starts it again."""
    RESUME = "resume"
    """The same command, given again, resumes from the newest checkpoint."""
    FIX = "fix"
    """Something has to be changed first; the reason says what."""


@dataclass(frozen=True)
class Reason:
    """Why a run ended, or its attempt before the present one."""

    text: str
    exit_code: int | None = None
    """As in docs/reference/exit-codes.md; None if it was killed without a message, or its machine was lost."""
    time: str = ""
    """UTC, ISO 8601; empty if unknown."""


@dataclass(frozen=True)
class Record:
    """The content of `status.json`. Times are UTC in ISO 8601, to the second."""

    state: State
    since: str
    """When it came into this state."""
    seen: str
    """When the file was written last, by the clock of the run's first host."""
    begun: str = ""
    """When this process of the run began."""
    doing: str = ""
    """The phase within the state: compile, train, eval, checkpoint, ..."""
    step: int = 0
    """Steps completed."""
    end_step: int | None = None
    """The step at which the run ends: its length, or less with `--max-steps`; None before it is known."""
    total_steps: int | None = None
    """The length of the whole run in steps."""
    hosts: tuple[str, ...] = ()
    """The host of each process, in the order of the processes."""
    restart: int = 0
    """How often a launcher has started it again, in its present life."""
    reason: Reason | None = None
    next_action: Action = Action.WAIT
    next_text: str = ""
    failure: int = 1
    """The number that the next folder in `failures` gets, or has got when the state is FAILED."""
    process: Holder | None = None
    """The first process of the run, for a reader on the same machine; None for a run that has not begun."""
    version: str = ""
    """The version of jaxdl."""
    best_metric: str = ""
    """The metric of an evaluation by which the run's task says which is best; empty if it is not known."""
    best_mode: str = ""
    """"max" or "min": whether a higher or a lower one is better."""
    skipped: str = ""
    """The last bad steps, which made no update, and why they were bad; empty while there are none."""

    def to_bytes(self) -> bytes:
        """The content of the file."""
        values = {"format": 1} | dataclasses.asdict(self)
        return (json.dumps(values, indent=2) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Record:
        """The inverse of `to_bytes`. Unknown fields are ignored. Raises ValueError for what is no record."""
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            fields = {name: value for name, value in values.items() if name in names}
            fields |= {"state": State(fields["state"]), "next_action": Action(fields.get("next_action", Action.WAIT))}
            fields["hosts"] = tuple(map(str, fields.get("hosts", ())))
            fields["reason"] = _inner(Reason, fields.get("reason"))
            fields["process"] = _inner(Holder, fields.get("process"))
            record = cls(**fields)
            check_types(record)
            _ = seconds_since(record.seen), seconds_since(record.since)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it is no status of a run: {error}") from None
        return record

    def is_alive(self, now: datetime | None = None) -> bool | None:
        """Whether the run lives, None for one that has not begun.

        On the machine and in the process namespace of its first process that is asked; elsewhere it lives if it has
        written its status in the last `SILENT_SEC`, by the clocks of both machines.
        """
        if self.state.is_final:
            return False
        if self.process is None:
            return None
        here = is_alive(self.process)
        return seconds_since(self.seen, now) < SILENT_SEC if here is None else here


def _inner(cls: Any, values: Any) -> Any:
    if values is None:
        return None
    made = cls(**values)
    check_types(made)
    return made


def status_path(workdir: Path) -> Path:
    """Where the status of the run in a workdir is."""
    return workdir / STATUS_FILE


def read_record(workdir: Path) -> Record | None:
    """The record in a workdir, None without one. Raises ValueError for a damaged one, and OSError."""
    try:
        return Record.from_bytes(status_path(workdir).read_bytes())
    except FileNotFoundError:
        return None


def write_record(workdir: Path, record: Record) -> None:
    """Replaces the status in a workdir, whole or not at all. Raises OSError."""
    replace_file(status_path(workdir), record.to_bytes())


def utc_now() -> str:
    """Now, as the records have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(time: str, now: datetime | None = None) -> float:
    """Seconds from a time of a record to `now`, at least 0. Raises ValueError for what is no time."""
    then = datetime.fromisoformat(time)
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())
