"""Searches that compile less: of layouts that are so few that all are timed at once, and where memory does not bind."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.exchange import ExchangeConfig
from jaxdl.performance.planner.choices import Cluster, RunWorkload, choices
from jaxdl.performance.planner.memory import Memory
from jaxdl.performance.planner.reasons import describe
from jaxdl.performance.planner.search import Candidate, SearchResult, search
from jaxdl.performance.planner.steptime import StepTime
from jaxdl.performance.planner.timed import quickest

_SMALL = 0.4
"""Of a device's memory: where no layout needs more, an estimate of what the exchange adds will do."""


def few_layouts(work: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any], most: int) -> list[Candidate]:
    """All layouts that may be the fastest if memory does not bind, the simplest first; none if there are more.

    More micro-batches, fewer kept activations and layers that are split over `tensor` only add time, and so do stages
    inside a node. Nothing is known of their time and memory. None either where that is needed for more than the order
    of trials: to choose an exchange or schemes of tables, or to weigh stages between nodes.
    """
    if work.tables is not None or not isinstance(work.exchange, ExchangeConfig):
        return []
    if work.decoder is not None and cluster.nodes > 1:
        return []
    least = least_memory_aside(work, fixed)
    if work.decoder is not None and work.decoder.splits_length and not _fsdp_suffices(least, cluster, fixed):
        return []
    inside = work.decoder and dataclasses.replace(work.decoder, stages=(), splits_length=False)
    every = sorted(choices(dataclasses.replace(least, decoder=inside), cluster, fixed))
    every = [choice for choice in every if choice.tensor == min(other.tensor for other in every)]
    if len(every) > most:
        return []
    unknown = StepTime(0.0, 0.0, 0.0, 0.0), Memory(0.0, 0.0, 0.0)
    return [Candidate(choice, work.exchange, *unknown, fits=True) for choice in every]


def _fsdp_suffices(work: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> bool:
    """Whether the examples of a batch are enough for all devices, so that no text need be split."""
    return any(choice.tensor == choice.context == 1 for choice in choices(work, cluster, fixed))


def least_memory_aside(work: RunWorkload, fixed: Mapping[str, Any]) -> RunWorkload:
    """The workload with what takes the least time if memory is of no account: one micro-batch, all activations kept."""
    kept = work.remats[:1] if "model.remat" not in fixed else work.remats
    counts = work.microbatches or (int(fixed.get("step.microbatches", 1)),)
    return dataclasses.replace(work, remats=kept, microbatches=counts)


def search_layouts(work: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> SearchResult:
    """The layouts; those that need less memory and more time are searched only where memory is what binds without them.

    They keep fewer activations, or have more micro-batches, which each take all that is done once for each. Nor is the
    memory of the exchange compiled where all layouts need a small part of what there is.
    """
    least = least_memory_aside(work, fixed)
    layouts = search(dataclasses.replace(least, measured_exchange=None), cluster, fixed)
    most = max((candidate.memory.total for candidate in layouts.candidates), default=0.0)
    if most > _SMALL * cluster.device_bytes:
        layouts = search(least, cluster, fixed)
    best = layouts.best
    binds = best is None or any(
        not candidate.fits and candidate.time.total_sec < best.time.total_sec for candidate in layouts.candidates
    )
    return search(work, cluster, fixed, pruned=True) if binds and least != work else layouts


def fastest_of(layouts: Sequence[Candidate], times: Sequence[Sequence[float]]) -> tuple[Candidate, tuple[str, ...]]:
    """The fastest, the simplest of those that noise does not tell from it, and why."""
    best = quickest(dict(enumerate(times)))
    medians = [statistics.median(seconds) for seconds in times]
    words = [f"{describe(layout)}, {1e3 * sec:.4g} ms" for layout, sec in zip(layouts, medians, strict=True)]
    lines = ["so few layouts, with all activations and no more micro-batches, that all are timed and none is predicted"]
    lines.append("timed: " + "; ".join(words))
    if medians[best] > min(medians):
        lines.append("the plan is the simplest of those that noise does not tell from the fastest")
    return layouts[best], tuple(lines)


def all_fit(times: Sequence[Sequence[float]]) -> bool:
    """Whether no layout needs more memory by XLA's plan than a plan may."""
    return all(not math.isinf(seconds[0]) for seconds in times)
