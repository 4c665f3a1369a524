"""Whether a training loss has left its starting point by orders of magnitude, although it is finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

LOSS = "train/loss"
FACTOR = 1000.0
"""A run has diverged whose loss is so many times that of its first report, or the least that it has had."""
_LEAST = 0.01
"""A loss below this counts as this: what is nearly 0 is a bad unit."""
_REPORTS = 3
"""So many reports in a row, up to the last one, must say so: a spike is none. Of runs with fewer, all but the first."""


class Divergence(NamedTuple):
    """Where a run went."""

    step: int
    """That of the first report of those, up to the last one, that have such a loss."""
    why: str


def losses(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, training loss) of each report, in the order of the rows; infinity where it is infinite.

    Reports without a loss, null or NaN, are left out: no step counted, and the run's own guard knows bad ones.
    """
    found = []
    for row in rows:
        if LOSS in row:
            value = row[LOSS]
            if isinstance(value, int | float) and not math.isnan(value):
                found.append((row["step"], float(value) if math.isfinite(value) else math.inf))
    return found


def first_loss(reports: Sequence[tuple[int, float]]) -> float:
    """The size of the first finite loss; infinity without one."""
    return next((abs(loss) for _, loss in reports if math.isfinite(loss)), math.inf)


def divergence(reports: Sequence[tuple[int, float]], others: float = math.inf) -> Divergence | None:
    """Whether the losses of a run have left where it was, and stayed away up to its end; None if not.

    `others` is the least first loss of runs like it: its own first report may come after it diverged. A loss that falls
    counts from the least that it has had, unless some are negative, such as those of log-likelihoods: then nothing but
    the size of the first one says what is much.
    """
    start = min(first_loss(reports), others)
    if not reports or not math.isfinite(start):
        return None
    least_loss = min(loss for _, loss in reports)
    low = min(start, least_loss) if least_loss >= 0 else start
    bound = FACTOR * max(low, _LEAST)
    away = 0
    while away < len(reports) and reports[-1 - away][1] > bound:
        away += 1
    least = min(_REPORTS, len(reports) - (reports[0][1] <= bound))
    if not away or away < least:
        return None
    step, last = reports[-away][0], reports[-1][1]
    before = f"was {start:.3g} at first" if low == start else f"had been {low:.3g}"
    return Divergence(step, f"the training loss is {last:.3g} at step {reports[-1][0]}, and {before}")
