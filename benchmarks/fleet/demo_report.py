"""Checks and measures what benchmarks/fleet/demo.py played, from the journal of the fleet and the runs' metrics."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.demo_config import EVERY_STEPS
from jaxdl.core.files import METRICS_FILE, replace_file
from jaxdl.platform.fleet.policy import fairness_loss
from jaxdl.platform.fleet.simulate import Job, shares_of

TOLERANCE = 1e-5
"""Largest difference of a loss, relative to the larger of it and 1, after the mesh has changed: sums of float32 in
another order, which training amplifies."""


@dataclass(frozen=True)
class Asked:
    """A run of the demonstration."""

    name: str
    seed: int
    arrival_sec: float
    steps: int
    sizes: tuple[int, ...]
    whole_nodes: int = 2
    """The devices of the run that it is compared with, which is never resized or killed."""


@dataclass
class Attempt:
    """An attempt of a run, by the journal and the log of steps; times are Unix times."""

    run: str
    number: int
    nodes: tuple[str, ...]
    started: float
    why: str
    """Why it was started: `first`, `resized` by a decision, `moved` from a lost node, or after it had `failed`."""
    asked: float | None = None
    """When it was asked to save and end."""
    decided: bool = False
    """Whether that was by a decision of the policy, not for a lost node."""
    ended: float = 0.0
    code: int | None = None
    steps: tuple[tuple[int, float], ...] = ()
    """Its steps and when they were made."""
    queued: bool = False
    """Whether the cluster chose its nodes, and says itself what it has on them."""
    processes: set[tuple[int, int]] = field(default_factory=set)
    """(process id, number of nodes) of what made them."""

    @property
    def first_sec(self) -> float:
        """How long it took to its first step."""
        return (self.steps[0][1] if self.steps else self.ended) - self.started


def read_attempts(folder: Path, names: Mapping[str, str]) -> list[Attempt]:
    """The attempts of a play that have ended; `names` are those of the runs by their number in the fleet."""
    logs = {name: lines(folder / "steps" / f"{name}.jsonl") for name in names.values()}
    attempts: list[Attempt] = []
    open_: dict[str, Attempt] = {}
    last: dict[str, Attempt] = {}
    for event in lines(folder / "fleet" / "journal.jsonl"):
        name = names[event["run"]]
        if event["what"] == "started":
            before = last.get(name)
            if before is None:
                why = "first"
            elif before.asked is None:
                why = "failed"
            else:
                why = "resized" if before.decided else "moved"
            if name in open_:
                raise ValueError(f"{name}: attempt {event['attempt']} was started while another had not ended")
            queued = not event.get("placed", True)
            open_[name] = Attempt(name, event["attempt"], tuple(event["nodes"]), event["at"], why, queued=queued)
        elif event["what"] == "placed":
            open_[name].nodes = tuple(event["nodes"])
        elif event["what"] == "stopping":
            open_[name].asked, open_[name].decided = event["at"], " -> " in event["reason"]
        elif event["what"] in ("left", "ended"):
            attempt = last[name] = open_.pop(name)
            attempt.ended, attempt.code = event["at"], event["code"]
            made = [line for line in logs[name] if attempt.started <= line["at"] <= attempt.ended]
            attempt.steps = tuple((line["step"], line["at"]) for line in made)
            attempt.processes = {(line["pid"], line["nodes"]) for line in made}
            attempts.append(attempt)
    for name, log in logs.items():
        if len(log) != sum(len(attempt.steps) for attempt in attempts if attempt.run == name):
            raise ValueError(f"{name}: some of its {len(log)} steps were made outside of its attempts")
    return attempts


def names_of(asked: Sequence[Asked], folder: Path) -> dict[str, str]:
    """Number in the fleet -> name, by the workdirs of the submissions."""
    names = {run.name for run in asked}
    by_number = {}
    for path in sorted((folder / "fleet" / "runs").glob("*/submission.json")):
        command = json.loads(path.read_text(encoding="utf-8"))["command"]
        workdir = Path(command[command.index("--workdir") + 1]).name
        by_number[path.parent.name] = workdir if workdir in names else ""
    return by_number


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check(out: Path, asked: Sequence[Asked], plays: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """(what is wrong, a comparison with the run that was never resized nor killed for each run of each play)."""
    problems: list[str] = []
    compared = []
    for play in plays:
        try:
            attempts = read_attempts(out / play, names_of(asked, out / play))
        except ValueError as error:
            return [f"{play}: {error}"], []
        problems += [f"{play}: {problem}" for problem in wrong_starts(asked, attempts)]
        for run in asked:
            run_attempts = [attempt for attempt in attempts if attempt.run == run.name]
            problems += [f"{play}, {run.name}: {what}" for what in wrong_steps(run, run_attempts)]
            comparison = compare(out / play / run.name, out / "whole" / run.name, run, run_attempts)
            problems += [f"{play}, {run.name}: {what}" for what in comparison.pop("problems")]
            compared.append({"play": play, "run": run.name, **comparison})
    return problems, compared


def wrong_starts(asked: Sequence[Asked], attempts: Sequence[Attempt]) -> list[str]:
    """What was lost, or started twice: attempts of a run one after the other, a node with one run at a time."""
    problems = []
    completed = {attempt.run for attempt in attempts if attempt.code == 0}
    problems += [f"{asked_run.name} has not completed" for asked_run in asked if asked_run.name not in completed]
    by_run, by_node = defaultdict(list), defaultdict(list)
    for attempt in attempts:
        by_run[attempt.run].append(attempt)
        for node in () if attempt.queued else attempt.nodes:
            by_node[node].append(attempt)
    for run, ones in by_run.items():
        numbers = [attempt.number for attempt in ones]
        if len(set(numbers)) != len(numbers) or numbers != sorted(numbers):
            problems.append(f"{run} has attempts {numbers}")
        if sum(attempt.code == 0 for attempt in ones) > 1:
            problems.append(f"{run} has completed more than once")
    for what, groups in (("run", by_run), ("node", by_node)):
        for name, ones in groups.items():
            for earlier, later in pairwise(sorted(ones, key=lambda attempt: attempt.started)):
                if later.started < earlier.ended:
                    problems.append(f"{what} {name} has two attempts at a time")
    return problems


def wrong_steps(run: Asked, attempts: Sequence[Attempt]) -> list[str]:
    """Steps that an attempt should not have made: each follows the last, but for those that a kill took."""
    problems, done = [], 0
    for attempt in attempts:
        steps = [step for step, _ in attempt.steps]
        if steps != list(range(steps[0], steps[0] + len(steps))) if steps else False:
            problems.append(f"attempt {attempt.number} made steps {steps}")
        if len(attempt.processes) > 1 or any(size != len(attempt.nodes) for _, size in attempt.processes):
            problems.append(f"attempt {attempt.number} on {len(attempt.nodes)} nodes had {attempt.processes}")
        if steps:
            again = done + 1 - steps[0]
            # A kill takes at most the steps since a checkpoint, and one that was being written.
            most = 0 if earlier_saved(attempts, attempt) else 2 * EVERY_STEPS
            if not 0 <= again <= most:
                problems.append(f"attempt {attempt.number} began at step {steps[0]} after step {done}")
            done = steps[-1]
    return problems if done == run.steps else [*problems, f"it ended at step {done} of {run.steps}"]


def earlier_saved(attempts: Sequence[Attempt], attempt: Attempt) -> bool:
    """Whether the attempt before, that made steps, ended by SIGTERM, so that it had saved them."""
    before = [other for other in attempts if other.number < attempt.number and other.steps]
    return bool(before) and before[-1].code == 143


def compare(workdir: Path, reference: Path, run: Asked, attempts: Sequence[Attempt]) -> dict[str, Any]:
    """The metrics of a run beside those of the same run on `whole_nodes`, never resized or killed."""
    ours, theirs = metrics(workdir), metrics(reference)
    problems = [f"metrics.jsonl has {what} twice" for what in doubled(workdir)]
    if list(ours) != list(range(1, run.steps + 1)):
        problems.append(f"metrics.jsonl has steps {list(ours)}")
    lacking = [step for step, values in theirs.items() if values.keys() - ours.get(step, {}).keys()]
    if lacking:
        problems.append(f"metrics.jsonl lacks numbers of steps {lacking}")
    nodes = {step: len(attempt.nodes) for attempt in attempts for step, _ in attempt.steps}
    changed = min((step for step, size in nodes.items() if size != run.whole_nodes), default=run.steps + 1)
    # The last attempt may have had no step to make, but the last evaluation.
    if attempts and len(attempts[-1].nodes) != run.whole_nodes:
        changed = min(changed, run.steps)
    # The evaluation and the row of a step belong to it.
    equal = [step for step in theirs if ours.get(step) == theirs[step]]
    same = [step for step in theirs if step < changed]
    if not set(same) <= set(equal):
        problems.append(f"steps {sorted(set(same) - set(equal))} differ, though the mesh had not changed")
    losses = {
        step: abs(ours[step]["train/loss"] - theirs[step]["train/loss"]) / max(1.0, abs(theirs[step]["train/loss"]))
        for step in theirs
        if step not in lacking
    }
    final = [ours.get(run.steps, {}).get("eval/loss", float("nan")), theirs[run.steps]["eval/loss"]]
    away = abs(final[0] - final[1]) / max(1.0, abs(final[1]))
    if not all(difference <= TOLERANCE for difference in (*losses.values(), away)):  # NaN is not.
        problems.append(f"its losses differ by {sorted({*losses.values(), away})[-3:]}, more than {TOLERANCE:g}")
    return {
        "mesh_changed_at": changed if changed <= run.steps else None,
        "sizes": [len(attempt.nodes) for attempt in attempts],
        "attempts": len(attempts),
        "steps": run.steps,
        "bit_equal_steps": len(equal),
        "worst_loss": max(losses.values(), default=float("nan")),
        "worst_evaluation": away,
        "accuracy": [ours.get(run.steps, {}).get("eval/accuracy"), theirs[run.steps]["eval/accuracy"]],
        "problems": problems,
    }


def metrics(workdir: Path) -> dict[int, dict[str, float]]:
    """Step -> what was measured in training and evaluation, without times; a step that is there twice comes last."""
    by_step: dict[int, dict[str, float]] = {}
    for row in lines(workdir / METRICS_FILE):
        values = {name: value for name, value in row.items() if name.startswith(("train/", "eval/"))}
        if "event" in row or not values:
            continue
        if set(values) & set(by_step.get(row["step"], {})):
            by_step.pop(row["step"])
        by_step[row["step"]] = by_step.get(row["step"], {}) | values
    return by_step


def doubled(workdir: Path) -> list[str]:
    """What metrics.jsonl has more than once: a step that was made again must be there once."""
    counts: Counter[tuple[int, str]] = Counter()
    for row in lines(workdir / METRICS_FILE):
        if "event" not in row:
            counts.update((row["step"], name) for name in ("train/loss", "eval/loss") if name in row)
    return [f"{name} of step {step}" for (step, name), count in counts.items() if count > 1]


def measure(
    out: Path, asked: Sequence[Asked], plays: Mapping[str, tuple[float, list[dict[str, Any]]]], num_nodes: int
) -> dict[str, Any]:
    """Play -> its figures, over the time until the first play was over."""
    attempts = {play: read_attempts(out / play, names_of(asked, out / play)) for play in plays}
    until = min(max(attempt.ended for attempt in attempts[play]) - began for play, (began, _) in plays.items())
    figures = {}
    for play, (began, harmed) in plays.items():
        ones = attempts[play]
        completion = {
            run.name: max(a.ended for a in ones if a.run == run.name) - began - run.arrival_sec for run in asked
        }
        whole = sum(len(attempt.nodes) * (attempt.ended - attempt.started) for attempt in ones)
        busy = sum(
            len(attempt.nodes) * (min(attempt.ended, began + until) - min(attempt.started, began + until))
            for attempt in ones
        )
        lost = {"resized": 0.0, "first": 0.0, "moved": 0.0, "failed": 0.0}
        for attempt in ones:
            lost[attempt.why] += len(attempt.nodes) * attempt.first_sec
        for before, after in pairs_of(ones):
            if before.asked is not None:
                lost[after.why] += len(before.nodes) * (before.ended - before.asked)
        figures[play] = {
            "until_sec": until,
            "took_sec": max(attempt.ended for attempt in ones) - began,
            "utilization": busy / (num_nodes * until),
            "completion_sec": completion,
            "mean_completion_sec": sum(completion.values()) / len(completion),
            "fairness_loss": unfairness(asked, ones, began, until, num_nodes),
            "lost": {why: sec / whole for why, sec in lost.items()},
            "attempts": {why: sum(attempt.why == why for attempt in ones) for why in lost},
            "stopped_sec": [attempt.ended - attempt.asked for attempt in ones if attempt.asked is not None],
            "first_step_sec": [attempt.first_sec for attempt in ones if attempt.steps],
            "steps_made_again": sum(len(attempt.steps) for attempt in ones) - sum(run.steps for run in asked),
            "harmed": [{**harm, "at": harm["at"] - began} for harm in harmed],
            "bars": [
                (attempt.run, attempt.nodes, attempt.started - began, attempt.first_sec, attempt.ended - began)
                for attempt in ones
            ],
        }
    return figures


def pairs_of(attempts: Sequence[Attempt]) -> list[tuple[Attempt, Attempt]]:
    """Each attempt with the next one of its run."""
    by_run = defaultdict(list)
    for attempt in attempts:
        by_run[attempt.run].append(attempt)
    return [pair for ones in by_run.values() for pair in pairwise(ones)]


def unfairness(
    asked: Sequence[Asked], attempts: Sequence[Attempt], began: float, until: float, num_nodes: int
) -> float:
    """The mean over time of `fairness_loss`, of the runs that are there, waiting or not, and could have all sizes."""
    ends = {run.name: max(a.ended for a in attempts if a.run == run.name) - began for run in asked}
    times = {0.0, until, *ends.values(), *(run.arrival_sec for run in asked)}
    times |= {at - began for attempt in attempts for at in (attempt.started, attempt.ended)}
    total = 0.0
    for begin, end in pairwise(sorted(at for at in times if at <= until)):
        middle = (begin + end) / 2
        there = [run for run in asked if run.arrival_sec <= middle < ends[run.name]]
        jobs = [Job(run.name, 0.0, 1.0, dict.fromkeys(run.sizes, 1.0), 2) for run in there]
        nodes = {run.name: 0 for run in there}
        for attempt in attempts:
            if attempt.started <= began + middle < attempt.ended and attempt.run in nodes:
                nodes[attempt.run] = len(attempt.nodes)
        total += (end - begin) * fairness_loss(nodes, shares_of(jobs, num_nodes), num_nodes)
    return total / until


def write_report(
    out: Path, asked: Sequence[Asked], measures: Mapping[str, Any], compared: Sequence[Mapping[str, Any]],
    problems: Sequence[str], num_nodes: int, took_sec: float,
) -> None:  # fmt: skip
    """Prints the tables, and writes fleet_demo.json and fleet_demo.png."""
    console = Console(width=150)
    table = Table(title=f"{len(asked)} runs on {num_nodes} nodes; the same kinds of harm in both", title_justify="left")
    columns = ("nodes in use", "mean completion, s", "all done, s", "fairness loss", "lost: resizing", "other starts",
               "resizes", "steps again")  # fmt: skip
    table.add_column("play")
    for column in columns:
        table.add_column(column, justify="right")
    for play, measure in measures.items():
        others = sum(part for why, part in measure["lost"].items() if why != "resized")
        table.add_row(
            play, f"{measure['utilization']:.1%}", f"{measure['mean_completion_sec']:.1f}",
            f"{measure['took_sec']:.1f}", f"{measure['fairness_loss']:.3f}",
            f"{measure['lost']['resized']:.1%}", f"{others:.1%}",
            str(measure["attempts"]["resized"]), str(measure["steps_made_again"]),
        )  # fmt: skip
    console.print(table)
    print_compared(console, compared, problems)
    console.print(f"took {took_sec:.0f} s")
    content = {"took_sec": took_sec, "problems": list(problems), "plays": measures, "compared": list(compared)}
    replace_file(out / "fleet_demo.json", json.dumps(content, indent=1).encode())
    replace_file(out / "fleet_demo.png", picture(measures, asked, num_nodes))


def print_compared(console: Console, compared: Sequence[Mapping[str, Any]], problems: Sequence[str]) -> None:
    """Prints the runs beside those that were never resized or killed, and what is wrong."""
    table = Table(title="Beside the same run, never resized or killed", title_justify="left")
    columns = ("play", "run", "nodes of its attempts", "mesh changed", "bit-equal steps", "worst loss", "evaluation")
    for column in columns:
        table.add_column(column)
    for row in compared:
        changed = "never" if row["mesh_changed_at"] is None else f"from step {row['mesh_changed_at']}"
        equal = f"{row['bit_equal_steps']} of {row['steps']}"
        errors = (f"{row['worst_loss']:.1e}", f"{row['worst_evaluation']:.1e}")
        table.add_row(row["play"], row["run"], " ".join(map(str, row["sizes"])), changed, equal, *errors)
    console.print(table)
    for problem in problems:
        console.print(f"WRONG: {problem}", style="red", highlight=False)
    if not problems:
        console.print(
            "all runs completed, none was lost or started twice, every step is there once; bit-equal where the mesh "
            f"never changed, within {TOLERANCE:g} of the losses (relative) where it did"
        )


def picture(measures: Mapping[str, Any], asked: Sequence[Asked], num_nodes: int) -> bytes:
    """The run of each node over time, one panel a play; hatched until the first step of an attempt."""
    from matplotlib import colormaps

    from jaxdl.report.style import dress, new_figure, png

    figure = new_figure(11, 2.6 * len(measures) + 0.6, "Which run each node has")
    colors = {run.name: colormaps["tab10"](number % 10) for number, run in enumerate(asked)}
    last = max(measure["took_sec"] for measure in measures.values())
    axes: Any = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (play, one) in zip(axes, measures.items(), strict=True):
        for run, nodes, begin, first, end in one["bars"]:
            for row in sorted(int(node.removeprefix("node")) for node in nodes):
                panel.barh(
                    row, min(first, end - begin), left=begin, color="white", ec=colors[run], hatch="////", lw=0.5
                )
                panel.barh(row, max(0, end - begin - first), left=begin + first, color=colors[run], ec="white", lw=0.5)
            panel.text(
                begin + 0.5, int(nodes[0].removeprefix("node")), run.removeprefix("run"), fontsize=7, va="center"
            )
        for harm in one["harmed"]:
            row = int(harm["node"].removeprefix("node")) if "node" in harm else num_nodes - 0.4
            panel.plot(harm["at"], row, "kx" if harm["what"] != "server" else "kv", ms=6)
        panel.set(xlim=(0, last), ylim=(-0.6, num_nodes), yticks=range(num_nodes))
        title = f"{play}: {one['utilization']:.0%} of the nodes in use, a run takes {one['mean_completion_sec']:.0f} s"
        dress(panel, title, x="seconds (hatched: starting; cross: killed; triangle: server killed)", y="node")
    return png(figure)
