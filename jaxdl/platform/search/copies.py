"""A search as Optuna's own tools understand it: every trial ended, in a file of its own that is written at the end.

In the journal a trial that was stopped at a rung waits, so that it may train on; Optuna has no ended state from which
one goes on. Its plots and importances know ended trials alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from jaxdl.core.files import partial_path
from jaxdl.platform.search.journal import STUDY, storage_at
from jaxdl.platform.search.space import Setting, distributions, stored_settings
from jaxdl.platform.search.trial import Direction, Objective, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage

OPTUNA_FILE = "optuna.log"


def first_stop(trials: Sequence[Trial]) -> int:
    """The first step at which a trial has stopped: where most trials can be compared; 0 without any."""
    return min((min(trial.values) for trial in trials if trial.values), default=0)


def study_at(step: int) -> str:
    """The name of the study of all trials at a step."""
    return f"{STUDY} at step {step}"


def write_copies(
    path: Path,
    trials: Sequence[Trial],
    settings: Sequence[Setting],
    objectives: Sequence[Objective],
    times: Mapping[int, tuple[datetime, datetime]] = MappingProxyType({}),
) -> None:
    """Writes an Optuna journal whose study `jaxdl` has the same trials, under the same numbers.

    A finished one is COMPLETE, one that failed FAIL, and one that stopped before the full length, or was replaced,
    PRUNED with its last value, as Optuna ends those that it prunes; one that has not stopped yet is WAITING. If some
    are PRUNED, the study `jaxdl at step N` has those that have reached the first stop as COMPLETE with their values
    there: importances and most plots take no others.

    `times`: number -> when it began and when it stopped last; now where that is not known.
    """
    unfinished = partial_path(path)
    try:
        storage = storage_at(unfinished)
        copies = [_Copy(trial, _state(trial), trial.point) for trial in trials]
        names = [objective.metric for objective in objectives]
        study = _write_study(storage, STUDY, names, copies, settings, objectives, times)
        if any(copy.state == "PRUNED" for copy in copies):
            step = first_stop(trials)
            copies, names = [_at_step(trial, step) for trial in trials], [f"{objectives[0].metric} at step {step}"]
            _write_study(storage, study_at(step), names, copies, settings, objectives[:1], times)
            # The dashboard shows it beside importances, which are of the few that are COMPLETE.
            study.set_user_attr("importances", f"those of all trials are in the study '{study_at(step)}'")
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


class _Copy(NamedTuple):
    """A trial as a study has it."""

    trial: Trial
    state: str
    """The name of Optuna's."""
    point: Sequence[float] | None
    """The values of the metrics."""


def _at_step(trial: Trial, step: int) -> _Copy:
    """A trial as it was at a step; a copy of a population, which has not trained up to there, has no value."""
    if step in trial.values and trial.parent is None:
        return _Copy(replace(trial, values={step: trial.values[step]}), "COMPLETE", (trial.values[step],))
    state = "PRUNED" if trial.parent is not None else "FAIL" if trial.state == "failed" else "WAITING"
    return _Copy(replace(trial, values={}), state, None)


def _write_study(
    storage: JournalStorage,
    name: str,
    metrics: Sequence[str],
    copies: Sequence[_Copy],
    settings: Sequence[Setting],
    objectives: Sequence[Objective],
    times: Mapping[int, tuple[datetime, datetime]],
) -> Study:
    import optuna

    directions: list[Direction] = [objective.direction for objective in objectives]
    study = optuna.create_study(storage=storage, study_name=name, directions=directions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(metrics))
    for trial, state, point in copies:
        ended = optuna.trial.create_trial(
            state=optuna.trial.TrialState[state],
            values=point if state in ("COMPLETE", "PRUNED") else None,
            params=stored_settings(settings, trial.settings),
            distributions=distributions(settings, trial.settings),
            intermediate_values=dict(trial.values),
            user_attrs={"number": trial.number, "target": trial.target, "reason": trial.reason},
        )
        if trial.number in times and state != "WAITING":
            ended.datetime_start, ended.datetime_complete = times[trial.number]
        study.add_trial(ended)
    return study


def _state(trial: Trial) -> str:
    """The name of Optuna's state."""
    if trial.state == "open":
        return "PRUNED" if trial.values else "WAITING"
    return {"finished": "COMPLETE", "failed": "FAIL", "replaced": "PRUNED"}[trial.state]
