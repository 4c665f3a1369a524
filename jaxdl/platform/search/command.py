"""The options of `python -m jaxdl.search`, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.options import parse
from jaxdl.core.startup import example_config, find_config, no_config
from jaxdl.data import Data, Stage
from jaxdl.platform.search.conduct import Given, conduct
from jaxdl.platform.search.config import SearchConfig
from jaxdl.platform.search.driver import check_any
from jaxdl.platform.search.show import RESUMABLE, Display, Lines, SearchView
from jaxdl.training.experiment import Experiment, load_experiment

ABOUT = """Searches settings of an experiment: a sampler proposes the settings of runs, and the good ones train longer.

  python -m jaxdl.search --config configs/digits.py --workdir runs/search \\
      --vary optimizer.learning-rate=log:1e-3:1 --vary optimizer.momentum=0.8,0.9,0.95 --trials 20 --parallel 2

The same command continues a search that was killed. Options of the experiment hold for all trials, and so does
--stage-data FOLDER. --json prints the result as JSON."""


def run(args: list[str], prog: str) -> int | None:
    """Runs the command line; the signal that stopped the search, or None. Raises ConfigError."""
    if {"--help", "-h"} & set(args):
        print(f"{ABOUT}\n\nThe options of a search; all others are those of python -m jaxdl.train:\n")
        parse(
            SearchConfig(),
            [*_search_words(split([arg for arg in args if arg not in ("--help", "-h")])[0]), "--help"],
            prog=prog,
        )
    given, as_json = parse_command(args, prog), "--json" in args

    def shows(view: SearchView) -> Lines | Display:
        return Lines(as_json=as_json) if as_json or not Console().is_terminal else Display(view)

    outcome = conduct(given, shows)
    if as_json:
        print_out(json.dumps(outcome.report, indent=2, allow_nan=False))
    else:
        print_out("\n".join(_lines(given, outcome.report)))
    if outcome.signum is None:
        check_any(outcome.trials)
    return outcome.signum


def parse_command(args: Sequence[str], prog: str) -> Given:
    """The parsed command line. Raises ConfigError."""
    groups, words = split(args)
    values = _plain(groups)
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
    return Given(config, Path(values["workdir"]), search, experiment, tuple(words), stage_data)


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


def _plain(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    """The values of --config, --workdir and --stage-data. Raises ConfigError where one lacks, or --json has one."""
    values: dict[str, str] = {}
    for first, *rest in groups:
        name, equals, value = first.partition("=")
        if name == "--json":
            if rest or equals:
                raise ConfigError("--json: it takes no value.")
        elif name in _PLAIN:
            if len(rest) != (not equals):
                raise ConfigError(f"{name}: give one value.")
            values[name.removeprefix("--")] = value or rest[0]
    return values


def _lines(given: Given, outcome: Mapping[str, Any]) -> list[str]:
    """The result in a few lines."""
    diverged = f", {outcome['num_diverged']} of them diverged" if outcome["num_diverged"] else ""
    failed, steps = f"{outcome['num_failed']} failed{diverged}", f"{outcome['trained_steps']:,} steps in all"
    lines = [f"trials  {outcome['num_trials']} ({failed}), {steps}"]
    if waiting := sum(trial["state"] == RESUMABLE for trial in outcome["trials"]):
        lines.append(f"waiting {waiting} trial{'s' * (waiting > 1)}, to be resumed by the same command")
    if outcome["best"] is not None:
        best = outcome["best"]
        if len(outcome["metrics"]) > 1:
            lines.append(f"front   {len(outcome['front'])} trials, none of which another one beats:")
            lines += [f"        trial {number}: {_values(outcome, number)}" for number in outcome["front"]]
        lines += [
            f"best    trial {best['number']}: {_values(outcome, best['number'])} at step {best['step']}",
            f"        in {best['workdir']}",
            f"train   {best['command']}",
        ]
    return [*lines, f"report  {given.workdir / 'report.md'}"]


def _values(outcome: Mapping[str, Any], number: int) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in outcome["trials"][number]["metrics"].items())
