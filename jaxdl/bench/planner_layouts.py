"""Every layout of 8 devices of this machine: predicted by the planner, and timed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console

from jaxdl.bench.shared import make_table, write_json
from jaxdl.config import ConfigError
from jaxdl.data import TabularSpec
from jaxdl.exchange import Dense, ExchangeConfig, Quantized
from jaxdl.experiment import Experiment
from jaxdl.mesh import MeshConfig
from jaxdl.planner.calibrate import measured_machine, measured_profiles, timed_plans
from jaxdl.planner.memory import sharding_of
from jaxdl.planner.search import Candidate, Choice, Cluster, Workload, costed
from jaxdl.planner.steptime import Efficiency
from jaxdl.planner.trial import stand_in
from jaxdl.planner.workload import workload_of
from jaxdl.run.build import Plan, make_plan

if TYPE_CHECKING:
    from jaxdl.bench.planner import PlannerBench

NUM_DEVICES = 8
_EXCHANGES: tuple[ExchangeConfig, ...] = (Dense(), Quantized(bits=8))


@dataclass(frozen=True)
class Row:
    """One layout."""

    layout: str
    predicted_sec: float
    measured_sec: float
    """The median."""
    spread: float
    """Half the distance of the quartiles, over the median."""
    tied: bool
    """Whether noise hides that it is slower than the fastest one: of its rounds a quarter or more are as fast."""

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_sec / self.measured_sec - 1


def compare_times(command: PlannerBench, console: Console) -> None:
    """Measures the machine, predicts and times each layout, and prints and writes the table."""
    experiment = command.experiment
    if experiment.model.modality == TabularSpec.modality:
        raise ConfigError(f"model {experiment.model.kind}: steps with tables are timed by `bench embedding`.")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    devices = jax.devices()[:NUM_DEVICES]
    if len(devices) < NUM_DEVICES:
        raise ConfigError(f"there are {len(devices)} devices. Give {NUM_DEVICES}, or virtual ones of the CPU.")
    console.print("measuring links, and steps without messages")
    work = dataclasses.replace(
        workload_of(experiment, devices, 1),
        profiles=measured_profiles(experiment, devices, num_rounds=command.num_rounds),
    )
    candidates = {_named(one): one for one in _candidates(work, devices, command)}
    console.print(f"timing {len(candidates)} layouts")
    plans = {name: _planned(experiment, one, devices) for name, one in candidates.items()}
    rows = make_rows(
        {name: one.time.total_sec for name, one in candidates.items()}, timed_plans(plans, command.num_rounds)
    )
    console.print(_table(command, rows))
    for line in remarks(rows):
        console.print(line, highlight=False)
    write_json(command.json, [dataclasses.asdict(row) for row in rows])


def _candidates(work: Workload, devices: Sequence[Any], command: PlannerBench) -> list[Candidate]:
    found = []
    for replica in (1, 2, 4, 8):
        fsdp = NUM_DEVICES // replica
        machine = measured_machine(devices, replica)
        cluster = Cluster(replica, fsdp, machine, float("inf"), Efficiency(compute=1.0))
        for exchange in _EXCHANGES if replica > 1 else _EXCHANGES[:1]:
            for sharding in work.shardings if fsdp > 1 else work.shardings[:1]:
                for microbatches in command.microbatches:
                    if work.batch_size % (NUM_DEVICES * microbatches):
                        continue
                    choice = Choice(microbatches, 1, work.remats[0], sharding, replica, fsdp)
                    found.append(costed(dataclasses.replace(work, exchange=exchange), cluster, choice))
    return found


def _named(one: Candidate) -> str:
    c = one.choice
    exchange = f", {one.exchange.label}" if c.replica > 1 else ""
    return f"{c.replica} x {c.fsdp}, {c.microbatches} micro-batches, {c.param_sharding}{exchange}"


def _planned(experiment: Experiment, one: Candidate, devices: Sequence[Any]) -> Plan:
    c = one.choice
    changes: dict[str, Any] = {
        "mesh": MeshConfig(replica=c.replica, fsdp=c.fsdp, tensor=1),
        "step.microbatches": c.microbatches,
        "sharding": sharding_of(experiment.sharding, c.param_sharding),
        "exchange": one.exchange,
    }
    changes |= {"model.remat": c.remat} if c.remat else {}
    return make_plan(stand_in(experiment).replaced(changes), devices)


def make_rows(predicted: Mapping[str, float], times: Mapping[str, Sequence[float]]) -> list[Row]:
    """The layouts by predicted time: the planner's choice is the first."""
    fastest = min(times, key=lambda name: statistics.median(times[name]))
    rows = []
    for name in sorted(predicted, key=lambda name: predicted[name]):
        low, middle, high = np.quantile(times[name], (0.25, 0.5, 0.75))
        slower = np.quantile(np.divide(times[name], times[fastest]), 0.25)
        rows.append(Row(name, predicted[name], float(middle), float((high - low) / 2 / middle), bool(slower <= 1)))
    return rows


def rank_correlation(rows: Sequence[Row]) -> float:
    """Kendall's tau of predicted and measured times."""
    import scipy.stats

    found: Any = scipy.stats.kendalltau([one.predicted_sec for one in rows], [one.measured_sec for one in rows])
    return float(found.statistic)


def remarks(rows: Sequence[Row]) -> list[str]:
    """The choice against the fastest layout, ties, and errors."""
    chosen, best = rows[0], min(rows, key=lambda row: row.measured_sec)
    errors = sorted(abs(row.error) for row in rows)
    tied = [row.layout for row in rows if row.tied]
    return [
        f"the choice ({chosen.layout}) takes {chosen.measured_sec / best.measured_sec:.3f} times as long as the "
        f"fastest ({best.layout})",
        f"not told apart from the fastest by noise: {'; '.join(tied)}",
        f"error of the prediction: {chosen.error:+.1%} for the choice; median {statistics.median(errors):.1%}, "
        f"largest {errors[-1]:.1%}; {sum(one <= 0.15 for one in errors)} of {len(errors)} within 15 %; Kendall's tau "
        f"{rank_correlation(rows):.2f}",
    ]


def _table(command: PlannerBench, rows: Sequence[Row]) -> Any:
    best = min(row.measured_sec for row in rows)
    columns = ("replica x fsdp", "predicted, ms", "measured, ms", "error", "spread", "of the best")
    batch = command.experiment.batch_size
    title = f"{command.config}, batch {batch:,}, {NUM_DEVICES} devices, {command.num_rounds} rounds"
    table = make_table(title, columns)
    for row in rows:
        table.add_row(
            row.layout,
            f"{1e3 * row.predicted_sec:.2f}",
            f"{1e3 * row.measured_sec:.2f}",
            f"{row.error:+.1%}",
            f"{row.spread:.1%}",
            f"{row.measured_sec / best:.3f}" + (" =" if row.tied else ""),
        )
    return table
