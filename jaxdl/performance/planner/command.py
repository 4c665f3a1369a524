"""The options of `python -m jaxdl.planner`, and what it prints.

Steps of one replica are compiled for H100, which needs no GPU but JAX's CUDA compiler; nothing runs. What is given on
the command line, such as --mesh.tensor 2, or in the config with another value than the default, stays, and the rest is
planned around it. The global batch, the order of the data and the optimizer are never changed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import OptionError
from jaxdl.core.options import parse_options
from jaxdl.data import TabularSpec
from jaxdl.exchange import Auto
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine
from jaxdl.parallel.mesh import AXES, FILLING_AXIS, Axis
from jaxdl.performance.planner.choices import Cluster
from jaxdl.performance.planner.few import search_layouts
from jaxdl.performance.planner.h100 import DEVICE, h100_devices
from jaxdl.performance.planner.machine import NVLINK, network_rate
from jaxdl.performance.planner.memory import MOST_OF_DEVICE
from jaxdl.performance.planner.mesh_tables import given_schemes, tables_on_meshes, with_slots
from jaxdl.performance.planner.reasons import (
    best_of_each_mesh,
    binding,
    describe,
    mesh_of,
    why_it_wins,
    why_slower,
    why_this_way,
)
from jaxdl.performance.planner.search import Candidate, SearchResult
from jaxdl.performance.planner.steptime import Efficiency, nodes_that_pay, parameter_servers
from jaxdl.performance.planner.table_report import config_lines, measured_workload, table_of
from jaxdl.performance.planner.table_report import remarks as remarks_of_tables
from jaxdl.performance.planner.table_search import plan_tables
from jaxdl.performance.planner.trials import Trials
from jaxdl.performance.planner.workload import fixed_fields, no_layout, workload_of
from jaxdl.training.experiment import Experiment, find_config_option, parse_command_line
from jaxdl.training.plans import typed_fields

_SHOWN = 12
_PAYS = 0.8
_COLUMNS = (
    "replica x fsdp x tensor", "micro-batches", "kept", "parameters", "exchange", "step", "compute", "inner",
    "slow", "exposed", "idle, %", "to nodes, MB", "GB", "against the best",
)  # fmt: skip


@dataclass(frozen=True)
class PlannerOptions:
    """What is planned for, and what is shown."""

    gpus_per_node: int = 8
    """GPUs of a node, joined by NVLink."""
    nodes: int = 1
    """Nodes, joined by the network."""
    network: str = "25gbit"
    """The rate of a node's network, each way, which its GPUs share: 500mbit, 25gbit."""
    latency_us: float = 20.0
    """Microseconds of the shortest message between nodes."""
    device_gb: float = 0.0
    """Memory of a GPU in GB; 0: that of an H100."""
    efficiency: float = Efficiency().compute
    """The share of the least time by the roofline that kernels reach: measured, or this guess."""
    overlap: float = Efficiency().overlap
    """The share of kernels' time during which messages can be sent."""
    shown: int = _SHOWN
    """Candidates in the table."""
    only_tables: bool = False
    """Plan the embedding tables alone; this needs no compiler for GPUs."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlannerOptions):
    """The other options of the command are those of the experiment."""

    config: Path
    """The experiment: a Python file with a function config()."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]


