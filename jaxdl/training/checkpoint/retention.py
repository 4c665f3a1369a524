"""The retention policies that keep the checkpoints with the best evaluations, and those on which kept ones depend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from orbax.checkpoint.checkpoint_managers import PolicyCheckpointInfo, PreservationContext, PreservationPolicy

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import step_folder
from jaxdl.training.checkpoint.errors import Damaged, Unreadable
from jaxdl.training.checkpoint.meta import read_meta


class Best:
    """A preservation policy of Orbax: the `num` checkpoints with the best scores, those of earlier runs too.

    The description of a checkpoint has its score. A damaged description counts as no score: restoring the checkpoint
    reports the damage. A checkpoint whose description is unreadable may be the best, and is kept until it is readable.
    """

    def __init__(self, folder: Path, num: int, mode: Literal["max", "min"]) -> None:
        self._folder, self._num, self._sign = folder, num, 1 if mode == "max" else -1
        self._known: dict[int, float | None] = {}

    def add(self, step: int, score: float | None) -> None:
        """Records the score of a checkpoint that is about to be written; None if it was not evaluated."""
        self._known[step] = None if score is None or math.isnan(score) else self._sign * score

    def should_preserve(self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: object) -> list[bool]:
        """For each checkpoint, in Orbax's order, whether it is one of the best."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        unknown = {step for step in steps if not self._learn(step)}
        order = self.order([step for step in steps if step not in unknown])
        kept = unknown.union(order[: self._num])
        return [step in kept for step in steps]

    def order(self, steps: Sequence[int]) -> list[int]:
        """The steps with a score, the best first; of equal scores, the later step first. Raises Unreadable."""
        for step in steps:
            if not self._learn(step):
                read_meta(self._folder / step_folder(step))  # Raises.
        scored = [(score, step) for step in steps if (score := self._known[step]) is not None]
        return [step for _, step in sorted(scored, reverse=True)]

    def _learn(self, step: int) -> bool:
        """Reads the score of a checkpoint if needed; False if it is unreadable at the moment."""
        if step not in self._known:
            try:
                score = read_meta(self._folder / step_folder(step)).score
                self.add(step, None if score is None else float(score))
            except Unreadable:
                return False
            except (Damaged, ConfigError, TypeError, ValueError):
                self.add(step, None)
        return True


class WithBases:
    """A preservation policy of Orbax: what any of several keeps, and the whole tables on which that depends.

    A checkpoint whose description is unreadable may depend on any other: then all are kept until it is readable.
    """

    def __init__(self, folder: Path, policies: Sequence[PreservationPolicy]) -> None:
        self._folder, self._policies = folder, policies
        self._known: dict[int, int | None] = {}

    def add(self, step: int, base: int | None) -> None:
        """Records on which checkpoint one that is about to be written depends."""
        self._known[step] = base

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        """For each checkpoint, in Orbax's order, whether it is kept."""
        each = [policy.should_preserve(checkpoints, context=context) for policy in self._policies]
        kept = {
            checkpoint.step
            for checkpoint, votes in zip(checkpoints, zip(*each, strict=True), strict=True)
            if any(votes)
        }
        try:
            kept |= {base for step in kept if (base := self._base(step)) is not None}
        except Unreadable:
            return [True] * len(checkpoints)
        return [checkpoint.step in kept for checkpoint in checkpoints]

    def _base(self, step: int) -> int | None:
        """The step on which a checkpoint depends, if any. Raises Unreadable."""
        if step not in self._known:
            try:
                self._known[step] = read_meta(self._folder / step_folder(step)).base
            except (Damaged, ConfigError):
                self._known[step] = None
        return self._known[step]
