"""A search as Optuna's own tools understand it: every trial ended, in a file of its own that is written at the end.

In the journal a trial that was stopped at a rung waits, so that it may train on; Optuna has no ended state from which
one goes on. Its plots and importances know ended trials alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from jaxdl.core.files import partial_path
from jaxdl.platform.search.journal import STUDY, storage_at
from jaxdl.platform.search.space import Setting, distributions, stored_settings
from jaxdl.platform.search.trial import Direction, Trial

OPTUNA_FILE = "optuna.log"


def first_stop(trials: Sequence[Trial]) -> int:
    """The first step at which a trial has stopped: where most trials can be compared; 0 without any."""
    return min((min(trial.values) for trial in trials if trial.values), default=0)


def write_copies(path: Path, trials: Sequence[Trial], settings: Sequence[Setting], *directions: Direction) -> None:
    """Writes an Optuna journal whose study `jaxdl` has the same trials, under the same numbers.

    A finished one is COMPLETE, one that failed FAIL, and one that stopped before the full length, or was replaced,
    PRUNED with its intermediate values; one that has not stopped yet is WAITING. If some are PRUNED, the study `jaxdl
    at step N` has those that have reached the first stop as COMPLETE with their values there: importances take no
    others.
    """
    import optuna

    step = first_stop(trials)
    unfinished = partial_path(path)
    try:
        storage = storage_at(unfinished)
        kinds = [_state(trial) for trial in trials]
        studies = {STUDY: [(trial, state, trial.point) for trial, state in zip(trials, kinds, strict=True)]}
        if "PRUNED" in kinds:
            studies[f"{STUDY} at step {step}"] = [
                (trial, "COMPLETE", (trial.values[step],))
                for trial in trials
                if step in trial.values and trial.parent is None
            ]
        for name, copies in studies.items():
            study = optuna.create_study(storage=storage, study_name=name, directions=directions)
            for trial, state, point in copies:
                study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState[state],
                        values=point if state == "COMPLETE" else None,
                        params=stored_settings(settings, trial.settings),
                        distributions=distributions(settings, trial.settings),
                        intermediate_values=dict(trial.values),
                        user_attrs={"number": trial.number, "target": trial.target, "reason": trial.reason},
                    )
                )
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _state(trial: Trial) -> str:
    """The name of Optuna's state."""
    if trial.state == "open":
        return "PRUNED" if trial.values else "WAITING"
    return {"finished": "COMPLETE", "failed": "FAIL", "replaced": "PRUNED"}[trial.state]
