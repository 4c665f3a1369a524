"""Layouts of 8 devices of this machine: what the planner predicts and chooses, and how long each one takes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.data import TabularSpec
from jaxdl.exchange import Dense, ExchangeConfig, Quantized
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.bench.shared import make_table, write_json
from jaxdl.performance.planner.auto import layout_plan, prepare, search_layouts
from jaxdl.performance.planner.h100 import compile_step
from jaxdl.performance.planner.reasons import mesh_of
from jaxdl.performance.planner.search import Candidate
from jaxdl.performance.planner.timed import ROUNDS, is_as_fast, quickest, slowest, time_rounds
from jaxdl.performance.planner.trials import Trials
from jaxdl.report import Start
from jaxdl.training.plans import PlanAuto

if TYPE_CHECKING:
    from benchmarks.planner.options import PlannerBench

NUM_DEVICES = 8
_EXCHANGES: tuple[ExchangeConfig, ...] = (Dense(), Quantized(bits=8))


@dataclass(frozen=True)
class LayoutTimes:
    """One layout."""

    layout: str
    nodes: int
    """As the planner was told."""
    predicted_sec: float
    measured_sec: float
    """The median."""
    spread: float
    """Half the distance of the quartiles, over the median."""
    chosen: bool
    """Whether `--plan auto` takes it on so many nodes."""
    tied: bool
    """Whether noise hides that it is slower than the fastest one of these nodes: of its rounds a quarter or more are as
    fast."""

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_sec / self.measured_sec - 1


def compare_times(command: PlannerBench, console: Console) -> None:
    """Plans for each number of nodes, times every layout in turns, and prints and writes the tables."""
    experiment = command.experiment.replaced({"mesh": MeshConfig()})  # It may say how many devices a CPU has.
    if experiment.model.modality == TabularSpec.modality:
        raise ConfigError(f"model {experiment.model.kind}: steps with tables are timed by `bench embedding --rates`.")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    devices = jax.devices()[:NUM_DEVICES]
    if len(devices) < NUM_DEVICES:
        raise ConfigError(f"there are {len(devices)} devices. Give {NUM_DEVICES}, or virtual ones of the CPU.")
    every: list[LayoutTimes] = []
    for nodes in command.nodes:
        console.print(f"{nodes} nodes of {NUM_DEVICES // nodes}: planning")
        trials = Trials(experiment)
        candidates = _candidates(command, devices, nodes)
        plans = {name: layout_plan(experiment, trials, candidate, devices) for name, candidate in candidates.items()}
        console.print(f"compiling {len(plans)} layouts")
        programs = {name: (plan, compile_step(plan)) for name, plan in plans.items()}
        best = {name: programs[name] for name in list(plans)[: PlanAuto().timed]}
        chosen = quickest(slowest(time_rounds(best, ROUNDS)))
        console.print("timing them")
        times = time_rounds(programs, command.num_rounds, most_sec=float("inf"))
        predicted = {name: candidate.time.total_sec for name, candidate in candidates.items()}
        rows = make_rows(predicted, times, nodes=nodes, chosen=chosen)
        console.print(_table(command, rows))
        for line in remarks(rows):
            console.print(line, highlight=False)
        every += rows
        write_json(command.json, [dataclasses.asdict(row) for row in every])


def _candidates(command: PlannerBench, devices: Sequence[Any], nodes: int) -> dict[str, Candidate]:
    """The layouts on so many nodes that fit, by name, the fastest by prediction first: as `--plan auto` costs them."""
    plan = PlanAuto(devices_per_node=NUM_DEVICES // nodes)
    changes = {"exchange": _EXCHANGES[-1], "plan": plan, "mesh": MeshConfig(replica=nodes)}
    asked = command.experiment.replaced(changes)
    work, cluster, fixed = prepare(asked, Trials(asked), devices, Start(quiet=True))
    candidates: list[Candidate] = []
    for exchange in _EXCHANGES if nodes > 1 else _EXCHANGES[:1]:
        asked_of = dataclasses.replace(work, exchange=exchange, microbatches=command.microbatches)
        candidates += search_layouts(asked_of, cluster, fixed).candidates
    candidates = [
        candidate
        for candidate in candidates
        if candidate.fits and candidate.choice.microbatches in command.microbatches
    ]
    return {
        _named(candidate): candidate for candidate in sorted(candidates, key=lambda candidate: candidate.time.total_sec)
    }


def _named(candidate: Candidate) -> str:
    c = candidate.choice
    parts = [mesh_of(c), f"{c.microbatches} micro-batches", c.param_sharding]
    return ", ".join([*parts, candidate.exchange.label] if c.replica > 1 else parts)


def make_rows(
    predicted: Mapping[str, float], times: Mapping[str, Sequence[float]], *, nodes: int, chosen: str
) -> list[LayoutTimes]:
    """The layouts by predicted time."""
    fastest = min(times, key=lambda name: statistics.median(times[name]))
    rows = []
    for name in sorted(predicted, key=lambda name: predicted[name]):
        low, middle, high = (float(quantile) for quantile in np.quantile(times[name], (0.25, 0.5, 0.75)))
        tied, spread = is_as_fast(times[name], times[fastest]), (high - low) / 2 / middle
        rows.append(LayoutTimes(name, nodes, predicted[name], middle, spread, name == chosen, tied))
    return rows


def rank_correlation(rows: Sequence[LayoutTimes]) -> float:
    """Kendall's tau of predicted and measured times."""
    import scipy.stats

    correlation: Any = scipy.stats.kendalltau([row.predicted_sec for row in rows], [row.measured_sec for row in rows])
    return float(correlation.statistic)


def remarks(rows: Sequence[LayoutTimes]) -> list[str]:
    """The choice against the fastest layout, with and without timing the best; ties, and errors."""
    first, best = rows[0], min(rows, key=lambda row: row.measured_sec)
    [chosen] = [row for row in rows if row.chosen]
    errors = sorted(abs(row.error) for row in rows)
    tied = [row.layout for row in rows if row.tied]
    return [
        f"the choice ({chosen.layout}) takes {chosen.measured_sec / best.measured_sec:.3f} times as long as the "
        f"fastest ({best.layout}); by prediction alone ({first.layout}) it would be "
        f"{first.measured_sec / best.measured_sec:.3f}",
        f"not told apart from the fastest by noise: {'; '.join(tied)}",
        f"error of the prediction: {chosen.error:+.1%} for the choice; median {statistics.median(errors):.1%}, "
        f"largest {errors[-1]:.1%}; {sum(error <= 0.15 for error in errors)} of {len(errors)} within 15 %; "
        f"Kendall's tau {rank_correlation(rows):.2f}",
    ]


def _table(command: PlannerBench, rows: Sequence[LayoutTimes]) -> Any:
    best = min(row.measured_sec for row in rows)
    columns = ("replica x fsdp x tensor", "predicted, ms", "measured, ms", "error", "spread", "of the best")
    batch = command.experiment.batch_size
    title = f"{command.config}, batch {batch:,}, {rows[0].nodes} nodes of {NUM_DEVICES // rows[0].nodes} devices"
    table = make_table(f"{title}, {command.num_rounds} rounds", columns)
    for row in rows:
        table.add_row(
            row.layout + (" (chosen)" if row.chosen else ""),
            f"{1e3 * row.predicted_sec:.2f}",
            f"{1e3 * row.measured_sec:.2f}",
            f"{row.error:+.1%}",
            f"{row.spread:.1%}",
            f"{row.measured_sec / best:.3f}" + (" =" if row.tied else ""),
        )
    return table
