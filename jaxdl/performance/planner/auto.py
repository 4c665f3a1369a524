"""`--plan auto`: the layout of a run, planned when it begins, for the devices that it has.

Steps of one replica are compiled for the devices of a node, and steps without messages are run; links and speeds are
measured as exchange `auto` measures them. That gives each layout a predicted time. The best of them are then timed on
the run's devices, and the fastest is taken. All processes plan alike, from the same figures.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.data import TabularSpec
from jaxdl.exchange import Auto, ExchangeConfig
from jaxdl.exchange.auto import INNER_LINKS
from jaxdl.exchange.cost import ALWAYS_MEASURED, NOMINAL_SPEEDS, TURN, Figures, Link, Machine
from jaxdl.exchange.probe import probe
from jaxdl.parallel.cluster import host_memory_bytes, wait_for_all
from jaxdl.parallel.mesh import AXES, FILLING_AXIS, INNER_AXES, Axis, Device, MeshConfig, make_mesh, platform, ways
from jaxdl.performance.planner.choices import Choice, Cluster, RunWorkload
from jaxdl.performance.planner.few import all_fit, fastest_of, few_layouts, search_layouts
from jaxdl.performance.planner.machine import network_rate
from jaxdl.performance.planner.mesh_tables import tables_on_meshes
from jaxdl.performance.planner.reasons import binding, describe, why_it_wins, why_this_way
from jaxdl.performance.planner.search import Candidate, SearchResult, search, with_other_tables
from jaxdl.performance.planner.steptime import Efficiency
from jaxdl.performance.planner.tables import describe_schemes
from jaxdl.performance.planner.timed import ROUNDS, LocalSteps, Name, agree, memory_of, quickest, time_layouts
from jaxdl.performance.planner.trial import table_sec
from jaxdl.performance.planner.trials import Trials
from jaxdl.performance.planner.workload import fixed_fields, no_layout, workload_of
from jaxdl.report import Start
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import PlanAuto
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.run.plan.layout import Planned, check_equal

_LATENCY_US = 20.0
_NO_CHANCE = 1.4
_PROBED = {"cpu": 2**18, "gpu": 2**23}
"""The numbers on which a device works while it is measured."""


def plan(experiment: Experiment, devices: Sequence[Device], start: Start) -> Planned:
    """The layout with the fastest step on these devices, see `jaxdl.training.run.plan.layout.Planner`."""
    asked = experiment.plan
    assert isinstance(asked, PlanAuto)
    trials = Trials(experiment)
    work, cluster, fixed = prepare(experiment, trials, devices, start)

    def timed(layouts: Sequence[Candidate], what: str) -> list[list[float]]:
        check_equal([settings_of(layout, experiment) for layout in layouts])
        with start.doing(f"planning the layout: timing {len(layouts)} {what}"):
            plans = {number: layout_plan(experiment, trials, layout, devices) for number, layout in enumerate(layouts)}
            return list(time_layouts(plans, cluster.device_bytes, ROUNDS).values())

    if few := few_layouts(work, cluster, fixed, asked.timed):
        of_few = timed(few, "layouts")
        if all_fit(of_few):
            chosen, reasons = fastest_of(few, of_few)
            return Planned(settings_of(chosen, experiment), reasons)
    times: dict[Choice, list[float]] = {}
    for searching in (search_layouts, search):
        with start.doing("planning the layout: compiling and timing steps"):
            search_result = searching(work, cluster, fixed)
        if not search_result.candidates:
            raise no_layout(experiment, fixed, f"{cluster.nodes} nodes of {cluster.gpus_per_node} devices")
        left = [candidate for candidate in search_result.candidates if candidate.choice not in times]
        for best in worth_timing(left, asked.timed):
            times |= dict(zip((candidate.choice for candidate in best), timed(best, "layouts"), strict=True))
            if min(map(min, times.values())) < math.inf:
                break
        if times and min(map(min, times.values())) < math.inf:
            break  # Else XLA needs more memory for all of them than a device has.
    search_result = _chosen(search_result, times)
    choices = (
        [search_result.best, *with_other_tables(work, cluster, search_result.best, asked.timed - 1)]
        if search_result.best
        else []
    )
    of_tables = timed(choices, "choices of tables") if len(choices) > 1 else []
    return to_planned(search_result, experiment, times, list(zip(choices, of_tables, strict=False)))


def prepare(
    experiment: Experiment, trials: Trials, devices: Sequence[Device], start: Start
) -> tuple[RunWorkload, Cluster, dict[str, Any]]:
    """What is searched on these devices: (the workload, the devices and their links, fields that keep their values)."""
    asked = experiment.plan
    assert isinstance(asked, PlanAuto)
    fixed = fixed_fields(experiment, asked.keep)
    nodes, of_each = nodes_of(asked, devices)
    replica = int(fixed.get("mesh.replica", nodes))
    if replica < 1 or len(devices) % replica:
        raise no_layout(experiment, fixed, f"{nodes} nodes of {of_each} devices")
    mesh = make_mesh(MeshConfig(replica=replica), devices)
    sizes = dict(mesh.shape)
    mine = [device for device in devices if device.process_index == jax.process_index()]
    if (tensor := int(fixed.get("mesh.tensor", 1))) > len(mine):
        raise ConfigError(
            f"--plan auto: mesh.tensor {tensor} is more than the {len(mine)} devices of a process, and its steps are "
            "compiled for these before the run begins. Give the whole layout in place of --plan, or a smaller one."
        )
    device_bytes = 1e9 * (asked.device_gb or 0) or agree(memory_of(mine[0]) or _of_host(), min)
    # A link between replicas is one between nodes, also where a replica has several.
    linked = mesh if replica % nodes == 0 else make_mesh(MeshConfig(replica=nodes), devices)
    described = functools.cache(lambda: machine_of(experiment, asked, linked))
    with start.doing("planning the layout: reading the data, measuring the links"):
        tables = tables_on_meshes(experiment, sizes, described, asked.keep, trials.splits)
        cluster = Cluster(nodes, of_each, described(), device_bytes, Efficiency(compute=1.0))
    inner = described().link(FILLING_AXIS)  # In a trial the devices of a process are replicas.
    inside = dataclasses.replace(described(), links=dict.fromkeys(AXES, inner))
    local, of_tables = max(1, experiment.batch_size // len(devices)), functools.partial(table_sec, machine=inside)
    steps = LocalSteps(trials, mine, local, device_bytes, of_tables)
    return workload_of(experiment, trials, mine[:of_each], replica, tables, steps), cluster, fixed


def layout_plan(experiment: Experiment, trials: Trials, candidate: Candidate, devices: Sequence[Device]) -> Plan:
    """The step of a layout, on data of the run's shapes: where it can be, the program that the run will need."""
    changes = {**settings_of(candidate, experiment), "exchange": candidate.exchange}
    try:
        return trials.plan(trials.lengths | changes, devices, whole=True)
    except ConfigError:  # Of made-up data, which may be shorter than a warm-up.
        return trials.plan(changes, devices, whole=True)


