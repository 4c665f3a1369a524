"""What trials are compared by: columns of metrics.jsonl, the rate of a trial, and its size."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from jaxdl.core.files import METRICS_FILE, SUMMARY_FILE
from jaxdl.report.lines import is_throughput
from jaxdl.report.status.rows import parse_row

SIZE = "num_params"
"""The parameters of a trial's network, of its summary.json."""


def known_direction(metric: str) -> bool | None:
    """Whether a higher rate or size is better, and so for nothing else that this module knows; else None."""
    return True if is_throughput(metric) else False if metric == SIZE else None


def rows(workdir: Path) -> Iterator[dict[str, Any]]:
    """The rows of a workdir's metrics.jsonl, without a line that is being written."""
    with contextlib.suppress(OSError), (workdir / METRICS_FILE).open("rb") as file:
        yield from (row for row in map(parse_row, file) if row is not None)


def curve(workdir: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, `eval/accuracy`, in order of the steps; without values that are not finite."""
    return [(row["step"], float(row[metric])) for row in rows(workdir) if isinstance(row.get(metric), int | float)]


def value_at(workdir: Path, metric: str, step: int) -> tuple[float | None, str]:
    """(the first value of a metric from a step on, why there is none).

    A run whose replicas merge beside local steps may stop some steps later than asked. Of `examples_per_sec` and
    `tokens_per_sec` it is the median of all reports up to there: one report alone depends on what else the machine did.
    """
    if metric == SIZE:
        return _size(workdir)
    values = [(row["step"], row[metric]) for row in rows(workdir) if metric in row]
    if not (following := [(at, value) for at, value in values if at >= step]):
        known = metrics_of(workdir)
        there = f"its metrics are {', '.join(known)}" if known else "it has measured nothing"
        return None, f"no {metric} at step {step}: {there}"
    end, value = following[0]
    if is_throughput(metric):
        rates = [rate for at, rate in values if at <= end and _is_finite(rate)]
        value = statistics.median(rates) if rates else None
    return (float(value), "") if _is_finite(value) else (None, f"{metric} at step {step} is not finite")


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _size(workdir: Path) -> tuple[float | None, str]:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads((workdir / SUMMARY_FILE).read_text(encoding="utf-8"))[SIZE]), ""
    return None, f"its {SUMMARY_FILE} has no {SIZE}"


def has_metric(workdir: Path, metric: str) -> bool:
    """Whether a run measures a metric at all."""
    return _size(workdir)[0] is not None if metric == SIZE else any(metric in row for row in rows(workdir))


def metrics_of(workdir: Path) -> list[str]:
    """The metrics of training and evaluation that a run has, its rates, and its size."""
    names = sorted({name for row in rows(workdir) for name in row if name.startswith(("eval/", "train/"))})
    rates = sorted({name for row in rows(workdir) for name in row if is_throughput(name)})
    return [*names, *rates, *([SIZE] if names and _size(workdir)[0] is not None else [])]
