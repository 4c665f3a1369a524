"""Look-ahead caches of embedding tables beside whole tables: hits, step times in turns, and whether the bits are equal.

DLRM on made-up clicks. A hit is a distinct row of a batch that is in a slot already. On a CPU host and devices share
the memory, so step times show what planning and swapping cost, not what a GPU waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxdl.core.errors import OptionError
from jaxdl.data import Clicks
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.embedding.cache import CacheConfig, Policy
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import make_table, median_ratio, parse_bench, run_module, write_json
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import Plan, make_initial_state, make_plan
from jaxdl.training.state import TrainState
from jaxdl.training.tasks import Binary

WHOLE = "whole tables"


@dataclass(frozen=True)
class CacheBench:
    """Trains with caches of several sizes and policies."""

    rows: int = 200_000
    """Rows of each of four tables."""
    columns: int = 32
    """Numbers of a row."""
    batch_size: int = 512
    """Examples of a batch, with 1, 1, 2 and 4 ids."""
    skew: float = 1.05
    """Exponent of Zipf's law, which the ids follow."""
    fractions: tuple[float, ...] = (0.01, 0.1, 0.2)
    """Slots, as a fraction of the rows."""
    policies: tuple[Policy, ...] = ("farthest", "lru", "lfu")
    """Which rows leave."""
    window: int = 8
    """Batches that are looked ahead."""
    num_steps: int = 400
    """Steps of each."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class CacheTimes:
    """One cache."""

    name: str
    fraction: float
    hits: float
    """Share of the distinct rows of all batches."""
    late_hits: float
    """That of the last quarter, when slots have filled."""
    step_ms: float
    of_whole: float
    """Step time over that with whole tables, the median of ratios in one turn."""
    equal: bool
    """Whether all tables have the bits of the run with whole tables at the end."""


class _Side:
    """A run, step by step."""

    def __init__(self, command: CacheBench, cache: CacheConfig) -> None:
        self.plan: Plan = make_plan(_experiment(command, cache))
        self.program = compile_train_step(self.plan)
        self.state: TrainState = make_initial_state(self.plan)
        segment = self.plan.timeline.segments[0]
        self.batches: Iterator[Any] = self.plan.batches(segment, 0, command.num_steps, self.state)

    def counted(self) -> tuple[int, int]:
        """(distinct rows of batches so far that were in a slot, all of them)."""
        counts = self.plan.caches.counted if self.plan.caches else {"device": 0, "host": 0}
        return counts["device"], counts["device"] + counts["host"]

    def step(self) -> float:
        """Seconds of a step, with its swap; reading the batch is not counted."""
        batch = next(self.batches)
        begin = time.perf_counter()
        self.state = self.plan.swap_rows(self.state, 1)
        self.state, _ = self.program(self.state, batch)
        jax.block_until_ready(self.state)
        return time.perf_counter() - begin

    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        """Each whole table, and what is kept of its rows."""
        caches, tables = self.plan.caches, self.plan.parts.tables
        assert tables is not None
        if caches is not None:
            caches.store.write_back(self.state.tables)
        by_table = {}
        for buffer in tables.buffers:
            for table in buffer.tables:
                if caches is not None and table.name in caches.store.rows:
                    by_table[table.name] = caches.store.in_order(table.name)
                    continue
                places = buffer.places.of(table.name, np.arange(table.rows))
                by_table[table.name] = {
                    what: np.asarray(x)[places] for what, x in self.state.tables[buffer.name].items()
                }
        return by_table


def main(args: list[str]) -> None:
    """Prints the table."""
    command = parse_bench(CacheBench, args, __name__, rows=10, columns=1, batch_size=1, window=1, num_steps=4)
    wrong = next((fraction for fraction in command.fractions if not 0 < fraction < 1), None)
    if wrong is not None:
        raise OptionError(f"--fractions {wrong:g}: a fraction of the rows is above 0 and below 1.")
    console = Console(width=120)
    with console.status("") as status:
        rows = measure(command, status.update)
    title = f"4 tables of {command.rows:,} x {command.columns}, batch {command.batch_size:,}, {command.num_steps} steps"
    table = make_table(title, ("tables", "rows in slots", "hits", "in the last quarter", "step ms", "of whole", "bits"))
    for row in rows:
        hits, late = ("", "") if row.name == WHOLE else (f"{row.hits:.1%}", f"{row.late_hits:.1%}")
        of_whole = f"{row.of_whole:.2f}"
        bits = "equal" if row.equal else "other"
        table.add_row(row.name, f"{row.fraction:.0%}", hits, late, f"{row.step_ms:.2f}", of_whole, bits)
    console.print(table)
    write_json(command.json, [asdict(row) for row in rows])


def measure(command: CacheBench, say: Any) -> list[CacheTimes]:
    """The rows of the table; the first is that with whole tables."""
    caches = {WHOLE: CacheConfig()} | {
        f"{policy} {fraction:.0%}": CacheConfig(fraction=fraction, policy=policy, min_rows=1, window=command.window)
        for fraction in command.fractions
        for policy in command.policies
    }
    sides = {}
    for name, cache in caches.items():
        say(f"compiling: {name}")
        sides[name] = _Side(command, cache)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    before: dict[str, tuple[int, int]] = {}
    for number in range(command.num_steps):
        if number == command.num_steps * 3 // 4:
            before = {name: side.counted() for name, side in sides.items()}
        say(f"step {number + 1} of {command.num_steps}")
        for name, side in sides.items():
            seconds[name].append(side.step())
    # Slots fill up, and programs for other numbers of rows compile, in the first steps.
    late = {name: side_seconds[len(side_seconds) // 4 :] for name, side_seconds in seconds.items()}
    expected = sides[WHOLE].tables()
    rows = []
    for name, side in sides.items():
        (hits, lookups), (hits_before, lookups_before) = side.counted(), before[name]
        equal = all(
            np.array_equal(x, expected[table][what])
            for table, arrays in side.tables().items()
            for what, x in arrays.items()
        )
        rows.append(
            CacheTimes(
                name,
                caches[name].fraction or 1.0,
                hits / max(1, lookups),
                (hits - hits_before) / max(1, lookups - lookups_before),
                1e3 * statistics.median(late[name]),
                median_ratio(late[name], late[WHOLE]),
                equal,
            )
        )
    return rows


def _experiment(command: CacheBench, cache: CacheConfig) -> Experiment:
    examples = command.batch_size * command.num_steps
    data = Clicks(rows=(command.rows,) * 4, num_ids=(1, 1, 2, 4), skew=command.skew, train_examples=examples)
    return Experiment(
        model=DLRM(columns=command.columns, bottom=(16,), top=(32,)),
        data=data,
        task=Binary(),
        optimizer=SGD(learning_rate=0.05),
        schedule=Constant(),
        batch_size=command.batch_size,
        steps=command.num_steps,
        embedding=EmbeddingConfig(cache=cache),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
    )


if __name__ == "__main__":
    run_module(main)
