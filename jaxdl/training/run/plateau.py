"""Early stopping: a run ends when its evaluations have not become better for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from jaxdl.data.phases import Timeline
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.tasks import Task


class Plateau:
    """Judges the evaluations of a run, one after the other, by the metric that checkpoints are compared by.

    Those count that are due by their period; others, such as that of the step at which a run was interrupted, do not.
    So it is a function of the history alone, and a run that was interrupted ends where an unbroken one does.
    """

    def __init__(
        self, patience: int | None, mode: Literal["max", "min"], is_due: Callable[[int, int], bool] = lambda *_: True
    ) -> None:
        """`patience` evaluations in a row that are no better than the best before them end the run; None: none do.

        `is_due(step, num_steps)` says whether one was due in the last `num_steps` steps up to `step`.
        """
        self._patience, self._sign, self._is_due = patience, 1 if mode == "max" else -1, is_due
        self.begin(())

    @classmethod
    def of(cls, config: EvaluationConfig, task: Task, timeline: Timeline) -> Plateau:
        """By the best metric of a task. Raises ConfigError where it is not known whether a higher one is better."""
        mode = "max" if config.patience is None else task.resolved_mode
        return cls(config.patience, mode, lambda step, num_steps: timeline.due(step, config, num_steps))

    def begin(self, values: Iterable[tuple[int, float | None]]) -> None:
        """Forgets what was, and begins with earlier evaluations: (step, value)."""
        self._best: float | None = None
        self._since, self._step, self.saves = 0, 0, False
        for step, value in values:
            self.add(step, value)

    def add(self, step: int, value: float | None) -> None:
        """Adds the evaluation of a step; None and NaN are no better than anything."""
        is_due, self._step = self._is_due(step, step - self._step), step
        known = None if value is None or value != value else value
        is_best = is_due and known is not None and (self._best is None or self._sign * (known - self._best) > 0)
        if is_best:
            self._best, self._since = known, 0
        elif is_due:
            self._since += 1
        self.saves = self._patience is not None and is_best
        """Whether the last evaluation is to be saved: it is the best so far of a run that may end early."""

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self._patience is not None and self._since >= self._patience

    @property
    def reason(self) -> str:
        """Who ends the run, in words."""
        return f"--evaluation.patience {self._patience}"
