"""What the training loop adds to the step: data, metrics, reports and the host, over the bare jitted step."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from jaxdl.config import CLI_STYLE
from jaxdl.experiment import Experiment, load
from jaxdl.plan import make_initial_state, make_plan
from jaxdl.report import Stopwatch
from jaxdl.signals import StopSignals
from jaxdl.trainer import Session


@dataclass(frozen=True)
class StepBench:
    """Compares the loop's time per step with that of the bare step on resident data, interleaved."""

    config: Path
    """The experiment: a Python file with a function config()."""
    steps: int = 100
    """Steps in one repeat of either side."""
    repeats: int = 7
    """How often each side is measured; medians count."""


def main(args: list[str]) -> None:
    """Runs the measurement and prints both medians and their ratio."""
    command = tyro.cli(StepBench, args=args, prog="python -m jaxdl.bench step", config=CLI_STYLE)
    result = measure(load(command.config), steps=command.steps, repeats=command.repeats)
    table = Table(title=f"{command.config}, {result['devices']}")
    for column in ("", "ms a step (median)", "min", "max"):
        table.add_column(column, justify="left" if not column else "right")
    for side in ("bare step", "loop"):
        times = [1e3 * value for value in result[side]]
        table.add_row(side, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
    console = Console()
    console.print(table)
    console.print(f"loop / bare step = {result['ratio']:.3f} (median of {command.repeats} interleaved pairs)")


def measure(experiment: Experiment, *, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds a step of both sides, a list each of `repeats`, and `ratio`, the median of the pairs' ratios.

    The loop is the trainer's own, with its data, metrics, reports and files in a temporary workdir; evaluations and
    checkpoints do not fall into the measured steps. The bare step is the same compiled function on one resident batch.
    """
    total = steps * (repeats + 1) + 2
    far = {"epochs": None, "steps": total, "evaluation.every_steps": 2 * total, "checkpoint.every_steps": 2 * total}
    far |= {"evaluation.every_epochs": None, "checkpoint.every_epochs": None}
    plan = make_plan(experiment.replaced(far))
    times: dict[str, list[float]] = {"bare step": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder, StopSignals() as stop, contextlib.ExitStack() as stack:
        session = Session(plan, Path(folder), stop, Stopwatch(), stack, Console(quiet=True))
        session.prepare()
        session.compile()
        session.start_loop()
        state, batch = make_initial_state(plan), next(session.loader)

        def bare() -> None:
            nonlocal state
            for _ in range(steps):
                state, metrics = session.train_step(state, batch)
                if not session.run_ahead:
                    jax.block_until_ready(metrics)
            jax.block_until_ready(state)

        def loop() -> None:
            for _ in range(steps):
                session.advance()
            jax.block_until_ready(session.state)

        sides = [("bare step", bare), ("loop", loop)]
        for repeat in range(repeats + 1):
            for name, side in sides if repeat % 2 else sides[::-1]:
                start = time.perf_counter()
                side()
                if repeat > 0:  # The first round warms up.
                    times[name].append((time.perf_counter() - start) / steps)
    ratios = [loop / bare for loop, bare in zip(times["loop"], times["bare step"], strict=True)]
    device = jax.devices()[0]
    where = f"{jax.device_count()} x {device.device_kind}"
    return times | {"ratio": statistics.median(ratios), "devices": where}
