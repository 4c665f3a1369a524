"""The roofline of a training step: what one H100 must move and multiply, from the program compiled for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from jaxdl.core.errors import OptionError
from jaxdl.parallel.compiler import hlo, roofline
from jaxdl.parallel.compiler.times import CompileTimes
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import make_table
from jaxdl.performance.planner.h100 import compile_step, h100_devices
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import program_notes
from jaxdl.training.run.plan.build import make_plan

_COLUMNS = ("kernels", "GB", "products, ms", "at least, ms")


def measure(experiment: Experiment) -> dict[str, Any]:
    """The kernels of a training step on one H100 by kind, `jaxdl.parallel.compiler.roofline.summed`, its memory in
    bytes, the seconds that compiling took, and notes on the program.

    Nothing runs. Raises ConfigError where JAX's CUDA compiler is missing.
    """
    [device] = h100_devices(1, 1)
    plan = make_plan(experiment.replaced({"mesh": MeshConfig(replica=1, fsdp=1, tensor=1)}), [device])
    times = CompileTimes()
    compiled = compile_step(plan)
    return of_program(compiled) | {"compiling": times.figures(), "notes": program_notes(plan, compiled)}


def of_program(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """What `measure` returns, of a program that is compiled for one H100; but not how long that took."""
    memory = compiled.memory_analysis()
    kernels = roofline.summed(roofline.kernels(hlo.parse(compiled.as_text() or "")))
    return {"kernels": kernels, "temporary_bytes": memory and memory.temp_size_in_bytes}


def read(path: Path | None) -> dict[str, Any] | None:
    """The figures that an earlier measurement wrote; None without a file. Raises OptionError for any other file."""
    if path is None:
        return None
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        assert {"kernels", "bytes", "product_sec", "least_sec"} <= figures["kernels"]["all"].keys()
    except (OSError, ValueError, LookupError, TypeError, AssertionError):
        raise OptionError(f"--before {path}: not a file that --h100 --json wrote.") from None
    return figures


def table(title: str, figures: dict[str, Any], before: dict[str, Any] | None) -> Table:
    """A row for each kind of kernel, and one for all; with `before` also the figures of that measurement."""
    earlier = {} if before is None else before["kernels"]
    made = make_table(title, ("kind", *_COLUMNS, *(f"{name} before" for name in _COLUMNS if earlier)))
    names = [name for name in earlier | figures["kernels"] if name != "all"]
    names.sort(key=lambda name: -(figures["kernels"].get(name) or earlier[name])["least_sec"])
    for name in (*names, "all"):
        both = (figures["kernels"].get(name), *((earlier.get(name),) if earlier else ()))
        made.add_row(name, *(text for row in both for text in _texts(row)), end_section=name == names[-1])
    return made


def _texts(row: dict[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return ("", "", "", "")
    times = (f"{1e3 * row[name]:.2f}" for name in ("product_sec", "least_sec"))
    return (f"{row['kernels']:,}", f"{row['bytes'] / 1e9:.2f}", *times)
