"""The training speed of a config: images or tokens a second, share of the peak, memory, share of the update.

With --h100 nothing is measured: the step is compiled for one H100, on a machine without a GPU, and its kernels are
listed by kind, with the bytes that they move and the least time that they take.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import OptionError
from jaxdl.data import DataSpec, ImageSpec, TextSpec
from jaxdl.parallel.compiler.times import CompileTimes, in_words
from jaxdl.parallel.sharding import named
from jaxdl.performance.bench import roofline, trace
from jaxdl.performance.bench.flops import peak_flops, step_flops
from jaxdl.performance.bench.shared import (
    ExperimentBench,
    bench,
    make_table,
    median_ratio,
    parse_experiment_bench,
    time_in_turns,
    write_json,
)
from jaxdl.performance.planner.trial import planned_bytes, resident
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step, program_notes
from jaxdl.training.run.plan.build import Plan, make_initial_state, make_plan
from jaxdl.training.state import TrainState
from jaxdl.training.step import Parts, make_update

_PROFILED_STEPS, _SHOWN_KERNELS, _WRITTEN_KERNELS = 3, 5, 50

Steps = Callable[[int], None]
"""Runs a number of steps, and returns when they have ended."""
FRAMEWORKS: dict[str, Callable[[Experiment, DataSpec], tuple[Steps, str]]] = {}
"""Name for --against -> what makes the steps of an experiment there, and their description."""


@dataclass(frozen=True)
class TrainBench(ExperimentBench):
    """Times the training step of a config on data resident on the devices."""

    num_steps: int = 10
    """Steps in one repeat."""
    num_repeats: int = 5
    """How often each side is measured; medians are reported."""
    image_size: int | None = None
    """Photographs: height and width; by default that of the data (phases are left out)."""
    against: str | None = None
    """Also measure the same network in another framework, in turns; `benchmarks/train.py` of a checkout has torch."""
    profile: bool = False
    """Also show the kernels that take the most time of a step, from a profile of JAX's."""
    h100: bool = False
    """Measure nothing; compile for one H100 and list the kernels. No GPU is needed, but JAX's CUDA packages are."""
    before: Path | None = None
    """With --h100: a file of --json from another commit or config, whose figures are shown as well."""
    json: Path | None = None
    """File for the figures."""


@bench("train", "the training speed of a config: images or tokens a second, share of the peak")
def main(args: list[str]) -> None:
    """Runs the measurement and prints it."""
    command = parse_command(args)
    if command.h100:
        _list_kernels(command)
        return
    figures = measure(command)
    _print(command, figures)
    write_json(command.json, figures)


def _list_kernels(command: TrainBench) -> None:
    """Compiles for one H100, and prints and writes what its kernels need."""
    before = roofline.read(command.before)
    experiment = resident(command.experiment, command.image_size)
    figures = roofline.measure(experiment)
    console, total = Console(width=140), figures["kernels"]["all"]
    title = f"{command.config}: batch {experiment.batch_size:,}, {experiment.precision.kind}, compiled for one H100"
    console.print(roofline.table(title, figures, before))
    speed = f"{1e3 * total['least_sec']:.2f} ms a step, {experiment.batch_size / total['least_sec']:,.0f} examples/s"
    console.print(f"at least {speed}; {(figures['temporary_bytes'] or 0) / 1e9:.2f} GB of temporary memory")
    console.print(f"the step's program: {in_words(figures['compiling'])}, without autotuning")
    for note in figures["notes"]:
        console.print(note, highlight=False)
    write_json(command.json, figures)


def parse_command(args: list[str]) -> TrainBench:
    """The command line as a TrainBench. Raises ConfigError, or exits after --help."""
    command, _ = parse_experiment_bench(TrainBench, args, __name__, num_steps=1, num_repeats=1, image_size=1)
    if command.before is not None and not command.h100:
        raise OptionError(f"--before {command.before}: only with --h100. Leave it out.")
    if command.h100 and (command.against or command.profile):
        other = "--against" if command.against else "--profile"
        raise OptionError(f"--h100 with {other}: a described GPU runs nothing. Leave one of them out.")
    if command.against is not None and command.against not in FRAMEWORKS:
        raise OptionError(
            f"--against {command.against}: there is no such framework here. In a checkout of jaxdl, "
            "python -m benchmarks.train has torch."
        )
    if command.image_size is not None and getattr(command.experiment.data, "photos", None) is None:
        raise ConfigError(f"--image-size {command.image_size}: the images of this data have a fixed size.")
    return command


