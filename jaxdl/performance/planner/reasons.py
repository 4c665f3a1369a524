"""Why a layout is the plan, in words: what binds it, what made others lose, and when a pipeline would win."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdl.parallel.mesh import RARE_AXES
from jaxdl.performance.planner import pipeline
from jaxdl.performance.planner.choices import Choice
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.search import Candidate, Cluster, SearchResult
from jaxdl.training.step.turns import idle_share, num_messages


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
    parts = [mesh_of(c), f"{c.microbatches} micro-batches", c.remat, c.param_sharding, c.dispatch]
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


def why_this_way(layouts: SearchResult) -> str:
    """How tokens come to the experts of the plan, and why so, in a sentence; empty where they are on every device."""
    best, nodes = layouts.best, layouts.cluster.nodes
    if best is None or not best.way:
        return ""
    choice = best.choice
    wide = f" over {nodes // choice.replica} nodes" if choice.replica * choice.stage < nodes else ""
    says = f"tokens come to experts on {choice.fsdp} devices{wide} by {_way(best)}"
    other = next(
        (
            candidate
            for candidate in layouts.candidates
            if candidate.way != best.way and candidate.choice._replace(dispatch=choice.dispatch) == choice
        ),
        None,
    )
    if other is None:
        return f"{says}, which is given"
    if not other.fits:
        reason = "that does not fit"
    elif other.time.total_sec > best.time.total_sec:
        reason = f"that takes {1e3 * (other.time.total_sec - best.time.total_sec):.3g} ms more"
    else:
        reason = "kernels hide both" if other.time.total_sec == best.time.total_sec else "that is no faster when timed"
    return f"{says}; by {_way(other)}: {reason}"


def _way(candidate: Candidate) -> str:
    """The way of a candidate's tokens, with its bytes, its seconds and the memory of the layout."""
    time = candidate.time
    sent = f"{time.token_bytes / 1e9:.3g} GB a device and step, {1e3 * time.token_sec:.3g} ms"
    return f"{candidate.way} ({sent}, {candidate.memory.total / 1e9:.3g} GB of memory)"


def why_it_wins(layouts: SearchResult) -> str:
    """Why the plan has stages, or has none, in a sentence; empty where there is no choice, or nothing fits.

    On several nodes it is compared with the best layout that has the other thing between nodes: stages, or an exchange.
    """
    best, decoder, cluster = layouts.best, layouts.decoder, layouts.cluster
    if best is None or decoder is None:
        return ""
    several = any(
        candidate.choice.replica < cluster.nodes for candidate in layouts.candidates if candidate.choice.stage > 1
    )

    def has_stages(candidate: Candidate) -> bool:
        return candidate.choice.stage > 1 and (candidate.choice.replica < cluster.nodes or not several)

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
    even, by_time = _break_even(pipe, plain, decoder, tokens, cluster)
    side = "fewer" if tokens < even else "more"
    return (
        f"{says}: a step has {tokens:,.0f} tokens, {side} than the Q* = {even:,.0f} below which stages on "
        f"{cluster.nodes} nodes send less than {plain.exchange.label} (and send for a shorter time below "
        f"{by_time:,.0f}); {waits}"
    )


def _break_even(
    pipe: Candidate, plain: Candidate, decoder: Decoder, tokens: float, cluster: Cluster
) -> tuple[float, float]:
    """The tokens of a step at which nodes send as many bytes as stages as they exchange, and those of equal times.

    Bytes of short messages to and fro may take longer than those of an exchange.
    """
    node_bytes, of_pipe = (layout.time.node_bytes * cluster.gpus_per_node for layout in (plain, pipe))
    microbatches, replicas = pipe.choice.microbatches, pipe.choice.replica
    nothing = num_messages(pipe.choice.stage, microbatches) / (2 * microbatches) - 1
    # A node sends on the tokens of its replica.
    sent_on = tokens / replicas * pipeline.activation_bytes(1, decoder.width, decoder.itemsize) * (1 + nothing)
    even = pipeline.break_even_tokens(
        node_bytes, decoder.width, decoder.itemsize, others=of_pipe - sent_on, sent_for_nothing=nothing
    )
    share = sent_on / of_pipe
    messages_sec = share * pipe.time.slow_sec
    return replicas * even, tokens * max(0.0, plain.time.slow_sec - (1 - share) * pipe.time.slow_sec) / messages_sec
