"""The kernels of a compiled program by kind: how many, the bytes that they move, and the least time that they take.

The least time of a kernel is that of its bytes or that of its products, whichever is longer, at the peak of an H100
(`jaxdl.parallel.compiler.hlo`): real kernels take longer. Each operand of a kernel counts once, however often it is
read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxdl.parallel.compiler.hlo import (
    MEMORY_BYTES_PER_SEC,
    TABLES,
    Instruction,
    Module,
    host_bytes,
    inner_computations,
    trip_count,
)

_RECOMPUTED = "rematted_computation"
"""In the name of what `jax.checkpoint` computes again."""
_FUSIONS = {"Loop": "elementwise", "Input": "reduction", "Custom": "Triton"}
"""XLA's kinds of fusions."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program."""

    name: str
    kind: str
    """Its sort: cuDNN's and other libraries' by their function, a fusion by what it does, else XLA's operation."""
    part: str
    """Of a training step: forward, backward, tables or rest."""
    times: int
    """How often it runs: more than once inside a loop."""
    moved_bytes: float
    product_sec: float
    again: bool = False
    """Whether it computes again what the forward pass computed, to save memory."""
    host_bytes: float = 0.0
    """A copy between the memories of the device and of the host, which takes no time of the device, moves these."""

    @property
    def least_sec(self) -> float:
        """Seconds of one run, at least."""
        return max(self.moved_bytes / MEMORY_BYTES_PER_SEC, self.product_sec)


def kernels(module: Module) -> list[Kernel]:
    """All kernels of a program; of a conditional those of the longest branch."""
    return list(_kernels(module, module.entry, 1))


def _kernels(module: Module, computation: str, times: int) -> Iterable[Kernel]:
    for instruction in module.computations[computation].values():
        inner = [name for name in inner_computations(instruction) if name in module.computations]
        if inner:
            yield from _kernels(module, max(inner, key=module.total_sec), times * trip_count(instruction))
        elif (copied := host_bytes(instruction)) is not None:
            yield Kernel(instruction.name, "copy, host", part_of(instruction), times, 0.0, 0.0, host_bytes=copied)
        elif module.is_kernel(instruction):
            moved, product = module.moved_bytes(computation, instruction), module.product_sec(computation, instruction)
            yield Kernel(
                instruction.name,
                _kind(instruction),
                part_of(instruction),
                times,
                moved,
                product,
                _RECOMPUTED in instruction.line,
            )


def part_of(instruction: Instruction) -> str:
    """Whether an instruction belongs to embedding tables, the forward pass, the backward pass or the rest of a step."""
    if TABLES in instruction.line:
        return "tables"
    if "transpose(jvp" in instruction.line:
        return "backward"
    return "forward" if "jvp(" in instruction.line else "rest"


def _kind(instruction: Instruction) -> str:
    if match := re.search(r'custom_call_target="([^"]*)"', instruction.line):
        return match[1].strip("_").replace("$", " ")
    match = re.search(r"kind=k(\w+)", instruction.line) if instruction.kind == "fusion" else None
    return _FUSIONS.get(match[1], match[1]) if match else instruction.kind


def summed(all_kernels: Iterable[Kernel]) -> dict[str, dict[str, Any]]:
    """The kernels by kind and part, the longest first, and `all` of them: number, bytes and seconds of a step."""
    rows: dict[str, dict[str, Any]] = {}
    for kernel in all_kernels:
        for name in (f"{kernel.kind}, {kernel.part}", "all"):
            row = rows.setdefault(name, {"kernels": 0, "bytes": 0.0, "product_sec": 0.0, "least_sec": 0.0})
            row["kernels"] += kernel.times
            row["bytes"] += kernel.times * kernel.moved_bytes
            row["product_sec"] += kernel.times * kernel.product_sec
            row["least_sec"] += kernel.times * kernel.least_sec
    return dict(sorted(rows.items(), key=lambda row: (row[0] == "all", -row[1]["least_sec"])))
