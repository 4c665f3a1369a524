"""The search for a layout: every mesh, number of micro-batches and way to keep activations, costed and ranked.

What does not fit into memory is refused; the rest is ordered by predicted time of a step, ties by the choice itself, so
that the same input always gives the same plan. The global batch, the order of the data and the optimizer never change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import Gradients, Machine, predict
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme
from jaxdl.parallel.mesh import AXES, FILLING_AXIS, RARE_AXES, STAGE_AXES
from jaxdl.parallel.sharding import Layout, ShardingConfig
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.memory import (
    MOST_OF_DEVICE,
    Memory,
    Parameters,
    Step,
    described_layout,
    memory,
    sharding_of,
)
from jaxdl.performance.planner.pipeline import FORWARD_SHARE
from jaxdl.performance.planner.steptime import Efficiency, Profile, Split, StepTime, own_time, with_exchange
from jaxdl.performance.planner.tables import Costs
from jaxdl.performance.planner.tensor_cost import tensor_profile
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
    stage: int = 1
    context: int = 1

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
    decoder: Decoder | None = None
    """What decides how its layers and its texts are split; None where they cannot be."""
    derived: frozenset[int] = frozenset()
    """Sizes of `tensor` whose profiles follow by formula (`jaxdl.performance.planner.tensor_cost`)."""
    compares_tensor: bool = False
    """Whether `tensor` is compared where it is not needed: by formula, and by compiled steps where it seems best."""
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
    decoder: Decoder | None = None
    batch_size: int = 0

    @property
    def best(self) -> Candidate | None:
        """The plan; None where nothing fits."""
        return self.candidates[0] if self.candidates and self.candidates[0].fits else None


def search(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> SearchResult:
    """All layouts, costed and ordered; `fixed` are fields of the experiment, as in `LAYOUT`, that keep their values.

    Splitting layers over `tensor` is tried where no layout without it fits, where it is given, and with
    `RunWorkload.compares_tensor`.
    """
    every = list(choices(workload, cluster, fixed))
    sizes = sorted({choice.tensor for choice in every})
    if workload.compares_tensor and workload.decoder is not None and len(sizes) > 1:
        candidates = _with_tensor(workload, cluster, every)
    else:
        candidates = []
        for tensor in sizes:
            candidates += [make_candidate(workload, cluster, choice) for choice in every if choice.tensor == tensor]
            if any(candidate.fits for candidate in candidates):
                break
    whole = described_layout(workload.sharding, dict.fromkeys(AXES, 1))
    size = workload.parameters.bytes(whole)["parameters"]
    ranked = tuple(sorted(candidates, key=_rank))
    return SearchResult(ranked, cluster, size, workload.decoder, workload.batch_size)


def _with_tensor(workload: RunWorkload, cluster: Cluster, every: Sequence[Choice]) -> list[Candidate]:
    """The candidates with all sizes of `tensor`; the best is costed by steps that are compiled for its size."""
    derived = frozenset({choice.tensor for choice in every} - {1})
    made: dict[int, list[Candidate]] = {}
    while True:
        work = dataclasses.replace(workload, derived=derived)
        for tensor in {choice.tensor for choice in every} - made.keys():
            made[tensor] = [make_candidate(work, cluster, choice) for choice in every if choice.tensor == tensor]
        candidates = [candidate for of_size in made.values() for candidate in of_size]
        best = min(candidates, key=_rank).choice.tensor
        if best not in derived:
            return candidates
        derived -= {best}
        del made[best]


def _profile(workload: RunWorkload, choice: Choice) -> Profile:
    if choice.tensor in workload.derived and workload.decoder is not None:
        alone = workload.profiles(1, choice.remat, choice.param_sharding)
        return tensor_profile(alone, choice.tensor, workload.decoder)
    return workload.profiles(choice.tensor, choice.remat, choice.param_sharding)


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    return (
        not candidate.fits,
        candidate.time.total_sec if candidate.fits else candidate.memory.total,
        candidate.choice,
    )


def choices(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Every layout of the devices that divides the batch, with what is given kept; `replica` is the nodes by default.

    What is inside a stage, or a replica without stages, stays inside a node; stages may take the place of replicas on
    several nodes. A pipeline has as many micro-batches as stages, or more. With tables, every batch is spread over all
    devices, `tensor` too.
    """
    for mesh in _meshes(workload, cluster, fixed):
        ways = mesh.replica * mesh.fsdp
        for microbatches in divisors(workload.batch_size // ways):
            if mesh.stage > 1:
                if microbatches < mesh.stage:
                    continue
            elif workload.microbatches and microbatches not in workload.microbatches:
                continue
            if any(size % (ways * microbatches) for size in workload.batch_sizes):
                continue
            if workload.batch_size // (mesh.replica * microbatches) % (workload.norm_span or 1):
                continue
            for remat in workload.remats:
                gathered = mesh.fsdp * mesh.context > 1
                for param_sharding in workload.shardings if gathered else workload.shardings[:1]:
                    choice = mesh._replace(microbatches=microbatches, remat=remat, param_sharding=param_sharding)
                    if all(_kept(fixed, name, value) for name, value in choice.settings.items()):
                        yield choice


def _meshes(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Every mesh that divides the batch, as a choice of which nothing else is decided."""
    devices, decoder = cluster.nodes * cluster.gpus_per_node, workload.decoder
    asked = int(fixed.get("mesh.replica", -1))
    batch_sizes = (workload.batch_size, workload.eval_batch_size or 0, *workload.batch_sizes)
    for stage in (1, *(decoder.stages if decoder else ())):
        usual = divisors(cluster.nodes) if stage > 1 else [cluster.nodes]
        for replica in usual if asked == -1 else [asked]:
            inner = devices // (replica * stage) if replica > 0 and devices % (replica * stage) == 0 else 0
            if not inner or cluster.gpus_per_node % inner:
                continue
            for context, tensor in itertools.product(divisors(inner), repeat=2):
                if inner % (context * tensor) or not (context == 1 or (decoder and decoder.can_split(context))):
                    continue
                fsdp = inner // (context * tensor)
                ways = devices if workload.tables else replica * fsdp
                if not workload.tensor_fits(tensor) or any(size % ways for size in batch_sizes):
                    continue
                mesh = Choice(1, tensor, "", "", replica, fsdp, stage, context)
                if all(_kept(fixed, f"mesh.{axis}", size) for axis, size in mesh.sizes.items()):
                    yield mesh


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
    efficiency, sizes = cluster.efficiency, choice.sizes
    examples = workload.batch_size // (choice.replica * choice.fsdp * choice.microbatches)
    profile = _profile(workload, choice)
    sharding = sharding_of(workload.sharding, choice.param_sharding)
    layout = described_layout(sharding, sizes)
    costs = tables and tables.costs
    split = _split(workload, cluster, choice, layout)
    machine = cluster.machine
    if split is not None and choice.stage > 1:
        links = {**machine.links, **dict.fromkeys(STAGE_AXES, split.stage_link)}
        machine = dataclasses.replace(machine, links=links)
    step_time = own_time(profile, sizes, examples, choice.microbatches, machine, efficiency, costs, split)
    parameters, decoder = workload.parameters, workload.decoder
    if decoder is not None and choice.stage > 1:
        parameters = parameters.with_layers(choice.stage * decoder.room(choice.stage))
    gradients = parameters.gradients(layout)
    exchange, reasons = _exchange(workload, gradients, machine, step_time)
    cost = predict(exchange, gradients, machine)
    time = with_exchange(step_time, cost, machine, efficiency, delayed=bool(exchange.delay_steps))
    built = exchange.build(gradients.layout) if choice.replica > 1 else None
    step = Step(sizes, sharding, choice.microbatches, examples, built, workload.decoder)
    measured = None
    if choice.replica > 1 and exchange == workload.measured_exchange:
        measured = workload.exchange_bytes(choice.tensor, choice.remat)
    need = memory(parameters, profile.temporary, step, workload.example_bytes, costs, measured)
    fits = need.total <= MOST_OF_DEVICE * cluster.device_bytes
    return Candidate(choice, exchange, time, need, fits, reasons, tables)


def _split(workload: RunWorkload, cluster: Cluster, choice: Choice, layout: Layout) -> Split | None:
    """How layers and texts are split; stages are joined by the network where not all are on one node."""
    if workload.decoder is None:
        return None
    inside = choice.fsdp * choice.context * choice.tensor
    between = choice.stage * inside > cluster.gpus_per_node
    link = cluster.machine.slow if between else cluster.machine.link(FILLING_AXIS)
    if between and inside < cluster.gpus_per_node:  # A node with several stages sends less to others at a time.
        rate = link.bytes_per_sec * cluster.gpus_per_node / inside
        link = dataclasses.replace(link, bytes_per_sec=rate, curve=(), collectives={})
    common = workload.parameters.common_bytes(layout) if choice.stage > 1 else 0.0
    # With remat `block` the profile has a forward pass more already.
    forward = FORWARD_SHARE if choice.remat in ("", "none", "dots") else FORWARD_SHARE / (1 + FORWARD_SHARE)
    return Split(workload.decoder, link, between, common, forward)


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
