"""Rows a second of the lookup and the exact update of embedding tables on one device, beside PyTorch's EmbeddingBag.

A step looks up the ids of a batch, adds up the vectors of each example, and updates each touched row once, from the sum
of all of its gradients, as a train step does; the gradients of the pooled vectors are given, and there is no model.
Ids follow Zipf's law. The least time of a step is that of the bytes that it cannot save, at the speed of a copy on the
same device: each id once, each distinct row once for the lookup and twice for the update (read and written), with what
the optimizer keeps of it, and the pooled vectors and their gradients once each.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

from benchmarks.embedding import rows_torch
from benchmarks.pytorch import share_gpu_memory
from jaxdl.core.errors import ConfigError, OptionError
from jaxdl.core.kinds import kinds
from jaxdl.data.tables.clicks import shuffle_ids, zipf_rank
from jaxdl.parallel.embedding import EmbeddingConfig, RowOptimizer, Tables
from jaxdl.parallel.embedding.table import Table as EmbeddingTable
from jaxdl.parallel.embedding.tables import TableState
from jaxdl.parallel.embedding.update import ROUTE, SUMS
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.performance.bench import roofline, trace
from jaxdl.performance.bench.shared import (
    make_table,
    median_ratio,
    parse_bench,
    run_module,
    time_in_turns,
    write_json,
)
from jaxdl.performance.planner.h100 import h100_devices

OURS, LOOKUP, PLAIN = "jaxdl", "jaxdl, lookup alone", "jaxdl, plain XLA"
RATE = 0.01
"""The learning rate."""
MOST_DIFFERENT = 1e-5
"""Of the rows of two sides after some steps: the norm of the difference over that of the change."""
_NUM_BATCHES, _CHECKED_STEPS, _COPIED, _COPIES, _SHOWN = 4, 3, 2**28, 8, 12


@dataclass(frozen=True)
class RowsBench:
    """Times lookups and updates of embedding tables on one device."""

    num_tables: int = 8
    """Tables, with one feature each."""
    rows: int = 1_000_000
    """Rows of each table."""
    columns: int = 128
    """Numbers of a row."""
    batch_size: int = 16_384
    """Examples of a batch."""
    num_ids: int = 10
    """Ids that an example has of each feature."""
    skew: float = 1.05
    """Exponent of Zipf's law, which the ids follow, not 1."""
    optimizers: tuple[str, ...] = ("sgd", "adagrad", "rowwise_adagrad")
    """How rows are updated; PyTorch has no rowwise_adagrad."""
    num_steps: int = 10
    """Steps in one repeat."""
    num_repeats: int = 5
    """How often each side is measured; medians are reported."""
    against: Literal["torch"] | None = None
    """Also measure PyTorch's EmbeddingBag with sparse gradients, in turns."""
    profile: bool = False
    """Also show the kernels that take the most time of a step, from a profile of JAX's."""
    h100: bool = False
    """Measure nothing; compile for one H100 and list the kernels. No GPU is needed, but JAX's CUDA packages are.
    JAX 0.11 compiles plain XLA where no GPU is, and none of our own kernels."""
    json: Path | None = None
    """A file for the figures."""


Step = Callable[[TableState, jax.Array, jax.Array, Any], tuple[TableState, jax.Array]]


def main(args: list[str]) -> None:
    """Runs the measurement and prints it."""
    share_gpu_memory(args)
    command = parse_command(args)
    console = Console(width=130)
    if command.h100:
        results = {name: _compiled_for_h100(command, name) for name in command.optimizers}
        for name, figures in results.items():
            console.print(roofline.table(f"{_title(command)}, {name}, compiled for one H100", figures, None))
    else:
        results = measure(command)
        _print(command, results, console)
    write_json(command.json, results)


