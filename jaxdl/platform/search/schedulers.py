"""Which trial trains next, and how far: all to the end, successive halving with promotion, or a population.

A policy is a pure function of the journal's trials: a search that was killed takes the same decisions again.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pydantic

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.platform.search.space import Setting
from jaxdl.platform.search.trial import Direction, Trial, at_least_as_good, best_first


@dataclass(frozen=True)
class New:
    """Start a trial with settings that the sampler proposes; `target` None trains to the full length."""

    target: int | None


@dataclass(frozen=True)
class Promote:
    """Let a trial train on from where it stopped."""

    number: int
    target: int


@dataclass(frozen=True)
class Clone:
    """Start a trial from a copy of `parent` at a step, with other settings, in the place of the trial `replaces`."""

    parent: int
    from_step: int
    replaces: int
    settings: Mapping[str, Any]


Action = New | Promote | Clone


class Policy(Protocol):
    """What to do next."""

    def next(self, trials: Sequence[Trial]) -> Action | None:
        """The next action; None while there is nothing to do before a busy trial ends, or any more."""
        ...


@dataclass(frozen=True)
class Course:
    """What a policy is made for."""

    trials: int
    """The trials to start; of a population its size."""
    total_steps: int | None
    """The full length; None if it differs between trials."""
    align: Callable[[int], int]
    """The first step from a step on at which a run evaluates anyway: a stop there changes nothing in its history."""
    direction: Direction
    settings: Sequence[Setting]
    seed: int
    patience: int | None = None
    """So many trials that are no better than the best before them are the last that are started."""
    others: tuple[Direction, ...] = ()
    """Of several metrics those after the first."""


def is_plateau(
    trials: Sequence[Trial],
    points: Sequence[tuple[float, ...] | None],
    directions: Sequence[Direction],
    patience: int | None,
) -> bool:
    """Whether the last `patience` trials, in the order of their start, were no better than the best before them.

    `points` has the values of the metrics by which each trial is compared, None where it has none: it has not come so
    far, or failed, which counts as no better once it has ended. With several metrics a trial is better that no earlier
    one equals or beats.
    """
    if patience is None:
        return False
    best, since = list[tuple[float, ...]](), 0
    for trial, point in zip(trials, points, strict=True):
        if point is None:
            since += not trial.busy and trial.state == "failed"
        elif any(at_least_as_good(other, point, directions) for other in best):
            since += 1
        else:
            best = [*(other for other in best if not at_least_as_good(point, other, directions)), point]
            since = 0
    return bool(best) and since >= patience


class Scheduler(Choice):
    """Which trials train how long."""

    changes_settings: ClassVar[bool] = False
    """Whether settings change within a run."""
    one_length: ClassVar[bool] = True
    """Whether all trials must have the same number of steps."""
    one_metric: ClassVar[bool] = True
    """Whether it compares trials by one metric alone."""

    @abc.abstractmethod
    def policy(self, course: Course) -> Policy:
        """The decisions. Raises ConfigError for settings that do not fit the length of the runs."""


class Full(Scheduler, kind="none"):
    """Every trial is trained to the end."""

    one_length: ClassVar[bool] = False
    one_metric: ClassVar[bool] = False

    def policy(self, course: Course) -> Policy:
        """The decisions for a course."""
        return _AllToTheEnd(course)


@dataclass(frozen=True)
class _AllToTheEnd:
    course: Course

    def next(self, trials: Sequence[Trial]) -> Action | None:
        ends = [trial.point if trial.state == "finished" else None for trial in trials]
        directions = (self.course.direction, *self.course.others)
        enough = is_plateau(trials, ends, directions, self.course.patience)
        return New(None) if len(trials) < self.course.trials and not enough else None


class ASHA(Scheduler, kind="asha"):
    """Asynchronous successive halving (Li et al., arXiv 1810.05934): the best 1/`reduction` of a rung train on.

    A trial that stops at a rung is saved. It is promoted when it belongs to the best of those that have reached the
    rung so far, and resumes in its own workdir. In the end the best trial has been trained to the full length.
    """

    reduction: int = pydantic.Field(default=3, ge=2)
    """One in this many trials is promoted; a rung is this many times longer than the one before."""
    min_steps: int | None = pydantic.Field(default=None, ge=1)
    """The first rung; None: the full length over reduction ** 3."""
    rungs: tuple[int, ...] = ()
    """The steps of all rungs, instead of `min_steps`; the full length is always the last."""

    def policy(self, course: Course) -> Policy:
        """The decisions for a course."""
        return Halving(self.steps(course), self.reduction, course.trials, course.direction, course.patience)

    def steps(self, course: Course) -> list[int]:
        """The rungs in steps, the full length last. Raises ConfigError for rungs that do not fit."""
        total = course.total_steps
        assert total is not None
        if self.rungs and self.min_steps is not None:
            raise ConfigError("--scheduler.rungs and --scheduler.min-steps: give one of them.")
        for step in (*self.rungs, self.min_steps or 1):
            if not 1 <= step < max(total, 2):
                raise ConfigError(
                    f"--scheduler {self.kind}: a rung at step {step}, but a run has {total} steps. Give rungs from 1 "
                    f"to {total - 1}."
                )
        wanted = list(self.rungs)
        if not wanted:
            wanted = [self.min_steps or max(1, total // self.reduction**3)]
            while wanted[-1] * self.reduction < total:
                wanted.append(wanted[-1] * self.reduction)
        return sorted({course.align(step) for step in wanted} | {total})


@dataclass(frozen=True)
class Halving:
    """The decisions of ASHA. `rungs` are steps in rising order, the last the full length."""

    rungs: Sequence[int]
    reduction: int
    trials: int
    direction: Direction
    patience: int | None = None

    def next(self, trials: Sequence[Trial]) -> Action | None:
        """Promotes from the highest rung that can, else starts a trial; at the end completes the best one."""
        for place in reversed(range(len(self.rungs) - 1)):
            if (number := self._promotable(trials, place)) is not None:
                return Promote(number, self.rungs[place + 1])
        at_first = [trial.values.get(self.rungs[0]) for trial in trials]
        first = [None if value is None else (value,) for value in at_first]
        if len(trials) < self.trials and not is_plateau(trials, first, (self.direction,), self.patience):
            return New(self.rungs[0])
        if any(trial.busy for trial in trials) or any(trial.state == "finished" for trial in trials):
            return None
        return self._complete(trials)

    def _promotable(self, trials: Sequence[Trial], place: int) -> int | None:
        """The best trial of a rung that is among its best 1/reduction and was not promoted; None without one.

        Trials that failed on the way to the rung count as its worst.
        """
        step = self.rungs[place]
        ranked = best_first([*trials], step, self.direction)
        fell = sum(trial.state == "failed" and trial.target == step and step not in trial.values for trial in trials)
        for trial in ranked[: (len(ranked) + fell) // self.reduction]:
            if trial.state == "open" and trial.target == step:
                return trial.number
        return None

    def _complete(self, trials: Sequence[Trial]) -> Action | None:
        """Promotes the best of the highest rung when no rung has enough trials any more."""
        for place in reversed(range(len(self.rungs) - 1)):
            step = self.rungs[place]
            waiting = [trial for trial in trials if trial.state == "open" and trial.target == step]
            if ranked := best_first(waiting, step, self.direction):
                return Promote(ranked[0].number, self.rungs[place + 1])
        return None


class PBT(Scheduler, kind="pbt"):
    """Population based training (Jaderberg et al., arXiv 1711.09846), `--trials` is the size of the population.

    All train `interval` steps; then each of the worst `quantile` is replaced by a copy of one of the best, checkpoint
    and all, with settings near those of the copied one; and so on to the full length.
    """

    changes_settings: ClassVar[bool] = True

    interval: int | None = pydantic.Field(default=None, ge=1)
    """Steps between two exchanges; None: a tenth of the full length."""
    quantile: float = pydantic.Field(default=0.25, gt=0, le=0.5)
    """The share of the population that is replaced each time."""
    resample: float = pydantic.Field(default=0.25, ge=0, le=1)
    """How often a setting is drawn from its whole range instead of moved a little."""

    def policy(self, course: Course) -> Policy:
        """The decisions for a course."""
        total = course.total_steps
        assert total is not None
        if course.trials < 2:
            raise ConfigError(f"--trials {course.trials}: a population has 2 or more.")
        if course.patience is not None:
            raise ConfigError("--patience: a population starts all its trials at once. Leave it out, or give --hours.")
        interval = self.interval or max(1, total // 10)
        if interval >= total:
            raise ConfigError(f"--scheduler.interval {interval}: a run has {total} steps. Give fewer.")
        steps = sorted({course.align(step) for step in range(interval, total, interval)} | {total})
        return Population(steps, self.quantile, self.resample, course)


@dataclass(frozen=True)
class Population:
    """The decisions of population based training; `steps` are those at which it is compared, then the full length."""

    steps: Sequence[int]
    quantile: float
    resample: float
    course: Course

    def next(self, trials: Sequence[Trial]) -> Action | None:
        """Fills the population, then replaces the worst of a generation, then lets all train on."""
        if sum(trial.parent is None for trial in trials) < self.course.trials:  # Copies take the places of others.
            return New(self.steps[0])
        members = [trial for trial in trials if trial.state != "replaced"]
        step = min((member.target for member in members if member.state == "open"), default=None)
        if step is None or step == self.steps[-1] or any(member.busy and member.target == step for member in members):
            return None
        if all(member.target <= step for member in members):
            for clone in self.replacements(trials, step):
                if not any(trial.replaces == clone.replaces and trial.from_step == step for trial in trials):
                    return clone
        following = self.steps[self.steps.index(step) + 1]
        waiting = (member for member in members if member.state == "open" and member.target == step)
        return next((Promote(member.number, following) for member in waiting), None)

    def replacements(self, trials: Sequence[Trial], step: int) -> list[Clone]:
        """What replaces the worst of the generation that trained up to a step; failed members are the worst."""
        generation = [trial for trial in trials if not (trial.parent is not None and trial.from_step == step)]
        ranked = best_first([trial for trial in generation if trial.state != "failed"], step, self.course.direction)
        failed = [
            trial for trial in generation if trial.state == "failed" and not _was_replaced(trial, trials, before=step)
        ]
        num = min(max(len(failed), int(self.quantile * self.course.trials) or 1), len(ranked) + len(failed) - 1)
        if not ranked:
            return []
        losers = [*failed, *reversed(ranked)][:num]
        winners = ranked[: max(1, min(num, len(ranked) - max(0, num - len(failed))))]
        clones = []
        for loser in losers:
            draw = random.Random(f"{self.course.seed} {step} {loser.number}")
            parent = draw.choice(winners)
            clones.append(Clone(parent.number, step, loser.number, self.explore(parent.settings, draw)))
        return clones

    def explore(self, settings: Mapping[str, Any], draw: random.Random) -> dict[str, Any]:
        """Settings near these, or some of them drawn again."""
        return {
            setting.name: setting.sample(draw)
            if draw.random() < self.resample
            else setting.perturb(settings[setting.name], draw)
            for setting in self.course.settings
        }


def _was_replaced(trial: Trial, trials: Sequence[Trial], *, before: int) -> bool:
    """Whether a trial was replaced in an earlier generation."""
    return any(other.replaces == trial.number and other.from_step < before for other in trials)
