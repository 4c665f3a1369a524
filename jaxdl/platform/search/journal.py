"""The journal of a search: Optuna's file journal, from which everything is known after a kill.

An Optuna trial is RUNNING while a process trains it. One that waits at a rung, or has failed and may yet train, is
WAITING, as those that Optuna has enqueued: its finished ones cannot resume. Intermediate values are the metric, of
several the first, at the steps where it stopped. The search holds a lease of its folder and is the one writer, so the
file needs no lock; others, such as optuna-dashboard, may read it. What Optuna's tools make of a whole search is in
another file, see `copies`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import ConfigError
from jaxdl.platform.search.space import Setting, distributions, read_settings, stored_settings
from jaxdl.platform.search.trial import Direction, State, Trial

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

STUDY = "jaxdl"
_OWN = ("target", "reason", "given_up", "parent", "from_step", "replaces", "begun")
_OTHERS = "others"


def check_optuna() -> None:
    """Raises ConfigError when Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "a search needs Optuna, which is not installed. Install it: pip install 'jaxdl[search]'."
        ) from None
    optuna.logging.set_verbosity(logging.WARNING)


class _NoLock:
    """No lock, in Optuna's form: there is one writer, and the lock of a killed process would delay the next one."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def storage_at(path: Path) -> JournalStorage:
    """Optuna's storage in a file of one writer."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(path), _NoLock()))  # pyright: ignore[reportArgumentType]


class Journal:
    """The trials of a search on disk; every method returns when its record is.

    Raises ConfigError for a file that is no journal of this search.
    """

    def __init__(self, path: Path, settings: list[Setting], *directions: Direction) -> None:
        """`directions`: of each metric."""
        check_optuna()
        import optuna

        _cut_torn_line(path)
        self._settings = settings
        try:
            self._storage = storage_at(path)
            study = optuna.create_study(
                storage=self._storage, study_name=STUDY, directions=directions, load_if_exists=True
            )
            self._study, self._id = study, self._storage.get_study_id_from_name(STUDY)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: it is no journal of a search ({error}). Restore it, or choose another --workdir."
            ) from None

    def trials(self) -> list[Trial]:
        """All trials in order of their numbers."""
        return [_trial(trial, self._settings) for trial in self._storage.get_all_trials(self._id, deepcopy=False)]

    def add(
        self,
        settings: Mapping[str, Any],
        target: int,
        *,
        attributes: Mapping[str, Any] | None = None,
        values: Mapping[int, float] | None = None,
        **origin: Any,
    ) -> int:
        """Records a trial that is to train to a step, all in one line of the journal; returns its number.

        `origin` has `parent`, `from_step` and `replaces` of a copy, `attributes` what the sampler keeps with it.
        """
        from optuna.trial import TrialState, create_trial

        self._study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=stored_settings(self._settings, settings),
                distributions=distributions(self._settings, settings),
                user_attrs={"target": target, **origin},
                system_attrs=dict(attributes or {}),
                intermediate_values=dict(values or {}),
            )
        )
        return len(self._storage.get_all_trials(self._id, deepcopy=False)) - 1

    def start(self, number: int) -> None:
        """Records that a process trains a trial from now on, and when it does so first."""
        trial_id = self._at(number)
        if "begun" not in self._storage.get_trial(trial_id).user_attrs:
            self._storage.set_trial_user_attr(trial_id, "begun", time.time())
        self._turn(number, "WAITING", "RUNNING")

    def rest(self, number: int) -> None:
        """Records that none does; of a trial that has ended nothing."""
        self._turn(number, "RUNNING", "WAITING")

    def _turn(self, number: int, before: str, after: str) -> None:
        from optuna.trial import TrialState

        trial_id = self._at(number)
        if self._storage.get_trial(trial_id).state == TrialState[before]:
            self._storage.set_trial_state_values(trial_id, TrialState[after])

    def send(self, number: int, target: int) -> None:
        """Records that a trial trains on to a step."""
        self._storage.set_trial_user_attr(self._at(number), "target", target)

    def report(self, number: int, step: int, value: float, *others: float) -> None:
        """Records the metrics of a trial at a step where it stopped; with several it is its full length."""
        if others:
            self._storage.set_trial_user_attr(self._at(number), _OTHERS, others)
        self._storage.set_trial_intermediate_value(self._at(number), step, value)

    def finish(self, number: int, *point: float) -> None:
        """Records that a trial has reached its full length, with these values of the metrics."""
        self._end(number, "COMPLETE", point)

    def fail(self, number: int, reason: str) -> None:
        """Records that a trial cannot train on."""
        self.note(number, reason)
        self._end(number, "FAIL")

    def give_up(self, number: int, reason: str) -> None:
        """Records that a trial failed, until `reopen`."""
        self.note(number, reason)
        self._storage.set_trial_user_attr(self._at(number), "given_up", True)

    def reopen(self, number: int) -> None:
        """Records that a trial that was given up is tried again."""
        self._storage.set_trial_user_attr(self._at(number), "given_up", False)
        self.note(number, "")

    def note(self, number: int, reason: str) -> None:
        """Records why a trial does not train; an empty text when it does."""
        self._storage.set_trial_user_attr(self._at(number), "reason", reason)

    def replace(self, number: int) -> None:
        """Records that another trial continues in the place of this one."""
        self._end(number, "PRUNED")

    def study_attributes(self) -> dict[str, Any]:
        """What samplers keep with the study."""
        return self._storage.get_study_system_attrs(self._id)

    def keep_study_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Records what a sampler keeps with the study, where it has changed."""
        before = self.study_attributes()
        for name, value in attributes.items():
            if before.get(name) != value:
                self._storage.set_study_system_attr(self._id, name, value)

    def _end(self, number: int, state: str, point: Sequence[float] | None = None) -> None:
        from optuna.trial import TrialState

        self._storage.set_trial_state_values(self._at(number), TrialState[state], point)

    def _at(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)


def has_values(path: Path) -> bool:
    """Whether a trial of the journal has a value. False where there is no journal, or it cannot be read."""
    check_optuna()
    if not path.exists():
        return False
    _cut_torn_line(path)
    try:
        storage = storage_at(path)
        trials = storage.get_all_trials(storage.get_study_id_from_name(STUDY), deepcopy=False)
    except (ValueError, KeyError, TypeError):
        return False
    return any(trial.intermediate_values for trial in trials)


def _trial(trial: FrozenTrial, settings: Sequence[Setting]) -> Trial:
    states: dict[str, State] = {"COMPLETE": "finished", "FAIL": "failed", "PRUNED": "replaced"}
    attributes = {name: trial.user_attrs[name] for name in _OWN if name in trial.user_attrs}
    state = states.get(trial.state.name, "failed" if attributes.get("given_up") else "open")
    return Trial(
        number=trial.number,
        settings=read_settings(settings, trial.params),
        values=dict(trial.intermediate_values),
        others=tuple(trial.user_attrs.get(_OTHERS, ())),
        state=state,
        attributes=trial.system_attrs,
        **{"target": 0, **attributes, "given_up": state == "failed" and trial.state.name != "FAIL"},
    )


def _cut_torn_line(path: Path) -> None:
    """Removes a partial last line, which a crash of the machine left; nothing has acted on it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