def parse_command(args: list[str]) -> RowsBench:
    """The command line. Raises ConfigError, or exits after --help."""
    least = dict.fromkeys(("num_tables", "rows", "columns", "batch_size", "num_ids", "num_steps", "num_repeats"), 1)
    command = parse_bench(RowsBench, args, __name__, **least)
    known = kinds(RowOptimizer)
    for name in command.optimizers:
        if name not in known:
            raise OptionError(f"--optimizers {name}: there is no such one; choose from {', '.join(known)}.")
    if command.skew <= 0 or command.skew == 1:
        raise OptionError(f"--skew {command.skew:g}: the formula needs more than 0, and not 1. Give 1.05.")
    if command.h100 and command.against:
        raise OptionError("--h100 with --against: a described GPU runs nothing. Leave one of them out.")
    return command


def make_tables(command: RowsBench, optimizer: str, device: Any = None) -> Tables:
    """The tables on one device, by default the first."""
    names = [f"table{number}" for number in range(command.num_tables)]
    tables = [EmbeddingTable(name=name, rows=command.rows, columns=command.columns, features=(name,)) for name in names]
    kind: Any = kinds(RowOptimizer)[optimizer]
    config = EmbeddingConfig(optimizer=kind())
    mesh = make_mesh(MeshConfig(replica=1, fsdp=1, tensor=1), [device or jax.devices()[0]])
    return Tables(tables, dict.fromkeys(names, command.num_ids), config, mesh)


def make_step(tables: Tables) -> Step:
    """(state, ids, gradients of the pooled vectors, count of updates with this) -> (state after it, pooled vectors)."""

    def step(state: TableState, ids: jax.Array, grads: jax.Array, count: Any) -> tuple[TableState, jax.Array]:
        located = tables.locate(ids)
        vectors = tables.lookup({name: arrays["rows"] for name, arrays in state.items()}, located)
        # As in training, the gradients are there when the lookup is done.
        vectors, grads = lax.optimization_barrier((vectors, grads))
        row_grads, _ = tables.gradients(located, grads)
        after = tables.update(
            state, row_grads, kept=jnp.bool_(True), factor=jnp.float32(1), learning_rate=jnp.float32(RATE),
            count=count,
        )  # fmt: skip
        return after, vectors

    return step


def make_ids(command: RowsBench, number: int) -> np.ndarray:
    """The ids of a batch, int32 `[batch, all ids]`, those of a table side by side."""
    rng = np.random.default_rng([number])
    drawn = rng.random((command.num_tables, command.batch_size, command.num_ids))
    ranks = zipf_rank(drawn, command.rows, command.skew)
    parts = [shuffle_ids(ranks[table], command.rows, table) for table in range(command.num_tables)]
    return np.concatenate(parts, axis=1).astype(np.int32)


def make_grads(command: RowsBench) -> jax.Array:
    """Gradients of the pooled vectors, `[batch, all columns]`."""
    return jax.random.normal(jax.random.key(1), (command.batch_size, command.num_tables * command.columns))


def least_bytes(command: RowsBench, tables: Tables, distinct: float) -> dict[str, float]:
    """The bytes that a lookup, and a whole step, cannot save; `distinct` is the mean number of rows of a batch."""
    [buffer] = tables.buffers
    kept = sum(1 if number else command.columns for number in buffer.optimizer.row_numbers.values())
    ids = 4 * command.batch_size * command.num_tables * command.num_ids
    vectors = 4 * command.batch_size * command.num_tables * command.columns
    lookup = ids + vectors + distinct * 4 * command.columns
    return {LOOKUP: lookup, OURS: lookup + vectors + 2 * distinct * 4 * (command.columns + kept)}


def measure(command: RowsBench) -> dict[str, Any]:
    """The speed of a copy, bytes a second, and of each optimizer the seconds of a step of each side, and figures."""
    batches = [make_ids(command, number) for number in range(_NUM_BATCHES)]
    split = [np.split(ids, command.num_tables, axis=1) for ids in batches]
    distinct = statistics.mean(sum(len(np.unique(part)) for part in batch_parts) for batch_parts in split)
    by_optimizer = {name: _measured(command, name, batches, distinct) for name in command.optimizers}
    device = jax.devices()[0].device_kind
    return {"device": device, "jax": jax.__version__, "copy_bytes_per_sec": copy_speed(), "distinct_rows": distinct,
            "looked_up_rows": batches[0].size, "optimizers": by_optimizer}  # fmt: skip


