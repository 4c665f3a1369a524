"""The options of `python -m jaxdl.search`, what is kept in its folder, and what it prints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdl.core.config import ConfigError, differences
from jaxdl.core.errors import print_out
from jaxdl.core.files import SEARCH_FILE
from jaxdl.core.options import parse
from jaxdl.core.startup import example_config, find_config, no_config
from jaxdl.data import Data, Stage
from jaxdl.parallel.cluster import BROKEN, exits
from jaxdl.parallel.lease import Lease
from jaxdl.platform.search.config import (
    FREE,
    Lengths,
    SearchConfig,
    check_settings,
    combinations,
    direction_of,
    metric_of,
)
from jaxdl.platform.search.driver import Request, Search, check_any
from jaxdl.platform.search.journal import Journal, check_optuna, has_values
from jaxdl.platform.search.report import result, write_report
from jaxdl.platform.search.schedulers import Course
from jaxdl.platform.search.show import RESUMABLE, Display, Lines, SearchView
from jaxdl.platform.search.space import Setting, parse_settings
from jaxdl.report import replace_file
from jaxdl.report.status.rows import MARKS
from jaxdl.training.experiment import LENGTH, Experiment, identity, load_experiment

ABOUT = """Searches settings of an experiment: a sampler proposes the settings of runs, and the good ones train longer.

  python -m jaxdl.search --config configs/digits.py --workdir runs/search \\
      --vary optimizer.learning-rate=log:1e-3:1 --vary optimizer.momentum=0.8,0.9,0.95 --trials 20 --parallel 2

