"""Placement of shards on devices with little memory to spare, beside simpler ways: the largest load over its bound.

Costs and sizes of shards are lognormal and independent. The bound is the mean load of a device, or the largest shard's;
a shard that leaves no room for another one is alone on its device, and not in that mean.
"by size" is what TorchRec does by default: the largest first, onto the least loaded device that has room; "by cost" and
"differencing" know no memory, and their results may not fit.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxdl.performance.bench.shared import make_table, parse_bench, run_module, write_json
from jaxdl.performance.planner.placement import by_cost, by_size, largest_differencing, makespan, place
from jaxdl.performance.planner.placement_bound import lower_bound

INSTANCES = (
    (100, 8, 1.2), (100, 8, 1.05), (300, 16, 1.2), (300, 16, 1.05), (300, 16, 1.02), (1000, 64, 1.2), (1000, 64, 1.03),
)  # fmt: skip
"""Shards, devices, and the memory of all devices over the size of all shards."""


@dataclass(frozen=True)
class PlacementBench:
    """Places made-up shards."""

    seeds: int = 5
    """Instances of each kind; the worst is shown."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class PlacedLoads:
    """The worst of the instances of a kind, each figure over the bound."""

    shards: int
    devices: int
    slack: float
    by_size: float
    by_cost: float
    by_cost_fits: int
    """In how many instances it fits."""
    differencing: float
    differencing_fits: int
    placed: float
    """By `jaxdl.performance.planner.placement.place`."""
    seconds: float


def main(args: list[str]) -> None:
    """Prints the table."""
    command = parse_bench(PlacementBench, args, __name__, seeds=1)
    console = Console(width=140)
    columns = ("shards", "devices", "memory", "by size", "by cost", "fits", "differencing", "fits", "placed", "seconds")
    table = make_table(f"Largest load over its bound, the worst of {command.seeds}", columns)
    rows = []
    for shards, devices, slack in INSTANCES:
        with console.status(f"{shards} shards on {devices} devices"):
            rows.append(measure(shards, devices, slack, command.seeds))
        row = rows[-1]
        fits = (f"{count} of {command.seeds}" for count in (row.by_cost_fits, row.differencing_fits))
        table.add_row(
            f"{shards:,}",
            str(devices),
            f"{slack:.2f}x",
            f"{row.by_size:.4f}",
            f"{row.by_cost:.4f}",
            next(fits),
            f"{row.differencing:.4f}",
            next(fits),
            f"{row.placed:.4f}",
            f"{row.seconds:.2f}",
        )
    console.print(table)
    write_json(command.json, [asdict(row) for row in rows])


def instance(shards: int, devices: int, slack: float, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Costs and sizes of shards, and the memory of a device."""
    draw = np.random.default_rng(seed)
    costs, sizes = draw.lognormal(size=shards), draw.lognormal(size=shards)
    return costs, sizes, max(slack * sizes.sum() / devices, sizes.max())


def measure(shards: int, devices: int, slack: float, seeds: int) -> PlacedLoads:
    """The worst of the instances with these seeds."""
    instances = []
    for seed in range(seeds):
        costs, sizes, memory = instance(shards, devices, slack, seed)
        begin = time.perf_counter()
        ours = place(costs, sizes, devices, memory)
        seconds = time.perf_counter() - begin
        assert np.bincount(ours.device, sizes, devices).max() <= memory
        others = [by_size(costs, sizes, devices, memory), by_cost(costs, devices), largest_differencing(costs, devices)]
        bound = lower_bound(costs, devices, sizes, memory)
        loads = [makespan(costs, other, devices) / bound for other in others]
        fit = [bool(np.bincount(other, sizes, devices).max() <= memory) for other in others]
        instances.append((*loads, ours.makespan / bound, *fit, seconds))
    worst = np.max(instances, axis=0)
    fits = np.sum(instances, axis=0)
    return PlacedLoads(
        shards, devices, slack, worst[0], worst[1], int(fits[5]), worst[2], int(fits[6]), worst[3], float(worst[7])
    )


if __name__ == "__main__":
    run_module(main)
