"""A trial as the journal has it, and which of two values is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["open", "finished", "failed", "replaced"]
Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class Trial:
    """One run of the search, as far as it is recorded."""

    number: int
    settings: Mapping[str, Any]
    target: int
    """The step that it trains to now, or has trained to; schedules are those of the full length."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Step at which it stopped -> the metric there."""
    state: State = "open"
    """open: it trains, or waits at a rung; finished: at its full length; replaced: another continues in its place."""
    reason: str = ""
    """Why it failed, or why it is not trained now."""
    given_up: bool = False
    """Of a failed one: it may yet train, and the next process of the search tries it again."""
    parent: int | None = None
    """The trial whose checkpoint it began with, at step `from_step`, in the place of the trial `replaces`."""
    from_step: int = 0
    replaces: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler keeps with it."""

    @property
    def busy(self) -> bool:
        """Whether it has to train on."""
        return self.state == "open" and self.target not in self.values

    @property
    def step(self) -> int:
        """The last step with a value; 0 when there is none."""
        return max(self.values, default=0)

    @property
    def value(self) -> float | None:
        """The last value."""
        return self.values[self.step] if self.values else None


def key(value: float, direction: Direction) -> float:
    """A number that is lower for a better value."""
    return -value if direction == "maximize" else value


def best_first(trials: list[Trial], step: int, direction: Direction) -> list[Trial]:
    """The trials with a value at a step, the best first; the lower number first where they are equal."""
    return sorted((trial for trial in trials if step in trial.values),
                  key=lambda trial: (key(trial.values[step], direction), trial.number))  # fmt: skip


def comparable(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that may be the best: those that finished, whatever their length.

    When none has, those that came furthest: a run on its way is not compared with one at another step.
    """
    able = [trial for trial in trials if trial.values and trial.state != "failed"]
    furthest = max((trial.step for trial in able), default=0)
    return [trial for trial in able if trial.state == "finished"] or [trial for trial in able if trial.step == furthest]


def best(trials: Sequence[Trial], direction: Direction) -> Trial | None:
    """The best of the trials that are compared, the first of equal ones. None without values."""
    return min(comparable(trials), key=lambda trial: rank(trial, direction), default=None)


def rank(trial: Trial, direction: Direction) -> tuple[float, ...]:
    """A key by which trials are sorted: finished ones by value, then the others, those that came further first."""
    value = float("inf") if trial.value is None else key(trial.value, direction)
    return (0, 0, value, trial.number) if trial.state == "finished" else (1, -trial.step, value, trial.number)
