"""The memory of a device and the least time of a training step, by mesh, batch and what the backward pass finds kept.

The step is compiled for H100, on a machine without a GPU, once for each row. Nothing runs: the memory is XLA's plan,
and the time is the least that the kernels of one device need for their bytes and products, one after the other. Not in
it are messages between devices and to the host. MFU is the share of that time that the products need at the peak,
without those that are computed again; with a causal mask half of attention's products count.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import track

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import OptionError
from jaxdl.data import TextSpec
from jaxdl.parallel.compiler import hlo, roofline
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import ExperimentBench, bench, make_table, parse_experiment_bench, write_json
from jaxdl.performance.planner.h100 import compile_step, h100_devices
from jaxdl.performance.planner.trial import planned_bytes, resident
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan

_DEVICE_BYTES = 80e9
_HOST_BYTES_PER_SEC = 64e9
"""PCIe 5 with 16 lanes, one way (NVIDIA's data sheet of the H100 SXM)."""
_COLUMNS = (
    "mesh", "length", "examples", "kept", "GB of a device", "of it temporary", "kernels, ms", "MFU", "host's link, ms",
)  # fmt: skip


@dataclass(frozen=True)
class MemoryBench(ExperimentBench):
    """Compiles a training step for H100 and shows its memory and least time."""

    meshes: tuple[str, ...] = ("1x1",)
    """Devices of fsdp x tensor, such as 1x1 8x1 1x8 2x4."""
    lengths: tuple[int, ...] = ()
    """Tokens of an example; by default those of the config."""
    examples: tuple[int, ...] = (8,)
    """Examples of one row of the mesh's tensor axis in one micro-batch."""
    kept: tuple[Literal["none", "dots", "block", "offload"], ...] = ("none", "dots", "block", "offload")
    """Values of --model.remat."""
    json: Path | None = None
    """File for the figures."""


@bench("memory", "the memory of a device and the least time of a step by mesh and remat, compiled for H100")
def main(args: list[str]) -> None:
    """Compiles each row, and prints and writes the table."""
    command = parse_command(args)
    rows = [measure(command, *cell) for cell in track(cells(command), "compiling", console=Console(stderr=True))]
    add_mfu(rows)
    console = Console(width=140)
    table = make_table(f"{command.config}, {command.experiment.precision.kind}, compiled for H100", _COLUMNS)
    for row in rows:
        table.add_row(*texts(row))
    console.print(table)
    for line in remarks(rows):
        console.print(line, highlight=False)
    write_json(command.json, {"rows": rows})


def parse_command(args: list[str]) -> MemoryBench:
    """The command line as a MemoryBench. Raises ConfigError, or exits after --help."""
    command, given = parse_experiment_bench(MemoryBench, args, __name__)
    if command.experiment.mesh != given.mesh:
        raise ConfigError("--mesh: the measurement sets this itself. Give --meshes instead.")
    cells(command)
    return command


def cells(command: MemoryBench) -> list[tuple[MeshConfig, int | None, int, str]]:
    """Mesh, length, examples and what is kept of each row. Raises OptionError for what cannot be."""
    if not hasattr(command.experiment.model, "remat"):
        raise ConfigError(
            f"model {command.experiment.model.kind}: it has no setting remat. Take one that has, such as transformer."
        )
    for name, values in (("--lengths", command.lengths), ("--examples", command.examples)):
        if wrong := [value for value in values if value < 1]:
            raise OptionError(f"{name} {wrong[0]}: give 1 or more.")
    return list(
        itertools.product(map(_mesh, command.meshes), command.lengths or (None,), command.examples, command.kept)
    )


def _mesh(text: str) -> MeshConfig:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise OptionError(f"--meshes {text}: give the devices of fsdp and of tensor, for example 2x4.")
    return MeshConfig(replica=1, fsdp=int(match[1]), tensor=int(match[2]))


def measure(command: MemoryBench, mesh: MeshConfig, length: int | None, examples: int, kept: str) -> dict[str, Any]:
    """The figures of one row. Raises ConfigError where JAX's CUDA compiler is missing."""
    batch = examples * mesh.fsdp * command.experiment.step.microbatches
    changes: dict[str, Any] = {"mesh": mesh, "batch_size": batch, "model.remat": kept}
    experiment = resident(command.experiment, None).replaced(
        changes if length is None else changes | {"data.length": length}
    )
    plan = make_plan(_with_enough_data(experiment), h100_devices(1, mesh.fsdp * mesh.tensor))
    compiled = compile_step(plan)
    text, memory, spec = compiled.as_text() or "", compiled.memory_analysis(), plan.parts.data_spec
    module = hlo.parse(text)
    kernels = roofline.kernels(module)
    least = sum(kernel.times * kernel.least_sec for kernel in kernels)
    once = sum(kernel.times * kernel.product_sec for kernel in kernels if not kernel.again)
    words = getattr(experiment.model, "vocab_size", None) or getattr(spec, "vocab_size", None)
    vocab = None if words is None else own_words(words, mesh.tensor)
    return {
        "mesh": f"{mesh.fsdp} x {mesh.tensor}",
        "length": spec.length if isinstance(spec, TextSpec) else None,
        "examples": examples,
        "kept": kept,
        "bytes": planned_bytes(compiled),
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "least_sec": least,
        "product_sec": once,
        "host_sec": sum(kernel.times * kernel.host_bytes for kernel in kernels) / _HOST_BYTES_PER_SEC,
        "flash_forward": sum("fmha" in kernel.kind and "Backward" not in kernel.kind for kernel in kernels),
        "flash_backward": sum("fmha" in kernel.kind and "Backward" in kernel.kind for kernel in kernels),
        "logits_bytes": most_logits(module, vocab) if vocab else None,
    }


def _with_enough_data(experiment: Experiment) -> Experiment:
    """The experiment with as many examples as a batch takes."""
    data = experiment.data
    if getattr(data, "num_train", experiment.batch_size) >= experiment.batch_size:
        return experiment
    return experiment.replaced({"data.num_train": experiment.batch_size})


def add_mfu(rows: list[dict[str, Any]]) -> None:
    """Gives each row its `mfu`.

    The products are the fewest of the rows that differ in what is kept alone: XLA itself computes some again where
    memory is short.
    """
    for row in rows:
        same = [other for other in rows if all(other[name] == row[name] for name in ("mesh", "length", "examples"))]
        row["mfu"] = min(other["product_sec"] for other in same) / row["least_sec"]


def own_words(words: int, tensor: int) -> int:
    """The words of one device: all of them where `tensor` does not divide them."""
    return words // tensor if words % tensor == 0 else words


def most_logits(module: hlo.Module, vocab: int) -> float:
    """The bytes of the most logits that are in memory at a time: the largest result of a kernel of this last dimension.

    An array inside a fusion is nowhere in memory.
    """
    written = {kernel.name for kernel in roofline.kernels(module)}
    every = [instruction for part in module.computations.values() for instruction in part.values()]
    shapes = {shape for instruction in every if instruction.name in written for shape in instruction.shapes}
    # The embedding's table is [vocab, embed], and the head's kernel [embed, vocab].
    embeds = {dims[-1] for instruction in every for _, dims in instruction.shapes if dims[:1] == (vocab,)}
    logits = [
        (dtype, dims) for dtype, dims in shapes if dims[-1:] == (vocab,) and dims[:-1] not in {(n,) for n in embeds}
    ]
    return max((hlo.shapes_bytes((shape,)) for shape in logits), default=0.0)


def texts(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table; a star marks more memory than a device has."""
    size = row["bytes"] or 0
    return (
        row["mesh"],
        "" if row["length"] is None else f"{row['length']:,}",
        str(row["examples"]),
        row["kept"],
        f"{size / 1e9:.1f}" + ("*" if size > _DEVICE_BYTES else ""),
        f"{(row['temporary_bytes'] or 0) / 1e9:.1f}",
        f"{1e3 * row['least_sec']:.1f}",
        f"{100 * row['mfu']:.0f} %",
        f"{1e3 * row['host_sec']:.0f}" if row["host_sec"] else "",
    )


def remarks(rows: list[dict[str, Any]]) -> list[str]:
    """Below the table: what is too large, which kernel attention has, and how many logits there are at a time."""
    lines = []
    if any((row["bytes"] or 0) > _DEVICE_BYTES for row in rows):
        lines.append(f"* more than the {_DEVICE_BYTES / 1e9:.0f} GB of an H100")
    without = [row for row in rows if not (row["flash_forward"] and row["flash_backward"])]
    if not without:
        lines.append("attention: cuDNN's flash kernel, forward and backward, in every row")
    elif len(without) < len(rows):
        names = ", ".join(f"{row['mesh']} {row['kept']}" for row in without)
        lines.append(f"attention: cuDNN's flash kernel, forward and backward, but not in {names}")
    if any(row["logits_bytes"] for row in rows):
        most = max(row["logits_bytes"] or 0 for row in rows)
        lines.append(f"logits: at most {most / 1e6:.0f} MB of a device at a time")
    return lines
