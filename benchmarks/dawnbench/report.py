"""The page that `reproduce` writes at its end: report.md, with a picture."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.dawnbench.checks import Line
from benchmarks.dawnbench.entry import ALIBABA_IMAGES_PER_SEC, PUBLISHED, TARGET, Epoch, reached
from jaxdl.exchange import exchanged_on_mesh
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import is_spec
from jaxdl.report import event_of, replace_file, style
from jaxdl.training.run.plan.build import Plan, make_exchange_state
from jaxdl.training.run.result import Run


class PhaseSpeed(NamedTuple):
    """The measurements of a phase."""

    size: int
    epochs: float
    batch_size: int
    num_steps: int
    images_per_sec: float
    """Median over the reports of the phase; waiting for data included."""

    @property
    def step_sec(self) -> float:
        """Seconds a step."""
        return self.batch_size / self.images_per_sec


def epochs_of(run: Run, before_sec: float) -> list[Epoch]:
    """A line for each evaluation. `before_sec` passed from the start of the clock to that of the training."""
    history, epochs = run.history, []
    for row in range(len(history["step"])):
        top1, top5 = history["eval/accuracy"][row], history["eval/accuracy_top5"][row]
        if not _is_number(top1):
            continue
        phases = {name for name in history if name.startswith("seconds/")}
        counted = phases - {"seconds/eval", "seconds/checkpoint"}
        seconds = before_sec + sum(history[name][row] for name in counted if _is_number(history[name][row]))
        epochs.append(Epoch(math.floor(history["epoch"][row] + 1e-9), seconds / 3600, 100 * top1, 100 * top5))
    return epochs


def was_resumed(run: Run) -> bool:
    """Whether the run was resumed or rolled back: then its clock does not count."""
    rows = [dict(zip(run.history, row, strict=True)) for row in zip(*run.history.values(), strict=True)]
    events = [event for event in map(event_of, rows) if event is not None]
    return any(event.kind in ("resume", "restart", "rollback") for event in events)


def phase_speeds(run: Run) -> list[PhaseSpeed]:
    """The speed of each phase."""
    history, phases = run.history, []
    for segment in run.plan.timeline.segments:
        assert segment.phase is not None
        end = segment.first + segment.num_steps
        speeds = [
            speed
            for step, speed in zip(history["step"], history["examples_per_sec"], strict=True)
            if segment.first < step <= end and _is_number(speed)
        ]
        speed = statistics.median(speeds) if speeds else float("nan")
        phase = segment.phase
        phases.append(PhaseSpeed(phase.size, phase.epochs, segment.batch_size, segment.num_steps, speed))
    return phases


def exchange_seconds(plan: Plan, num_repeats: int = 5) -> float | None:
    """Median seconds of an exchange of random gradients by itself; None with one replica. All processes call it."""
    parts, spec = plan.parts, plan.parts.state_spec
    mesh = parts.layout.mesh
    replicas = mesh.shape[Axis.REPLICA]
    if replicas == 1:
        return None
    places = jax.tree.map(lambda leaf_spec: PartitionSpec(Axis.REPLICA.value, *leaf_spec), spec.grads, is_leaf=is_spec)
    shardings = jax.tree.map(lambda place: NamedSharding(mesh, place), places, is_leaf=is_spec)

    def gradients() -> Any:
        leaves, treedef = jax.tree.flatten(parts.network.param_shapes)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        made = [jax.random.normal(key, (replicas, *x.shape)) for key, x in zip(keys, leaves, strict=True)]
        return treedef.unflatten(made)

    grads = jax.jit(gradients, out_shardings=shardings)()
    state = make_exchange_state(plan)
    key, times = jax.random.key(1), []
    exchange = exchanged_on_mesh(parts.exchange, spec.grads, spec.specs.exchange_state, mesh, wanted=spec.update)
    kept = jax.tree.map(lambda x: x.sharding, state)  # The new state is passed to the next call.
    exchanged = jax.jit(exchange, out_shardings=(None, kept, None)).lower(grads, state, key).compile()
    wait_for_all()  # Gloo gives up when a process has compiled for 30 s longer than another.
    for repeat in range(num_repeats + 1):
        start = time.perf_counter()
        mean, state, _ = jax.block_until_ready(exchanged(grads, state, key))
        del mean
        if repeat:  # The first call warms up.
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def write_report(
    folder: Path,
    run: Run,
    rows: Sequence[Epoch],
    *,
    checks: Sequence[Line],
    expectations: Sequence[str],
    exchange_sec: float | None,
    price_per_hour: float | None,
    before_sec: float,
    is_rehearsal: bool,
    entry: str | None,
) -> Path:
    """Writes report.md and accuracy.png; returns the page's path."""
    replace_file(folder / "accuracy.png", figure(rows))
    target, last = reached(rows), rows[-1]
    result = (
        f"**{TARGET:g} % top-5 after epoch {target.epoch}: {_time(3600 * target.hours)}**"
        if target
        else f"**{TARGET:g} % top-5 was not reached.**"
    )
    lines = ["# DAWNBench, ImageNet training" + (": a rehearsal" if is_rehearsal else ""), "", result, ""]
    if is_rehearsal:
        lines += ["Another network on other data: no time, cost or accuracy here says anything about ImageNet.", ""]
    lines += [f"- last epoch: top-1 {last.top1:.2f} %, top-5 {last.top5:.2f} % after {_time(3600 * last.hours)}"]
    if price_per_hour is not None:
        hours = (target or last).hours
        lines += [f"- cost: {hours:.4f} hours at ${price_per_hour:,.2f} an hour: **${hours * price_per_hour:,.2f}**"]
    if was_resumed(run):
        lines += ["- the run was resumed or rolled back: the time between is missing, so it is no entry to submit"]
    lines += [f"- entry: `{entry}.json`, `{entry}.tsv`" if entry else "- no entry is written"]
    lines += ["- losses, learning rate and speed: `run/curves.png`"]
    lines += ["", "![accuracy](accuracy.png)", "", *_phases(run, exchange_sec), "", "## The published times", ""]
    lines += _published(None if is_rehearsal else target)
    lines += ["", "## The clock", "", *_clock(run, before_sec), "", "## Before the start", ""]
    lines += [f"- {line.what}: {line.found}" for line in checks]
    lines += ["", *(f"- {line}" for line in expectations), "", "## Every evaluation", ""]
    lines += ["| epoch | time | top-1 % | top-5 % |", "|---|---|---|---|"]
    lines += [f"| {row.epoch} | {_time(3600 * row.hours)} | {row.top1:.2f} | {row.top5:.2f} |" for row in rows]
    path = folder / "report.md"
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return path


