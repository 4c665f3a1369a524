"""How fast a run is on n nodes: as it was measured, else as its exchange over the network says, else as a guess."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.files import METRICS_FILE
from jaxdl.report.status import tail_rows

GUESS = 0.9
"""n nodes are taken for n ** GUESS times as fast as one where nothing is known: half as many lose 7 %."""
MEASURED, GUESSED = "measured", "guess"
_TAIL_ROWS, _LAST, _LEAST = 200, 5, 4


@dataclass(frozen=True)
class Exchange:
    """What the gradient exchange of a run adds to a step on each of its sizes, as its config says."""

    network: str
    """The rate of a node's network that it was computed for, such as 25gbit."""
    batch_size: int
    """The global batch, the same on all sizes."""
    seconds: Mapping[int, float]
    """Nodes -> seconds of one exchange. Sizes for which it is not known are left out."""


class Estimate(NamedTuple):
    """A speed and where it is from."""

    examples_per_sec: float
    """Where nothing was measured: times that of one node."""
    source: str
    """`MEASURED`, `GUESSED`, or what it was predicted from."""


def estimates(
    sizes: Sequence[int], measured: Mapping[int, float], exchange: Exchange | None = None
) -> dict[int, Estimate]:
    """Nodes -> speed, for each of `sizes`.

    A size without a measurement follows from the nearest measured one (by ratio; of two the smaller). With the exchange
    x(n) of both known, a step of the batch B takes c / n + x(n), and the measurement gives the computation c; this is
    strong scaling, as the batch is fixed. Where it is not known, and where the measured step is shorter than its
    exchange is said to be, the speed is scaled by `GUESS`.
    """
    speeds = {}
    for size in sizes:
        if size in measured:
            speeds[size] = Estimate(measured[size], MEASURED)
            continue
        near = min(measured, key=lambda other: (max(other / size, size / other), other), default=1)
        predicted = None
        if exchange is not None and near in measured:
            predicted = _predict(size, near, measured[near], exchange)
        if exchange is not None and predicted is not None:
            speeds[size] = Estimate(predicted, f"predicted from the exchange over {exchange.network}")
        else:
            speeds[size] = Estimate(measured.get(near, 1.0) * (size / near) ** GUESS, GUESSED)
    return speeds


def _predict(size: int, near: int, examples_per_sec: float, exchange: Exchange) -> float | None:
    """The speed on `size` nodes of a run with this one on `near` nodes; None where the exchange does not say it."""
    seconds, batch = exchange.seconds, exchange.batch_size
    if not {size, near} <= seconds.keys():
        return None
    compute = near * (batch / examples_per_sec - seconds[near])
    return batch / (compute / size + seconds[size]) if compute > 0 else None


def last_speed(workdir: Path, after_step: int = 0) -> float | None:
    """The median of examples a second in the last reports of a run, of steps after `after_step`; None for too few.

    A run that was resized was as fast as its earlier reports say on the nodes that it had then. Its first steps after a
    start are no measure.
    """
    speeds = [row["examples_per_sec"] for row in _last_rows(workdir) if row["step"] > after_step]
    return statistics.median(speeds[-_LAST:]) if len(speeds) >= _LEAST else None


def last_step(workdir: Path) -> int:
    """The step of the last report of a run; 0 where there is none."""
    return max((row["step"] for row in _last_rows(workdir)), default=0)


def _last_rows(workdir: Path) -> list[dict[str, Any]]:
    """The last rows with a speed."""
    try:
        rows = tail_rows(workdir / METRICS_FILE, _TAIL_ROWS)
    except (OSError, ValueError):
        return []
    speeds = ((row, row.get("examples_per_sec")) for row in rows)
    return [row for row, speed in speeds if isinstance(speed, int | float) and 0 < speed < math.inf]


class MeasuredSpeeds:
    """The speeds of runs as they were seen: by run and nodes, the last one counts."""

    def __init__(self) -> None:
        self._speeds: dict[str, dict[int, float]] = defaultdict(dict)

    def add(self, run: str, nodes: int, examples_per_sec: float) -> None:
        """What a run reached."""
        self._speeds[run][nodes] = examples_per_sec

    def of(self, run: str) -> Mapping[int, float]:
        """Nodes -> examples a second of a run."""
        return self._speeds[run]
