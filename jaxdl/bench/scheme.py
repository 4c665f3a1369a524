"""What the compiled training step sends: its collectives by mesh axis, on the devices here or on 8 x H100.

With `--h100` it is compiled for 8 x H100 on a machine without a GPU, as `replica 2 x fsdp 4` for example, to see what
XLA made of the sharding and of the exchange: which gathers, reductions and sorts there are, and how large.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxdl.bench.h100 import h100_mesh
from jaxdl.config import ConfigError
from jaxdl.exchange import Auto
from jaxdl.experiment import Experiment, parse_command_line
from jaxdl.plan import compile_train_step, make_plan

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_INSTRUCTION = re.compile(r"= (.+?) ((?:" + "|".join(KINDS) + r")(?:-start)?|sort)\(")
_SHAPE = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")


@dataclass(frozen=True)
class SchemeBench:
    """Lists the collectives and the sorts of the compiled training step."""

    config: Path
    """The experiment: a Python file with a function config()."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    h100: bool = False
    """Compile for 8 x H100; no GPU is needed, but JAX's CUDA packages are."""


@dataclass(frozen=True)
class Operation:
    """A collective or a sort in compiled HLO."""

    kind: str
    axes: tuple[str, ...]
    """The mesh axes that it talks over; none for a sort."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(dtype, shape) of each result on one device; for a sort, of each array sorted."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all results."""
        return sum(_BYTES[dtype] * math.prod(shape) for dtype, shape in self.shapes)

    @property
    def num_elements(self) -> int:
        """Elements of the largest result."""
        return max((math.prod(shape) for _, shape in self.shapes), default=0)


def main(args: list[str]) -> None:
    """Compiles the step and prints the table."""
    command = parse_command(args)
    devices = None
    if command.h100:
        auto = command.experiment.exchange
        if isinstance(auto, Auto) and auto.bandwidth_gbps is None:
            raise ConfigError(
                "--h100 with --exchange auto: there is no network here to measure. Give --exchange.bandwidth-gbps and "
                "--exchange.latency-us."
            )
        shape = command.experiment.mesh.sizes(8)
        devices = list(h100_mesh(shape).devices.flat)
    plan = make_plan(command.experiment, devices)
    compiled = compile_train_step(plan)
    mesh = plan.parts.layout.mesh
    console = Console(width=150)
    console.print(
        table_of(
            operations(compiled.as_text(), mesh.shape), f"{command.config}, exchange {plan.experiment.exchange.kind}"
        )
    )
    memory = compiled.memory_analysis()
    console.print(
        f"on one device: {memory.argument_size_in_bytes / 2**20:,.1f} MiB of state and batch, "
        f"{memory.temp_size_in_bytes / 2**20:,.1f} MiB of temporary memory"
    )


def parse_command(args: list[str]) -> SchemeBench:
    """The command line as a SchemeBench. Raises ConfigError, or exits as tyro does."""
    prog = "python -m jaxdl.bench scheme"
    return parse_command_line(SchemeBench, args, about=str(__doc__), prog=prog, intro=f"{__doc__}\n\n")[0]


def table_of(found: list[Operation], title: str) -> Table:
    """The operations as a table: equal ones in a row, the dearest first."""
    table = Table(title=title)
    for heading in ("operation", "over", "results", "number", "MiB together"):
        table.add_column(heading, justify="right" if heading in ("number", "MiB together") else "left")
    rows = Counter(found)
    for one, number in sorted(rows.items(), key=lambda row: -row[0].num_bytes * row[1]):
        shapes = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in one.shapes[:3])
        more = f" and {len(one.shapes) - 3} more" if len(one.shapes) > 3 else ""
        table.add_row(
            one.kind,
            "+".join(one.axes) or "-",
            shapes + more,
            str(number),
            f"{one.num_bytes * number / 2**20:,.3f}",
        )
    return table


def operations(text: str, axes: Mapping[str, int]) -> list[Operation]:
    """The collectives and sorts in the text of compiled HLO; `axes` are the mesh's, with their sizes.

    What lies in a loop or a branch counts once.
    """
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None or "-done(" in line:
            continue
        kind = match[2].removesuffix("-start")
        shapes = [(dtype, _dims(dims)) for dtype, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", match[1]))]
        if match[2].endswith("-start") and kind != "all-reduce":
            shapes = shapes[len(shapes) // 2 :]  # (operands, results)
        over = () if kind == "sort" else _axes(line, axes)
        if kind == "sort" or over:
            found.append(Operation(kind, over, tuple(shapes)))
    return found


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _axes(line: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ; devices are numbered in the order of the mesh."""
    groups = _groups(line)
    sizes = tuple(axes.values())
    if groups is None:
        return tuple(name for name, size in axes.items() if size > 1)
    places = np.stack(np.unravel_index(groups, sizes), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, one in zip(axes, differ, strict=True) if one)


def _groups(line: str) -> np.ndarray | None:
    """Groups of device numbers, `[group, device]`; None for all devices together."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        numbers = np.arange(math.prod(_dims(match[2]))).reshape(_dims(match[2]))
        if match[3]:
            numbers = numbers.transpose(_dims(match[3]))
        return numbers.reshape(_dims(match[1]))
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return np.array([_dims(group) for group in re.findall(r"\{([\d,]*)\}", match[1])])
    if match := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    ):
        return _mesh_groups(*match.groups())
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"its groups of devices are not understood: {line.strip()}")
    return None


def _mesh_groups(mesh: str, devices: str | None, order: str | None, names: str) -> np.ndarray:
    """Groups along some axes of a mesh of XLA's own: `'a'=2,'b'=4`, its devices in order or transposed, and `'b'`."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    along = [name.strip().strip("'") for name in names.split(",")]
    if unknown := [name for name in along if name not in sizes]:
        raise ValueError(f"groups along {unknown[0]} of mesh[{mesh}] are not understood.")
    numbers = np.arange(math.prod(sizes.values()))
    if devices is not None:
        numbers = numbers.reshape(_dims(devices)).transpose(_dims(order) if order else None)
    numbers = numbers.reshape(tuple(sizes.values()))
    last = [list(sizes).index(name) for name in along]
    return np.moveaxis(numbers, last, range(-len(last), 0)).reshape(-1, math.prod(sizes[name] for name in along))
