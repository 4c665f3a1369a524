"""What the commands `status` and `explain` print of a fleet."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdl.platform.fleet.member import ENDED, RESUMABLE
from jaxdl.platform.fleet.resources import format_amounts
from jaxdl.platform.fleet.sizes import describe_left_out
from jaxdl.platform.fleet.speed import GUESS, GUESSED, MEASURED, Estimate
from jaxdl.platform.fleet.store import Store
from jaxdl.report.status import read_row

_WIDE = 110
"""From this many characters on, workdirs have a column of their own."""
_ENDED = 50
"""Number of complete or cancelled runs in the table: those that ended last."""


def show_status(store: Store, *, as_json: bool) -> None:
    """Prints the runs and nodes as the server last saw them, and the step that each run says it has."""
    view = store.view()
    known = {run["run"] for run in view["runs"]}
    waiting = [name for name in store.names() if name not in known]
    older = set[str]() if as_json else _older(view["runs"])
    runs = [run | {"step": _step(run)} for run in view["runs"] if run["run"] not in older]
    if as_json:
        print(json.dumps(view | {"runs": runs, "not_seen": waiting}, indent=2))
        return
    age = time.time() - view["at"]
    used = sum(bool(run) for run in view["nodes"].values())
    console = Console()
    table = _table(runs, beside=console.width >= _WIDE)
    table.title = f"{used} of {len(view['nodes'])} nodes have a run, {age:.0f} s ago"
    console.print(table)
    if older:
        console.print(
            f"{len(older):,} earlier runs have ended: --json has them, `remove --ended` takes all that have ended away"
        )
    if view.get("free"):
        left = Table(title="what is left of nodes")
        for column in ("node", "runs", "free"):
            left.add_column(column)
        for node, free in view["free"].items():
            left.add_row(node, view["nodes"][node], format_amounts(free))
        console.print(left)
    if view.get("lost"):
        console.print(f"out of service: {', '.join(view['lost'])}")
    for problem in view.get("problems", ()):
        console.print(f"damaged: {escape(problem)}", soft_wrap=True)
    for problem in view.get("engine", ()):
        console.print(escape(problem), soft_wrap=True)
    if waiting:
        console.print(f"accepted, and not seen by a server yet: {', '.join(waiting)}")


def _older(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The runs that are not in the table. Those that somebody may have to look after are in it."""
    done = [run for run in runs if run["state"] in ENDED and run["state"] not in RESUMABLE]
    # A server of an earlier version did not tell when they ended.
    done.sort(key=lambda run: run.get("ended") or run.get("since") or 0.0)
    return {run["run"] for run in done[:-_ENDED]}


def _table(runs: Sequence[Mapping[str, Any]], *, beside: bool) -> Table:
    """The runs; workdirs in a column of their own if `beside`, else beneath the reasons."""
    table = Table()
    for column in ("run", "state", "nodes", "share", "attempt", "resized", "step"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=True)
    for column in ("workdir", "why") if beside else ("why, and workdir",):
        table.add_column(column, overflow="fold")
    here = f"{Path.cwd()}/"
    for run in runs:
        counts = (f"{run['share']:.3g}", str(run["attempt"]), str(run["resized"]))
        step, workdir = "" if run["step"] is None else f"{run['step']:,}", run["workdir"].removeprefix(here)
        words = (workdir, run["reason"]) if beside else (f"{run['reason']}\n{workdir}".strip(),)
        table.add_row(run["run"], run["state"], _num_nodes(run), *counts, step, *map(escape, words))
    return table


def _step(run: Mapping[str, Any]) -> int | None:
    """The step of a run by its workdir; None without one, or before there is any."""
    return read_row(Path(run["workdir"])).step if run["workdir"] else None


def _num_nodes(run: Mapping[str, Any]) -> str:
    """How many nodes a run has; of one that shares nodes, how many hosts on how many nodes."""
    hosts, nodes = len(run["nodes"]), len(set(run["nodes"]))
    return f"{hosts} hosts on {nodes}" if run.get("needs") and hosts else str(nodes)


def explain(view: Mapping[str, Any]) -> list[str]:
    """Lines on what the last decision said of each run, and what is left of nodes."""
    lines: list[str] = []
    for run in view["runs"]:
        unit = "host" if run.get("needs") else "node"
        # A server of an earlier version told the measured speeds alone.
        speeds = run.get("estimates", {size: (speed, MEASURED) for size, speed in run["speeds"].items()})
        known = format_speeds({int(size): Estimate(*estimate) for size, estimate in speeds.items()}, unit)
        sizes = ", ".join(map(str, run["sizes"]))
        lines.append(f"run {run['run']}, {run['state']}: {run['reason']}")
        if run["decided"] not in ("", run["reason"]):
            lines.append(f"  the last decision: {run['decided']}")
        if run.get("killed"):
            lines.append(f"  it did not save and end in time, and was killed: {run['killed']} times")
        each = f", each with {format_amounts(run['needs'])}" if run.get("needs") else ""
        lines.append(
            f"  it may have {sizes} {unit}s{each}; weight {run['weight']:g}, priority {run['priority']}; speed: {known}"
        )
        left_out = {int(size): why for size, why in run.get("left_out", {}).items()}
        lines += [f"  {line}" for line in describe_left_out(left_out, unit)]
    for node, free in view.get("free", {}).items():
        lines.append(f"{node}: {format_amounts(free)} are free; runs: {view['nodes'][node] or 'none'}")
    return lines


def format_speeds(speeds: Mapping[int, Estimate], unit: str) -> str:
    """The speeds of a run, and where each is from; `unit`: node or host."""
    if all(estimate.source == GUESSED for estimate in speeds.values()):
        return f"not measured; guess: n {unit}s are n^{GUESS:g} times as fast as one"
    by_size = [
        f"{size} {unit}{'' if size == 1 else 's'} {estimate.examples_per_sec:,.0f}/s ({estimate.source})"
        for size, estimate in speeds.items()
    ]
    return ", ".join(by_size)
