"""How fast a run is on n nodes: as it was measured, and otherwise as a guess."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.files import METRICS_FILE

GUESS = 0.9
"""n nodes are taken for n ** GUESS times as fast as one where nothing was measured: half as many lose 7 %."""
_TAIL_BYTES, _LAST, _LEAST = 65_536, 5, 4


def speeds(sizes: Sequence[int], measured: Mapping[int, float]) -> dict[int, float]:
    """Nodes -> examples a second, for each of `sizes`.

    A size without a measurement has the speed of the nearest measured one (by ratio; of two the smaller), scaled by
    `GUESS`.
    """
    found = {}
    for size in sizes:
        near = min(measured, key=lambda one: (max(one / size, size / one), one), default=1)
        found[size] = measured.get(near, 1.0) * (size / near) ** GUESS
    return found


def last_speed(workdir: Path, after_step: int = 0) -> float | None:
    """The median of examples a second in the last reports of a run, of steps after `after_step`; None for too few.

    A run that was resized was as fast as its earlier reports say on the nodes that it had then. Its first steps after a
    start are no measure.
    """
    found = [row["examples_per_sec"] for row in _last_rows(workdir) if row["step"] > after_step]
    return statistics.median(found[-_LAST:]) if len(found) >= _LEAST else None


def last_step(workdir: Path) -> int:
    """The step of the last report of a run; 0 where there is none."""
    return max((row["step"] for row in _last_rows(workdir)), default=0)


def _last_rows(workdir: Path) -> list[dict[str, Any]]:
    """The last rows with a speed."""
    try:
        with (workdir / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # The beginning of the tail, or a line that is being written.
            row = json.loads(line)
            named = isinstance(row, dict) and {"step", "examples_per_sec"} <= row.keys()
            if named and 0 < row["examples_per_sec"] < math.inf:
                found.append(row)
    return found


class Measured:
    """The speeds of runs as they were seen: by run and nodes, the last one counts."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, float]] = defaultdict(dict)

    def add(self, run: str, nodes: int, examples_per_sec: float) -> None:
        """What a run reached."""
        self._found[run][nodes] = examples_per_sec

    def of(self, run: str) -> Mapping[int, float]:
        """Nodes -> examples a second of a run."""
        return self._found[run]
