"""The search for a layout: every mesh, number of micro-batches and way to keep activations, costed and ranked.

What does not fit into memory is refused; the rest is ordered by predicted time of a step, ties by the choice itself, so
that the same input always gives the same plan. The global batch, the order of the data and the optimizer never change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import Gradients, Machine, predict
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme
from jaxdl.parallel.mesh import AXES, RARE_AXES
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.planner.memory import (
    MOST_OF_DEVICE,
    Memory,
    Parameters,
    Step,
    described_layout,
    memory,
    sharding_of,
)
from jaxdl.performance.planner.steptime import Efficiency, Profile, StepTime, own_time, with_exchange
from jaxdl.performance.planner.tables import Costs
from jaxdl.training.plans import LAYOUT


class Choice(NamedTuple):
    """One layout; the order of its fields breaks ties: the simplest one first."""

    microbatches: int
    tensor: int
    remat: str
    """Empty for a model without the setting."""
    param_sharding: str
    replica: int
    fsdp: int

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of an experiment that it sets."""
        values = (*self.sizes.values(), self.microbatches, self.remat, self.param_sharding)
        fields: dict[str, Any] = dict(zip(LAYOUT, values, strict=True))
        unspoken = {f"mesh.{axis}": 1 for axis in RARE_AXES}
        return {name: value for name, value in fields.items() if value not in ("", unspoken.get(name))}


@dataclass(frozen=True)
class Cluster:
    """The devices, and what connects them."""

    nodes: int
    gpus_per_node: int
    machine: Machine
    device_bytes: float
    efficiency: Efficiency = field(default_factory=Efficiency)


@dataclass(frozen=True)
class TablesOnMesh:
    """The embedding tables on one mesh."""

    embedding: EmbeddingConfig
    """With the scheme of each."""
    schemes: Mapping[str, Scheme]
    """Table -> its scheme."""
    costs: Costs
    """Of a step, with the global batch."""
    others: Callable[[int], Sequence[TablesOnMesh]] = lambda _: ()
    """Up to so many, and half as many more, other choices of schemes that are worth timing beside this one, the best by
    prediction first."""


PlanTables = Callable[[Mapping[str, int], float], TablesOnMesh]
"""(sizes of the mesh axes, bytes of a device that tables may have) -> the tables; ConfigError if they need more."""


@dataclass(frozen=True)
class RunWorkload:
    """What is planned: a model, its batch, and what a compiled step says of both."""

    batch_size: int
    parameters: Parameters
    profiles: Callable[[int, str, str], Profile]
    """(size of `tensor`, remat, param_sharding) -> what a step needs; compiled when it is first asked for."""
    remats: Sequence[str] = ("",)
    shardings: Sequence[str] = ("sharded", "replicated")
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    exchange: ExchangeConfig | Auto = field(default_factory=Dense)
    measured_exchange: ExchangeConfig | None = None
    """That for which `exchange_bytes` says how much memory it adds."""
    exchange_bytes: Callable[[int, str], float | None] = lambda tensor, remat: None
    """(size of `tensor`, remat) -> temporary bytes that `measured_exchange` adds on one device of `fsdp`; they are less
    than none where XLA finds a better order. Compiled when it is first asked for; None if that is not known."""
    microbatches: Sequence[int] = ()
    """The numbers that are tried; none: all that divide the batch."""
    example_bytes: float = 0.0
    tables: PlanTables | None = None
    """Plans the embedding tables for a mesh; None without any."""
    batch_sizes: Sequence[int] = ()
    """Of phases of the run with another one: each is divided as `batch_size` is."""
    eval_batch_size: int | None = None
    """Of the evaluation, which is spread as `batch_size` is; None: that."""
    norm_span: int | None = None
    """Examples over which batch norm takes its statistics, if that is given as a number."""
    tensor_fits: Callable[[int], bool] = lambda size: size == 1
    """Whether the model can be split over a number of devices of `tensor`."""


@dataclass(frozen=True)
class Candidate:
    """One layout, with what it is predicted to need."""

    choice: Choice
    exchange: ExchangeConfig
    time: StepTime
    memory: Memory
    fits: bool
    reasons: tuple[str, ...] = ()
    """Why this exchange."""
    tables: TablesOnMesh | None = None


