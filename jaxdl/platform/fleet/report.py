"""The report of a simulated fleet: figures, and a picture of which run has which nodes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
    elastic,
    elastic_shared,
    made_up_jobs,
    made_up_shared,
    static,
    static_shared,
)

_HOUR = 3600.0


def report(
    *,
    runs: int,
    nodes: int,
    seed: int,
    fairness: float,
    resized: float,
    resize_sec: float,
    between_sec: float,
    mixed: bool,
    solve_sec: float,
    plot: Path | None,
    json: Path | None,
) -> None:
    """Plays and prints both policies, and writes what is asked for. Raises ConfigError for settings that cannot be."""
    _check(
        seed, {"--fairness": fairness, "--resized": resized}, {"--resize-sec": resize_sec, "--between-sec": between_sec}
    )
    for path, option in ((plot, "--plot"), (json, "--json")):
        if path is not None:
            check_writable(path, option)
    costs, rules = Costs(resize_sec / 2, resize_sec, between_sec), Rules(fairness, resized, solve_sec)
    if mixed:
        jobs, shared = made_up_shared(runs, nodes, seed)
        results = [static_shared(jobs, shared, costs), elastic_shared(jobs, shared, rules, costs)]
    else:
        jobs = made_up_jobs(runs, nodes, seed)
        results = [static(jobs, nodes, costs), elastic(jobs, nodes, rules, costs)]
    console = Console(width=120)
    console.print(_table(f"{runs} runs on {nodes} {'shared ' if mixed else ''}nodes, seed {seed}", results, jobs))
    faster = results[0].completion_sec(jobs) / results[1].completion_sec(jobs)
    slower = int((faster < 1).sum())
    console.print(
        f"under elastic sizes a run ends {faster.mean():.2f} times as soon on average (median {np.median(faster):.2f}, "
        f"at most {faster.max():.1f}); {slower} of {runs} end later",
        highlight=False,
    )
    console.print(_beside_dorm(*results), highlight=False)
    if mixed:
        console.print(_told(results[1], solve_sec), highlight=False)
    if json is not None:
        replace_file(json, _as_json(results, jobs))
    if plot is not None:
        replace_file(plot, _picture(results, jobs, None if mixed else nodes))


def _check(seed: int, parts: Mapping[str, float], times: Mapping[str, float]) -> None:
    """Raises OptionError for the first number that cannot be."""
    if seed < 0:
        raise OptionError(f"--seed {seed}: it must be 0 or more.")
    for option, value in parts.items():
        if not 0 <= value <= 1:
            raise OptionError(f"{option} {value:g}: it must be from 0 to 1.")
    for option, value in times.items():
        if not 0 <= value < math.inf:
            raise OptionError(f"{option} {value:g}: it must be a number, 0 or more.")


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
    for one in results:
        hours = one.completion_sec(jobs) / _HOUR
        table.add_row(
            one.policy,
            f"{one.utilization:.1%}",
            f"{one.fairness_loss:.3f}",
            f"{hours.mean():.2f}",
            f"{np.median(hours):.2f}",
            f"{one.lost:.1%}",
            str(one.num_resized),
            str(one.most_resized),
        )
    return table


def _beside_dorm(fixed: Result, resized: Result) -> str:
    """What elastic sizes give over static ones, beside what Dorm reports of its own cluster and applications."""
    dorm = (
        "Dorm (arXiv 1704.06738) reports, of its own cluster and applications: up to 2.32 times the utilization, "
        "fairness loss 1.52 times lower, applications up to 2.72 times as fast, less than 5 % lost in most cases"
    )
    if not fixed.utilization or not resized.fairness_loss:  # One run alone, say.
        return dorm
    used, fair = resized.utilization / fixed.utilization, fixed.fairness_loss / resized.fairness_loss
    return f"over static sizes {used:.2f} times the nodes in use, fairness loss {fair:.2f} times lower. {dorm}"


def _told(played: Result, solve_sec: float) -> str:
    """What the decisions on shared nodes took."""
    at_once = np.array([len(nodes) for _, nodes in played.history])
    seconds = np.array(played.decide_sec)
    return (
        f"{len(seconds)} decisions on {at_once.mean():.0f} runs on average, {at_once.max()} at most, took "
        f"{seconds.mean():.2f} s on average, {seconds.max():.2f} s at most; in {played.num_struck} the limit of "
        f"{solve_sec:g} s struck"
    )


def _as_json(results: Sequence[Result], jobs: Sequence[Job]) -> bytes:
    found = {
        one.policy: {
            "utilization": one.utilization,
            "fairness_loss": one.fairness_loss,
            "lost": one.lost,
            "resizes": one.num_resized,
            "completion_sec": one.completion_sec(jobs).tolist(),
        }
        for one in results
    }
    return json.dumps(found, indent=1).encode()


def _picture(results: Sequence[Result], jobs: Sequence[Job], num_nodes: int | None) -> bytes:
    """The nodes of each run over time (None: hosts on shared nodes), stacked, one panel a policy."""
    from matplotlib import colormaps

    from jaxdl.report.style import dress, new_figure, png

    what = "nodes" if num_nodes else "hosts"
    figure = new_figure(9, 3.0 * len(results), f"{what.capitalize()} of each run over time")
    last = max(max(one.ended_sec.values()) for one in results) / _HOUR
    colors = colormaps["tab20"]
    axes: Any = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, one in zip(axes, results, strict=True):
        at = np.array([when for when, _ in one.history]) / _HOUR
        heights = [[nodes.get(job.name, 0) for _, nodes in one.history] for job in jobs]
        panel.stackplot(
            at, heights, step="post", colors=[colors(number % 20) for number in range(len(jobs))], lw=0.2, ec="white"
        )
        panel.set(xlim=(0, last), ylim=(0, num_nodes))
        panel.yaxis.get_major_locator().set_params(integer=True)
        mean = one.completion_sec(jobs).mean() / _HOUR
        title = f"{one.policy}: {one.utilization:.0%} of the nodes in use, a run takes {mean:.1f} h"
        dress(panel, title, x="hours" if panel is axes[-1] else "", y=what)
    return png(figure)