def settings_of(candidate: Candidate, experiment: Experiment) -> dict[str, Any]:
    """The fields of an experiment that a layout sets, besides the exchange, with their values as in JSON."""
    return candidate.choice.settings | table_settings(candidate, experiment)


def table_settings(candidate: Candidate, experiment: Experiment) -> dict[str, Any]:
    """Those of `settings_of` for embedding tables."""
    if candidate.tables is None or candidate.tables.embedding == experiment.embedding:
        return {}
    values = candidate.tables.embedding.model_dump(mode="json")
    return {f"embedding.{name}": values[name] for name in ("schemes", "places")}


def nodes_of(asked: PlanAuto, devices: Sequence[Device]) -> tuple[int, int]:
    """(nodes, devices of each): processes, or as given. Raises ConfigError where nodes would differ."""
    counts = set(collections.Counter(device.process_index for device in devices).values())
    if len(counts) > 1:
        raise ConfigError(
            f"--plan auto: the processes have {' and '.join(map(str, sorted(counts)))} devices. Give each as many."
        )
    of_each = asked.devices_per_node or next(iter(counts))
    if len(devices) % of_each:
        raise ConfigError(
            f"--plan.devices-per-node {of_each}: does not divide the {len(devices)} devices of the run. Choose another."
        )
    return len(devices) // of_each, of_each


def machine_of(experiment: Experiment, asked: PlanAuto, mesh: Any) -> Machine:
    """The links and speeds of the run's devices: given by the plan or by exchange `auto`, else measured."""
    kind, exchange = "cpu" if platform(mesh) == "cpu" else "gpu", experiment.exchange
    inner = ways(mesh.shape, INNER_AXES)
    given: Link | None = None
    if asked.network is not None:
        latency = _LATENCY_US if asked.latency_us is None else asked.latency_us
        given = Link(1e-6 * latency, network_rate(asked.network, "--plan.network") / inner)
    elif isinstance(exchange, Auto) and exchange.bandwidth_gbps is not None and exchange.latency_us is not None:
        given = Link(1e-6 * exchange.latency_us, exchange.bandwidth_gbps * 1e9 / 8)
    if given is not None or mesh.size == 1:
        links = dict.fromkeys(AXES, INNER_LINKS[kind])
        links[Axis.REPLICA.value] = given or INNER_LINKS[kind]
        return Machine(links, NOMINAL_SPEEDS[kind], "given; speeds of the devices from a table", kind == "gpu")
    replicas = mesh.shape[Axis.REPLICA.value]
    configs = exchange.configs(replicas) if isinstance(exchange, Auto) else [exchange]
    needed = Figures.of([config for config in configs if isinstance(config, ExchangeConfig)])
    staged = (TURN,) if experiment.model.splits_layers and replicas > 1 else ()
    needed |= Figures(collectives=(*ALWAYS_MEASURED, "all_to_all", *staged))
    wait_for_all()  # Gloo gives up when a process measures 30 s after another.
    machine = probe(
        mesh,
        num_elements=_PROBED[kind],
        density=min(max(exchange.densities), 0.25) if isinstance(exchange, Auto) else 0.01,
        methods=needed.methods,
        bits=needed.bits,
        collectives=needed.collectives,
        num_repeats=3,
        together=experiment.model.modality == TabularSpec.modality,  # It may have tables.
    )
    links = dict(machine.links)
    links = dict.fromkeys(AXES, links.get(FILLING_AXIS, INNER_LINKS[kind])) | links
    return dataclasses.replace(machine, links=links)


