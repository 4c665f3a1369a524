"""How long a training step takes, before it is run: kernels, messages inside a node, messages between nodes.

Kernels take their least time by the roofline of the compiled step (`jaxdl.parallel.compiler.roofline`), divided by the
share of it that real ones reach. Messages are those of the compiled step inside a replica, and those of the exchange
between replicas (`jaxdl.exchange.cost`); embedding tables have a model of their own
(`jaxdl.performance.planner.tables`). What is sent while kernels run is not waited for: the exchange beside the backward
pass of the last micro-batch, messages inside a replica beside all kernels, both up to a share that is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdl.exchange.cost import TURN, Cost, Link, Machine
from jaxdl.parallel.collectives.experts import Way
from jaxdl.parallel.mesh import GATHER_AXES, LENGTH_AXES, MODEL_AXES, STAGE_AXES, ways
from jaxdl.performance.planner import context_cost, pipeline
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.expert_cost import Brought, Path, brought, gathered_bytes
from jaxdl.performance.planner.memory import Fit
from jaxdl.performance.planner.tables import Costs
from jaxdl.training.step.turns import num_messages, time_in_turns

_BACKWARD = 2 / 3
"""The share of the backward pass in both: it has two products for each of the forward pass."""


@dataclass(frozen=True)
class Profile:
    """What a step of one replica needs, as compiled for one size of `tensor` and one way to keep activations.

    What it sends, and its seconds, are those without embedding tables.
    """

    temporary: Fit
    """Bytes besides state and batch."""
    passes_sec: Fit
    """Least seconds of the kernels of the forward and the backward pass."""
    other_sec: Fit
    """Those of the update and of all else that is done once a step."""
    fsdp_bytes: float = 0.0
    """Bytes of the arrays that are sent over `fsdp` in one micro-batch; of these a device sends (fsdp - 1) / fsdp."""
    fsdp_messages: float = 0.0
    """Collectives over `fsdp` in one micro-batch."""
    tensor_bytes: Fit = field(default_factory=Fit)
    """Bytes that a device sends over `tensor` in one micro-batch."""
    tensor_messages: float = 0.0
    """Collectives over `tensor` in one micro-batch."""


@dataclass(frozen=True)
class Efficiency:
    """How far real programs stay behind bounds."""

    compute: float = 0.5
    """The share of the roofline that kernels reach."""
    overlap: float = 0.7
    """The share of kernels' time during which messages can be sent."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and what they are made of."""

    compute_sec: float
    """Kernels of the model and of the update, and rows of embedding tables."""
    inner_sec: float
    """Messages inside a replica."""
    slow_sec: float
    """The exchange between replicas, its messages and its work on the device, and messages of embedding tables."""
    exposed_sec: float
    """The part of both that nothing hides."""
    exposed_slow_sec: float = 0.0
    """The part of `exposed_sec` that waits for other nodes."""
    backward_sec: float = 0.0
    """The part of `compute_sec` in the last micro-batch's backward pass, behind which the exchange hides."""
    idle_sec: float = 0.0
    """The part of `compute_sec` in which a stage of a pipeline waits for others."""
    node_bytes: float = 0.0
    """Bytes that a device sends to other nodes."""
    token_sec: float = 0.0
    """Messages of tokens to experts and back, in `inner_sec`, or in `slow_sec` where they cross the network."""
    token_bytes: float = 0.0
    """Bytes of these that a device sends."""

    @property
    def total_sec(self) -> float:
        """The step."""
        return self.compute_sec + self.exposed_sec

    @property
    def overhead(self) -> float:
        """The time that nodes wait for each other over all other time of a step."""
        return self.exposed_slow_sec / max(self.total_sec - self.exposed_slow_sec, 1e-12)


@dataclass(frozen=True)
class Split:
    """How a network is divided besides its batch and its parameters: into stages, and its texts into parts."""

    decoder: Decoder
    stage_link: Link
    """Between stages."""
    between_nodes: bool = False
    """Whether that is the network between nodes."""
    common_bytes: float = 0.0
    """Of a device's gradients of parameters that all stages have, such as tables."""
    forward: float = pipeline.FORWARD_SHARE
    """The part of the passes that is the forward pass, which a stage computes again."""
    path: Path | None = None
    """What messages over `fsdp` pass; None: its link."""
    way: Way | None = None
    """How tokens are brought to experts on other devices of `fsdp`; None: all experts are on each, or gathered."""
    computes_again: bool = False
    """Whether the backward pass computes experts again."""
    gathers_experts: bool = False
    """Whether experts are sharded over `fsdp` as all else is, and gathered."""


