"""Workdirs are found and read: one row for each run, also for older and damaged ones. Nothing is changed, none raises.

Read are `status.json` and the end of `metrics.jsonl`; of a run that has no status, because an older version of jaxdl
made it, also what else says how it stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import CONFIG_FILE, LEASE_FILE, METRICS_FILE, REPORT_FILE, STATUS_FILE, SUMMARY_FILE
from jaxdl.core.paths import find_paths
from jaxdl.core.runs import has_checkpoint
from jaxdl.parallel.lease import Holder, is_alive
from jaxdl.report.status.parsing import parse_json
from jaxdl.report.status.record import Action, Reason, Record, State, read_record, seconds_since

UNKNOWN = "UNKNOWN"
"""In place of a state: the workdir does not say how its run stands."""
TAIL_BYTES = 1 << 14
"""So much of the end of metrics.jsonl is read first."""
DEPTH = 3
"""How many folders deep workdirs are looked for."""
MARKS = (STATUS_FILE, CONFIG_FILE, SUMMARY_FILE, METRICS_FILE)
"""A folder with one of these is a workdir."""
_ENDED = {"finished": State.COMPLETED, "stopped": State.STOPPED, "interrupted": State.HALTED}


@dataclass(frozen=True)
class Row:
    """One run in the table."""

    workdir: str
    state: str
    """A name of `State`, or `UNKNOWN`."""
    alive: bool | None = None
    """Whether its process lives; None if that is not known, or it has not begun."""
    doing: str = ""
    step: int | None = None
    end_step: int | None = None
    total_steps: int | None = None
    since_sec: float | None = None
    """Seconds since it came into its state."""
    seen_sec: float | None = None
    """Seconds since it was last heard of."""
    hosts: tuple[str, ...] = ()
    restart: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each, of the newest rows of metrics.jsonl."""
    not_finite: tuple[str, ...] = ()
    """The metrics whose last value is `null`, as one is written that is not finite; they have none in `metrics`."""
    reason: str = ""
    exit_code: int | None = None
    next_action: str = ""
    next_text: str = ""
    problem: str = ""
    """What could not be read, if anything."""


def find_workdirs(given: Sequence[str], *, closed: bool = True) -> list[Path]:
    """The workdirs that are named by folders, folders of workdirs (`DEPTH` deep) and glob patterns, each once, sorted.

    With `closed` also folders inside that may not be read.

    Raises ConfigError for a name of nothing, and for folders without any workdir.
    """
    workdirs: dict[Path, None] = {}
    for name in given:
        paths = [Path(name)] if os.path.exists(name) else find_paths(name)
        if not name.strip() or not paths:
            raise ConfigError(f"{name or repr('')}: there is no such folder. Give workdirs, or folders of workdirs.")
        inside = [workdir for path in sorted(paths) for workdir in _search(path, DEPTH, closed)]
        if not inside:
            raise ConfigError(f"{name}: there is no run in it, nor in its folders. Give workdirs, or folders of them.")
        workdirs |= dict.fromkeys(inside)
    return sorted(workdirs)


def _search(folder: Path, depth: int, closed: bool) -> Iterator[Path]:
    """The workdirs in a folder, and folders that may not be read: their rows say so.

    Without `closed` only the folder itself is among the latter.
    """
    try:
        if any((folder / mark).exists() for mark in MARKS):
            yield folder
            return
        inner = [] if not depth else sorted(entry.path for entry in os.scandir(folder) if _is_searched(entry))
    except OSError:
        if closed or depth == DEPTH:
            yield folder
        return
    for path in inner:
        yield from _search(Path(path), depth - 1, closed)


