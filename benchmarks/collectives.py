"""The collectives of the compiled training step by mesh axis, on these devices or on 8 x H100.

Where replicas agree less often, those of each program: the local step, each merge, and merges beside local steps.

With `--h100` it is compiled for 8 x H100 on a machine without a GPU, for example as `replica 2 x fsdp 4`, to see how
XLA compiled the sharding and the exchange: which gathers, reductions and sorts it uses, and their sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Auto
from jaxdl.parallel.compiler.collectives import Operation, operations
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.bench.shared import ExperimentBench, make_table, parse_experiment_bench, run_module
from jaxdl.performance.planner.h100 import compile_programs, h100_mesh
from jaxdl.training.run.plan.build import make_plan


@dataclass(frozen=True)
class CollectivesBench(ExperimentBench):
    """Lists the collectives and the sorts of the compiled training step."""

    h100: bool = False
    """Compile for 8 x H100; no GPU is needed, but JAX's CUDA packages are."""
    only: tuple[str, ...] = ()
    """Of several programs, only those of these names, in which * stands for any text: "local step" "merge 0*"."""


def main(args: list[str]) -> None:
    """Compiles the step and prints the table."""
    command, _ = parse_experiment_bench(CollectivesBench, args, __name__)
    devices = None
    if command.h100:
        auto = command.experiment.exchange
        if isinstance(auto, Auto) and auto.bandwidth_gbps is None:
            raise ConfigError(
                "--h100 with --exchange auto: no network can be measured. Give --exchange.bandwidth-gbps and "
                "--exchange.latency-us."
            )
        shape = command.experiment.mesh.sizes(8)
        devices = list(h100_mesh(shape).devices.flat)
    plan = make_plan(command.experiment, devices)
    mesh, console = plan.parts.layout.mesh, Console(width=150)
    for name, compiled in compile_programs(plan, command.only):
        collectives = operations(compiled.as_text() or "", mesh.shape)
        console.print(table_of(collectives, f"{command.config}, exchange {plan.experiment.exchange.kind}: {name}"))
        console.print(over_replica(collectives, mesh.shape))
        if (memory := compiled.memory_analysis()) is None:
            continue
        console.print(
            f"on one device: {memory.argument_size_in_bytes / 2**20:,.1f} MiB of state and batch, "
            f"{memory.temp_size_in_bytes / 2**20:,.1f} MiB of temporary memory"
        )


def over_replica(collectives: Sequence[Operation], axes: Mapping[str, int]) -> str:
    """How many of the operations cross `replica`, and the bytes that one device sends in them, in words."""
    crossing = [collective for collective in collectives if Axis.REPLICA.value in collective.axes]
    sent = sum(collective.sent_bytes(axes) for collective in crossing)
    return f"over replica: {len(crossing)} collectives, in which one device sends {sent:,.0f} bytes"


def table_of(collectives: list[Operation], title: str) -> Table:
    """The operations as a table: equal ones share a row, the largest first."""
    columns = ("operation", "over", "results", "number", "MiB together")
    table = make_table(title, columns, left=columns[:3])
    rows = Counter(collectives)
    for collective, number in sorted(rows.items(), key=lambda row: -row[0].num_bytes * row[1]):
        shapes = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in collective.shapes[:3])
        more = f" and {len(collective.shapes) - 3} more" if len(collective.shapes) > 3 else ""
        table.add_row(
            collective.kind,
            "+".join(collective.axes) or "-",
            shapes + more,
            str(number),
            f"{collective.num_bytes * number / 2**20:,.3f}",
        )
    return table


if __name__ == "__main__":
    run_module(main)