def own_time(
    profile: Profile,
    sizes: Mapping[str, int],
    examples: int,
    microbatches: int,
    machine: Machine,
    efficiency: Efficiency,
    tables: Costs | None = None,
    split: Split | None = None,
) -> StepTime:
    """The time of a step whose replicas exchange nothing but what embedding tables need.

    `examples` are those of a device in a micro-batch, of which each device of `context` has a part; `tables` is what a
    step costs for tables, nothing of which is in the profile. Stages and `context` need `split`.
    """
    gathered, tensor = ways(sizes, GATHER_AXES), ways(sizes, MODEL_AXES)
    stages, parts = ways(sizes, STAGE_AXES), ways(sizes, LENGTH_AXES)
    local = examples / parts
    passes = profile.passes_sec.at(gathered, local) / efficiency.compute
    kept = 1.0 if split is None else split.decoder.params_share(stages)
    update = kept * profile.other_sec.at(gathered, 0) / efficiency.compute
    head_share, forward = (0.0, 0.0) if split is None else (split.decoder.head_share, split.forward)
    shares = None if split is None else split.decoder.shares(stages)
    turns = pipeline.turns(passes, head_share, stages, microbatches, forward, shares=shares)
    compute = turns.total_sec + update
    again = kept * (1 + forward) if stages > 1 else 1.0
    elapsed = time_in_turns(stages, microbatches)  # A stage waits also while the others send inside theirs.
    inner, crossing = _gathers(profile, machine, split, sizes, microbatches, kept)
    tokens = _tokens(split, stages, local, microbatches)
    if tokens is not None:
        inner, crossing = inner + tokens.seconds * elapsed / microbatches, crossing + tokens.node_bytes
    if tensor > 1:
        num_bytes, messages = again * profile.tensor_bytes.at(gathered, local), again * profile.tensor_messages
        inner += elapsed * _seconds(machine, MODEL_AXES[0], messages, 2 * (tensor - 1), num_bytes)
    if parts > 1 and split is not None:
        inner += elapsed * _ring_sec(split, machine, parts, stages, examples)
    hidden = efficiency.overlap * compute if machine.overlaps else 0.0
    exposed, slow = max(0.0, inner - hidden), 0.0
    if crossing:  # Nearly all that is sent inside such a replica is.
        inner, slow = 0.0, inner
    exposed_slow = exposed if slow else 0.0
    if tables is not None:
        # Vectors are needed before the forward pass, and their gradients come after the backward pass.
        compute, inner, slow = compute + tables.memory_sec, inner + tables.inner_sec, tables.slow_sec
        exposed, exposed_slow = exposed + tables.inner_sec + tables.slow_sec, slow
    backward = (_BACKWARD * passes) if stages == 1 else (1 - forward / (1 + forward)) * turns.turn_sec
    node_bytes = crossing if tables is None else tables.slow_bytes
    of_tokens = (0.0, 0.0) if tokens is None else (tokens.seconds, tokens.num_bytes)
    time = StepTime(compute, inner, slow, exposed, exposed_slow, backward, turns.idle_sec, node_bytes, *of_tokens)
    if stages == 1 or split is None:
        return time
    sent = split.decoder.tokens(local) * microbatches
    return _with_stages(time, split, stages, sent, microbatches, max(0.0, hidden - inner))


def _gathers(
    profile: Profile,
    machine: Machine,
    split: Split | None,
    sizes: Mapping[str, int],
    microbatches: int,
    kept: float,
) -> tuple[float, float]:
    """(seconds, bytes of a device to other nodes) of gathered parameters, and of the sums of their gradients.

    A device has the share `kept` of all parameters.
    """
    gathered, stages = ways(sizes, GATHER_AXES), ways(sizes, STAGE_AXES)
    if gathered == 1:
        return 0.0, 0.0
    uses = kept * pipeline.gather_uses(split.decoder.itemsize, microbatches) if stages > 1 and split else microbatches
    num_bytes = profile.fsdp_bytes
    if split is not None and split.decoder.mixture is not None and split.gathers_experts:
        num_bytes += gathered_bytes(split.decoder.mixture)
    sent = uses * num_bytes * (gathered - 1) / gathered
    seconds = _seconds(machine, GATHER_AXES[0], uses * profile.fsdp_messages, gathered - 1, sent)
    return seconds, 0.0 if split is None or split.path is None else split.path.node_bytes("gather", sent)