The same command continues a search that was killed. Options of the experiment hold for all trials, and so does
--stage-data FOLDER. --json prints the result as JSON."""
JOURNAL_FILE = "journal.log"


@dataclass(frozen=True)
class Given:
    """The command line of a search."""

    config: str
    workdir: Path
    search: SearchConfig
    experiment: Experiment
    words: tuple[str, ...]
    """The options that all trials share, as typed."""
    as_json: bool
    stage_data: str | None = None
    """Where trials keep copies of the data; it may be another folder when the search goes on."""


def run(args: list[str], prog: str) -> int | None:
    """Runs the command line; the signal that stopped the search, or None. Raises ConfigError."""
    if {"--help", "-h"} & set(args):
        print(f"{ABOUT}\n\nThe options of a search; all others are those of python -m jaxdl.train:\n")
        parse(
            SearchConfig(),
            [*_search_words(split([arg for arg in args if arg not in ("--help", "-h")])[0]), "--help"],
            prog=prog,
        )
    given = parse_command(args, prog)
    check_optuna()
    settings = parse_settings(given.search.vary)
    check_settings(given.search, given.experiment, settings)
    metric, direction = metric_of(given.search, given.experiment), direction_of(given.search, given.experiment)
    _check_no_run(given.workdir)
    with_lease = Lease(given.workdir, _lost, lambda text: Console(stderr=True).print(text, highlight=False))
    request, course = _prepare(given, settings, metric, direction)
    policy = given.search.scheduler.policy(course)
    try:
        with_lease.acquire()
        _claim(given)
        journal = Journal(given.workdir / JOURNAL_FILE, settings, direction)
        workers = given.search.engine.open(given.search.parallel, given.search.devices_per_trial)
        shown = SearchView(request, course, given.search.scheduler)
        with Lines(as_json=given.as_json) if given.as_json or not Console().is_terminal else Display(shown) as shows:
            search = Search(request, journal, given.search.sampler, policy, workers, shows)
            signum = search.run()
        _finish(given, request, journal, shown)
        if signum is None:
            check_any(journal.trials())
        return signum
    except BrokenPipeError:
        raise
    except OSError as error:  # A full disk, say. A line of the journal that is not whole is cut off when it is opened.
        where, why = error.filename or given.workdir, error.strerror or error
        raise ConfigError(f"{where}: {why}. When that is put right, the same command goes on.") from None
    finally:
        with_lease.release()


def parse_command(args: Sequence[str], prog: str) -> Given:
    """The parsed command line. Raises ConfigError."""
    groups, words = split(args)
    values, as_json = _plain(groups)
    if "config" not in values:
        raise ConfigError(no_config(prog))
    if not values.get("workdir", "").strip():
        raise ConfigError(f"no --workdir. Give --workdir FOLDER, where the search keeps its trials. See {prog} --help.")
    search = parse(SearchConfig(), _search_words(groups))
    path, function = find_config(values["config"])
    config = str(path.absolute()) + (f":{function}" if function != "config" else "")
    experiment = parse(load_experiment(values["config"]), words)
    stage_data = values.get("stage-data")
    if stage_data is not None:
        _check_staged(stage_data, search, experiment)
    return Given(config, Path(values["workdir"]), search, experiment, tuple(words), as_json, stage_data)


def _check_staged(folder: str, search: SearchConfig, experiment: Experiment) -> None:
    """Raises ConfigError for no folder, and for data without files, which each trial would refuse."""
    stage = Stage(folder)
    varies = any(text.partition("=")[0] == "data" for text in search.vary)
    if not varies and type(experiment.data).staged is Data.staged:
        experiment.data.staged(stage)


_PLAIN = ("--config", "--workdir", "--stage-data", "--json")
_REFUSED = {
    "--max-steps": "--scheduler decides where trials stop",
    "--may-change": "--scheduler pbt changes what --vary names",
    "--devices": "give --mesh.cpu-devices",
    "--init-from": "it is not passed on; use a config that begins with other parameters",
}


def split(args: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """(options of the search with their values, the words of all others). Raises ConfigError for a stray word."""
    groups: list[list[str]] = []
    for word in args:
        if word.startswith("--"):
            groups.append([word])
        elif not groups:
            raise ConfigError(f"{word}: not an option. Options begin with --, such as --config {example_config()}.")
        else:
            groups[-1].append(word)
    groups_of_search, words = [], []
    for group in groups:
        name = group[0].partition("=")[0]
        if name in _REFUSED:
            raise ConfigError(f"{name}: a search does not take it: {_REFUSED[name]}.")
        field = name.removeprefix("--").partition(".")[0].replace("-", "_").removeprefix("no_")
        if name in _PLAIN or field in SearchConfig.model_fields:
            groups_of_search.append(group)
        else:
            words += group
    return groups_of_search, words


def _search_words(groups: Sequence[Sequence[str]]) -> list[str]:
    """The words that set fields of `SearchConfig`."""
    return [word for group in groups if group[0].partition("=")[0] not in _PLAIN for word in group]


def _plain(groups: Sequence[Sequence[str]]) -> tuple[dict[str, str], bool]:
    """(the values of --config, --workdir and --stage-data, whether --json is given)."""
    values, as_json = dict[str, str](), False
    for first, *rest in groups:
        name, equals, value = first.partition("=")
        if name == "--json":
            if rest or equals:
                raise ConfigError("--json: it takes no value.")
            as_json = True
        elif name in _PLAIN:
            if len(rest) != (not equals):
                raise ConfigError(f"{name}: give one value.")
            values[name.removeprefix("--")] = value or rest[0]
    return values, as_json


def _prepare(given: Given, settings: list[Setting], metric: str, direction: Any) -> tuple[Request, Course]:
    """What the loop and the policy are made of. Raises ConfigError."""
    search, lengths = given.search, Lengths(given.experiment, settings)
    lengths.check(combinations(settings))
    most = search.sampler.check(settings)
    trials = search.trials or most
    if trials is None:
        raise ConfigError("--trials: how many is not given. Give --trials N, or --sampler grid for a whole grid.")
    if most is not None and trials > most:
        raise ConfigError(
            f"--trials {trials}: the grid has {most} combinations. Give {most} or fewer, or leave it out."
        )
    request = Request(
        folder=given.workdir,
        command=("--config", given.config, *given.words),
        settings=tuple(settings),
        metric=metric,
        direction=direction,
        length=lengths.of,
        seed=search.sampler_seed,
        retries=search.retries,
        changing=search.scheduler.changes_settings,
        stage_data=given.stage_data,
    )
    total = None if lengths.differ else lengths.timeline.total_steps
    course = Course(trials, total, lengths.align, direction, settings, search.sampler_seed)
    return request, course


def _check_no_run(folder: Path) -> None:
    """Raises ConfigError for the workdir of a run: the files of both would be mixed. Makes nothing."""
    marks = [name for name in MARKS if os.path.exists(folder / name)]
    if marks and not os.path.exists(folder / SEARCH_FILE):
        raise ConfigError(f"--workdir {folder}: a run is in it ({', '.join(marks)}). Choose another --workdir.")


def _claim(given: Given) -> None:
    """Writes search.json, or checks that the search in the folder is this one. Raises ConfigError."""
    path = given.workdir / SEARCH_FILE
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            before, experiment = SearchConfig.model_validate(content["search"]), content["experiment"]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigError(
                f"{path}: it cannot be read ({error}). Restore it, or choose another --workdir."
            ) from None
        free = {name: getattr(before, name) for name in (*FREE, *_not_yet_fixed(given, before))}
        changes = differences(before, given.search.replaced(free))
        if _fixed_fields(experiment) != _fixed_fields(json.loads(given.experiment.to_json())):
            changes = [*changes, "the experiment is another one"]
        if before.trials and given.search.trials and given.search.trials < before.trials:
            changes = [*changes, f"trials: {before.trials} -> {given.search.trials}: only more are possible"]
        if changes:
            raise ConfigError(
                f"--workdir {given.workdir} belongs to another search:\n  " + "\n  ".join(changes) + "\nChoose another "
                "--workdir, or the settings of the search that is there."
            )
    content = {
        "search": json.loads(given.search.to_json()),
        "config": given.config,
        "options": list(given.words),
        "experiment": json.loads(given.experiment.to_json()),
    }
    try:
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"--workdir {given.workdir}: {error.strerror}. Choose a writable folder.") from None


def _not_yet_fixed(given: Given, before: SearchConfig) -> tuple[str, ...]:
    """The settings that may be others as long as no trial has a value: a metric that no run has is corrected so."""
    if has_values(given.workdir / JOURNAL_FILE):
        return ()
    directions = {direction_of(config, given.experiment) for config in (before, given.search)}
    return ("metric", "direction") if len(directions) == 1 else ()


def _fixed_fields(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """What must stay of a dumped experiment: all that a run's workdir fixes, and the length, on which rungs depend."""
    return identity(experiment) | {name: experiment.get(name) for name in LENGTH}


