"""How fast a run is on n nodes: as it was measured, and otherwise as a guess."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxdl.files import METRICS_FILE

GUESS = 0.9
"""n nodes are taken for n ** GUESS times as fast as one where nothing was measured: half as many lose 7 %."""
_TAIL_BYTES, _LAST = 65_536, 5


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


def last_speed(workdir: Path) -> float | None:
    """Examples a second in the last reports of a run; None where there are none."""
    try:
        with (workdir / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        try:
            found.append(json.loads(line)["examples_per_sec"])
        except (ValueError, KeyError, TypeError):  # The beginning of the tail, or a row without the metric.
            continue
    return statistics.median(found[-_LAST:]) if found else None


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
