"""The overhead of the training loop (data, metrics, reports, host) over the bare jitted step."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.optim import Constant
from jaxdl.performance.bench.shared import ExperimentBench, bench, make_table, median_ratio, parse_experiment_bench
from jaxdl.report import ReportConfig
from jaxdl.training.evaluation import max_in_flight
from jaxdl.training.experiment import SINGLE_LENGTHS, Experiment
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.hooks import StepInfo
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.train import train


@dataclass(frozen=True)
class StepBench(ExperimentBench):
    """Compares the loop's time per step with that of the bare step on resident data, interleaved."""

    num_steps: int = 100
    """Steps in one repeat of either side (the experiment's own length and schedule are not used)."""
    num_repeats: int = 7
    """How often each side is measured; medians are reported."""


@bench("step", "the training loop's time per step over that of the bare jitted step")
def main(args: list[str]) -> None:
    """Runs the measurement and prints both medians and their ratio."""
    command = parse_command(args)
    result = measure(command.experiment, num_steps=command.num_steps, num_repeats=command.num_repeats)
    table = make_table(f"{command.config}, {result['devices']}", ("", "ms a step (median)", "min", "max"))
    for side in ("bare step", "loop"):
        times = [1e3 * value for value in result[side]]
        table.add_row(side, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
    console = Console()
    console.print(table)
    console.print(f"loop / bare step = {result['ratio']:.3f} (median of {command.num_repeats} interleaved pairs)")


def parse_command(args: list[str]) -> StepBench:
    """The command line as a StepBench. Raises ConfigError, or exits after --help."""
    command, given = parse_experiment_bench(StepBench, args, __name__, num_steps=1, num_repeats=1)
    values = {name: getattr(command.experiment, name) for name in SINGLE_LENGTHS}
    for name, value in sorted(values.items(), key=lambda pair: pair[1] is None):  # One that is given unsets others.
        if value != getattr(given, name):
            raise ConfigError(f"--{name} {value}: the measurement sets its own length. Give --num-steps instead.")
    return command


def measure(experiment: Experiment, *, num_steps: int, num_repeats: int) -> dict[str, Any]:
    """Seconds a step of both sides, a list each of `num_repeats`, and `ratio`, the median of the pairs' ratios.

    The loop is the trainer's own, with its data, metrics, reports and files in a temporary workdir; evaluations and
    checkpoints do not fall into the measured steps, nothing is profiled, and the learning rate is constant, so that a
    measurement may be shorter than the warm-up. The bare step is the same compiled function on one resident batch.
    """
    total = num_steps * (num_repeats + 1)
    far = {"epochs": None, "tokens": None, "steps": total}
    far |= {"evaluation.every_steps": 2 * total, "checkpoint.every_steps": 2 * total}
    far |= {"evaluation.every_epochs": None, "checkpoint.every_epochs": None, "schedule": Constant()}
    far |= {"report.profile_start_step": None, "report.profile_steps": ReportConfig().profile_steps}
    experiment = experiment.replaced(far)
    plan = make_plan(experiment)
    times: dict[str, list[float]] = {"bare step": [], "loop": []}
    state = make_initial_state(plan)
    with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
        batch = next(batches)
    run_ahead = max_in_flight() > 1

    def bare() -> None:
        nonlocal state
        for _ in range(num_steps):
            state, metrics = step(state, [batch], 0)
            if not run_ahead:
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)

    since_sec = 0.0

    def after_step(info: StepInfo) -> None:
        """At the end of each repeat of the loop: one of the bare step."""
        nonlocal since_sec
        if info.step % num_steps:
            return
        jax.block_until_ready(info.state)
        middle = time.perf_counter()
        bare()
        end = time.perf_counter()
        if info.step > num_steps:  # The first round warms up.
            times["loop"].append((middle - since_sec) / num_steps)
            times["bare step"].append((end - middle) / num_steps)
        since_sec = time.perf_counter()

    with shared_programs() as programs, tempfile.TemporaryDirectory() as folder:
        step = programs.of(plan, plan.timeline.segments[0]).train
        train(experiment, folder, quiet=True, on_step=[after_step])
    where = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return times | {"ratio": median_ratio(times["loop"], times["bare step"]), "devices": where}
