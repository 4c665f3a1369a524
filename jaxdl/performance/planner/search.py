"""The search for a layout: every mesh, number of micro-batches and way to keep activations, costed and ranked.

What does not fit into memory is refused; the rest is ordered by predicted time of a step, ties by the choice itself, so
that the same input always gives the same plan. The global batch, the order of the data and the optimizer never change.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense, ExchangeConfig
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import Gradients, Machine, predict
from jaxdl.parallel.collectives.experts import WAYS
from jaxdl.parallel.mesh import AXES, FILLING_AXIS, STAGE_AXES
from jaxdl.parallel.sharding import Layout
from jaxdl.performance.planner.choices import Choice, Cluster, RunWorkload, TablesOnMesh, brings_tokens, choices
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.expert_cost import Path, buffer_bytes, computes_again, kept_layers
from jaxdl.performance.planner.memory import (
    MOST_OF_DEVICE,
    Memory,
    Step,
    described_layout,
    memory,
    sharding_of,
)
from jaxdl.performance.planner.pipeline import FORWARD_SHARE
from jaxdl.performance.planner.steptime import Profile, Split, StepTime, own_time, with_exchange
from jaxdl.performance.planner.tensor_cost import tensor_profile

_ESTIMATED = 0.02
"""By this part an estimate has to be faster than what was compiled."""


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
    way: str = ""
    """How tokens come to experts on other devices, if any do."""
    estimated: bool = False
    """Whether no step was compiled for its size of `tensor`."""


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


def search(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any], *, pruned: bool = False) -> SearchResult:
    """All layouts, costed and ordered; `fixed` are fields of the experiment, as in `LAYOUT`, that keep their values.

    Splitting layers over `tensor` is tried where no layout without it fits, where it is given, and with
    `RunWorkload.compares_tensor`. With `pruned` those that keep fewer activations are left out where they cannot be the
    fastest: see `_made`.
    """
    every = list(choices(workload, cluster, fixed))
    sizes = sorted({choice.tensor for choice in every})
    if workload.compares_tensor and workload.decoder is not None and len(sizes) > 1:
        candidates = _with_tensor(workload, cluster, every, pruned=pruned)
    else:
        candidates = []
        for tensor in sizes:
            of_size = [choice for choice in every if choice.tensor == tensor]
            candidates += _made(workload, cluster, of_size, pruned=pruned)
            if any(candidate.fits for candidate in candidates):
                break
    whole = described_layout(workload.sharding, dict.fromkeys(AXES, 1))
    size = workload.parameters.bytes(whole)["parameters"]
    ranked = tuple(sorted(candidates, key=_rank))
    return SearchResult(ranked, cluster, size, workload.decoder, workload.batch_size)


def _made(workload: RunWorkload, cluster: Cluster, every: Sequence[Choice], *, pruned: bool) -> list[Candidate]:
    """The candidates of these choices.

    To compute activations again only adds time. So with `pruned` a layout that keeps fewer is left out if it fits with
    more, or would be no faster with more than the best that fits. Steps that none needs are not compiled.
    """
    if not pruned:
        return [make_candidate(workload, cluster, choice) for choice in every]
    made: dict[Choice, Candidate] = {}
    for number, remat in enumerate(workload.remats):
        best = min((candidate.time.total_sec for candidate in made.values() if candidate.fits), default=math.inf)
        for choice in every:
            if choice.remat != remat:
                continue
            twins = (choice._replace(remat=more) for more in workload.remats[:number])
            keeping = [made[twin] for twin in twins if twin in made]
            if not any(candidate.fits or candidate.time.total_sec >= best for candidate in keeping):
                made[choice] = make_candidate(workload, cluster, choice)
    return list(made.values())


def _with_tensor(workload: RunWorkload, cluster: Cluster, every: Sequence[Choice], *, pruned: bool) -> list[Candidate]:
    """The candidates with all sizes of `tensor`; the best is costed by steps that are compiled for its size.

    That takes longer than all other steps, so that an estimate has to be better by more than `_ESTIMATED`.
    """
    derived = frozenset({choice.tensor for choice in every} - {1})
    made: dict[int, list[Candidate]] = {}
    while True:
        work = dataclasses.replace(workload, derived=derived)
        for tensor in {choice.tensor for choice in every} - made.keys():
            made[tensor] = _made(work, cluster, [c for c in every if c.tensor == tensor], pruned=pruned)
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
    margin = 1 + _ESTIMATED * candidate.estimated
    value = margin * candidate.time.total_sec if candidate.fits else candidate.memory.total
    # Of ways that are hidden alike by kernels that with the shorter messages comes first.
    return not candidate.fits, value, candidate.time.token_sec, candidate.choice


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
    efficiency, sizes, decoder = cluster.efficiency, choice.sizes, workload.decoder
    examples = workload.batch_size // (choice.replica * choice.fsdp * choice.microbatches)
    profile = _profile(workload, choice)
    sharding = sharding_of(workload.sharding, choice.param_sharding)
    layout = described_layout(sharding, sizes)
    costs = tables and tables.costs
    split = _split(workload, cluster, choice, layout, examples)
    machine = _machine(cluster, choice, split)
    step_time = own_time(profile, sizes, examples, choice.microbatches, machine, efficiency, costs, split)
    parameters = workload.parameters
    if decoder is not None and choice.stage > 1:
        parameters = parameters.with_layers(choice.stage * decoder.room(choice.stage))
    gradients = parameters.gradients(layout)
    exchange, reasons = _exchange(workload, gradients, machine, step_time)
    cost = predict(exchange, gradients, machine)
    time = with_exchange(step_time, cost, machine, efficiency, delayed=bool(exchange.delay_steps))
    built = exchange.build(gradients.layout) if choice.replica > 1 else None
    buffers = 0.0
    if decoder is not None and decoder.mixture is not None and split is not None and split.way is not None:
        kept, tokens = (
            kept_layers(choice.remat, decoder.room(choice.stage)),
            decoder.tokens(examples / choice.context),
        )
        buffers = buffer_bytes(decoder.mixture, split.way, choice.fsdp, tokens, choice.tensor, kept)
    step = Step(sizes, sharding, choice.microbatches, examples, built, decoder, buffers)
    measured = None
    estimated = choice.tensor in workload.derived
    if choice.replica > 1 and exchange == workload.measured_exchange and not estimated:
        measured = workload.exchange_bytes(choice.tensor, choice.remat)
    need = memory(parameters, profile.temporary, step, workload.example_bytes, costs, measured)
    fits = need.total <= MOST_OF_DEVICE * cluster.device_bytes
    way = (split and split.way) or ""
    return Candidate(choice, exchange, time, need, fits, reasons, tables, way, estimated)


def _machine(cluster: Cluster, choice: Choice, split: Split | None) -> Machine:
    """The links of a layout: those of stages, and of `fsdp` where it spans nodes."""
    if split is None:
        return cluster.machine
    links = dict(cluster.machine.links)
    if choice.stage > 1:
        links |= dict.fromkeys(STAGE_AXES, split.stage_link)
    if split.path is not None and split.path.of_node:
        links[FILLING_AXIS] = split.path.ring
    return dataclasses.replace(cluster.machine, links=links)


def _path(cluster: Cluster, choice: Choice) -> Path:
    """What messages over `fsdp` pass."""
    of_node = cluster.gpus_per_node // (choice.context * choice.tensor)
    machine = cluster.machine
    return Path(choice.fsdp, machine.link(FILLING_AXIS), machine.slow, of_node if choice.fsdp > of_node else 0)


def _split(workload: RunWorkload, cluster: Cluster, choice: Choice, layout: Layout, examples: int) -> Split | None:
    """How layers, texts and experts are split; stages are joined by the network where not all are on one node."""
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
    split = Split(workload.decoder, link, between, common, forward, _path(cluster, choice))
    mixture, spread = workload.decoder.mixture, brings_tokens(workload, choice)
    if mixture is None or choice.param_sharding == "replicated" or choice.fsdp == 1:
        return split
    if not spread:
        return dataclasses.replace(split, gathers_experts=True)
    way = next((way for way in WAYS if way == choice.dispatch), None)
    tokens = workload.decoder.tokens(examples / choice.context)
    return dataclasses.replace(
        split, way=way or mixture.way(choice.fsdp, tokens), computes_again=computes_again(choice.remat)
    )


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