def _finish(given: Given, request: Request, journal: Journal, shown: SearchView) -> None:
    """Writes the report and prints the result."""
    trials = journal.trials()
    outcome = result(request, trials, shown)
    write_report(given.workdir, request, trials, outcome, shown)
    if given.as_json:
        print_out(json.dumps(outcome, indent=2, allow_nan=False))
        return
    print_out("\n".join(_lines(given, outcome)))


def _lines(given: Given, outcome: Mapping[str, Any]) -> list[str]:
    """The result in a few lines."""
    diverged = f", {outcome['num_diverged']} of them diverged" if outcome["num_diverged"] else ""
    failed, steps = f"{outcome['num_failed']} failed{diverged}", f"{outcome['trained_steps']:,} steps in all"
    lines = [f"trials  {outcome['num_trials']} ({failed}), {steps}"]
    if waiting := sum(trial["state"] == RESUMABLE for trial in outcome["trials"]):
        lines.append(f"waiting {waiting} trial{'s' * (waiting > 1)}, to be resumed by the same command")
    if outcome["best"] is not None:
        best = outcome["best"]
        lines += [
            f"best    trial {best['number']}: {outcome['metric']} {best['value']:.6g} at step {best['step']}",
            f"        in {best['workdir']}",
            f"train   {best['command']}",
        ]
    return [*lines, f"report  {given.workdir / 'report.md'}"]


def _lost(reason: str) -> None:
    exits.end_process(reason.replace("this run", "this search"), BROKEN)
