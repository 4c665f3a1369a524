"""The time to the first step: tracing, lowering and compiling of a decoder's step, beside a plain JAX step's.

With `--h100` both are compiled for one H100 on a machine without a GPU, without the autotuning of a real one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from benchmarks.plain import plain_step
from jaxdl.parallel.compiler.times import CompileTimes
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import ExperimentBench, make_table, parse_experiment_bench, run_module, write_json
from jaxdl.performance.planner.h100 import compile_step, h100_devices
from jaxdl.performance.planner.trial import resident
from jaxdl.training.run.plan.build import make_plan

_STAGES = ("trace_sec", "lower_sec", "compile_sec")


@dataclass(frozen=True)
class FirstStepBench(ExperimentBench):
    """Compiles the training step of a config and a plain one, in turns."""

    num_repeats: int = 3
    """How often each is traced, lowered and compiled; medians are reported."""
    h100: bool = False
    """Compile for one H100, which is only described."""
    json: Path | None = None
    """File for the figures."""


def main(args: list[str]) -> None:
    """Compiles both and prints the medians."""
    command, _ = parse_experiment_bench(FirstStepBench, args, __name__, num_repeats=1)
    figures = measure(command)
    columns = ("", *(stage.replace("_sec", ", s") for stage in _STAGES), "all, s")
    table = make_table(f"{command.config}: the step's program, {'one H100' if command.h100 else 'here'}", columns)
    sums = {name: {stage: statistics.median(one[stage] for one in times) for stage in _STAGES}
            for name, times in figures.items()}  # fmt: skip
    for name, times in sums.items():
        table.add_row(name, *(f"{times[stage]:.1f}" for stage in _STAGES), f"{sum(times.values()):.1f}")
    console = Console()
    console.print(table)
    ratio = sum(sums["jaxdl"].values()) / sum(sums["plain"].values())
    console.print(f"jaxdl's takes {ratio:.2f} times as long as the plain one's")
    write_json(command.json, figures)


def measure(command: FirstStepBench) -> dict[str, list[dict[str, float]]]:
    """The figures of `CompileTimes`: a list of a dict a repeat, of `jaxdl` and `plain`."""
    device = h100_devices(1, 1)[0] if command.h100 else jax.devices()[0]
    experiment = resident(command.experiment, None).replaced({"mesh": MeshConfig(replica=1, fsdp=1, tensor=1)})
    plan = make_plan(experiment, [device])
    sides: dict[str, Callable[[], Any]] = {
        "jaxdl": lambda: compile_step(plan),
        "plain": lambda: _compile_plain(experiment, plan.parts.data_spec, device),
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    option = "jax_enable_compilation_cache"
    before = jax.config.values[option]
    jax.config.update(option, False)  # A program that is read from disk was not compiled.
    compilation_cache.reset_cache()  # Else JAX keeps to what it has decided.
    try:
        for _ in range(command.num_repeats):
            for name, compile in sides.items():
                jax.clear_caches()
                times = CompileTimes()
                compile()
                figures[name].append(times.figures())
    finally:
        jax.config.update(option, before)
        compilation_cache.reset_cache()
    return figures


def _compile_plain(experiment: Any, spec: Any, device: Any) -> jax.stages.Compiled:
    step, make_state, tokens = plain_step(experiment, spec, flash=device.platform != "cpu")
    place = SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), (jax.eval_shape(make_state), tokens)
    )
    return step.lower(*shapes).compile()


if __name__ == "__main__":
    run_module(main)
