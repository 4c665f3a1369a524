"""The report of a simulated fleet: figures, and a picture of which run has which nodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxdl.core.errors import OptionError
from jaxdl.core.files import replace_file
from jaxdl.core.runs import check_writable
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.simulate import (
    Costs,
    Job,
    Result,
    play_elastic,
    play_elastic_shared,
    play_static,
    play_static_shared,
    random_jobs,
    random_shared_jobs,
)

_HOUR = 3600.0


@dataclass(frozen=True)
class Simulate:
    """Plays made-up runs in simulated time, elastic and on static partitions, and draws both."""

    runs: int = 50
    """The number of runs."""
    nodes: int = 20
    """The number of nodes."""
    seed: int = 0
    """Another seed gives other runs."""
    fairness: float = 0.2
    """As of `serve`."""
    resized: float = 0.1
    """As of `serve`."""
    resize_sec: float = 120.0
    """What a resize takes; a start takes half of it."""
    between_sec: float = 1200.0
    """As of `serve`."""
    mixed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Runs whose hosts share nodes, as with `submit --needs`; and how long a decision takes."""
    solve_sec: float = 0.8
    """As of `serve`, of --mixed."""
    plot: Path | None = None
    """A PNG file for the picture."""
    json: Path | None = None
    """A file for the figures."""


def report(options: Simulate) -> None:
    """Plays and prints both policies, and writes what is asked for. Raises ConfigError for settings that cannot be."""
    _check(options)
    costs = Costs(options.resize_sec / 2, options.resize_sec, options.between_sec)
    rules = Rules(options.fairness, options.resized, options.solve_sec)
    runs, nodes, seed, mixed = options.runs, options.nodes, options.seed, options.mixed
    if mixed:
        jobs, shared = random_shared_jobs(runs, nodes, seed)
        results = [play_static_shared(jobs, shared, costs), play_elastic_shared(jobs, shared, rules, costs)]
    else:
        jobs = random_jobs(runs, nodes, seed)
        results = [play_static(jobs, nodes, costs), play_elastic(jobs, nodes, rules, costs)]
    console = Console(width=120)
    console.print(_table(f"{runs} runs on {nodes} {'shared ' if mixed else ''}nodes, seed {seed}", results, jobs))
    faster = results[0].completion_sec(jobs) / results[1].completion_sec(jobs)
    slower = int((faster < 1).sum())
    console.print(
        f"under elastic sizes a run ends {faster.mean():.2f} times as soon on average (median {np.median(faster):.2f}, "
        f"at most {faster.max():.1f}); {slower} of {runs} end later",
        highlight=False,
    )
    console.print(_compare_with_dorm(*results), highlight=False)
    if mixed:
        console.print(_describe_decisions(results[1], options.solve_sec), highlight=False)
    if options.json is not None:
        replace_file(options.json, _as_json(results, jobs))
    if options.plot is not None:
        replace_file(options.plot, _picture(results, jobs, None if mixed else nodes))


def _check(options: Simulate) -> None:
    """Raises OptionError for the first number that cannot be, ConfigError for a file that cannot be written."""
    if options.runs < 1 or options.nodes < 1:
        raise OptionError("--runs, --nodes: 1 or more.")
    if not 0 < options.solve_sec < math.inf or (options.solve_sec != Simulate.solve_sec and not options.mixed):
        raise OptionError("--solve-sec: a number above 0, with --mixed alone.")
    if options.seed < 0:
        raise OptionError(f"--seed {options.seed}: it must be 0 or more.")
    for option, value in (("--fairness", options.fairness), ("--resized", options.resized)):
        if not 0 <= value <= 1:
            raise OptionError(f"{option} {value:g}: it must be from 0 to 1.")
    for option, value in (("--resize-sec", options.resize_sec), ("--between-sec", options.between_sec)):
        if not 0 <= value < math.inf:
            raise OptionError(f"{option} {value:g}: it must be a number, 0 or more.")
    for path, option in ((options.plot, "--plot"), (options.json, "--json")):
        if path is not None:
            check_writable(path, option)


