"""`jaxdl.search`: a search from Python and from notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.platform.search.conduct import Given, Outcome, conduct
from jaxdl.platform.search.config import SearchConfig
from jaxdl.platform.search.copies import OPTUNA_FILE, study_at
from jaxdl.platform.search.driver import check_any
from jaxdl.platform.search.journal import STUDY, storage_at
from jaxdl.platform.search.report import REPORT_FILE
from jaxdl.platform.search.show import Display, Lines, SearchView, Silent
from jaxdl.platform.search.trial import Direction, rank
from jaxdl.platform.search.vary import vary_texts
from jaxdl.training.experiment import Experiment, as_experiment, load
from jaxdl.training.run.result import Interrupted

if TYPE_CHECKING:
    import pandas as pd
    from optuna import Study

    from jaxdl.inference.predictor import Predictor

EXPERIMENT_FILE = "experiment.json"
"""The experiment that the trials are trained from, in the folder of the search."""


@dataclass(frozen=True)
class SearchTrial:
    """A run of a search."""

    number: int
    settings: dict[str, Any]
    """What varies, by its dotted name, and its value here; what does not apply to it is not there."""
    state: str
    """finished, waits (stopped where trials are compared), failed, replaced, or to be resumed."""
    reason: str
    """Why it failed."""
    step: int
    """Where it was compared last."""
    value: float | None
    """The metric there."""
    values: dict[int, float]
    """Step -> the metric, wherever it was compared; of several metrics the first."""
    metrics: dict[str, float]
    """All metrics there by name; empty without values."""
    workdir: Path
    command: str
    """A command that trains the same settings to the end in a new folder."""

    def restore(self) -> Predictor:
        """The trained network; raises ConfigError as `jaxdl.restore` does."""
        from jaxdl.inference.predictor import restore

        return restore(self.workdir)


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search has found."""

    folder: Path
    metric: str
    """Of several the first."""
    direction: Direction
    """Whether a higher or a lower metric is better: maximize or minimize."""
    trials: tuple[SearchTrial, ...]
    best: SearchTrial | None
    """None where no trial has a value. With several metrics that trial of the front whose first metric is best."""
    front: tuple[SearchTrial, ...]
    """The Pareto front of several metrics: the trials than which no other is as good in all and better in one."""
    directions: dict[str, Direction]
    """Metric -> maximize or minimize."""
    finished: bool
    """False where `hours` were over before: the same call goes on."""

    def frame(self) -> pd.DataFrame:
        """A row for each trial: number, state, step, value, then the settings; with several metrics one column each.

        Raises ImportError without pandas.
        """
        import pandas as pd

        rows = [
            {"number": trial.number, "state": trial.state, "step": trial.step, **self._values(trial), **trial.settings}
            for trial in self.trials
        ]
        return pd.DataFrame(rows).set_index("number")

    def _values(self, trial: SearchTrial) -> dict[str, float | None]:
        if len(self.directions) == 1:
            return {"value": trial.value}
        return {metric: trial.metrics.get(metric) for metric in self.directions}

    def study(self, *, first_stop: bool = False) -> Study:
        """The trials as an Optuna study, for its plots and importances: what stopped early is pruned there.

        With `first_stop` each trial counts as complete with its value where trials are first compared: Optuna's
        importances and most of its plots leave out those that are pruned. Without any it is the same study.
        """
        import optuna

        names = [STUDY]
        stops = [min(trial.values) for trial in self.trials if trial.values]
        if first_stop and stops:
            names.insert(0, study_at(min(stops)))
        storage = storage_at(self.folder / OPTUNA_FILE)
        known = {study.study_name for study in storage.get_all_studies()}
        return optuna.load_study(study_name=next(name for name in names if name in known), storage=storage)

    def __repr__(self) -> str:
        """Two lines: the best trial, and where the report is."""
        found = "no trial has a value"
        if (best := self.best) is not None:
            settings = ", ".join(f"{name} {value}" for name, value in best.settings.items())
            values = ", ".join(f"{name} {value:.6g}" for name, value in best.metrics.items())
            found = f"trial {best.number}: {values} at step {best.step} ({settings})"
            if len(self.directions) > 1:
                found = f"{len(self.front)} of them on the front, {found}"
        goes_on = "" if self.finished else "; its hours are over, the same call goes on"
        return f"SearchResult of {len(self.trials)} trials, {found}{goes_on}\nreport: {self.folder / REPORT_FILE}"

    def _repr_html_(self) -> str:
        """The same for notebooks, and a table of the best trials."""
        order = sorted(self.trials, key=lambda trial: (trial not in self.front, rank(trial, self.direction)))
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.settings))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ("trial", *names, "state", "step", *self.directions))
        rows = []
        for trial in order[:20]:
            values = [f"{trial.metrics[name]:.6g}" if trial.metrics else "" for name in self.directions]
            settings = [str(trial.settings.get(name, "")) for name in names]
            cells = [str(trial.number), *settings, trial.state, str(trial.step), *values]
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<pre>{html.escape(repr(self))}</pre><table><tr>{head}</tr>{body}</table>"


