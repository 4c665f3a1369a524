"""Embedding tables under every scheme and under the plan: bytes between nodes, and step times on a slow network.

The bytes are those of one training step, between nodes and inside each: predicted by
`jaxdl.parallel.embedding.traffic`, which the planner uses, and counted in the program that XLA compiles for as many
virtual CPU devices; nothing runs, so tables may have any size. By default the tables are those of MLPerf's DLRM-DCNv2,
with ids of Zipf's law.

With --rates, small tables are trained on an emulated cluster: each host is a network namespace with one process and its
part of the processor, and the links between them have these rates. The plan is made as by `--plan auto`: the best
choices of schemes by prediction are timed first. A step is predicted as its time without a slow network, measured, and
what the planner's model says of its messages on the links as they were probed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.embedding.network import PLAN, measure_steps
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks, Feature
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme, Table
from jaxdl.parallel.embedding.wire import WireType
from jaxdl.parallel.mesh import FILLING_AXIS, Axis, MeshConfig
from jaxdl.performance.bench.cluster.cluster_hosts import HostFailed
from jaxdl.performance.bench.shared import make_table, parse_bench, run_module, write_json
from jaxdl.performance.planner.machine import nominal_machine
from jaxdl.performance.planner.table_bytes import predicted_bytes, sent_along_axes
from jaxdl.performance.planner.table_search import plan_tables, under_one
from jaxdl.performance.planner.tables import Workload, with_schemes
from jaxdl.performance.planner.zipf import distinct_rows
from jaxdl.platform.launch.netns import check_possible, parse_rate


@dataclass(frozen=True)
class EmbeddingBench:
    """Compares the schemes of embedding tables with the plan."""

    nodes: int = 2
    """Nodes, each a replica."""
    gpus_per_node: int = 4
    """Devices of a node."""
    batch_size: int = 65_536
    """The global batch."""
    columns: int = 128
    """Numbers of a row."""
    divide_rows: int = 1
    """Divide the rows of each table by this."""
    skew: float = 1.05
    """Exponent of Zipf's law, which the ids follow."""
    network: str = "25gbit"
    """Rate of a node's network card, for the plan."""
    memory_gib: float = 70.0
    """Memory of a device for tables, for the plan."""
    jagged: bool = False
    """Let examples have from 1 id to as many as now of each feature, a quarter of them on average, and send ids as
    values and lengths, beside ids in columns."""
    wire: WireType = "float32"
    """The type in which vectors and their gradients are sent."""
    rates: tuple[str, ...] = ()
    """Rates of the links of an emulated cluster of --nodes hosts, such as 25mbit, on which steps are timed instead."""
    schemes: tuple[str, ...] = ()
    """The schemes whose steps are timed beside the plan; all of them if none is given."""
    cores: float = 0.0
    """Cores of each emulated host, also while others wait; 0: an equal part of the machine's, if it can be limited."""
    ids_ahead: bool = False
    """Time each also with the ids of the next batch sent ahead."""
    num_rounds: int = 7
    """How often the configs take turns at each rate, for three steps each. Medians of all steps are reported."""
    num_repeats: int = 5
    """How often the probe of the network sends each message."""
    json: Path | None = None
    """A file for the results."""

    @property
    def base(self) -> EmbeddingConfig:
        """What all configs have: the wires."""
        return EmbeddingConfig(forward_wire=self.wire, backward_wire=self.wire)


@dataclass(frozen=True)
class Bytes:
    """All tables under one scheme, or under the plan."""

    name: str
    predicted_bytes: float
    """Bytes that one device sends to other nodes in a step."""
    counted_bytes: float
    inner_bytes: float
    """Bytes that it sends inside its node."""
    counted_inner_bytes: float
    of_table_wise: float
    """Bytes of `table_wise` over these."""
    column_bytes: float
    """Predicted bytes with as many columns as the example with most ids needs."""
    device_gib: float
    """Memory of a device for tables."""
    predicted_ms: float
    """By the planner's model: messages and memory."""


