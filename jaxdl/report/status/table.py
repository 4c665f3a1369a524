"""The table of many runs: which cells it has, in which order, as plain lines, for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import OptionError
from jaxdl.report.status.record import State
from jaxdl.report.status.rows import Row

if TYPE_CHECKING:
    from rich.text import Text

METRICS = ("train/loss", "eval/loss", "eval/accuracy")
"""The metrics that have a column, if any of the runs has them and none are asked for."""
SORT_KEYS = ("workdir", "state", "step", "progress", "since", "seen")
"""What rows are sorted by; or by a metric."""
LOST = "LOST"
"""In place of a state that says that a run lives, where its process is gone or silent."""
_FINAL = tuple(state for state in State if state.is_final)
_ORDER = [*State, "UNKNOWN"]
_COLORS: Mapping[str, str] = {
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.STOPPED: "green",
    State.HALTED: "yellow",
    State.REFUSED: "yellow",
    State.PROCESSING: "cyan",
}
NOTE_WIDTH = 160
"""The note of a plain line is cut to this many characters."""


def sort_rows(rows: Sequence[Row], key: str, *, reverse: bool = False) -> list[Row]:
    """The rows by one of `SORT_KEYS` or a metric, those without it last. Raises OptionError for another name."""
    if key not in SORT_KEYS and not any(key in row.metrics for row in rows):
        known = sorted({name for row in rows for name in row.metrics if name.startswith(("train/", "eval/"))})
        raise OptionError(
            f"--sort {key}: choose one of {', '.join(SORT_KEYS)}, or a metric of these runs"
            + (f": {', '.join(known[:12])}." if known else "; they have none.")
        )

    def value(row: Row) -> Any:
        keys: dict[str, Any] = {
            "workdir": row.workdir,
            "state": _ORDER.index(row.state) if row.state in _ORDER else len(_ORDER),
            "step": row.step,
            "progress": _progress(row),
            "since": row.since_sec,
            "seen": row.seen_sec,
        }
        return keys[key] if key in keys else row.metrics.get(key)

    there = [row for row in rows if value(row) is not None]
    missing = [row for row in rows if value(row) is None]
    return sorted(there, key=lambda row: (value(row), row.workdir), reverse=reverse) + missing


def _end(row: Row) -> int | None:
    """The step that a run is on its way to; of one that ended, its whole length."""
    return row.total_steps if row.state in _FINAL else row.end_step or row.total_steps


def _progress(row: Row) -> float | None:
    end = _end(row)
    return None if row.step is None or not end else row.step / end


def _is_lost(row: Row) -> bool:
    """Whether a run says that it lives, and does not."""
    return row.alive is False and row.state not in _FINAL


def metric_columns(rows: Sequence[Row], asked: Sequence[str] = ()) -> list[str]:
    """The metrics that get a column."""
    there = {name for row in rows for name in (*row.metrics, *row.not_finite)}
    return list(asked) or [name for name in METRICS if name in there]


def cells(rows: Sequence[Row], metrics: Sequence[str]) -> list[list[str]]:
    """The head of the table, then a line for each row."""
    head = ["run", "state", "step", "", "for", "seen", *metrics, "hosts", "note"]
    return [
        head,
        *([*_cells(row), *(_metric(row, metric) for metric in metrics), *_ends(row)] for row in rows),
    ]


def _cells(row: Row) -> list[str]:
    progress, end = _progress(row), _end(row)
    step = "" if row.step is None else f"{row.step:,}" + (f"/{end:,}" if end else "")
    share = "" if progress is None else f"{math.floor(100 * min(1.0, progress))}%"
    return [
        row.workdir,
        LOST if _is_lost(row) else row.state,
        step,
        share,
        _duration(row.since_sec),
        _duration(row.seen_sec),
    ]


def _ends(row: Row) -> list[str]:
    return [str(len(row.hosts) or ""), note(row)]


def note(row: Row) -> str:
    """What else there is to say about a run, in one line: what it does, why it ended, what happens next."""
    if row.problem:
        return row.problem
    if _is_lost(row):
        last = f"last seen {row.doing} {_duration(row.seen_sec)} ago: {row.reason}; {row.next_text}"
        return " ".join(last.split())
    if row.alive or row.state == State.QUEUED:
        again = f", restart {row.restart}" if row.restart else ""
        before = f" (before: {row.reason})" if row.reason else ""
        return " ".join(f"{row.doing}{again}{before}".strip(", ").split())
    code = "" if row.exit_code is None else f"exit code {row.exit_code}"
    return " ".join("; ".join(part for part in (code, row.reason, row.next_text) if part).split())


def plain(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """The table as lines of plain text."""
    return "\n".join(align([[*line[:-1], line[-1][:NOTE_WIDTH]] for line in cells(rows, metrics)]))


def align(lines: Sequence[Sequence[str]], left: Sequence[str] = ("run", "state", "note")) -> list[str]:
    """The lines with their cells in columns: those that the first line names in `left` to the left, others right."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    right = [place for place, name in enumerate(lines[0]) if name not in left]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def for_terminal(rows: Sequence[Row], metrics: Sequence[str], width: int) -> list[list[Text]]:
    """The table for a terminal, with coloured states: the head, then the one or two lines of each run.

    Notes are beside the runs if all have room there, else each is beneath its run.
    """
    from rich.text import Text

    lines, notes = cells(rows, metrics), ["", *map(note, rows)]
    beside = align(lines)
    if all(len(line) <= width for line in beside):
        notes = [""] * len(notes)
    else:
        beside = align([line[:-1] for line in lines])
    texts_of_runs = [[Text(line)] for line in beside]
    for texts, below in zip(texts_of_runs, notes, strict=True):
        texts.extend([Text(f"  {below}", style="dim")] if below else [])
    texts_of_runs[0][0].stylize("bold")
    start = max(len(line[0]) for line in lines) + 2
    for row, (line, *_), words in zip(rows, texts_of_runs[1:], lines[1:], strict=True):
        color = "red" if row.problem or _is_lost(row) else _COLORS.get(row.state, "")
        line.stylize(color, start, start + len(words[1]))
    return texts_of_runs


def as_json(rows: Sequence[Row]) -> str:
    """The rows as a JSON list of objects, with the fields of `Row`."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)


def _metric(row: Row, name: str) -> str:
    value = row.metrics.get(name)
    return f"{value:.4g}" if value is not None else "nan" if name in row.not_finite else ""


def _duration(seconds: float | None) -> str:
    """`7 s`, `12 min`, `3.4 h`, `5 d`."""
    if seconds is None:
        return ""
    for size, name in ((60.0, "s"), (60.0, "min")):
        if seconds < size:
            return f"{seconds:.0f} {name}"
        seconds /= size
    return f"{seconds:.1f} h" if seconds < 48 else f"{seconds / 24:.0f} d"