def _published(target: Epoch | None) -> list[str]:
    """The table of the published times, beside that of `target`; None when there is nothing to compare."""
    lines = ["| date | team | hardware | time | this run is |", "|---|---|---|---|---|"]
    for entry in PUBLISHED:
        ratio = f"{entry.seconds / (3600 * target.hours):.2f} x as fast" if target else "not to be compared"
        lines.append(f"| {entry.date} | {entry.team} | {entry.hardware} | {_time(entry.seconds)} | {ratio} |")
    return lines


def _phases(run: Run, exchange_sec: float | None) -> list[str]:
    """The table of the phases, and the time of the exchange."""
    devices = run.plan.parts.layout.mesh.size
    heads = ["epochs", "pixels", "batch", "steps", "images/s", "a device", "ms a step", "exchange alone / step"]
    lines = ["## Phases", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in phase_speeds(run):
        share = "-" if exchange_sec is None else f"{100 * exchange_sec / row.step_sec:.0f} %"
        lines.append(
            f"| {row.epochs:g} | {row.size} | {row.batch_size:,} | {row.num_steps:,} | {row.images_per_sec:,.0f} | "
            f"{row.images_per_sec / devices:,.0f} | {1e3 * row.step_sec:.1f} | {share} |"
        )
    lines += ["", "Images a second are those of the training steps, waiting for data included; medians."]
    published = ", ".join(f"{size}: {round(speed / 128):,}" for size, speed in ALIBABA_IMAGES_PER_SEC.items())
    lines += [f"Alibaba's entry, on each of its V100 and with its evaluations, by pixels: {published}.", ""]
    if exchange_sec is None:
        return [*lines, "One node: no gradient was exchanged."]
    sent = [num_bytes for num_bytes in run.history["train/exchange/bytes_sent/replica"] if _is_number(num_bytes)]
    name = run.plan.exchange.label
    lines += [
        f"Exchange: {name}, {sent[-1] / 1e6:,.2f} MB that a device sends in a step. By itself it took "
        f"{1e3 * exchange_sec:.1f} ms; the part of it that overlaps with computation is not subtracted."
    ]
    return lines


def _clock(run: Run, before_sec: float) -> list[str]:
    seconds = run.summary["seconds"]
    counted = {name: value for name, value in seconds.items() if name not in ("eval", "checkpoint")}
    parts = f"start {before_sec:.1f} s, " + ", ".join(f"{name} {value:.1f} s" for name, value in counted.items())
    return [
        "It runs from the start of the program, reading the data, making the model and compiling included, and stands "
        "still while the model is evaluated or a checkpoint is written (dawn-bench-entries, issues 9 and 21) and for "
        "the checks before the start. Meanwhile the next images are read, and the steps of the next phase compiled.",
        "",
        f"Counted: {parts}; not counted: eval {seconds.get('eval', 0):.1f} s, "
        f"checkpoint {seconds.get('checkpoint', 0):.1f} s.",
    ]


def figure(rows: Sequence[Epoch]) -> bytes:
    """A PNG: top-5 and top-1 of every evaluation over the minutes of the clock."""
    drawn = style.new_figure(8.5, 5, "Validation accuracy, measured")
    axes = drawn.subplots()
    minutes = [60 * row.hours for row in rows]
    every = max(1, len(rows) // 40)
    lines = {
        "top-5": ([row.top5 for row in rows], "#0072b2", "o"),
        "top-1": ([row.top1 for row in rows], "#e69f00", "s"),
    }
    entries = []
    for name, (values, color, mark) in lines.items():
        axes.plot(minutes, values, color=color, marker=mark, lw=1.4, markevery=every, **style.MEASURED)
        entries.append(style.line_entry(name, color, mark, **style.MEASURED))
    axes.axhline(TARGET, color=style.INK, lw=1, ls=":")
    entries.append(style.line_entry(f"target: {TARGET:g} % top-5", style.INK, ls=":"))
    if (target := reached(rows)) is not None:
        axes.plot(60 * target.hours, target.top5, "*", color=style.INK, ms=13, mec="white", mew=0.6)
        label = f"reached after {_time(3600 * target.hours)}"
        entries.append(style.line_entry(label, style.INK, "*", ls="", ms=13, mec="white"))
    style.dress(axes, x="minutes on the clock", y="accuracy, %")
    axes.set(ylim=(0, 101), xlim=(0, None))
    axes.locator_params(axis="x", nbins=8)
    style.legend(drawn, entries)
    return style.png(drawn)


def _time(seconds: float) -> str:
    hours, rest = divmod(round(seconds, 1), 3600)
    minutes, rest = divmod(rest, 60)
    return (f"{hours:.0f} h " if hours else "") + (f"{minutes:.0f} min " if hours or minutes else "") + f"{rest:.1f} s"


def _is_number(value: Any) -> bool:
    return value is not None and value == value