def measure(command: TrainBench) -> dict[str, Any]:
    """Times (seconds a step, one a repeat, of `jaxdl` and optionally `torch`) and figures derived from them."""
    experiment = resident(command.experiment, command.image_size)
    plan = make_plan(experiment)
    sides: dict[str, Steps] = {}
    about = {"jaxdl": f"jaxdl, JAX {jax.__version__}"}
    if command.against is not None:
        if jax.device_count() > 1 and jax.default_backend() != "cpu":
            raise ConfigError(f"--against {command.against}: it is measured on one GPU. Set CUDA_VISIBLE_DEVICES=0.")
        make_steps = FRAMEWORKS[command.against]
        sides[command.against], about[command.against] = make_steps(experiment, plan.parts.data_spec)
    jaxdl, program, compiling = _jaxdl_side(plan)
    times = _time({"jaxdl": jaxdl} | sides, command)
    used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    kernels = trace.kernels(functools.partial(jaxdl, _PROFILED_STEPS), _PROFILED_STEPS) if command.profile else []
    heads = getattr(experiment.model, "num_heads", None)
    del jaxdl, sides  # Free their memory for the measurement.
    times |= _time({"update alone": make_updates(plan.parts)}, command)
    spec = plan.parts.data_spec
    unit, number = ("tokens", spec.length) if isinstance(spec, TextSpec) else (spec.described()[0], 1)
    flops, (peak, source) = step_flops(plan), peak_flops(experiment.precision)
    device = jax.devices()[0]
    return {
        "times": times,
        "about": about,
        "unit": unit,
        "units_per_step": experiment.batch_size * number,
        "flops_per_step": flops,
        "peak_flops_per_sec": peak,
        "peak_source": source,
        "compiling": compiling,
        "memory_bytes": planned_bytes(program),
        "memory_peak_bytes": used,
        "kernels": kernels[:_WRITTEN_KERNELS],
        "kinds_of_kernels_ms": trace.by_kind(kernels),
        "attention": trace.attention(program.as_text() or "", kernels) if heads else None,
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "precision": experiment.precision.kind,
        "notes": program_notes(plan, program),
        "input": f"{spec.height} x {spec.width} pixels" if isinstance(spec, ImageSpec) else f"{number} {unit}",
    }


def _time(sides: dict[str, Steps], command: TrainBench) -> dict[str, list[float]]:
    """Seconds a step of each side, in turns; the first round warms up."""
    runs = {name: functools.partial(run, command.num_steps) for name, run in sides.items()}
    times = time_in_turns(runs, command.num_repeats)
    return {name: [value / command.num_steps for value in values] for name, values in times.items()}


def _jaxdl_side(plan: Plan) -> tuple[Steps, jax.stages.Compiled, dict[str, float]]:
    """The training steps, their program, and the figures of compiling it."""
    times = CompileTimes()
    step = compile_train_step(plan)
    compiling, state = times.figures(), make_initial_state(plan)
    with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
        batch = next(batches)

    def steps(number: int) -> None:
        nonlocal state
        for _ in range(number):
            state, metrics = step(state, batch)
            if jax.default_backend() == "cpu":
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)

    return steps, step, compiling


def make_updates(parts: Parts) -> Callable[..., None]:
    """A function that runs a number of updates (1) on gradients sharded as after the exchange, and waits for them."""
    spec = parts.state_spec

    def fresh() -> tuple[TrainState, Any]:
        return spec.init(jax.random.key(0)), jax.tree.map(
            lambda x: jnp.full(x.shape, 1e-2, x.dtype), parts.network.param_shapes
        )

    state, grads = jax.jit(fresh, out_shardings=(spec.shardings, named(parts.layout.mesh, spec.update)))()
    update = make_update(parts)

    def updates(number: int = 1) -> None:
        nonlocal state
        for _ in range(number):
            state = update(state, grads)
            if jax.default_backend() == "cpu":
                jax.block_until_ready(state.step)
        jax.block_until_ready(state)

    return updates


def _print(command: TrainBench, figures: dict[str, Any]) -> None:
    times = {name: statistics.median(values) for name, values in figures["times"].items()}
    title = f"{command.config}: batch {command.experiment.batch_size:,}, {figures['input']}, {figures['precision']}, "
    columns = ("", "ms a step", "min", "max", f"{figures['unit']}/s", "TFLOP/s", "of the peak")
    table = make_table(title + figures["devices"], columns)
    for name, values in figures["times"].items():
        milliseconds = [f"{1e3 * value:.2f}" for value in (times[name], min(values), max(values))]
        if name == "update alone":
            table.add_row(name, *milliseconds, "", "", "")
            continue
        rate = figures["flops_per_step"] / times[name]
        speeds = (f"{figures['units_per_step'] / times[name]:,.0f}", f"{rate / 1e12:.3g}")
        table.add_row(name, *milliseconds, *speeds, f"{100 * rate / figures['peak_flops_per_sec']:.1f} %")
    console = Console(width=140)
    console.print(table)
    for line in figures["about"].values():
        console.print(line, highlight=False)
    if command.against in times:
        ratio = median_ratio(figures["times"][command.against], figures["times"]["jaxdl"])
        console.print(f"jaxdl is {ratio:.2f} times as fast (median of the rounds)")
    share = 100 * times["update alone"] / times["jaxdl"]
    console.print(f"update ({command.experiment.optimizer.kind}) alone: {share:.1f} % of a step")
    console.print(
        f"peak: {figures['peak_flops_per_sec'] / 1e12:.3g} TFLOP/s, from {figures['peak_source']}; a step has "
        f"{figures['flops_per_step'] / 1e12:.3g} TFLOP in products and convolutions, forward times 3"
    )
    console.print(f"the step's program: {in_words(figures['compiling'])}")
    for note in figures["notes"]:
        console.print(note, highlight=False)
    if figures["memory_bytes"] is not None:
        used = figures["memory_peak_bytes"]
        really = "" if used is None else f", {used / 1e9:.2f} GB at most in use"
        console.print(f"memory of a device: {figures['memory_bytes'] / 1e9:.2f} GB (XLA's plan){really}")
    if figures["attention"]:
        console.print(f"attention: {figures['attention']}", highlight=False)
    if figures["kernels"]:
        console.print(trace.table("the kernels with the most time", figures["kernels"][:_SHOWN_KERNELS]))
