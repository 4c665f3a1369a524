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
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.core.options import parse_options
from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks, Feature
from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.embedding import ROWS, EmbeddingConfig, Scheme, Table, Tables
from jaxdl.parallel.embedding.traffic import axis_bytes, messages, sent_bytes
from jaxdl.parallel.mesh import FILLING_AXIS, Axis, MeshConfig
from jaxdl.performance.bench.cluster.cluster_hosts import HostFailed
from jaxdl.performance.bench.embedding.embedding_network import PLAN, measure_steps
from jaxdl.performance.bench.embedding.options import PROG, EmbeddingBench
from jaxdl.performance.bench.scheme import operations
from jaxdl.performance.bench.shared import check_options, make_table, write_json
from jaxdl.performance.planner.machine import nominal_machine
from jaxdl.performance.planner.table_search import plan_tables, under_one
from jaxdl.performance.planner.tables import Workload, with_schemes
from jaxdl.performance.planner.zipf import distinct_rows
from jaxdl.platform.launch.netns import check_possible, parse_rate


@dataclass(frozen=True)
class Row:
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
    command = parse_options(EmbeddingBench, args=args, prog=PROG, description=str(__doc__))
    check_options(
        command, nodes=2, gpus_per_node=1, batch_size=1, columns=1, divide_rows=1, num_rounds=1, num_repeats=1, cores=0
    )
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
    rows = [max(1, one // command.divide_rows) for one in CRITEO_ROWS]
    tables = tuple(
        Table(name=f"feature{i:02d}", rows=count, columns=command.columns, features=(f"feature{i:02d}",))
        for i, count in enumerate(rows)
    )
    num_ids = {f"feature{i:02d}": count for i, count in enumerate(CRITEO_NUM_IDS)}
    jagged = {one.name: one for one in jagged_features()} if command.jagged else {}
    means = [jagged[name].mean_ids or count if jagged else count for name, count in num_ids.items()]
    distinct = {
        table.name: distinct_rows(table.rows, int(mean * command.batch_size // command.nodes), command.skew)
        for table, mean in zip(tables, means, strict=True)
    }
    sizes = MeshConfig(replica=command.nodes).sizes(command.nodes * command.gpus_per_node)
    return Workload(tables, num_ids, distinct, command.batch_size, sizes, jagged)


def measure(command: EmbeddingBench) -> tuple[list[Row], Counter[str]]:
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
    slow = {name: one[Axis.REPLICA.value] for name, one in sent.items()}
    columns = dataclasses.replace(work, jagged={})
    in_columns = {name: predicted_bytes(columns, config) for name, config in configs.items()}
    rows = [
        Row(
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
    return rows, Counter(one.kind for one in plan.schemes.values())


def jagged_features() -> tuple[Feature, ...]:
    """The features with the statistics of made-up jagged clicks."""
    data = Clicks(num_ids=CRITEO_NUM_IDS, jagged=True, train_examples=1, test_examples=2)
    return data.build().train.spec.id_features()


def predicted_bytes(work: Workload, config: EmbeddingConfig, axis: str = Axis.REPLICA.value) -> float:
    """Bytes that one device sends along a mesh axis in a step: to other nodes, or inside its own."""
    found = [
        one
        for buffer in work.buffers(config)
        for one in messages(buffer, work.local_batch, config.forward_wire, config.backward_wire)
    ]
    return sent_bytes(found, work.sizes, axis)


def sent_along_axes(work: Workload, config: EmbeddingConfig) -> dict[str, tuple[float, float]]:
    """Mesh axis -> (`predicted_bytes` along it, the bytes that are counted in the compiled program)."""
    devices = jax.devices()[: math.prod(work.sizes.values())]
    mesh = Mesh(np.array(devices).reshape(tuple(work.sizes.values())), tuple(work.sizes))
    jagged = tuple(work.jagged[name] for name in work.num_ids) if work.jagged else ()
    tables = Tables(work.tables, work.num_ids, config, mesh, jagged)
    text = compiled_step(tables, work.batch_size, sum(work.num_ids.values()))
    counted = usual_collectives(text, work.sizes)
    return {
        axis: (predicted_bytes(work, config, axis), sum(axis_bytes(*one, work.sizes, axis) for one in counted))
        for axis in work.sizes
    }


def compiled_step(tables: Tables, batch_size: int, num_ids: int) -> str:
    """The HLO of lookups and updates, compiled; as pooled vectors' gradients it takes the vectors themselves.

    Jagged ids are in the first bucket, others in `num_ids` columns.
    """
    shapes = [(batch_size, num_ids)]
    if found := tables.buckets(batch_size):
        shapes = [(batch_size, sum(found[0])), (batch_size, len(found[0]))]

    def step(state: Any, *ids: jax.Array) -> Any:
        key = jax.random.key(0)
        located = tables.locate(*ids)
        vectors = tables.lookup({name: one[ROWS] for name, one in state.items()}, located, key)
        found, square = tables.gradients(located, vectors, key)
        numbers = {"factor": jnp.float32(1), "learning_rate": jnp.float32(0.1), "count": jnp.int32(1)}
        return tables.update(state, found, kept=jnp.isfinite(square), **numbers)

    def struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    everywhere = NamedSharding(tables.mesh, PartitionSpec(tuple(tables.mesh.axis_names)))
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere) for shape in shapes]
    state = jax.tree.map(struct, tables.shapes, tables.shardings())
    return (
        jax.jit(step, donate_argnums=0, out_shardings=tables.shardings()).lower(state, *ids).compile().as_text() or ""
    )


def usual_collectives(text: str, axes: Mapping[str, int]) -> list[tuple[str, tuple[str, ...], float]]:
    """(kind, mesh axes, bytes of the result on a device) of the collectives in compiled HLO.

    Of the branches of a conditional it takes the one that sends least: the other is for rows that exceed their room.
    """
    module = hlo.parse(text)

    def of(computation: str) -> list[tuple[str, tuple[str, ...], float]]:
        found = []
        for one in module.computations[computation].values():
            inner = hlo.inner_computations(one)
            if one.kind == "conditional":
                found += min(map(of, inner), key=lambda some: sum(size for *_, size in some))
            else:
                for name in inner:
                    found += of(name)
            listed = operations(one.line, axes) if hlo.is_collective(one) else []
            found += [(op.kind, op.axes, op.num_bytes) for op in listed if op.axes]
        return found

    return of(module.entry)
