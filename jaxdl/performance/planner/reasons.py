"""Why a layout is the plan, in words: what binds it, what made others lose, and when a pipeline would win."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdl.parallel.mesh import RARE_AXES
from jaxdl.performance.planner import pipeline
from jaxdl.performance.planner.search import Candidate, Choice, SearchResult
from jaxdl.training.step.turns import idle_share


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
    parts = [mesh_of(c), f"{c.microbatches} micro-batches", c.remat, c.param_sharding]
    return ", ".join(part for part in parts if part)


def mesh_of(choice: Choice) -> str:
    """The mesh of a choice: `replica x fsdp x tensor`, and other axes of several devices."""
    others = [f", {axis} {getattr(choice, axis)}" for axis in RARE_AXES if getattr(choice, axis) > 1]
    return f"{choice.replica} x {choice.fsdp} x {choice.tensor}{''.join(others)}"


def best_of_each_mesh(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate with each mesh."""
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(mesh_of(candidate.choice), candidate)
    return list(first.values())


def why_it_wins(layouts: SearchResult) -> str:
    """Why the plan has stages, or has none, in a sentence; empty where there is no choice, or nothing fits.

    On several nodes it is compared with the best layout that has the other thing between nodes: stages, or an exchange.
    """
    best, decoder, cluster = layouts.best, layouts.decoder, layouts.cluster
    if best is None or decoder is None:
        return ""
    several = any(candidate.choice.replica < cluster.nodes for candidate in layouts.candidates)

    def has_stages(candidate: Candidate) -> bool:
        return candidate.choice.replica < cluster.nodes if several else candidate.choice.stage > 1

    staged = has_stages(best)
    others = [candidate for candidate in layouts.candidates if has_stages(candidate) != staged]
    fitting = [candidate for candidate in others if candidate.fits]
    if not fitting:
        what = f"{'without' if staged else 'with'} stages{' between nodes' if several else ''}"
        return f"{mesh_of(best.choice)} wins: no layout {what} fits into memory" if others else ""
    other = fitting[0]
    pipe, plain = (best, other) if staged else (other, best)
    idle = idle_share(pipe.choice.stage, pipe.choice.microbatches)
    waits = f"{pipe.choice.stage} stages wait for each other for {100 * idle:.0f} % of their time"
    lead = 1e3 * (other.time.total_sec - best.time.total_sec)
    says = f"{mesh_of(best.choice)} wins over {mesh_of(other.choice)} by {lead:.3g} ms a step"
    if not several or not plain.time.node_bytes:
        return f"{says}: {waits}, and they save no message on a slow network"
    tokens = decoder.tokens(layouts.batch_size)
    node_bytes, of_pipe = (one.time.node_bytes * cluster.gpus_per_node for one in (plain, pipe))
    nothing = (pipe.choice.stage - 1) / pipe.choice.microbatches
    others = of_pipe - tokens * pipeline.activation_bytes(1, decoder.width, decoder.itemsize) * (1 + nothing)
    even = pipeline.break_even_tokens(
        node_bytes, decoder.width, decoder.itemsize, others=others, sent_for_nothing=nothing
    )
    side = "fewer" if tokens < even else "more"
    return (
        f"{says}: a step has {tokens:,.0f} tokens, {side} than the Q* = {even:,.0f} below which stages on "
        f"{cluster.nodes} nodes send less than {plain.exchange.label}; {waits}"
    )
