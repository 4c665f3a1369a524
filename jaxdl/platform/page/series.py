"""What runs measured, for the curves: metrics.jsonl is read as it grows, and thinned where it is large."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import CONFIG_FILE, EXAMPLES_FILE, METRICS_FILE
from jaxdl.platform.page.files import Signature, Unreadable, opened, read_json, read_status, signature
from jaxdl.report.compare.curves import By, Curves, curves_of_rows
from jaxdl.report.status.rows import parse_row

WHOLE_BYTES = 16 << 20
"""Of a metrics.jsonl up to this size each row is read; of a larger one each second, fourth, ... row, so that about as
much is kept, and every evaluation and event."""
MOST_BYTES = 1 << 30
"""Of a larger one the end is read."""
LINE_BYTES = 1 << 20
"""A longer line is damaged."""
KEPT_RUNS = 64
"""Rows of so many runs are kept in memory: those that were looked at last."""
MOST_POINTS = 1_000
MOST_EVENTS = 500
_CHUNK = 1 << 20


@dataclass
class _File:
    """The rows of a metrics.jsonl, as far as it has been read."""

    path: Path
    inode: int = 0
    start: int = 0
    offset: int = 0
    """Where the first line begins that has not been read: it may be one that is being written."""
    every: int = 1
    number: int = 0
    """Lines read."""
    training: int = 0
    """Those of them that are neither evaluations nor events."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    first_damaged: int = 0
    left_out: int = 0

    def update(self) -> None:
        """Reads what is new; all of it again if the file was replaced. Raises FileNotFoundError, and Unreadable."""
        with opened(self.path, self.path.parent) as (file, size):
            inode = signature(self.path)
            every = 1 << max(0, math.ceil(math.log2(max(1, min(size, MOST_BYTES)) / WHOLE_BYTES)))
            if (inode and inode[2]) != self.inode or size < self.offset or every != self.every:
                start = max(0, size - MOST_BYTES)
                self.__init__(self.path, inode[2] if inode else 0, start, start, every)
            file.seek(self.offset)
            rest, too_long = b"", False
            while chunk := file.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._add(b"?" if too_long else line)
                    self.offset += len(line) + 1
                    too_long = False
                if len(rest) > LINE_BYTES:
                    self.offset, rest, too_long = self.offset + len(rest), b"", True

    def _add(self, line: bytes) -> None:
        self.number += 1
        kept = b'"event"' in line or b'"eval/' in line
        if not line.strip() or (self.number == 1 and self.start):
            return
        if not kept:
            self.training += 1
            if self.training % self.every:
                self.left_out += 1
                return
        row = parse_row(line)
        if row is None or abs(row["step"]) > 1 << 53:
            self.damaged += 1
            self.first_damaged = self.first_damaged or self.number
        elif "event" in row:
            self.events.append(row)
        else:
            self.rows.append(row)

    def problems(self) -> list[str]:
        """What is not as it should be, or is not shown."""
        found = []
        if self.damaged:
            lines = "line is" if self.damaged == 1 else "lines are"
            found.append(
                f"{METRICS_FILE}: {self.damaged:,} {lines} no row of metrics and not shown, the first is line "
                f"{self.first_damaged:,}"
            )
        if self.start:
            found.append(f"{METRICS_FILE}: it is larger than {MOST_BYTES >> 30} GiB; only its end is shown")
        if self.left_out:
            found.append(
                f"{METRICS_FILE}: it is large: of the rows of training one in {self.every} is shown, {self.left_out:,} "
                "are not; all evaluations are"
            )
        return found


@dataclass(frozen=True)
class Series:
    """What one run measured, and what happened to it."""

    curves: Curves
    events: Sequence[Mapping[str, Any]]
    config: Any
    """The JSON of config.json; None if there is none, or it cannot be read."""
    problems: Sequence[str]


@dataclass
class _Kept:
    """What is kept in memory of a run. Who reads its files has the lock, and no other run waits for it."""

    file: _File
    lock: threading.Lock = field(default_factory=threading.Lock)
    signatures: tuple[Signature | None, ...] = ()
    series: Series | None = None


