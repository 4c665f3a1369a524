"""The result of a search: as JSON, and as a page with plots in its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxdl.core.files import METRICS_FILE, RESULT_FILE
from jaxdl.platform.search import plots
from jaxdl.platform.search.copies import OPTUNA_FILE, first_stop, write_copies
from jaxdl.platform.search.driver import DIVERGED_REASON, Request
from jaxdl.platform.search.metrics import curve
from jaxdl.platform.search.samplers import as_study
from jaxdl.platform.search.show import SearchView, state_of
from jaxdl.platform.search.space import short
from jaxdl.platform.search.trial import Trial, best, front, rank
from jaxdl.platform.search.workdirs import last_step
from jaxdl.report import replace_file

REPORT_FILE = "report.md"
PLOTS = {
    "pareto.png": "The Pareto front: trials that no other one beats, before all others. Far outliers stand at the edge",
    "history.png": "Every trial in the order of their start, and the best value so far. Far outliers stand at the edge",
    "curves.png": "The metric of all trials over steps. Far outliers are cut off",
    "slices.png": "The last value of each trial over each setting. Far outliers stand at the edge",
    "parallel.png": "Parallel coordinates: a line for each trial",
    "importances.png": "How much of the variance at the first stop each setting explains (PED-ANOVA)",
}
_MIN_FOR_IMPORTANCES = 6


def result(request: Request, trials: Sequence[Trial], shown: SearchView) -> dict[str, Any]:
    """The result as JSON: the best trial with a command that trains it, all trials, the steps trained in all."""
    top = best(trials, *request.directions)
    return {
        "metric": request.metric,
        "direction": request.direction,
        "metrics": {objective.metric: objective.direction for objective in request.objectives},
        "scheduler": shown.scheduler.kind,
        "stops": shown.stops,
        "num_trials": len(trials),
        "num_failed": sum(trial.state == "failed" for trial in trials),
        "num_diverged": sum(trial.state == "failed" and trial.reason.startswith(DIVERGED_REASON) for trial in trials),
        "trained_steps": sum(max(0, _trained_steps(request, trial) - trial.from_step) for trial in trials),
        "best": None if top is None else {
            "number": top.number,
            "settings": dict(top.settings),
            "value": top.value,
            "step": top.step,
            "workdir": str(request.workdir(top.number)),
            "command": request.again(top),
            "lineage": lineage(trials, top),
        },
        "front": [trial.number for trial in front(trials, request.directions)],
        "trials": [
            {
                "number": trial.number,
                "settings": dict(trial.settings),
                "state": state_of(trial, []),
                "reason": trial.reason,
                "step": trial.step,
                "value": trial.value,
                "metrics": _metrics(request, trial),
                "values": {str(step): value for step, value in sorted(trial.values.items())},
                "parent": trial.parent,
                "from_step": trial.from_step,
            }
            for trial in trials
        ],
    }  # fmt: skip


def _metrics(request: Request, trial: Trial) -> dict[str, float]:
    """Metric -> its last value; empty without values."""
    if trial.point is None:
        return {}
    return {objective.metric: value for objective, value in zip(request.objectives, trial.point, strict=True)}


def lineage(trials: Sequence[Trial], trial: Trial) -> list[dict[str, Any]]:
    """The settings of a trial and of those whose checkpoints it began with, from step 0 on: a schedule of settings."""
    ancestors = [{"number": trial.number, "from_step": trial.from_step, "settings": dict(trial.settings)}]
    while trial.parent is not None:
        trial = trials[trial.parent]
        ancestors.append({"number": trial.number, "from_step": trial.from_step, "settings": dict(trial.settings)})
    return ancestors[::-1]


def write_report(
    folder: Path, request: Request, trials: Sequence[Trial], outcome: Mapping[str, Any], shown: SearchView
) -> None:
    """Writes result.json, report.md with its plots, and the trials as Optuna's tools understand them."""
    times = {trial.number: known for trial in trials if (known := _times(request, trial)) is not None}
    write_copies(folder / OPTUNA_FILE, trials, request.settings, request.objectives, times)
    replace_file(folder / RESULT_FILE, (json.dumps(outcome, indent=2, allow_nan=False) + "\n").encode())
    curves = {trial.number: curve(request.workdir(trial.number), request.metric) for trial in trials}
    pictures = {
        "pareto.png": plots.pareto(trials, request),
        "history.png": plots.history(trials, request),
        "curves.png": plots.curves(trials, curves, request, shown.stops),
        "slices.png": plots.slices(trials, request),
        "parallel.png": plots.parallel(trials, request),
        "importances.png": plots.importances(importances(trials, request)),
    }
    for name, picture in pictures.items():
        if picture is None:
            (folder / name).unlink(missing_ok=True)
        else:
            replace_file(folder / name, picture)
    page = _page(request, trials, outcome, [name for name, picture in pictures.items() if picture])
    replace_file(folder / REPORT_FILE, page.encode(errors="surrogateescape"))  # A path may be no UTF-8.


