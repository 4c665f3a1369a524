"""Who proposes the settings of the next trial: Optuna's samplers by name, or a grid.

A sampler is asked with a study in memory that is made of the journal's trials each time, and its random numbers are
those of the trial's number: so a proposal is a function of the journal, also after a kill. In that study a trial that
waits at a rung counts as pruned there, which TPE ranks below all that came further; one that failed ranks last.
"""

from __future__ import annotations

import abc
import importlib.util
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pydantic

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.platform.search.space import Setting, distributions, stored_settings
from jaxdl.platform.search.trial import Direction, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


class Proposal(NamedTuple):
    """The settings of a trial, and what the sampler keeps with it and with the study."""

    settings: dict[str, Any]
    attributes: Mapping[str, Any] = {}
    study_attributes: Mapping[str, Any] = {}


class Sampler(Choice):
    """Who proposes settings."""

    needs: ClassVar[str] = ""
    """A package that its algorithm needs."""
    ranks_pruned: ClassVar[bool] = False
    """Whether it learns from trials that stopped at a rung as such; others see their last values as final ones."""
    several: ClassVar[bool] = False
    """Whether it proposes settings for several metrics."""

    def check(self, settings: Sequence[Setting]) -> int | None:
        """The number of proposals there are; None without a limit. Raises ConfigError when it cannot be used here."""
        del settings
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise ConfigError(
                f"--sampler {self.kind}: it needs the package {self.needs}. Install it: pip install {self.needs}; or "
                "choose another --sampler, such as tpe."
            )
        return None

    @abc.abstractmethod
    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""

    def propose(
        self,
        settings: Sequence[Setting],
        trials: Sequence[Trial],
        directions: Sequence[Direction],
        seed: int,
        study_attributes: Mapping[str, Any],
    ) -> Proposal:
        """The settings of the trial that follows `trials`."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self.make(random.Random(f"{seed} {len(trials)}").randrange(2**31))
            study = as_study(trials, settings, directions, sampler, ranks_pruned=self.ranks_pruned)
            storage = study._storage
            for name, value in study_attributes.items():
                storage.set_study_system_attr(study._study_id, name, value)
            asked, values = study.ask(), {}
            for setting in settings:  # One that others depend on stands before them.
                if setting.applies(values):
                    values[setting.name] = setting.read(asked._suggest(setting.key, setting.distribution()))
            kept = storage.get_trial(asked._trial_id).system_attrs
            return Proposal(values, kept, storage.get_study_system_attrs(study._study_id))


def _of_optuna(name: str, **options: Any) -> BaseSampler:
    import optuna

    return getattr(optuna.samplers, name)(**options)


class Random(Sampler, kind="random"):
    """Independent draws."""

    several: ClassVar[bool] = True

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        return _of_optuna("RandomSampler", seed=seed)


class TPE(Sampler, kind="tpe"):
    """Tree-structured Parzen estimator (Bergstra et al. 2011); the first `startup` trials are random."""

    ranks_pruned: ClassVar[bool] = True
    several: ClassVar[bool] = True

    startup: int = 10
    """Trials before it begins to model."""

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        return _of_optuna("TPESampler", seed=seed, n_startup_trials=self.startup, constant_liar=True)


class GP(Sampler, kind="gp"):
    """A Gaussian process with expected improvement."""

    needs: ClassVar[str] = "torch"

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        return _of_optuna("GPSampler", seed=seed, warn_independent_sampling=False)


class CMAES(Sampler, kind="cmaes"):
    """CMA-ES, for numbers; lists of values are drawn at random."""

    needs: ClassVar[str] = "cmaes"

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        return _of_optuna("CmaEsSampler", seed=seed, warn_independent_sampling=False)


class NSGA2(Sampler, kind="nsga2"):
    """A genetic algorithm for several metrics (Deb et al. 2002): the first `population` trials are random."""

    several: ClassVar[bool] = True

    population: int = pydantic.Field(default=20, ge=2)
    """Trials of a generation."""

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        return _of_optuna("NSGAIISampler", seed=seed, population_size=self.population)


class QMC(Sampler, kind="qmc"):
    """A Sobol sequence, scrambled; lists of values are drawn at random."""

    several: ClassVar[bool] = True

    def make(self, seed: int) -> BaseSampler:
        """Optuna's sampler."""
        independent = _of_optuna("RandomSampler", seed=seed)
        quiet = {"warn_independent_sampling": False, "warn_asynchronous_seeding": False}
        return _of_optuna("QMCSampler", scramble=True, seed=self.sequence, independent_sampler=independent, **quiet)

    sequence: int = 0
    """Which scrambling; the trials of one search are points of one sequence."""