def main(args: list[str]) -> None:
    """Prints the table."""
    ones = dict.fromkeys(("gpus_per_node", "batch_size", "columns", "divide_rows", "num_rounds", "num_repeats"), 1)
    command = parse_bench(EmbeddingBench, args, __name__, nodes=2, cores=0, **ones)
    if not command.skew > 0 or command.skew == 1:
        raise ConfigError(f"--skew {command.skew:g}: the formula needs more than 0, and not 1. Give 1.05.")
    if not command.memory_gib > 0:
        raise ConfigError(
            f"--memory-gib {command.memory_gib:g}: nothing fits there. Give the GiB of a device, such as 70."
        )
    count = command.nodes * command.gpus_per_node
    if command.batch_size % count:
        raise ConfigError(f"--batch-size {command.batch_size}: it cannot be split over {count} devices.")
    if command.rates:
        if command.jagged:
            raise ConfigError("--jagged: with --rates ids are in columns. Give one of both.")
        if command.network != EmbeddingBench.network:
            raise ConfigError(f"--network {command.network}: with --rates links have these rates. Give one of both.")
        _time_steps(command)
        return
    for option, given in (
        ("--schemes", command.schemes),
        ("--ids-ahead", command.ids_ahead),
        ("--cores", command.cores),
        ("--num-rounds", command.num_rounds != EmbeddingBench.num_rounds),
        ("--num-repeats", command.num_repeats != EmbeddingBench.num_repeats),
    ):
        if given:
            raise ConfigError(f"{option}: only steps on an emulated network depend on it. Give --rates as well.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    console = Console(width=150)
    rows, kinds_of = measure(command)
    title = f"MLPerf's tables on {command.nodes} nodes of {command.gpus_per_node}, batch {command.batch_size:,}"
    columns = ("tables", "MB to other nodes", "counted", "fewer than table_wise", "MB inside the node", "counted")
    columns += ("GiB", "predicted ms")
    columns += ("ids in columns: MB",) if command.jagged else ()
    table = make_table(f"{title}: one device, one step", columns)
    for row in rows:
        table.add_row(
            row.name,
            *_predicted_and_counted(row.predicted_bytes, row.counted_bytes),
            f"{row.of_table_wise:.2f}x",
            *_predicted_and_counted(row.inner_bytes, row.counted_inner_bytes),
            f"{row.device_gib:,.1f}",
            f"{row.predicted_ms:,.1f}",
            *([f"{row.column_bytes / 1e6:,.3f}"] if command.jagged else []),
        )
    console.print(table)
    console.print("the plan: " + ", ".join(f"{number} {kind}" for kind, number in kinds_of.most_common()))
    write_json(command.json, {"rows": [asdict(row) for row in rows], "plan": kinds_of})


def _predicted_and_counted(predicted: float, counted: float) -> tuple[str, str]:
    return f"{predicted / 1e6:,.3f}", "the same" if predicted == counted else f"{counted / 1e6:,.3f}"


def _time_steps(command: EmbeddingBench) -> None:
    for rate in command.rates:
        parse_rate(rate)
    classes: dict[str, Any] = dict(kinds(Scheme))
    for name in command.schemes:
        if name not in classes:
            raise ConfigError(f"--schemes {name}: there is no such scheme; choose from {', '.join(classes)}.")
    check_possible()
    work = workload(command)
    configs = {
        name: with_schemes(command.base, under_one(work, classes[name]())) for name in command.schemes or classes
    }
    try:
        rows = measure_steps(command, work, configs, Console(width=120))
    except HostFailed as error:
        raise SystemExit(f"{error}") from None
    write_json(command.json, [asdict(row) | {"error": row.error} for row in rows])


def workload(command: EmbeddingBench) -> Workload:
    """The tables of the options, and what a batch does with them."""
    rows = [max(1, num_rows // command.divide_rows) for num_rows in CRITEO_ROWS]
    tables = tuple(
        Table(name=f"feature{i:02d}", rows=count, columns=command.columns, features=(f"feature{i:02d}",))
        for i, count in enumerate(rows)
    )
    num_ids = {f"feature{i:02d}": count for i, count in enumerate(CRITEO_NUM_IDS)}
    jagged = {feature.name: feature for feature in jagged_features()} if command.jagged else {}
    means = [jagged[name].mean_ids or count if jagged else count for name, count in num_ids.items()]
    distinct = {
        table.name: distinct_rows(table.rows, int(mean * command.batch_size // command.nodes), command.skew)
        for table, mean in zip(tables, means, strict=True)
    }
    sizes = MeshConfig(replica=command.nodes).sizes(command.nodes * command.gpus_per_node)
    return Workload(tables, num_ids, distinct, command.batch_size, sizes, jagged)


def measure(command: EmbeddingBench) -> tuple[list[Bytes], Counter[str]]:
    """The rows of the table, and how many tables have each scheme in the plan."""
    work = workload(command)
    machine = nominal_machine(command.network, command.gpus_per_node)
    base = command.base
    plan = plan_tables(work, machine, command.memory_gib * 2**30, base)
    classes: dict[str, Any] = dict(kinds(Scheme))
    configs = {name: with_schemes(base, under_one(work, classes[name]())) for name in classes if name in plan.alone}
    costs = dict(plan.alone) | {PLAN: plan.costs}
    configs[PLAN] = plan.config(base)
    sent = {name: sent_along_axes(work, config) for name, config in configs.items()}
    slow = {name: by_axis[Axis.REPLICA.value] for name, by_axis in sent.items()}
    columns = dataclasses.replace(work, jagged={})
    in_columns = {name: predicted_bytes(columns, config) for name, config in configs.items()}
    rows = [
        Bytes(
            name,
            *slow[name],
            *sent[name][FILLING_AXIS],
            of_table_wise=slow["table_wise"][0] / slow[name][0],
            column_bytes=in_columns[name],
            device_gib=costs[name].device_bytes / 2**30,
            predicted_ms=costs[name].total_sec * 1e3,
        )
        for name in configs
    ]
    return rows, Counter(scheme.kind for scheme in plan.schemes.values())


def jagged_features() -> tuple[Feature, ...]:
    """The features with the statistics of made-up jagged clicks."""
    data = Clicks(num_ids=CRITEO_NUM_IDS, jagged=True, train_examples=1, test_examples=2)
    return data.build().train.spec.id_features()


if __name__ == "__main__":
    run_module(main)