ABOUT = """Plans mesh, micro-batches, what activations are kept, sharding and exchange of a run, and says why.

  python -m jaxdl.planner --config configs/lm_gpt2_124m.py --gpus-per-node 8 --nodes 4 --network 25gbit
  python -m jaxdl.planner --config configs/lm_gpt2_124m.py --nodes 2 --mesh.tensor 2 --exchange auto
  python -m jaxdl.planner --config configs/criteo_synthetic.py --nodes 2 --only-tables

Nothing runs, and no GPU is needed, but JAX's compiler for GPUs: pip install 'jax[cuda12]'. --only-tables needs none.
For tables, up to 65,536 examples of the config's data are read, to count the rows that a batch touches."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Raises ConfigError for what cannot be planned."""
    if find_config_option(args) is None and {"--help", "-h"} & set(args):
        print(
            f"{ABOUT}\n\nAll other options are those of python -m jaxdl.train. With --config FILE --help: every option,"
            " with its default in that file."
        )
        parse_options(PlannerOptions, ["--help"], prog=prog)
    command, _ = parse_command_line(_command, args, about=ABOUT, prog=prog, gpus=True)
    cluster = cluster_of(command)
    keep = typed_fields(args) | set(getattr(command.experiment.plan, "keep", ()))
    fixed = fixed_fields(command.experiment, keep)
    console = Console(width=170)
    trials = Trials(command.experiment)
    if command.only_tables:
        for name in ("efficiency", "overlap", "shown"):
            if (value := getattr(command, name)) != getattr(PlannerOptions, name):
                raise OptionError(f"--{name} {value:g}: with --only-tables nothing depends on it. Leave it out.")
        sizes = _sizes(command, fixed)
        if math.prod(sizes.values()) == 1:
            raise OptionError("--only-tables: one device has all tables. Give --nodes or --gpus-per-node above 1.")
        if not _print_tables(command, trials, cluster, console, keep, sizes):
            raise OptionError(f"--only-tables: model {command.experiment.model.kind} has no embedding tables.")
        return
    replica = int(fixed.get("mesh.replica", command.nodes))
    total = command.nodes * command.gpus_per_node
    sizes = dict.fromkeys(AXES, 1) | {Axis.REPLICA.value: replica, FILLING_AXIS: max(1, total // replica)}
    tables = tables_on_meshes(command.experiment, sizes, lambda: cluster.machine, keep, trials.splits)
    devices = h100_devices(1, cluster.gpus_per_node)
    work = workload_of(command.experiment, trials, devices, replica, tables)
    layouts = search_layouts(dataclasses.replace(work, compares_tensor=True), cluster, fixed)
    if not layouts.candidates:
        raise no_layout(command.experiment, fixed, f"{command.nodes} nodes of {command.gpus_per_node} GPUs")
    if layouts.best is not None and tables is not None and math.prod(layouts.best.choice.sizes.values()) > 1:
        _print_tables(command, trials, cluster, console, keep, layouts.best.choice.sizes, layouts.best)
    console.print(table(layouts, command))
    for line in remarks(layouts, command):
        console.print(line, highlight=False)
    if layouts.best is None:
        least = layouts.candidates[0]
        raise ConfigError(
            f"nothing fits: the least memory is {least.memory.total / 1e9:.1f} GB ({describe(least)}), of "
            f"{cluster.device_bytes / 1e9:.1f}. Take more nodes, or a smaller --batch-size."
        )


def _command(config: Path, experiment: Experiment) -> PlanCommand:
    return PlanCommand(config=config, experiment=experiment)


def _sizes(command: PlanCommand, fixed: Mapping[str, Any]) -> dict[str, int]:
    """The mesh for which tables are planned alone: as given, or a replica on each node, without tensor parallelism."""
    total = command.nodes * command.gpus_per_node
    sizes = {axis: int(fixed.get(f"mesh.{axis}", 1)) for axis in AXES}
    sizes[Axis.REPLICA.value] = int(fixed.get("mesh.replica", command.nodes))
    if f"mesh.{FILLING_AXIS}" not in fixed:
        sizes[FILLING_AXIS] = max(1, total // math.prod(sizes.values()))
    if math.prod(sizes.values()) != total:
        raise no_layout(command.experiment, fixed, f"{command.nodes} nodes of {command.gpus_per_node} GPUs")
    return sizes


def _print_tables(
    command: PlanCommand,
    trials: Trials,
    cluster: Cluster,
    console: Console,
    keep: Collection[str],
    sizes: Mapping[str, int],
    best: Candidate | None = None,
) -> bool:
    """Plans the embedding tables for a mesh, if there are any, or shows those of a plan; whether there are."""
    if command.experiment.model.modality != TabularSpec.modality:  # No data need be read.
        return False
    workload = measured_workload(command.experiment, sizes, trials.splits)
    if workload is None:
        return False
    base = command.experiment.embedding
    work, memory = with_slots(workload, base), MOST_OF_DEVICE * cluster.device_bytes
    given = given_schemes(work, base, keep)
    if best is not None and best.tables is not None:
        memory -= best.memory.total - best.memory.tables
        plan = plan_tables(work, cluster.machine, memory, best.tables.embedding, best.tables.schemes)
    else:
        plan = plan_tables(work, cluster.machine, memory, base, given)
    console.print(table_of(work, plan, base, cluster.machine, given))
    for line in [*remarks_of_tables(plan, memory, given), "in the config: EmbeddingConfig(", *config_lines(plan), ")"]:
        console.print(line, highlight=False, soft_wrap=True)
    return True


def cluster_of(command: PlanCommand) -> Cluster:
    """The described devices and links. Raises OptionError for values that cannot be."""
    for name in ("gpus_per_node", "nodes", "shown"):
        if getattr(command, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(command, name)}: give 1 or more.")
    for name in ("efficiency", "overlap"):
        if not 0 < getattr(command, name) <= 1:
            raise OptionError(f"--{name} {getattr(command, name):g}: a share is above 0 and at most 1.")
    if command.latency_us < 0 or command.device_gb < 0 or not math.isfinite(command.latency_us + command.device_gb):
        raise OptionError("--latency-us and --device-gb: give finite numbers, 0 or more.")
    rate = network_rate(command.network, "--network", OptionError) / command.gpus_per_node
    links = dict.fromkeys(AXES, NVLINK) | {Axis.REPLICA.value: Link(1e-6 * command.latency_us, rate)}
    machine = Machine(links, NOMINAL_SPEEDS["gpu"], "given", overlaps=True)
    size = 1e9 * command.device_gb or float(DEVICE["device_memory_size"])
    return Cluster(command.nodes, command.gpus_per_node, machine, size, Efficiency(command.efficiency, command.overlap))


def table(layouts: SearchResult, command: PlanCommand) -> Table:
    """The first candidates, and the fastest that does not fit."""
    devices = f"{command.nodes} x {command.gpus_per_node} H100, {command.network}"
    title = f"{command.config}: {devices}, batch {command.experiment.batch_size:,}; times in ms"
    made = Table(title=title)
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column in (_COLUMNS[0], _COLUMNS[4], _COLUMNS[-1]) else "right")
    listed = layouts.candidates if layouts.decoder is None else best_of_each_mesh(layouts.candidates)
    fitting = [candidate for candidate in listed if candidate.fits]
    refused = sorted(
        (candidate for candidate in layouts.candidates if not candidate.fits),
        key=lambda candidate: (candidate.time.total_sec, candidate.choice),
    )
    best = layouts.best or layouts.candidates[0]
    for candidate in [*fitting[: command.shown], *refused[: 3 if fitting else command.shown]]:
        made.add_row(*_texts(candidate, best))
    return made


def _texts(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    c, t = candidate.choice, candidate.time
    times = (t.total_sec, t.compute_sec, t.inner_sec, t.slow_sec, t.exposed_sec)
    return (
        mesh_of(c),
        str(c.microbatches),
        c.remat,
        f"{c.param_sharding}{', ' if candidate.way else ''}{candidate.way}",
        candidate.exchange.label,
        *(f"{1e3 * value:.2f}" for value in times),
        f"{100 * t.idle_sec / t.total_sec:.0f}",
        f"{t.node_bytes / 1e6:.1f}",
        f"{candidate.memory.total / 1e9:.1f}" + ("" if candidate.fits else "*"),
        "the plan" if candidate is best and candidate.fits else why_slower(candidate, best),
    )


def remarks(layouts: SearchResult, command: PlanCommand) -> list[str]:
    """Below the table: what binds, how many nodes pay, and the options of the plan."""
    lines = [f"{len(layouts.candidates):,} layouts, {sum(candidate.fits for candidate in layouts.candidates):,} fit"]
    if any(not candidate.fits for candidate in layouts.candidates):
        lines.append(f"* more than 90 % of a device's {layouts.cluster.device_bytes / 1e9:.1f} GB")
    best = layouts.best
    if best is None:
        return lines
    lines.append(f"what binds: {binding(layouts)}")
    lines += [why for why in (why_it_wins(layouts), why_this_way(layouts)) if why]
    lines += best.reasons
    norm_span = getattr(command.experiment.model, "norm_span", None)
    if norm_span == Axis.REPLICA.value and getattr(command.experiment.model, "norm", "batch") == "batch":
        examples = command.experiment.batch_size // (best.choice.replica * best.choice.microbatches)
        lines.append(
            f"batch norm takes its statistics over a replica's {examples} examples at a time under this plan; "
            "--model.norm-span keeps another number"
        )
    if command.nodes > 1:
        ratio = best.time.overhead
        most = nodes_that_pay(ratio / command.nodes)  # Of what one node alone would compute.
        many = "any number of nodes" if math.isinf(most) else f"{most:.1f} nodes"
        lines.append(
            f"waiting for other nodes takes {ratio:.3g} times as long as all else: if it stays as long, up to {many} "
            f"work at {100 * _PAYS:.0f} % efficiency (Zou et al. 2017)"
        )
        rate = network_rate(command.network, "--network", OptionError)
        servers = parameter_servers(layouts.param_bytes, command.nodes, rate, best.time.compute_sec)
        lines.append(f"parameter servers on the same network that keep up (Zou et al. 2017): {math.ceil(servers)}")
    options = [f"--{name.replace('_', '-')} {value}" for name, value in best.choice.settings.items()]
    if isinstance(command.experiment.exchange, Auto):
        changed = best.exchange.model_dump(exclude_defaults=True)
        options += [f"--exchange {best.exchange.kind}"]
        options += [f"--exchange.{name.replace('_', '-')} {value}" for name, value in changed.items() if name != "kind"]
    return [*lines, "the plan: " + " ".join(options)]