class Grid(Sampler, kind="grid"):
    """Every combination of lists of values and whole numbers, the last setting changing first."""

    several: ClassVar[bool] = True

    def make(self, seed: int) -> BaseSampler:
        """Raises NotImplementedError: a grid needs no sampler of Optuna."""
        raise NotImplementedError

    def check(self, settings: Sequence[Setting]) -> int | None:
        """The number of combinations. Raises ConfigError for a setting without a list of values."""
        for setting in settings:
            if setting.grid is None:
                raise ConfigError(
                    f"--sampler grid: {setting.option.removeprefix('--')} has no list of values. Give one: "
                    f"--vary {setting.option.removeprefix('--')}=A,B,C."
                )
        return _count(settings, {})

    def propose(
        self,
        settings: Sequence[Setting],
        trials: Sequence[Trial],
        directions: Sequence[Direction],
        seed: int,
        study_attributes: Mapping[str, Any],
    ) -> Proposal:
        """The combination of this number."""
        del directions, seed, study_attributes
        place = sum(trial.parent is None for trial in trials)  # Copies of a population are no places of the grid.
        return Proposal(next(itertools.islice(combinations_of(settings), place, None)))


def _count(settings: Sequence[Setting], before: Mapping[str, Any]) -> int:
    """How many combinations there are, of which only those that a condition tells apart are gone through."""
    if not settings:
        return 1
    first, rest = settings[0], settings[1:]
    if not first.applies(before):
        return _count(rest, before)
    if all(other.when is None or other.when.name != first.name for other in rest):
        return len(first.grid or ()) * _count(rest, before)
    return sum(_count(rest, {**before, first.name: value}) for value in first.grid or ())


def combinations_of(settings: Sequence[Setting], before: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Every combination of settings with lists of values, the last changing first; each has those that apply to it."""
    if not settings:
        yield dict(before or {})
        return
    first, rest, before = settings[0], settings[1:], before or {}
    if not first.applies(before):
        yield from combinations_of(rest, before)
        return
    for value in first.grid or ():
        yield from combinations_of(rest, {**before, first.name: value})


def as_study(
    trials: Sequence[Trial],
    settings: Sequence[Setting],
    directions: Sequence[Direction],
    sampler: BaseSampler | None = None,
    *,
    ranks_pruned: bool = True,
) -> Study:
    """A study in memory, with the trials as a sampler should see them."""
    import optuna

    study = optuna.create_study(directions=directions, sampler=sampler)
    for trial in trials:
        study.add_trial(_as_seen(trial, settings, len(directions), ranks_pruned=ranks_pruned))
    return study


def _as_seen(trial: Trial, settings: Sequence[Setting], num_metrics: int, *, ranks_pruned: bool) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    state, point, values = TrialState.RUNNING, None, dict(trial.values) if num_metrics == 1 else {}
    if trial.state == "failed":
        state, values = (TrialState.PRUNED, {}) if ranks_pruned else (TrialState.FAIL, values)
    elif trial.values:
        final = trial.state == "finished" or not ranks_pruned
        state, point = (TrialState.COMPLETE, trial.point) if final else (TrialState.PRUNED, None)
    return create_trial(
        state=state,
        values=point,
        params=stored_settings(settings, trial.settings),
        distributions=distributions(settings, trial.settings),
        intermediate_values=values,
        system_attrs=dict(trial.attributes),
    )
