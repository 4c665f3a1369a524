"""The planner's memory of a device beside XLA's, for layouts of 8 x H100 that are only described."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import make_table, write_json
from jaxdl.performance.planner.auto import table_settings
from jaxdl.performance.planner.choices import Choice, Cluster, RunWorkload, divisors
from jaxdl.performance.planner.h100 import DEVICE, NUM_DEVICES, compile_step, h100_devices
from jaxdl.performance.planner.machine import nominal_machine
from jaxdl.performance.planner.memory import sharding_of
from jaxdl.performance.planner.mesh_tables import tables_on_meshes
from jaxdl.performance.planner.search import Candidate, make_candidate
from jaxdl.performance.planner.trial import planned_bytes
from jaxdl.performance.planner.trials import Trials
from jaxdl.performance.planner.workload import workload_of

if TYPE_CHECKING:
    from benchmarks.planner.options import PlannerBench

_MESHES = ((1, 8, 1), (8, 1, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2))
"""Devices of replica x fsdp x tensor: pure data and FSDP, over one or several replicas, with and without tensor."""


@dataclass(frozen=True)
class LayoutMemory:
    """The memory of one layout."""

    layout: str
    microbatches: int
    kept: str
    parameters: str
    estimate_bytes: float
    xla_bytes: float
    parts: dict[str, float]
    """Of the estimate."""

    @property
    def ratio(self) -> float:
        """The estimate over XLA's."""
        return self.estimate_bytes / self.xla_bytes


def compare_memory(command: PlannerBench, console: Console) -> None:
    """Compiles each layout, and prints and writes the table. Raises ConfigError if none can be compiled."""
    experiment = command.experiment
    machine = nominal_machine("25gbit", NUM_DEVICES)
    cluster = Cluster(1, NUM_DEVICES, machine, float(DEVICE["device_memory_size"]))
    trials = Trials(experiment)
    sizes = MeshConfig().sizes(NUM_DEVICES)
    tables = tables_on_meshes(experiment, sizes, lambda: machine, (), trials.splits)
    work = workload_of(experiment, trials, h100_devices(1, NUM_DEVICES), 1, tables, replicas=True)
    rows = []
    for candidate in itertools.islice(layouts(work, cluster), command.layouts or None):
        compiled_bytes = _compiled_bytes(trials, candidate)
        c = candidate.choice
        rows.append(
            LayoutMemory(
                f"{c.replica} x {c.fsdp} x {c.tensor}",
                c.microbatches,
                c.remat,
                c.param_sharding,
                candidate.memory.total,
                compiled_bytes,
                dataclasses.asdict(candidate.memory),
            )
        )
        row = rows[-1]
        console.print(
            f"{row.layout}, {row.microbatches} micro-batches, {row.kept} {row.parameters}: XLA "
            f"{row.xla_bytes / 1e6:,.2f} MB, estimate {row.estimate_bytes / 1e6:,.2f}, ratio {row.ratio:.3f}",
            highlight=False,
        )
    if not rows:
        raise ConfigError(f"{command.config}: no layout of {NUM_DEVICES} x H100 fits or divides the batch.")
    columns = ("replica x fsdp x tensor", "micro-batches", "kept", "parameters", "XLA, MB", "estimate, MB", "ratio")
    table = make_table(f"{command.config}, batch {experiment.batch_size:,}, for 8 x H100", columns)
    for row in rows:
        sizes = (f"{row.xla_bytes / 1e6:,.2f}", f"{row.estimate_bytes / 1e6:,.2f}", f"{row.ratio:.3f}")
        table.add_row(row.layout, str(row.microbatches), row.kept, row.parameters, *sizes)
    console.print(table)
    worst = max(rows, key=lambda row: abs(row.ratio - 1))
    console.print(f"the worst of {len(rows)}: {worst.ratio - 1:+.1%}", highlight=False)
    write_json(command.json, [dataclasses.asdict(row) for row in rows])


def layouts(work: RunWorkload, cluster: Cluster) -> Iterator[Candidate]:
    """One candidate of each mesh, way to keep activations and sharding, in turns: with few micro-batches, and more.

    Steps are compiled for a layout when it is asked for.
    """
    num_yielded = 0
    for mesh in _MESHES:
        kinds = [(work.remats[0], sharding) for sharding in (work.shardings if mesh[1] > 1 else work.shardings[:1])]
        if mesh == _MESHES[0]:
            kinds += [(remat, "sharded") for remat in work.remats[1:]]
        for remat, sharding in kinds:
            try:
                fitting = _fitting(work, cluster, mesh, remat, sharding)
            except ConfigError as error:
                print(f"{' x '.join(map(str, mesh))}, {sharding}: left out. {error}")
                continue
            if fitting:  # Every second layout has more micro-batches than it needs.
                yield fitting[-1 if num_yielded % 2 else 0]
                num_yielded += 1


def _fitting(
    work: RunWorkload, cluster: Cluster, mesh: tuple[int, int, int], remat: str, sharding: str
) -> list[Candidate]:
    """By micro-batches, the first two that divide the batch and fit."""
    replica, fsdp, tensor = mesh
    if not work.tensor_fits(tensor) or work.batch_size % (replica * fsdp):
        return []
    fitting: list[Candidate] = []
    for microbatches in divisors(work.batch_size // (replica * fsdp)):
        if work.batch_size // (replica * microbatches) % (work.norm_span or 1):
            continue
        candidate = make_candidate(work, cluster, Choice(microbatches, tensor, remat, sharding, replica, fsdp))
        fitting += [candidate] if candidate.fits else []
        if len(fitting) == 2:
            break
    return fitting


def _compiled_bytes(trials: Trials, candidate: Candidate) -> float:
    """What XLA plans for the step of a layout."""
    c = candidate.choice
    changes = {
        "mesh": MeshConfig(replica=c.replica, fsdp=c.fsdp, tensor=c.tensor),
        "step.microbatches": c.microbatches,
        "sharding": sharding_of(trials.experiment.sharding, c.param_sharding),
        "exchange": candidate.exchange,
    }
    changes |= {"model.remat": c.remat} if c.remat else {}
    changes |= table_settings(candidate, trials.experiment)
    plan = trials.plan(changes, h100_devices(c.replica, NUM_DEVICES // c.replica), whole=True)
    num_bytes = planned_bytes(compile_step(plan))
    assert num_bytes is not None, "XLA plans memory for GPUs"
    return float(num_bytes)