class AllSeries:
    """The measurements of runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, _Kept] = OrderedDict()

    def of(self, workdir: Path) -> Series:
        """What a run has measured by now. Raises nothing: what cannot be read is one of its problems."""
        with self._lock:
            kept = self._kept.setdefault(workdir, _Kept(_File(workdir / METRICS_FILE)))
            self._kept.move_to_end(workdir)
            while len(self._kept) > KEPT_RUNS:
                self._kept.popitem(last=False)
        with kept.lock:
            signatures = tuple(signature(workdir / name) for name in (METRICS_FILE, CONFIG_FILE, EXAMPLES_FILE))
            if kept.series is None or signatures != kept.signatures:
                kept.series, kept.signatures = _series(workdir, kept.file), signatures
            return kept.series


def _series(workdir: Path, file: _File) -> Series:
    problems, values = [], {}
    try:
        file.update()
    except FileNotFoundError:
        file.rows, file.events = [], []
    except Unreadable as error:
        problems.append(f"{METRICS_FILE}: {error}")
    problems += file.problems()
    for name in (CONFIG_FILE, EXAMPLES_FILE):
        try:
            values[name] = read_json(workdir / name, workdir)
        except FileNotFoundError:
            pass
        except Unreadable as error:
            problems.append(f"{name}: {error}")
    config = values.get(CONFIG_FILE)
    curves = curves_of_rows(workdir, file.rows, config, values.get(EXAMPLES_FILE), read_status(workdir))
    return Series(curves, list(file.events[-MOST_EVENTS:]), config, problems)


def thin(where: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most about `most` of the points: the lowest and the highest of each part, so that no spike is lost."""
    if len(values) <= most:
        return where, values
    parts = np.array_split(np.arange(len(values)), most // 2)
    kept = sorted(
        {0, len(values) - 1} | {int(part[pick(values[part])]) for part in parts for pick in (np.argmin, np.argmax)}
    )
    return where[kept], values[kept]


def part_means(where: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, ...]:
    """(where, mean, count) of each part that `thin` keeps the extremes of; none if it keeps every point.

    What is smoothed is these: the middle of two extremes is not the mean where large values are rare.
    """
    if len(values) <= most:
        return np.empty(0), np.empty(0), np.empty(0, int)
    parts = np.array_split(np.arange(len(values)), most // 2)
    with np.errstate(over="ignore"):  # The sum of values near the largest float is infinite, their mean is not.
        means = [np.clip(values[part].mean(), values[part].min(), values[part].max()) for part in parts]
    return np.asarray([where[part].mean() for part in parts]), np.asarray(means), np.asarray([*map(len, parts)])


def curves_as_json(series: Series, by: By, metrics: Sequence[str] = (), most: int = MOST_POINTS) -> dict[str, Any]:
    """The points of each metric (of `metrics` alone, if any are given), the events, and what is not shown.

    A number is rounded to six digits, a curve thinned as `thin` says; `num_points` is what there is, `means` what
    `part_means` returns, by `x`, `y` and `count`.
    """
    curves, problems = series.curves, list(series.problems)
    names = dict.fromkeys(name for row in curves.rows for name in row if name not in ("step", "epoch"))
    found: dict[str, Any] = {}
    for name in names:
        if metrics and name not in metrics:
            continue
        try:
            where, values = curves.points(name, by)
        except ConfigError as error:  # The run does not say how many examples there were, say.
            problems.append(f"drawn by step: {error}".replace(" Give --by step.", ""))
            by = "step"
            where, values = curves.points(name, by)
        except (ValueError, TypeError, OverflowError):
            continue
        missing = sum(row.get(name, 0) is None for row in curves.rows)
        if not len(values) and not missing:
            continue
        thinned, means = thin(where, values, most), part_means(where, values, most)
        best = _best(curves, name)
        found[name] = {
            **_as_lists(*thinned),
            "means": _as_lists(*means[:2]) | {"count": means[2].tolist()},
            "num_points": len(values),
            "not_finite": missing,
            "best": None if best is None else [best[0], best[1]],
        }
    return {"metrics": found, "problems": problems, "by": by}


def _as_lists(where: np.ndarray, values: np.ndarray) -> dict[str, list]:
    return {"x": [float(f"{value:.9g}") for value in where], "y": [float(f"{value:.6g}") for value in values]}


def _best(curves: Curves, metric: str) -> tuple[float, int] | None:
    try:
        return curves.best(metric)
    except (ValueError, TypeError, OverflowError):
        return None


def panels(names: Sequence[str]) -> list[dict[str, Any]]:
    """Which metrics are in one panel: training and evaluation of the same, loss first; `main` are those that matter.

    Speeds are with the main ones; all others are behind them, by name.
    """
    grouped: dict[str, list[str]] = {}
    for name in sorted(names):
        prefix, _, rest = name.partition("/")
        grouped.setdefault(rest if prefix in ("train", "eval") and rest else name, []).append(name)
    speed = "tokens_per_sec" if "tokens_per_sec" in names else "examples_per_sec"

    def rank(title: str) -> tuple[int, str]:
        if title == "loss":
            return 0, ""
        if any(name.startswith("eval/") for name in grouped[title]):
            return 1, title
        return (2, "") if title == speed else (3, "") if title == "learning_rate" else (4, title)

    return [
        {"title": title, "metrics": sorted(grouped[title], reverse=True), "main": rank(title)[0] < 4}
        for title in sorted(grouped, key=rank)
    ]