def _of_host() -> float:
    return host_memory_bytes() / jax.local_device_count()


def worth_timing(candidates: Sequence[Candidate], number: int) -> list[list[Candidate]]:
    """The candidates that fit and can be the fastest, the best predicted first, in groups of this number.

    Predictions are too short or too long by about the same share for all layouts of a run, so that one whose time is
    predicted as `_NO_CHANCE` times the best will not win.
    """
    fitting = [candidate for candidate in candidates if candidate.fits]
    groups = [fitting[first : first + number] for first in range(0, len(fitting), number)]
    return [
        [candidate for candidate in group if candidate.time.total_sec <= _NO_CHANCE * group[0].time.total_sec]
        for group in groups
    ]


def to_planned(
    layouts: SearchResult,
    experiment: Experiment,
    times: Mapping[Choice, Sequence[float]] | None = None,
    tables: Sequence[tuple[Candidate, Sequence[float]]] = (),
) -> Planned:
    """What to set, and why. Raises ConfigError if nothing fits.

    Of the layouts that were timed it is the best by prediction that noise does not tell from the fastest; so it is of
    the choices of schemes for its tables, with their seconds in `tables`.
    """
    size = layouts.cluster.device_bytes
    if layouts.best is None:
        least = layouts.candidates[0]
        raise ConfigError(
            f"--plan auto: nothing fits: the least memory is {least.memory.total / 1e9:.3g} GB ({describe(least)}) of "
            f"a device's {size / 1e9:.3g}. Take more devices, or a smaller --batch-size."
        )
    number = len(layouts.candidates)
    medians = _medians(times or {})
    layouts = _chosen(layouts, times or {})
    best = layouts.candidates[0]
    of_tables = dict(enumerate(sec for _, sec in tables))
    if tables:
        best = tables[quickest(of_tables)][0]
    t = best.time
    parts = {"compute": t.compute_sec, "messages inside a node": t.inner_sec, "between nodes": t.slow_sec}
    inside = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in parts.items())
    lines = [
        f"best of {number} layouts: {1e3 * t.total_sec:.3g} ms a step predicted ({inside}; waiting for "
        f"messages {1e3 * t.exposed_sec:.3g}), {best.memory.total / 1e9:.3g} GB of {size / 1e9:.3g}",
        f"what binds: {binding(layouts)}",
    ]
    lines += [why for why in (why_it_wins(layouts), why_this_way(layouts)) if why]
    if medians:
        timed = [
            (describe(candidate), medians[candidate.choice])
            for candidate in layouts.candidates
            if candidate.choice in medians
        ]
        words = [f"{name}, {_ms(sec)}" for name, sec in timed]
        lines.append("timed: " + "; ".join(words))
        if medians[best.choice] > min(medians.values()):
            lines.append("the plan is the best by prediction of those that noise does not tell from the fastest")
    second = next((candidate for candidate in layouts.candidates[1:] if candidate.fits), None)
    if second is not None and not times:
        lines.append(f"next: {describe(second)}, {1e3 * second.time.total_sec:.3g} ms")
    if best.tables is not None:
        lines.append(f"tables: {_schemes(best)}")
    if tables:
        words = [f"{_schemes(table)}: {_ms(statistics.median(sec))}" for table, sec in tables]
        lines.append("timed with these schemes of tables: " + "; ".join(words))
    chosen = best.exchange if isinstance(experiment.exchange, Auto) and best.choice.replica > 1 else None
    return Planned(settings_of(best, experiment), (*lines, *best.reasons), chosen)


def _medians(times: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    return {choice: statistics.median(sec) for choice, sec in times.items()}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms" if seconds < math.inf else "not: too large"


def _schemes(candidate: Candidate) -> str:
    return describe_schemes(candidate.tables.schemes) if candidate.tables else ""


def _chosen(layouts: SearchResult, times: Mapping[Choice, Sequence[float]]) -> SearchResult:
    """The candidates with those that were timed before the others: that to take, then the fastest first.

    Raises ConfigError if all of them are too large by XLA's plan.
    """
    medians = _medians(times)
    if medians and min(medians.values()) == math.inf:
        raise ConfigError(
            f"--plan auto: all {len(medians)} layouts that should fit need more by XLA's plan than 90 % of a device's "
            f"memory, {layouts.cluster.device_bytes / 1e9:.3g} GB. Take more devices, or a smaller --batch-size."
        )
    timed = [candidate for candidate in layouts.candidates if candidate.choice in times]
    chosen = quickest({candidate.choice: times[candidate.choice] for candidate in timed}) if timed else None
    first = sorted(timed, key=lambda candidate: (candidate.choice != chosen, medians[candidate.choice]))
    others = [candidate for candidate in layouts.candidates if candidate.choice not in times]
    return dataclasses.replace(layouts, candidates=(*first, *others))
