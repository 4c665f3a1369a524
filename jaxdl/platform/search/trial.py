"""A trial as the journal has it, and which of two values is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

State = Literal["open", "finished", "failed", "replaced"]
Direction = Literal["maximize", "minimize"]


class Objective(NamedTuple):
    """What trials are compared by."""

    metric: str
    """A column of metrics.jsonl, `eval/accuracy`, or another name of `jaxdl.platform.search.metrics`."""
    direction: Direction
    """Whether a higher or a lower value is better."""


@dataclass(frozen=True)
class Trial:
    """One run of the search, as far as it is recorded."""

    number: int
    settings: Mapping[str, Any]
    target: int
    """The step that it trains to now, or has trained to; schedules are those of the full length."""
    values: Mapping[int, float] = field(default_factory=dict)
    """Step at which it stopped -> the metric there; of several metrics the first."""
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
    begun: float | None = None
    """Unix time of its first start."""
    others: tuple[float, ...] = ()
    """Of several metrics, for which all trials are trained to the end, the last values of those after the first."""

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

    @property
    def point(self) -> tuple[float, ...] | None:
        """The last values of all metrics."""
        return None if self.value is None else (self.value, *self.others)


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


def best(trials: Sequence[Trial], *directions: Direction) -> Trial | None:
    """The best of the trials that are compared, the first of equal ones. None without values.

    With several metrics, of which the first has the first direction, it is that trial of the front whose first is best.
    """
    return min(front(trials, directions), key=lambda trial: rank(trial, directions[0]), default=None)


def at_least_as_good(point: Sequence[float], other: Sequence[float], directions: Sequence[Direction]) -> bool:
    """Whether a point is no worse than another in any metric."""
    return all(key(a, way) <= key(b, way) for a, b, way in zip(point, other, directions, strict=True))


def front(trials: Sequence[Trial], directions: Sequence[Direction]) -> list[Trial]:
    """The Pareto front of the trials that are compared, by number: none of the others beats them.

    A trial beats another if it is as good in all metrics and better in one; so of equal ones all are in it.
    """
    points = [(trial, trial.point) for trial in comparable(trials) if trial.point is not None]
    return [
        trial
        for trial, point in points
        if not any(other != point and at_least_as_good(other, point, directions) for _, other in points)
    ]


class Ranked(Protocol):
    """What of a trial decides its rank."""

    @property
    def number(self) -> int:
        """Of the trial."""
        ...

    @property
    def state(self) -> str:
        """Whether it is finished."""
        ...

    @property
    def step(self) -> int:
        """The last step with a value."""
        ...

    @property
    def value(self) -> float | None:
        """The value there."""
        ...


def rank(trial: Ranked, direction: Direction) -> tuple[float, ...]:
    """A key by which trials are sorted: finished ones by value, then the others, those that came further first."""
    value = float("inf") if trial.value is None else key(trial.value, direction)
    return (0, 0, value, trial.number) if trial.state == "finished" else (1, -trial.step, value, trial.number)
