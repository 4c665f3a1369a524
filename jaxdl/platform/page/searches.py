"""A search as its page shows it: its settings, its trials, the best of them, the pictures of its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdl.core.files import CONFIG_FILE, RESULT_FILE, SEARCH_FILE
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.platform.page.details import as_text, fields_of, is_picture
from jaxdl.platform.page.files import (
    Signature,
    Unreadable,
    json_or_problem,
    names_in,
    read_json,
    read_status,
    signature,
)
from jaxdl.platform.page.runs import Run, as_shown
from jaxdl.report.better_direction import is_higher_better

MOST_TRIALS = 1_000


@dataclass
class Search:
    """What is shown of a search."""

    problems: list[str] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    """Those of search.json."""
    varied: list[str] = field(default_factory=list)
    """The names of what varies."""
    metric: str = ""
    direction: str = ""
    """Of several metrics the first."""
    others: list[tuple[str, str]] = field(default_factory=list)
    """(metric, direction) of the others."""
    front: list[str] = field(default_factory=list)
    """The numbers of the trials on the Pareto front of several metrics, by the report."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    best: str = ""
    """The number of the best trial by the report; empty before there is one."""
    command: str = ""
    """What trains the best trial anew."""
    has_result: bool = False
    pictures: list[tuple[str, str]] = field(default_factory=list)
    not_listed: int = 0


class Searches:
    """The searches; the config of a trial is read once."""

    def __init__(self) -> None:
        self._configs: dict[str, tuple[Signature | None, Mapping[str, Any]]] = {}

    def read(self, folder: Path, trials: Sequence[Run]) -> Search:
        """A search, by its settings, its report, and the workdirs of its trials. Raises nothing."""
        found = Search()
        config, result = (json_or_problem(folder, name, found.problems) for name in (SEARCH_FILE, RESULT_FILE))
        config = config.get("search", config) if isinstance(config, dict) else {}
        config = config if isinstance(config, dict) else {}
        found.settings = fields_of(config)
        vary = as_list(config.get("vary"))
        found.varied = [str(word).partition("=")[0] for word in vary]
        result = result if isinstance(result, dict) else {}
        found.has_result = bool(result)
        (found.metric, found.direction), *found.others = _objectives(result, config, trials)
        best = result.get("best")
        if isinstance(best, dict):
            found.best, found.command = str(best.get("number", "")), as_shown(str(best.get("command", "")))
        if found.others:
            found.front = [as_shown(str(number)) for number in as_list(result.get("front"))]
        listed = [trial for trial in as_list(result.get("trials")) if isinstance(trial, dict)]
        by_number = {str(trial.get("number")): trial for trial in listed}
        found.not_listed = max(0, len(trials) - MOST_TRIALS)
        for run in sorted(trials, key=lambda run: run.trial)[:MOST_TRIALS]:
            found.trials.append(self._trial(run, found, by_number))
        missing = by_number.keys() - {trial["number"] for trial in found.trials}
        if missing and not found.not_listed:
            found.problems.append(f"{len(missing)} trials of {RESULT_FILE} have no workdir any more")
        found.trials.sort(key=lambda trial: (trial["number"] not in found.front, _rank(trial, found.direction)))
        found.varied = [as_shown(name) for name in found.varied]
        found.pictures = [
            (name, f"{known[0]}-{known[1]}")
            for name in names_in(folder)
            if is_picture(name) and (known := signature(folder / name)) is not None
        ]
        return found

    def _trial(self, run: Run, found: Search, by_number: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        number = str(int(run.trial)) if run.trial.isdecimal() else run.trial
        told, config = by_number.get(number, {}), self._config(run)
        settings = told.get("settings")
        settings = settings if isinstance(settings, dict) else {}
        values = [settings.get(name, config.get(name.replace("-", "_"))) for name in found.varied]
        by_report = {} if run.is_live else {found.metric: told.get("value")}
        if not run.is_live and isinstance(told.get("metrics"), dict):
            by_report |= told["metrics"]
        points = [_number(by_report.get(name), run.row.metrics.get(name)) for name in _names(found)]
        return {
            "number": number,
            "run": run,
            "settings": [
                value if isinstance(value, float) else "" if value is None else as_text(value) for value in values
            ],
            "state": as_shown(str(told.get("state") or "")),
            "why": as_shown(str(told.get("reason") or "")),
            "value": points[0],
            "others": points[1:],
        }

    def _config(self, run: Run) -> Mapping[str, Any]:
        known = signature(run.path / CONFIG_FILE)
        before = self._configs.get(run.id)
        if before is None or before[0] != known:
            try:
                content = read_json(run.path / CONFIG_FILE, run.path)
            except (Unreadable, FileNotFoundError):
                content = None
            before = self._configs[run.id] = known, flat(content) if isinstance(content, dict) else {}
        return before[1]


def as_list(value: Any) -> list[Any]:
    """The value, if it is a list; else none of it."""
    return value if isinstance(value, list) else []


def _names(found: Search) -> list[str]:
    return [found.metric, *(metric for metric, _ in found.others)]


def _number(*values: Any) -> float | None:
    """The first finite number of these."""
    numbers = (float(value) for value in values if isinstance(value, int | float))
    return next((value for value in numbers if math.isfinite(value)), None)


def _objectives(result: Mapping[str, Any], config: Mapping[str, Any], trials: Sequence[Run]) -> list[tuple[str, str]]:
    """(metric, direction) of what trials are compared by: as the report has it, else as the search was given it."""
    told = result.get("metrics")
    if isinstance(told, dict) and told:
        return [(as_shown(str(metric)), as_shown(str(direction))) for metric, direction in told.items()]
    given = [result["metric"]] if result.get("metric") else _as_several(config.get("metric"))
    directions = [result["direction"]] if result.get("direction") else _as_several(config.get("direction"))
    objectives = []
    for place, name in enumerate(given or [_best_metric(trials)]):
        metric = as_shown(str(name)).replace("evaluation/", "eval/", 1)
        rises = is_higher_better(metric)
        known = "" if rises is None else "maximize" if rises else "minimize"
        objectives.append((metric, as_shown(str(directions[place])) if place < len(directions) else known))
    return objectives


def _as_several(given: Any) -> list[Any]:
    """A list of what a search was given; earlier versions kept the one value."""
    return as_list(given) or ([given] if given and not isinstance(given, list) else [])


def _best_metric(trials: Sequence[Run]) -> str:
    """The best metric of the task of the trials, by the status of one of them."""
    for run in trials:
        record = read_status(run.path)
        if record is not None and record.best_metric:
            return f"eval/{record.best_metric}"
    return "eval/loss"


def _rank(trial: Mapping[str, Any], direction: str) -> tuple[bool, float, str]:
    """The best trial first; by number where it is not known which is better."""
    value = trial["value"]
    if value is None or direction not in ("maximize", "minimize"):
        return value is None and bool(direction), 0.0, trial["number"].zfill(9)
    return False, -value if direction == "maximize" else value, trial["number"].zfill(9)
