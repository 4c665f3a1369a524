"""The table of `--explain`: the sharding of each parameter, and the memory that the compiled step needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console
from rich.table import Table

from jaxdl.optim import decay_mask
from jaxdl.parallel.mesh import GATHER_AXES, MODEL_AXES, mesh_text
from jaxdl.parallel.sharding import UNNAMED, UNNAMED_STACK, LogicalAxes, Params, Specs, entry_names, is_names, is_spec

_BY_SIZE = "(by size)"


@dataclass(frozen=True)
class ParamRow:
    """One line of `explain`: a parameter, its shape and spec, and its bytes on one device."""

    name: str
    shape: tuple[int, ...]
    spec: str
    bytes_per_device: int
    by_size: bool = False
    """Whether the parameter has no logical axes and more than one dimension, so that its sizes alone decided."""
    decayed: bool = False
    """Whether it is a weight, which weight decay and trust ratios are for; not a bias or a norm's scale."""


def explain(params: Params, specs: Specs, mesh: Mesh, axes: LogicalAxes) -> list[ParamRow]:
    """How every parameter is sharded: the rows of the table that `--explain` prints.

    `params` is a tree of arrays or shape structs, `specs` their PartitionSpecs, `axes` their logical axes.
    """
    rows = []
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    more = (
        jax.tree.leaves(specs, is_leaf=is_spec),
        jax.tree.leaves(axes, is_leaf=is_names),
        jax.tree.leaves(decay_mask(axes)),
    )
    for (path, x), spec, names, decayed in zip(flat, *more, strict=True):
        local = NamedSharding(mesh, spec).shard_shape(x.shape)
        text = ", ".join("+".join(entry_names(entry)) or "-" for entry in spec) or "whole"
        name = "/".join(str(getattr(part, "key", part)) for part in path)
        by_size = len(names) > 1 and set(names) <= {UNNAMED, UNNAMED_STACK}
        rows.append(
            ParamRow(name, tuple(x.shape), text, math.prod(local) * np.dtype(x.dtype).itemsize, by_size, decayed)
        )
    return rows


def print_explanation(
    rows: Sequence[ParamRow],
    mesh: Mapping[str, int],
    memory: Any,
    console: Console | None = None,
    *,
    min_elements: int = 0,
) -> None:
    """Prints one line per parameter (shape, mesh axes of each dimension, bytes on one device) and the step's memory.

    Parameters of fewer than `min_elements` are not split, which a line says. `memory` is the `memory_analysis()` of the
    compiled step; None on platforms without one.
    """
    console = console or Console()
    table = Table(title=f"parameters on {mesh_text(mesh)}", title_justify="left")
    for column, justify in (
        ("parameter", "left"),
        ("shape", "right"),
        ("sharded over", "left"),
        ("decayed", "left"),
        ("per device", "right"),
    ):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    for row in rows:
        spec = f"{row.spec} {_BY_SIZE}" if row.by_size else row.spec
        table.add_row(row.name, " x ".join(map(str, row.shape)), spec, "yes" if row.decayed else "no",
                      readable_bytes(row.bytes_per_device))  # fmt: skip
    elements = sum(math.prod(row.shape) for row in rows)
    table.add_section()
    table.add_row("all", f"{elements:,}", "", "", readable_bytes(sum(row.bytes_per_device for row in rows)))
    console.print(table)
    if any(row.by_size for row in rows):
        console.print(
            f"{_BY_SIZE}: the parameter has no logical axes; {' and '.join(GATHER_AXES)} splits its largest dimension "
            f"that it divides, and {' and '.join(MODEL_AXES)} keeps it whole"
        )
    if any(row.spec == "whole" and math.prod(row.shape) < min_elements for row in rows):
        console.print(
            f"whole: parameters of fewer than {min_elements:,} elements (--sharding.min-shard-elements), and those of "
            "one dimension, are on every device; this is as it should be, the messages would cost more than the memory"
        )
    if memory is None:
        console.print("XLA reports no memory for the compiled step on this platform.")
        return
    # Donated arguments share their memory with the outputs.
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    console.print(
        f"the compiled step needs {readable_bytes(total)} per device: "
        f"{readable_bytes(memory.argument_size_in_bytes)} of state and batch, "
        f"{readable_bytes(memory.temp_size_in_bytes)} temporary "
        f"(XLA's analysis; nothing was run)"
    )


def readable_bytes(count: float) -> str:
    """A number of bytes with three digits and a binary unit: `1.23 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:,.3g} TiB"
