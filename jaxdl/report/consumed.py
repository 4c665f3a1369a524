"""What a run has trained on so far: tokens, and of a mixture the epochs and tokens of each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.data import Source
from jaxdl.data.phases import Timeline
from jaxdl.report.fetching import OWN, joint_totals, reasons
from jaxdl.report.skips import REASON, Skip


class Consumption:
    """Counts what steps have trained on, in a unit of which an example has several, such as tokens.

    Args:
      unit: the unit, in the plural.
      per_example: how many of it a training example has in the mean; of 1 nothing is counted.
      source: the training data.
      seed: that of the run's order of the data.
    """

    def __init__(self, unit: str, per_example: float, source: Source, seed: int, timeline: Timeline) -> None:
        self._unit, self._per_example, self._source = unit, per_example, source
        self._seed, self._timeline = seed, timeline

    def report(
        self,
        steps: Sequence[Mapping[str, np.ndarray]],
        last_step: int,
        seconds: float,
        rows: Sequence[Mapping[str, Any]],
    ) -> dict[str, float]:
        """The metrics of some steps up to `last_step`, which took `seconds`.

        `rows` are those of the history so far, from which counting goes on; what an earlier version did not count is
        estimated.
        """
        counts = self._source.seen(self._timeline.position(last_step), self._seed)
        if self._per_example == 1:
            return counts
        estimate = self._timeline.position(last_step - len(steps)) * self._per_example
        before = self.total(rows).get(self.name, int(estimate))
        here = [step["sums/weight"] for step in steps if "sums/weight" in step]
        if not here:  # Other processes have replicas of their own: what all have seen is known when they merge.
            return counts | {self.name: before + int(joint_totals(steps).get("seen", 0))}
        counted = int(np.sum(here, dtype=np.float64))
        return counts | {f"{self._unit}_per_sec": counted / seconds, self.name: before + counted}

    @staticmethod
    def empty_steps(steps: Sequence[Mapping[str, np.ndarray]], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """How many steps of the run made no update because nothing in the batch counted; empty if there is none.

        The steps of all replicas together that have parameters of their own and are seen here.
        """
        name = f"train/{OWN if any(OWN + REASON in step for step in steps) else ''}empty_steps"
        before = next((row[name] for row in reversed(rows) if name in row), 0)
        number = before + sum(int(np.sum(reasons(step) & Skip.EMPTY != 0)) for step in steps)
        return {name: number} if number else {}

    @property
    def name(self) -> str:
        """The metric of all that has been seen, `tokens_seen`."""
        return f"{self._unit}_seen"

    def total(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The last count in the rows of a history, by its name; empty if there is none."""
        return next(({self.name: row[self.name]} for row in reversed(rows) if self.name in row), {})