def _table(title: str, results: Sequence[Result], jobs: Sequence[Job]) -> Table:
    table = Table(title=title)
    columns = (
        "policy",
        "nodes in use",
        "fairness loss",
        "completion, h",
        "median",
        "lost by resizes",
        "resizes",
        "most at once",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for result in results:
        hours = result.completion_sec(jobs) / _HOUR
        table.add_row(
            result.policy,
            f"{result.utilization:.1%}",
            f"{result.fairness_loss:.3f}",
            f"{hours.mean():.2f}",
            f"{np.median(hours):.2f}",
            f"{result.lost:.1%}",
            str(result.num_resized),
            str(result.most_resized),
        )
    return table


def _compare_with_dorm(fixed: Result, resized: Result) -> str:
    """What elastic sizes give over static ones, beside what Dorm reports of its own cluster and applications."""
    dorm = (
        "Dorm (arXiv 1704.06738) reports, of its own cluster and applications: up to 2.32 times the utilization, "
        "fairness loss 1.52 times lower, applications up to 2.72 times as fast, less than 5 % lost in most cases"
    )
    if not fixed.utilization or not resized.fairness_loss:  # One run alone, say.
        return dorm
    used, fair = resized.utilization / fixed.utilization, fixed.fairness_loss / resized.fairness_loss
    return f"over static sizes {used:.2f} times the nodes in use, fairness loss {fair:.2f} times lower. {dorm}"


def _describe_decisions(played: Result, solve_sec: float) -> str:
    """What the decisions on shared nodes took."""
    at_once = np.array([len(nodes) for _, nodes in played.history])
    seconds = np.array(played.decide_sec)
    return (
        f"{len(seconds)} decisions on {at_once.mean():.0f} runs on average, {at_once.max()} at most, took "
        f"{seconds.mean():.2f} s on average, {seconds.max():.2f} s at most; in {played.num_struck} the limit of "
        f"{solve_sec:g} s struck"
    )


def _as_json(results: Sequence[Result], jobs: Sequence[Job]) -> bytes:
    figures = {
        result.policy: {
            "utilization": result.utilization,
            "fairness_loss": result.fairness_loss,
            "lost": result.lost,
            "resizes": result.num_resized,
            "completion_sec": result.completion_sec(jobs).tolist(),
        }
        for result in results
    }
    return json.dumps(figures, indent=1).encode()


def _picture(results: Sequence[Result], jobs: Sequence[Job], num_nodes: int | None) -> bytes:
    """The nodes of each run over time (None: hosts on shared nodes), stacked, one panel a policy."""
    from matplotlib import colormaps

    from jaxdl.report.style import dress, new_figure, png

    what = "nodes" if num_nodes else "hosts"
    figure = new_figure(9, 3.0 * len(results), f"{what.capitalize()} of each run over time")
    last = max(max(result.ended_sec.values()) for result in results) / _HOUR
    colors = colormaps["tab20"]
    axes: Any = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, result in zip(axes, results, strict=True):
        at = np.array([when for when, _ in result.history]) / _HOUR
        heights = [[nodes.get(job.name, 0) for _, nodes in result.history] for job in jobs]
        panel.stackplot(
            at, heights, step="post", colors=[colors(number % 20) for number in range(len(jobs))], lw=0.2, ec="white"
        )
        panel.set(xlim=(0, last), ylim=(0, num_nodes))
        panel.yaxis.get_major_locator().set_params(integer=True)
        mean = result.completion_sec(jobs).mean() / _HOUR
        title = f"{result.policy}: {result.utilization:.0%} of the nodes in use, a run takes {mean:.1f} h"
        dress(panel, title, x="hours" if panel is axes[-1] else "", y=what)
    return png(figure)