def _is_searched(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and os.path.isdir(entry.path)  # Unlike its `is_dir`, this raises nothing.


def read_row(workdir: Path, now: datetime | None = None) -> Row:
    """The row of a workdir. Raises nothing: what cannot be read is its `problem`."""
    now = now or datetime.now(UTC)
    try:
        rows, problem = tail_rows(workdir / METRICS_FILE), ""
    except (OSError, ValueError) as error:
        rows, problem = [], f"{METRICS_FILE}: {_why(error)}"
    try:
        record = read_record(workdir)
    except (OSError, ValueError) as error:
        row = Row(str(workdir), UNKNOWN, problem=f"{STATUS_FILE} cannot be read: {_why(error)}")
        return _with_metrics(row, rows)
    try:
        row = _without_status(workdir, rows, now) if record is None else _from_record(workdir, record, now)
    except Exception as error:  # A damaged file of one run, of whatever kind, must not hide the others.
        row = Row(str(workdir), UNKNOWN, problem=f"its files cannot be read: {type(error).__name__}: {_why(error)}")
    return _with_metrics(row, rows, problem)


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else " ".join(str(error).split())


def _from_record(workdir: Path, record: Record, now: datetime) -> Row:
    alive, seen_sec = record.is_alive(now), seconds_since(record.seen, now)
    reason = record.reason or Reason("")
    names = ("state", "doing", "step", "end_step", "total_steps", "hosts", "restart", "next_action", "next_text")
    fields: dict[str, Any] = {name: getattr(record, name) for name in names}
    fields |= {"since_sec": seconds_since(record.since, now), "seen_sec": seen_sec}
    row = Row(str(workdir), **fields, alive=alive, reason=reason.text, exit_code=reason.exit_code)
    if record.state.is_final or alive is not False:
        return row
    return _lost_row(row, record.process)


def _lost_row(row: Row, process: Holder | None) -> Row:
    """The row of a run that its files take for live, and that is not."""
    gone = process is not None and is_alive(process) is False
    reason = "killed without a message, or its machine was lost" if gone else "no report since"
    if row.state in (State.DEPLOY, State.DOWNLOADING):
        reason += ", before this start made a step" if gone else " (this start had made no step)"
    return dataclasses.replace(
        row,
        reason=reason,
        exit_code=None,
        next_action=Action.RESUME,
        next_text="the same command "
        + ("resumes from the newest checkpoint" if has_checkpoint(Path(row.workdir)) else "begins at step 0"),
    )


def _with_metrics(row: Row, rows: Sequence[Mapping[str, Any]], problem: str = "") -> Row:
    """With the last metrics; a run that trains, or was killed meanwhile, may have made more steps since its status."""
    last_values: dict[str, Any] = {}
    for line in rows:
        last_values.update(line)
    metrics: dict[str, float | None] = {
        name: value
        for name, value in last_values.items()
        if name not in ("step", "epoch")
        and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    }
    finite = {name: value for name, value in metrics.items() if value is not None}
    last = max((line["step"] for line in rows if "event" not in line), default=None)
    step = row.step
    if last is not None and (step is None or (row.state == State.PROCESSING and row.alive is not None)):
        step = max(last, step or 0)
    not_finite = tuple(name for name in metrics if name not in finite)
    return dataclasses.replace(row, metrics=finite, not_finite=not_finite, step=step, problem=row.problem or problem)


def _without_status(workdir: Path, rows: Sequence[Mapping[str, Any]], now: datetime) -> Row:
    """The row of a run of an older version, by its summary, its report of a divergence, its lease and its metrics."""
    lease, since_sec = _lease(workdir), _age(workdir / METRICS_FILE, now)
    step = max((line["step"] for line in rows), default=None)
    base = Row(str(workdir), UNKNOWN, step=step, since_sec=None, seen_sec=since_sec)
    summary_sec, diverged_sec = _age(workdir / SUMMARY_FILE, now), _age(workdir / REPORT_FILE, now)
    if lease is not None:
        holder, lease_sec = lease
        record = Record(State.PROCESSING, "", _ago(now, lease_sec), process=holder)
        alive = record.is_alive(now)
        live = dataclasses.replace(base, state=State.PROCESSING, alive=alive, seen_sec=lease_sec, hosts=(holder.host,))
        return live if alive else _lost_row(live, holder)
    if diverged_sec is not None and (summary_sec is None or diverged_sec < summary_sec):
        why = f"diverged, see {REPORT_FILE}"
        return dataclasses.replace(
            base, state=State.FAILED, alive=False, since_sec=diverged_sec, reason=why, exit_code=3
        )
    if summary_sec is None:
        return dataclasses.replace(base, problem=_why_closed(workdir))
    try:
        summary = parse_json((workdir / SUMMARY_FILE).read_bytes())
        state, steps, total = _ENDED[summary["status"]], int(summary["steps"]), int(summary["total_steps"])
        since_sec = seconds_since(summary["time"], now)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        return dataclasses.replace(base, problem=f"{SUMMARY_FILE} cannot be read: {_why(error)}")
    done = state == State.COMPLETED
    return dataclasses.replace(
        base,
        state=state,
        alive=False,
        step=steps,
        end_step=total,
        total_steps=total,
        since_sec=since_sec,
        seen_sec=since_sec,
        next_action=Action.NONE if done else Action.RESUME,
        next_text="" if done else f"the same command resumes from step {steps}",
    )


def _why_closed(folder: Path) -> str:
    """Why the files of a folder cannot be listed; empty if they can be."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        return f"the folder cannot be read: {_why(error)}"
    return ""


def _lease(workdir: Path) -> tuple[Holder, float] | None:
    """The holder in the lease and the seconds since its last beat; None without one."""
    path = workdir / LEASE_FILE
    try:
        return Holder.from_bytes(path.read_bytes()), max(0.0, datetime.now(UTC).timestamp() - path.stat().st_mtime)
    except OSError:
        return None


def _age(path: Path, now: datetime) -> float | None:
    """Seconds since a file was written; None without it."""
    try:
        return max(0.0, now.timestamp() - path.stat().st_mtime)
    except OSError:
        return None


def _ago(now: datetime, seconds: float) -> str:
    return datetime.fromtimestamp(now.timestamp() - seconds, UTC).isoformat()


def tail_rows(path: Path, num_rows: int = 40) -> list[dict[str, Any]]:
    """The last rows of a metrics.jsonl, at most `num_rows`, without reading the whole file; none if there is no file.

    Lines that are no rows are left out, such as a last one that is being written. Raises OSError, and ValueError for a
    file that has lines but no row.
    """
    try:
        with path.open("rb") as file:
            size, wanted = file.seek(0, os.SEEK_END), TAIL_BYTES
            while True:
                start = max(0, size - wanted)
                file.seek(start)
                lines = file.read(size - start).split(b"\n")
                lines = lines if start == 0 else lines[1:]
                if start == 0 or len(lines) > num_rows or wanted > 64 * TAIL_BYTES:
                    break
                wanted *= 4
    except FileNotFoundError:
        return []
    whole = [line for line in lines if line.strip()][-num_rows - 1 :]
    rows = _parse_rows(whole)
    if len(whole) > 1 and not rows:
        raise ValueError("it has no rows of metrics")
    return rows[-num_rows:]


def _parse_rows(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The rows in lines of metrics.jsonl, without what is none. It need not hold for lines made up to deceive it."""
    if all(line.startswith(b"{") and line.rstrip().endswith(b"}") for line in lines):
        with contextlib.suppress(ValueError):  # In one text: the page reads the ends of thousands of files.
            values = parse_json(b"[" + b",".join(lines) + b"]")
            if len(values) == len(lines):
                return [value for value in values if _is_row(value)]
    return [row for row in map(parse_row, lines) if row is not None]


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row in a line of metrics.jsonl; None for a line that is none, such as one that is being written."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if _is_row(row) else None


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("step")) is int