def importances(trials: Sequence[Trial], request: Request) -> dict[str, float]:
    """Setting -> its share of the explained variance of the metric at the first stop; empty with too few trials.

    At the first stop, since all trials reach it: PED-ANOVA (Watanabe et al., arXiv 2304.10255), of Optuna.
    """
    import warnings

    import optuna

    first = first_stop(trials)
    reached = [trial for trial in trials if first in trial.values and trial.parent is None]
    if len(reached) < _MIN_FOR_IMPORTANCES or len({trial.values[first] for trial in reached}) < 2:
        return {}
    alike = [
        Trial(trial.number, trial.settings, first, {first: trial.values[first]}, "finished", attributes={})
        for trial in reached
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = as_study(alike, request.settings, (request.direction,))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _times(request: Request, trial: Trial) -> tuple[datetime, datetime] | None:
    """When a trial was started first, and when it wrote its history last; None where that is not known."""
    if trial.begun is None:
        return None
    with contextlib.suppress(OSError):
        written = datetime.fromtimestamp((request.workdir(trial.number) / METRICS_FILE).stat().st_mtime)
        begun = datetime.fromtimestamp(trial.begun)
        return begun, max(begun, written)
    return None


def _trained_steps(request: Request, trial: Trial) -> int:
    return max(trial.step, last_step(request.workdir(trial.number)))


def _page(request: Request, trials: Sequence[Trial], outcome: Mapping[str, Any], pictures: Sequence[str]) -> str:
    """The text of report.md."""
    names = [setting.name for setting in request.settings]
    diverged = f", {outcome['num_diverged']} of them diverged" if outcome["num_diverged"] else ""
    lines = [
        f"# Search over {', '.join(map(short, names))}",
        "",
        f"{outcome['num_trials']} trials, {outcome['num_failed']} failed{diverged}; "
        f"{outcome['trained_steps']:,} steps trained in all. "
        f"Compared by {_objectives(request)}; scheduler `{outcome['scheduler']}`"
        + (f", stops at steps {', '.join(map(str, outcome['stops']))}." if outcome["stops"] else "."),
    ]
    if (top := outcome["best"]) is not None:
        lines += [
            "",
            *_front(request, trials, outcome["front"]),
            f"Best{' of these by the first metric' if request.others else ''}: trial {top['number']}, "
            f"{top['value']:.6g} at step {top['step']}, in `{top['workdir']}`.",
            "",
            "```bash",
            top["command"],
            "```",
        ]
        if len(top["lineage"]) > 1:
            lines += [
                "",
                "It did not train with these settings from the start:",
                "",
                "| from step | trial | settings |",
            ]
            lines += ["|---|---|---|"]
            lines += [
                f"| {ancestor['from_step']} | {ancestor['number']} | {_words(ancestor['settings'])} |"
                for ancestor in top["lineage"]
            ]
    for name in pictures:
        lines += ["", f"![{PLOTS[name]}]({name})", "", f"*{PLOTS[name]}.*"]
    metrics = [objective.metric for objective in request.objectives]
    lines += ["", f"| trial | {' | '.join([*names, 'state', 'step', *metrics])} |"]
    lines += ["|---" * (len(names) + len(metrics) + 3) + "|"]
    for trial in sorted(trials, key=lambda trial: rank(trial, request.direction)):
        state = state_of(trial, []) + (f": {trial.reason}" if trial.reason else "")
        cells = [
            str(trial.number),
            *(_cell(trial.settings.get(name, "")) for name in names),
            state,
            str(trial.step),
            *([f"{value:.6g}" for value in trial.point or ()] or [""] * len(metrics)),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _objectives(request: Request) -> str:
    return ", ".join(f"`{objective.metric}` ({objective.direction})" for objective in request.objectives)


def _front(request: Request, trials: Sequence[Trial], numbers: Sequence[int]) -> list[str]:
    """A table of the front, by the first metric; nothing with one metric."""
    if not request.others:
        return []
    metrics = " | ".join(objective.metric for objective in request.objectives)
    lines = ["No other trial beats these, which means as good in all metrics and better in one:", ""]
    lines += [f"| trial | {metrics} | settings |", "|---" * (len(request.objectives) + 2) + "|"]
    for trial in sorted((trials[number] for number in numbers), key=lambda trial: rank(trial, request.direction)):
        values = " | ".join(f"{value:.6g}" for value in trial.point or ())
        lines.append(f"| {trial.number} | {values} | {_words(trial.settings)} |")
    return [*lines, ""]


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{short(name)} {_cell(value)}" for name, value in settings.items())


def _cell(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
