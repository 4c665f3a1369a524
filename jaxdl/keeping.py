"""Which checkpoints are kept for their evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal


class Best:
    """A preservation policy of Orbax: the `num` checkpoints with the best scores, those of earlier runs too.

    A score lies in the checkpoint's own `meta`. One that cannot be read there any more counts as none: the checkpoint
    is damaged, and restoring it will say so.
    """

    def __init__(self, folder: Path, num: int, mode: Literal["max", "min"]) -> None:
        self._folder, self._num, self._sign = folder, num, 1 if mode == "max" else -1
        self._known: dict[int, float | None] = {}

    def add(self, step: int, score: float | None) -> None:
        """Notes the score of a checkpoint that is about to be written; None when it was not evaluated."""
        self._known[step] = None if score is None or math.isnan(score) else self._sign * score

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint, in Orbax's order, whether it is one of the best."""
        del context
        steps = [one.step for one in checkpoints]
        for step in steps:
            if step not in self._known:
                self.add(step, self._read(step))
        scores = [(score, step) for step in steps if (score := self._known[step]) is not None]
        best = {step for _, step in sorted(scores)[max(0, len(scores) - self._num) :]}
        return [step in best for step in steps]

    def _read(self, step: int) -> float | None:
        try:
            return float(json.loads((self._folder / f"step_{step}" / "meta" / "metadata").read_text())["score"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