@dataclass(frozen=True)
class SearchResult:
    """All candidates: those that fit, the fastest first, then the others."""

    candidates: tuple[Candidate, ...]
    cluster: Cluster
    param_bytes: float = 0.0
    """Of all trained parameters."""

    @property
    def best(self) -> Candidate | None:
        """The plan; None where nothing fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None


def search(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> SearchResult:
    """All layouts, costed and ordered; `fixed` are fields of the experiment, as in `LAYOUT`, that keep their values.

    Splitting layers over `tensor` is tried where no layout without it fits, or where it is given.
    """
    candidates: list[Candidate] = []
    every = list(choices(workload, cluster, fixed))
    for tensor in sorted({choice.tensor for choice in every}):
        candidates += [make_candidate(workload, cluster, choice) for choice in every if choice.tensor == tensor]
        if any(candidate.fits for candidate in candidates):
            break
    whole = described_layout(workload.sharding, dict.fromkeys(AXES, 1))
    size = workload.parameters.bytes(whole)["parameters"]
    return SearchResult(tuple(sorted(candidates, key=_rank)), cluster, size)


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    return (
        not candidate.fits,
        candidate.time.total_sec if candidate.fits else candidate.memory.total,
        candidate.choice,
    )


def choices(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Every layout of the devices that divides the batch, with what is given kept; `replica` is the nodes by default.

    `fsdp` and `tensor` together stay inside a node. With tables, every batch is spread over all devices, `tensor` too.
    """
    devices = cluster.nodes * cluster.gpus_per_node
    replica = int(fixed.get("mesh.replica", -1))
    replica = cluster.nodes if replica == -1 else replica
    inner = devices // replica if replica > 0 and devices % replica == 0 else 0
    if not inner or cluster.gpus_per_node % inner:
        return
    for tensor in divisors(inner):
        fsdp = inner // tensor
        ways = devices if workload.tables else replica * fsdp
        batch_sizes = (workload.batch_size, workload.eval_batch_size or 0, *workload.batch_sizes)
        if not workload.tensor_fits(tensor) or any(size % ways for size in batch_sizes):
            continue
        if not _kept(fixed, "mesh.tensor", tensor) or not _kept(fixed, "mesh.fsdp", fsdp):
            continue
        for microbatches in divisors(workload.batch_size // (replica * fsdp)):
            if workload.microbatches and microbatches not in workload.microbatches:
                continue
            if any(size % (replica * fsdp * microbatches) for size in workload.batch_sizes):
                continue
            if workload.batch_size // (replica * microbatches) % (workload.norm_span or 1):
                continue
            for remat in workload.remats:
                for param_sharding in workload.shardings if fsdp > 1 else workload.shardings[:1]:
                    choice = Choice(microbatches, tensor, remat, param_sharding, replica, fsdp)
                    if all(_kept(fixed, name, value) for name, value in choice.settings.items()):
                        yield choice


def _kept(fixed: Mapping[str, Any], name: str, value: Any) -> bool:
    return fixed.get(name, value) in (value, -1)


def divisors(number: int) -> list[int]:
    """Of a positive number, in their order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def make_candidate(workload: RunWorkload, cluster: Cluster, choice: Choice) -> Candidate:
    """A layout with its exchange, its time and its memory; with the tables that are best on its mesh, if they fit.

    Raises ConfigError where tables do not fit into a device that has nothing else.
    """
    most = MOST_OF_DEVICE * cluster.device_bytes
    if workload.tables is None:
        return _candidate(workload, cluster, choice, None)
    candidate = _candidate(workload, cluster, choice, workload.tables(choice.sizes, most))
    left = most - (candidate.memory.total - candidate.memory.tables)
    if candidate.fits or left <= 0:
        return candidate
    try:  # Other schemes need less memory. Few amounts of it are tried, since each is a plan of its own.
        return _candidate(workload, cluster, choice, workload.tables(choice.sizes, 2 ** math.floor(math.log2(left))))
    except ConfigError:
        return candidate


def with_other_tables(workload: RunWorkload, cluster: Cluster, candidate: Candidate, most: int) -> list[Candidate]:
    """Layouts with other schemes of tables that fit, see `TablesOnMesh.others`."""
    others = candidate.tables.others(most) if candidate.tables else ()
    candidates = [_candidate(workload, cluster, candidate.choice, tables) for tables in others]
    return [candidate for candidate in candidates if candidate.fits]


def _candidate(workload: RunWorkload, cluster: Cluster, choice: Choice, tables: TablesOnMesh | None) -> Candidate:
    machine, efficiency = cluster.machine, cluster.efficiency
    examples = workload.batch_size // (choice.replica * choice.fsdp * choice.microbatches)
    profile = workload.profiles(choice.tensor, choice.remat, choice.param_sharding)
    sharding = sharding_of(workload.sharding, choice.param_sharding)
    layout = described_layout(sharding, choice.sizes)
    costs = tables and tables.costs
    step_time = own_time(profile, choice.sizes, examples, choice.microbatches, machine, efficiency, costs)
    gradients = workload.parameters.gradients(layout)
    exchange, reasons = _exchange(workload, gradients, machine, step_time)
    cost = predict(exchange, gradients, machine)
    time = with_exchange(step_time, cost, machine, efficiency, delayed=bool(exchange.delay_steps))
    built = exchange.build(gradients.layout) if choice.replica > 1 else None
    step = Step(choice.sizes, sharding, choice.microbatches, examples, built)
    measured = None
    if choice.replica > 1 and exchange == workload.measured_exchange:
        measured = workload.exchange_bytes(choice.tensor, choice.remat)
    need = memory(workload.parameters, profile.temporary, step, workload.example_bytes, costs, measured)
    fits = need.total <= MOST_OF_DEVICE * cluster.device_bytes
    return Candidate(choice, exchange, time, need, fits, reasons, tables)


def _exchange(
    workload: RunWorkload, gradients: Gradients, machine: Machine, step_time: StepTime
) -> tuple[ExchangeConfig, tuple[str, ...]]:
    asked = workload.exchange
    if isinstance(asked, ExchangeConfig):
        return asked, ()
    if gradients.num_replicas == 1:
        return Dense(delay_steps=asked.delay_steps), ()
    recommendation = recommend(
        asked.configs(gradients.num_replicas),
        gradients,
        machine,
        min_speedup=asked.min_speedup,
        step_sec=step_time.total_sec,
    )
    return recommendation.best.replaced({"delay_steps": asked.delay_steps}), recommendation.reasons


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """What made a candidate lose against the best, in a few words."""
    if not candidate.fits:
        return f"needs {candidate.memory.total / 1e9:.1f} GB"
    losses = {
        "more compute": candidate.time.compute_sec - best.time.compute_sec,
        "more waiting between nodes": candidate.time.exposed_slow_sec - best.time.exposed_slow_sec,
        "more waiting inside a node": candidate.time.exposed_sec
        - candidate.time.exposed_slow_sec
        - best.time.exposed_sec
        + best.time.exposed_slow_sec,
    }
    name, most = max(losses.items(), key=lambda item: item[1])
    return f"{name}: +{1e3 * most:.3g} ms" if most > 0 else "as fast, but less simple"


def binding(layouts: SearchResult) -> str:
    """The first constraint that keeps the best plan from being faster, in a sentence."""
    best = layouts.best
    if best is None:
        return "nothing fits: memory of a device"
    refused = [
        candidate
        for candidate in layouts.candidates
        if not candidate.fits and candidate.time.total_sec < best.time.total_sec
    ]
    if refused:
        faster = min(refused, key=lambda candidate: candidate.time.total_sec)
        return (
            f"memory: {describe(faster)} would take {1e3 * faster.time.total_sec:.4g} ms, but needs "
            f"{faster.memory.total / 1e9:.1f} GB of a device's {layouts.cluster.device_bytes / 1e9:.1f}"
        )
    if best.time.exposed_sec > 0.5 * best.time.compute_sec:
        slow = 2 * best.time.exposed_slow_sec >= best.time.exposed_sec
        return "the network between nodes" if slow else "the links inside a node"
    return "the arithmetic and the memory bandwidth of a device"


def describe(candidate: Candidate) -> str:
    """A candidate in a few words."""
    c = candidate.choice
    parts = [f"{c.replica} x {c.fsdp} x {c.tensor}", f"{c.microbatches} micro-batches", c.remat, c.param_sharding]
    return ", ".join(part for part in parts if part)
