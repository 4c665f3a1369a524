"""Whether a training loss has left its starting point by orders of magnitude, although it is finite."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

LOSS = "train/loss"
FACTOR = 1000.0
"""A run has diverged if its loss is this many times its loss at an earlier place."""
_LEAST = 0.01
"""A loss below this counts as this: what is nearly 0 is a bad unit."""
_REPORTS = 3
"""Number of reports in a row, up to the last one, that must say so: a spike is not enough. Of runs with fewer, all but
the first.

So many also say where a run was: a single one may be low by chance, as of a batch of one row. Of a loss that only the
first report or the first two had, it must be `FACTOR` times as many for each one that is missing.
"""
_MANY, _MANY_FACTORS = 10, (1e4, 1e3)
"""If all later reports say so, at least so many, these are enough for what the first report, or the first two, had."""
_OTHERS_FACTORS = (1e9, 1e6)
"""For the least first loss of several runs, the luckiest: of `_REPORTS` reports, and of all, at least `_MANY`."""
_SHARE = 20
"""After the first reports a place is one more of them in a row, and at least one in so many of them all: of many
reports, some in a row are low by chance."""


class Divergence(NamedTuple):
    """Where a run went."""

    step: int
    """That of the first report of those, up to the last one, that have such a loss."""
    why: str


def losses(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, training loss) of each report, in the order of the rows; infinity where it is infinite.

    Reports without a loss, null or NaN, are left out: no step counted, and the run's own guard knows bad ones.
    """
    reports = []
    for row in rows:
        if LOSS in row:
            value = row[LOSS]
            if isinstance(value, int | float) and not math.isnan(value):
                reports.append((row["step"], float(value) if math.isfinite(value) else math.inf))
    return reports


def first_loss(reports: Sequence[tuple[int, float]]) -> float:
    """The size of the first finite loss; infinity without one."""
    return next((abs(loss) for _, loss in reports if math.isfinite(loss)), math.inf)


def divergence(reports: Sequence[tuple[int, float]], others: float = math.inf) -> Divergence | None:
    """Whether the losses of a run have left a place where it was, and stayed away up to its end; None if not.

    `others` is the least first loss of runs like it: its own first report may come after it diverged. A loss that falls
    counts from the least that it has had for some reports, unless some are negative, such as those of log-likelihoods:
    then nothing but the sizes of the first ones says what is much.
    """
    departures = []
    for place in _places([loss for _, loss in reports], others):
        away = 0
        while away < len(reports) and reports[-1 - away][1] > place.bound:
            away += 1
        if away and away >= place.reports:
            departures.append((away, place.before))
    if not departures:
        return None
    away, before = max(departures)
    step, last = reports[-away][0], reports[-1][1]
    return Divergence(step, f"the training loss is {last:.3g} at step {reports[-1][0]}, and {before}")


class _Place(NamedTuple):
    """Where a run was."""

    bound: float
    """The loss above which the run has left it."""
    reports: int
    """How many reports in a row, up to the last one, must say so."""
    before: str
    """What the loss was, in words."""


def _places(values: Sequence[float], others: float) -> Iterator[_Place]:
    def place(low: float, factor: float, before: str, reports: int | None = None) -> _Place:
        bound = max(low, _LEAST) * factor
        return _Place(bound, reports or min(_REPORTS, len(values) - (values[0] <= bound)), before)

    sizes = [abs(loss) for loss in values if math.isfinite(loss)][:_REPORTS]
    if values and others < min(sizes[:1], default=math.inf):
        before = f"other runs began at {others:.3g}"
        yield place(others, _OTHERS_FACTORS[0], before)
        yield place(others, _OTHERS_FACTORS[1], before, max(_MANY, len(values)))
    for count in range(1, len(sizes) + 1):
        low = max(sizes[:count])
        before = f"was {low:.3g} at first" if count == 1 else f"had been {low:.3g}"
        yield place(low, FACTOR ** (_REPORTS + 1 - count), before)
        if count < _REPORTS:
            yield place(low, _MANY_FACTORS[count - 1], before, max(_MANY, len(values) - count))
    width = max(_REPORTS + 1, len(values) // _SHARE)
    if len(values) >= width and min(values) >= 0:
        low = min(_highest(values, width))
        yield place(low, FACTOR, f"had been {low:.3g}")


def _highest(values: Sequence[float], width: int) -> Iterator[float]:
    """The highest of each `width` values in a row."""
    falling: collections.deque[int] = collections.deque()
    for place, value in enumerate(values):
        while falling and values[falling[-1]] <= value:
            falling.pop()
        falling.append(place)
        if falling[0] <= place - width:
            falling.popleft()
        if place >= width - 1:
            yield values[falling[0]]