def search(
    experiment: Experiment | str | Path,
    vary: Mapping[str, Any] | Sequence[str] | str,
    workdir: str | Path,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    quiet: bool = False,
    **settings: Any,
) -> SearchResult:
    """Trains many runs of an experiment with different settings, the good ones longer; `python -m jaxdl.search`.

        found = jaxdl.search("configs/digits.py", {"optimizer.learning_rate": "log:1e-3:1", "optimizer.momentum": [0.8,
                             0.9]}, "runs/search", trials=20, parallel=2)
        found.best.restore().evaluate()

    Each trial is a process of its own, so a process that holds the GPUs leaves them none: call it before JAX is used.
    The same call goes on with a search that was stopped; Ctrl-C saves the trials.

    Args:
      experiment: an Experiment, or the path of a config file. Its classes must be importable, not those of a notebook.
      vary: the dotted field -> what it varies over. A list of values (words, numbers, tuples), `range(1, 9)`, a text as
        `--vary` takes (`"log:1e-3:1"`, perhaps with a condition, `"0.8,0.9 if optimizer=sgd"`), a distribution of
        Optuna's, or a dictionary with what varies beside each value: `{"optimizer": {"sgd": {"optimizer.momentum":
        [0.8, 0.9]}, "adamw": {}}}`. Or the texts of `--vary` themselves.
      workdir: the folder of the search.
      overrides: of a config file, as `jaxdl.load` takes them.
      quiet: print nothing. Otherwise a live table in a terminal, else a line for each event.
      settings: the fields of `SearchConfig`: trials, parallel, metric, sampler, scheduler, hours, patience and others,
        also `**{"scheduler.min_steps": 100}`.

    Returns:
      What was found: `best`, of several metrics the `front`, all `trials`, `frame()` for pandas, `study()` for Optuna.

    Raises:
      ConfigError: for a setting that cannot be used, or when every trial has failed.
      Interrupted: after a signal, once the trials are saved and the report of what there is so far is written.
    """
    folder = Path(workdir)
    given = _given(experiment, overrides, folder, {"vary": vary_texts(vary), **settings})

    def shows(view: SearchView) -> Lines | Display:
        return Silent() if quiet else Display(view) if Console().is_terminal else Lines()

    outcome = conduct(given, shows)
    if outcome.signum is not None:
        message = f"The search in {folder} was stopped, and its trials are saved. The same call goes on."
        raise Interrupted(outcome.signum, message)
    check_any(outcome.trials)
    return _result(folder, outcome)


def _given(experiment: Experiment | str | Path, overrides: Any, folder: Path, settings: Mapping[str, Any]) -> Given:
    """The search that is asked for. Raises ConfigError."""
    if overrides and not isinstance(experiment, str | Path):
        raise ConfigError("overrides: they are for a config file. Give experiment.replaced({...}) instead.")
    chosen = load(experiment, overrides) if isinstance(experiment, str | Path) else as_experiment(experiment)
    unknown = sorted(name for name in settings if name.partition(".")[0] not in SearchConfig.model_fields)
    if unknown:
        raise ConfigError(f"search: {unknown[0]}: no such setting. There are {', '.join(SearchConfig.model_fields)}.")
    content = chosen.to_json()
    try:
        Experiment.from_json(content)
    except ConfigError as error:
        raise ConfigError(f"search: its trials, other processes, cannot read the experiment: {error}") from None
    config = SearchConfig().replaced(dict(settings))
    return Given(str((folder / EXPERIMENT_FILE).absolute()), folder, config, chosen, content=content.encode())


def _result(folder: Path, outcome: Outcome) -> SearchResult:
    """The outcome for Python."""
    request, report = outcome.request, outcome.report
    trials = tuple(
        SearchTrial(
            number=trial.number,
            settings=dict(trial.settings),
            state=told["state"],
            reason=trial.reason,
            step=trial.step,
            value=trial.value,
            values=dict(sorted(trial.values.items())),
            metrics=told["metrics"],
            workdir=request.workdir(trial.number),
            command=request.again(trial),
        )
        for trial, told in zip(outcome.trials, report["trials"], strict=True)
    )
    best = None if report["best"] is None else trials[report["best"]["number"]]
    return SearchResult(
        folder=folder,
        metric=request.metric,
        direction=request.direction,
        trials=trials,
        best=best,
        front=tuple(trials[number] for number in report["front"]),
        directions={objective.metric: objective.direction for objective in request.objectives},
        finished=not outcome.time_is_over,
    )