def copy_speed() -> float:
    """Bytes that a copy on the device reads and writes in a second."""
    source = jnp.ones(_COPIED if jax.default_backend() == "gpu" else _COPIED // 16, jnp.float32)
    copy = jax.jit(jnp.copy)
    seconds = time_in_turns({"copy": lambda: [copy(source) for _ in range(_COPIES)]}, 9)["copy"]
    return _COPIES * 2 * source.nbytes / statistics.median(seconds)


def _measured(command: RowsBench, optimizer: str, batches: list[np.ndarray], distinct: float) -> dict[str, Any]:
    tables = make_tables(command, optimizer)
    grads, ids = make_grads(command), [jnp.asarray(batch) for batch in batches]
    state = jax.jit(tables.init)(jax.random.key(0))
    programs = {OURS: _compiled(tables, state, ids[0], grads)}
    if jax.default_backend() == "gpu":
        with _plain():
            programs[PLAIN] = _compiled(tables, state, ids[0], grads)

    @jax.jit
    def lookup(state: TableState, ids: jax.Array) -> jax.Array:
        return tables.lookup({name: arrays["rows"] for name, arrays in state.items()}, tables.locate(ids))

    def ours(step: Step) -> Any:
        nonlocal state
        vectors = None
        for number in range(command.num_steps):
            state, vectors = step(state, ids[number % len(ids)], grads, np.float32(1 + number))
        return state, vectors

    def looked_up() -> Any:
        return [lookup(state, ids[number % len(ids)]) for number in range(command.num_steps)][-1]

    sides: dict[str, Callable[[], Any]] = {name: functools.partial(ours, step) for name, step in programs.items()}
    sides[LOOKUP] = looked_up
    different: dict[str, float] = {}
    if command.against and rows_torch.has(optimizer):
        different = check(command, optimizer)
        sides |= {
            name: functools.partial(side, command.num_steps)
            for name, side in rows_torch.sides(command, optimizer, batches, np.asarray(grads), RATE).items()
        }
    times = time_in_turns(sides, command.num_repeats)
    seconds = {name: [value / command.num_steps for value in values] for name, values in times.items()}
    kernels = trace.kernels(sides[OURS], command.num_steps) if command.profile else []
    least = least_bytes(command, tables, distinct)
    return {"seconds": seconds, "least_bytes": least, "different": different, "kernels": kernels}


def _compiled(tables: Tables, state: Any, ids: Any, grads: Any) -> jax.stages.Compiled:
    """The program of a step, for arrays like these or for their shapes."""
    return jax.jit(make_step(tables), donate_argnums=0).lower(state, ids, grads, np.float32(1)).compile()


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Programs compiled inside have none of our own kernels."""
    before = os.environ.get(ROUTE)
    os.environ[ROUTE] = "xla"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ROUTE]
        else:
            os.environ[ROUTE] = before


def check(command: RowsBench, optimizer: str) -> dict[str, float]:
    """Of each of PyTorch's sides, how far its rows are from ours after some steps of small tables.

    The norm of the difference over that of the change. Raises ConfigError above MOST_DIFFERENT: such times say nothing.
    """
    small = RowsBench(num_tables=2, rows=500, columns=16, batch_size=64, num_ids=command.num_ids, skew=command.skew)
    tables, grads = make_tables(small, optimizer), make_grads(small)
    batches = [make_ids(small, number) for number in range(_CHECKED_STEPS)]
    state = jax.jit(tables.init)(jax.random.key(0))
    first = rows_of(tables, state)
    step = jax.jit(make_step(tables))
    for number, ids in enumerate(batches):
        state, _ = step(state, jnp.asarray(ids), grads, np.float32(1 + number))
    wanted = rows_of(tables, state)
    differences = {}
    for name, trained_rows in rows_torch.trained(small, optimizer, batches, np.asarray(grads), RATE, first).items():
        differences[name] = float(np.linalg.norm(trained_rows - wanted) / np.linalg.norm(wanted - first))
        if not differences[name] < MOST_DIFFERENT:
            raise ConfigError(
                f"{name}, {optimizer}: its rows differ from ours by {differences[name]:.2g} of their change."
            )
    return differences


def rows_of(tables: Tables, state: Mapping[str, Mapping[str, jax.Array]]) -> np.ndarray:
    """The rows of all tables, one after the other, `[all rows, columns]`."""
    [buffer] = tables.buffers
    rows = np.asarray(state[buffer.name]["rows"])
    return np.concatenate([rows[buffer.places.of(table.name, np.arange(table.rows))] for table in buffer.tables])


def _compiled_for_h100(command: RowsBench, optimizer: str) -> dict[str, Any]:
    """What `roofline.measure` returns, of a step of the tables."""
    [device] = h100_devices(1, 1)
    tables = make_tables(command, optimizer, device)
    everywhere = jax.sharding.NamedSharding(tables.mesh, jax.sharding.PartitionSpec(tuple(tables.mesh.axis_names)))
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tables.shapes, tables.shardings()
    )
    total = command.num_tables * command.num_ids
    ids = jax.ShapeDtypeStruct((command.batch_size, total), jnp.int32, sharding=everywhere)
    size = (command.batch_size, command.num_tables * command.columns)
    grads = jax.ShapeDtypeStruct(size, jnp.float32, sharding=everywhere)
    return roofline.of_program(_compiled(tables, shapes, ids, grads))


def _title(command: RowsBench) -> str:
    sizes = f"{command.num_tables} tables of {command.rows:,} x {command.columns}"
    return f"{sizes}, batch {command.batch_size:,} with {command.num_ids} ids each"


def _print(command: RowsBench, results: dict[str, Any], console: Console) -> None:
    columns = ("", "ms a step", "min", "max", "million rows/s", "of the copy's speed", "jaxdl is faster")
    table = make_table(f"{_title(command)}, {results['device']}", ("optimizer", *columns), left=("optimizer", ""))
    for optimizer, figures in results["optimizers"].items():
        for side, values in figures["seconds"].items():
            middle = statistics.median(values)
            least = figures["least_bytes"][LOOKUP if side == LOOKUP else OURS] / results["copy_bytes_per_sec"]
            milliseconds = [f"{1e3 * value:.3f}" for value in (middle, min(values), max(values))]
            faster = "" if side in (OURS, LOOKUP) else f"{median_ratio(values, figures['seconds'][OURS]):.2f} x"
            rate = f"{results['looked_up_rows'] / middle / 1e6:,.1f}"
            table.add_row(optimizer, side, *milliseconds, rate, f"{least / middle:.1%}", faster)
        table.add_section()
    console.print(table)
    for optimizer, figures in results["optimizers"].items():
        if figures["kernels"]:
            console.print(trace.table(f"{optimizer}: the kernels with the most time", figures["kernels"][:_SHOWN]))
    speed = f"{results['copy_bytes_per_sec'] / 1e12:.3f} TB/s"
    share = f"{results['distinct_rows']:,.0f} of {results['looked_up_rows']:,} rows of a batch are distinct"
    console.print(f"a copy moves {speed}, read and written; {share}; JAX {results['jax']}", highlight=False)
    if jax.default_backend() == "gpu":
        console.print(f"by {'kernels of our own' if SUMS.used() else 'plain XLA'}")
    worst = {name: most for figures in results["optimizers"].values() for name, most in figures["different"].items()}
    if worst:
        text = ", ".join(f"{name} {most:.1e}" for name, most in worst.items())
        console.print(f"rows after {_CHECKED_STEPS} steps of small tables, relative to ours: {text}", highlight=False)


if __name__ == "__main__":
    run_module(main)
