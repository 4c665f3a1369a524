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
        self,
        patience: int | None,
        mode: Literal["max", "min"],
        is_due: Callable[[int, int], bool] = lambda *_: True,
        end: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        """`patience` evaluations in a row that are no better than the best before them end the run; None: none do.

        `is_due(step, num_steps)` says whether one was due in the last `num_steps` steps up to `step`; `end` ends the
        run, for a reason in words, and so that there is nothing to resume.
        """
        self._patience, self._sign, self._is_due, self._end = patience, 1 if mode == "max" else -1, is_due, end
        self._best: float | None = None
        self._since, self._step, self._is_best = 0, 0, False

    @classmethod
    def of(cls, config: EvaluationConfig, task: Task, timeline: Timeline, end: Callable[[str, bool], None]) -> Plateau:
        """By the best metric of a task. Raises ConfigError where it is not known whether a higher one is better."""
        mode = "max" if config.patience is None else task.resolved_mode
        return cls(config.patience, mode, lambda step, num_steps: timeline.due(step, config, num_steps), end)

    def begin(self, values: Iterable[tuple[int, float | None]]) -> None:
        """Forgets what was, and begins with earlier evaluations: (step, value)."""
        self._best, self._since, self._step, self._is_best = None, 0, 0, False
        for step, value in values:
            self._judge(step, value)
        self._end_if_over()

    def add(self, step: int, value: float | None) -> None:
        """Adds the evaluation of a step, and ends the run if it is time; None and NaN are no better than anything."""
        self._judge(step, value)
        self._end_if_over()

    def _judge(self, step: int, value: float | None) -> None:
        is_due, self._step = self._is_due(step, step - self._step), step
        known = None if value is None or value != value else value
        self._is_best = is_due and known is not None and (self._best is None or self._sign * (known - self._best) > 0)
        if self._is_best:
            self._best, self._since = known, 0
        elif is_due and self._best is not None:  # Else nothing has counted in any evaluation yet.
            self._since += 1

    def _end_if_over(self) -> None:
        if self.is_over:
            self._end(f"--evaluation.patience {self._patience}", True)

    def saves(self, step: int) -> bool:
        """Whether a step is to be saved: it was evaluated, and is the best so far of a run that may end early."""
        return self._patience is not None and self._is_best and step == self._step

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self._patience is not None and self._since >= self._patience