def _tokens(split: Split | None, stages: int, examples: float, microbatches: int) -> Brought | None:
    """What a step costs to bring tokens to experts on other devices; None if none are brought."""
    if split is None or split.decoder.mixture is None or split.way is None or split.path is None:
        return None
    mixture, uses = split.decoder.mixture, microbatches * split.decoder.room(stages)
    again = split.computes_again or stages > 1
    return brought(mixture, split.way, split.path, split.decoder.tokens(examples), uses, again=again)


def _ring_sec(split: Split, machine: Machine, parts: int, stages: int, examples: int) -> float:
    """The seconds of the messages of keys and values in one micro-batch."""
    decoder, again = split.decoder, stages > 1 or split.forward < pipeline.FORWARD_SHARE
    num_bytes = context_cost.pass_bytes(decoder.length, parts, decoder.key_width, decoder.itemsize, again=again)
    messages = decoder.room(stages) * context_cost.pass_messages(parts, again=again)
    return _seconds(machine, LENGTH_AXES[0], messages, 1, decoder.room(stages) * examples * num_bytes)


def _with_stages(
    time: StepTime, split: Split, stages: int, tokens: float, microbatches: int, hidden: float
) -> StepTime:
    """The time with what stages send each other: two messages a turn, and sums of gradients after all turns.

    `tokens` are those of a device in all micro-batches; messages of turns hide behind `hidden` seconds of kernels.
    """
    decoder, count = split.decoder, num_messages(stages, microbatches) / 2
    of_turn = pipeline.activation_bytes(tokens / microbatches, decoder.width, decoder.itemsize)
    sent, of_turns = count * of_turn, count * sum(split.stage_link.of(TURN).seconds(2, of_turn))
    tables = pipeline.table_bytes(stages, split.common_bytes)
    summing = sum(split.stage_link.seconds(2 * (stages - 1), tables))
    exposed, seconds = max(0.0, of_turns - hidden) + summing, of_turns + summing
    if not split.between_nodes:
        return dataclasses.replace(time, inner_sec=time.inner_sec + seconds, exposed_sec=time.exposed_sec + exposed)
    return dataclasses.replace(
        time,
        slow_sec=time.slow_sec + seconds,
        exposed_sec=time.exposed_sec + exposed,
        exposed_slow_sec=time.exposed_slow_sec + exposed,
        node_bytes=time.node_bytes + sent + tables,
    )


def with_exchange(
    step_time: StepTime, cost: Cost, machine: Machine, efficiency: Efficiency, *, delayed: bool
) -> StepTime:
    """The time of a step that also exchanges gradients at this cost; `delayed` ones are sent beside all kernels."""
    beside = step_time.compute_sec if delayed else step_time.backward_sec
    left = cost.beside(efficiency.overlap * beside) if machine.overlaps else cost
    return dataclasses.replace(
        step_time,
        slow_sec=step_time.slow_sec + cost.total_sec,
        exposed_sec=step_time.exposed_sec + left.total_sec,
        exposed_slow_sec=step_time.exposed_slow_sec + left.total_sec,
        node_bytes=step_time.node_bytes + cost.sent_bytes,
    )


def _seconds(machine: Machine, axis: str, collectives: float, num_messages: float, num_bytes: float) -> float:
    """Of collectives of equal size, one after the other, each of `num_messages` messages, that send `num_bytes` in all.

    Each is looked up by its own size: a curve as measured is far from a line where collectives are short.
    """
    if not collectives:
        return 0.0
    return collectives * sum(machine.link(axis).seconds(num_messages, num_bytes / collectives))


def nodes_that_pay(overhead: float, efficiency: float = 0.8) -> float:
    """The most nodes that work at this efficiency.

    Waiting takes `overhead` times as long as all kernels of a step would on one node, however many nodes share these.

    By Amdahl's law, in the form of Zou et al. 2017 (arXiv 1709.06622): G <= (1 + (1 - efficiency) / overhead) /
    efficiency.
    """
    return float("inf") if overhead <= 0 else (1 + (1 - efficiency) / overhead) / efficiency


def parameter_servers(param_bytes: float, num_workers: int, bytes_per_sec: float, compute_sec: float) -> float:
    """The parameter servers that keep up with all workers: 2 S N / (B T), Zou et al. 2017 (arXiv 1709.06622)."""
    return 2 * param_bytes * num_workers / (bytes_per_sec * compute_sec)
