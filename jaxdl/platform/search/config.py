"""The settings of a search, and what they mean for one experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.core.options import parse
from jaxdl.data.phases import Timeline, make_timeline
from jaxdl.platform.search.engines import Engine, Local
from jaxdl.platform.search.fleet_engine import OnFleet
from jaxdl.platform.search.metrics import known_direction
from jaxdl.platform.search.ray_engine import OnRay
from jaxdl.platform.search.samplers import TPE, Sampler
from jaxdl.platform.search.schedulers import ASHA, Scheduler
from jaxdl.platform.search.space import Setting, words_of
from jaxdl.platform.search.trial import Objective
from jaxdl.report.better_direction import is_higher_better
from jaxdl.training.experiment import LENGTH, SETS_LENGTH, Experiment
from jaxdl.training.run.plan.changed_settings import check_may_change
from jaxdl.training.run.plan.data import read_splits
from jaxdl.training.run.plan.length import steps_of
from jaxdl.training.run.plan.validate import check_phases, check_warmup

if TYPE_CHECKING:
    from jaxdl.data import Splits

__all__ = ["Lengths", "OnFleet", "OnRay", "SearchConfig", "check_settings", "combinations", "objectives_of"]

LENGTH_FIELDS = (*LENGTH, "batch_size", "data")
"""Fields that decide how many steps a run has."""


class SearchConfig(Config):
    """All settings of a search; search.json in its folder."""

    vary: tuple[str, ...] = ()
    """What varies: NAME=log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, logint:LOW:HIGH, or NAME=A,B,C, of which one may
    be a tuple, (64,64); each perhaps with a condition, "NAME=VALUES if OTHER=A,B"."""
    metric: tuple[str, ...] = ()
    """What is compared: evaluation/accuracy, any column of metrics.jsonl, or num_params; none: the task's best metric.
    Of several, of which no trial may be the best in all, the Pareto front is found."""
    direction: tuple[Literal["maximize", "minimize"], ...] = ()
    """Whether a higher or a lower metric is better, of each. None: as the task says of its best metric; lower for loss,
    perplexity, bits_per_byte, error, auc_error, rmse, mae and num_params, higher for accuracy, accuracy_top5, auc,
    bleu, r2, balanced_accuracy and rates such as examples_per_sec; required for others."""
    trials: int | None = pydantic.Field(default=None, ge=1)
    """How many trials are started in all; of a population its size. None: the whole grid of --sampler grid."""
    parallel: int = pydantic.Field(default=1, ge=1)
    """How many run at a time."""
    devices_per_trial: int | None = pydantic.Field(default=None, ge=1)
    """GPUs of each trial; None: all, divided by --parallel."""
    sampler: Sampler = TPE()
    """Who proposes settings."""
    sampler_seed: int = pydantic.Field(default=0, ge=0, lt=2**31)
    """The seed of the proposals."""
    scheduler: Scheduler = ASHA()
    """Which trials train how long."""
    engine: Engine = Local()
    """Where trials run."""
    hours: float | None = pydantic.Field(default=None, gt=0)
    """How long this command searches; then the trials that train are saved, and the result is that so far. The same
    command goes on."""
    patience: int | None = pydantic.Field(default=None, ge=1)
    """No trial is started once the last so many were no better than the best before them, where the scheduler first
    compares trials."""
    retries: int = pydantic.Field(default=3, ge=0)
    """How often a trial that broke off, and neither diverged nor was refused, is started again."""

    @pydantic.field_validator("metric", "direction", mode="before")
    @classmethod
    def _as_several(cls, given: Any) -> Any:
        """One is given as such too, as in search.json of earlier versions."""
        return () if given is None else (given,) if isinstance(given, str) else given


FREE = ("trials", "parallel", "devices_per_trial", "engine", "hours", "patience", "retries")
"""The settings that may be others when a search goes on; `trials` only more."""


def objectives_of(config: SearchConfig, experiment: Experiment) -> tuple[Objective, ...]:
    """What trials are compared by, and in which direction. Raises ConfigError where that is not known, or cannot be."""
    task = experiment.task
    given = config.metric or (f"eval/{task.best_metric}",)
    metrics = [f"eval/{name.removeprefix('evaluation/')}" if name.startswith("evaluation/") else name for name in given]
    if twice := next((name for name in metrics if metrics.count(name) > 1), None):
        raise ConfigError(f"--metric {' '.join(given)}: {twice} is given twice.")
    if config.direction and len(config.direction) != len(metrics):
        raise ConfigError(
            f"--direction {' '.join(config.direction)}: there are {len(metrics)} metrics ({', '.join(metrics)}). "
            "Give one direction for each, in their order."
        )
    objectives = []
    for place, metric in enumerate(metrics):
        if config.direction:
            objectives.append(Objective(metric, config.direction[place]))
            continue
        rises = is_higher_better(metric, (task.best_metric, task.resolved_mode))
        rises = known_direction(metric) if rises is None else rises
        if rises is None:
            each = f", one for each of the {len(metrics)} metrics" if len(metrics) > 1 else ""
            raise ConfigError(
                f"--metric {metric}: whether a higher value is better is not known. Give --direction too{each}."
            )
        objectives.append(Objective(metric, "maximize" if rises else "minimize"))
    if len(objectives) > 1:
        _check_several(config)
    return tuple(objectives)


def _check_several(config: SearchConfig) -> None:
    """Raises ConfigError for a scheduler or a sampler that takes one metric alone."""
    told = f"--metric {' '.join(config.metric)}: there are {len(config.metric)} metrics, and"
    if config.scheduler.one_metric:
        raise ConfigError(
            f"{told} --scheduler {config.scheduler.kind} compares trials by one. Give --scheduler none, with which "
            "every trial is trained to the end, or one metric."
        )
    if not config.sampler.several:
        able = ", ".join(sorted(name for name, sampler in kinds(Sampler).items() if sampler.several))
        raise ConfigError(f"{told} --sampler {config.sampler.kind} proposes settings for one. Choose one of {able}.")


class Lengths:
    """The lengths of runs in steps, and at which steps they evaluate."""

    def __init__(self, experiment: Experiment, settings: list[Setting]) -> None:
        self._experiment = experiment
        self._splits: dict[str, Splits] = {}
        self.timeline = self._timeline(experiment)
        self.differ = [setting.name for setting in settings if setting.name.partition(".")[0] in LENGTH_FIELDS]

    def of(self, settings: dict[str, Any]) -> int:
        """The length of a run with these settings."""
        if not self.differ:
            return self.timeline.total_steps
        return self._timeline(with_settings(self._experiment, settings)).total_steps

    def align(self, step: int) -> int:
        """The first step from `step` on at which a run evaluates, or its end."""
        total, period = self.timeline.total_steps, self._experiment.evaluation
        while step < total and not self.timeline.due(step, period):
            step += 1
        return min(step, total)

    def check(self, combinations: Iterable[dict[str, Any]]) -> None:
        """Raises ConfigError for settings with which a run would be refused whatever its devices: none is started."""
        for settings in combinations:
            experiment = with_settings(self._experiment, settings)
            timeline = self._timeline(experiment) if self.differ else self.timeline
            check_phases(experiment, self._splits[experiment.data.to_json()])
            check_warmup(experiment, timeline.total_steps)
            schedule, steps = experiment.schedule, timeline.scheduled_steps
            if schedule.users_name is None:  # A user's may compute, which starts the devices.
                length = {"total_steps": steps, "steps_per_epoch": timeline.steps_per_epoch}
                schedule.build(peak=experiment.optimizer.learning_rate, **length)

    def _timeline(self, experiment: Experiment) -> Timeline:
        if not any(getattr(experiment, name) for name in SETS_LENGTH):
            raise ConfigError("the length of the runs is not set. Give --epochs or --steps.")
        key = experiment.data.to_json()
        if key not in self._splits:
            self._splits[key] = read_splits(experiment.data, None)
        train = self._splits[key].train
        steps = experiment.steps or steps_of(experiment.tokens, experiment.batch_size, experiment.task, train.spec)
        return make_timeline(
            len(train),
            experiment.batch_size,
            epochs=experiment.epochs,
            steps=steps,
            within=experiment.steps_within,
            phases=experiment.phases,
        )


def with_settings(experiment: Experiment, settings: dict[str, Any]) -> Experiment:
    """The experiment of a trial. Raises ConfigError for settings that it cannot have."""
    return parse(experiment, words_of(settings))


def combinations(settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """The ends of each setting, with the first end of all others that apply then."""
    known = {setting.name: setting for setting in settings}
    for setting in settings:
        forced: dict[str, Any] = {}
        above = setting.when
        while above is not None:
            forced[above.name] = above.values[0]
            above = known[above.name].when
        for value in setting.ends():
            values: dict[str, Any] = {}
            for other in settings:
                if other.applies(values):
                    values[other.name] = {**forced, setting.name: value}.get(other.name, other.ends()[0])
            yield values


def check_settings(config: SearchConfig, experiment: Experiment, settings: list[Setting]) -> None:
    """Raises ConfigError for a range whose ends the experiment does not take, or that the scheduler cannot vary."""
    if not settings:
        raise ConfigError("nothing varies. Give --vary NAME=VALUES, such as --vary optimizer.learning-rate=log:1e-3:1.")
    for values in combinations(settings):
        with_settings(experiment, values)
    for setting in settings:
        part = setting.name.partition(".")[0]
        if config.scheduler.one_length and part in LENGTH_FIELDS:
            raise ConfigError(
                f"--vary {setting.name}: it changes how many steps a run has, and --scheduler {config.scheduler.kind} "
                "compares trials at the same steps. Give --scheduler none, or do not vary it."
            )
    if config.scheduler.changes_settings:
        if conditional := next((setting for setting in settings if setting.when), None):
            raise ConfigError(
                f"--vary {conditional.name}: it has a condition. --scheduler {config.scheduler.kind} changes "
                "settings within a run, and a condition would then add or remove some. Leave the condition out, or "
                "choose another scheduler."
            )
        check_may_change([setting.name for setting in settings], experiment, "--vary")
