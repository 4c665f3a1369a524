"""How long a training step takes, before it is run: kernels, messages inside a node, messages between nodes.

Kernels take their least time by the roofline of the compiled step (`jaxdl.parallel.compiler.roofline`), divided by the
share of it that real ones reach. Messages are those of the compiled step inside a replica, and those of the exchange
between replicas (`jaxdl.exchange.cost`); embedding tables have a model of their own
(`jaxdl.performance.planner.tables`). What is sent while kernels run is not waited for: the exchange beside the backward
pass of the last micro-batch, messages inside a replica beside all kernels, both up to a share that is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdl.exchange.cost import Cost, Machine
from jaxdl.parallel.mesh import GATHER_AXES, MODEL_AXES, ways
from jaxdl.performance.planner.memory import Fit
from jaxdl.performance.planner.tables import Costs

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

    @property
    def total_sec(self) -> float:
        """The step."""
        return self.compute_sec + self.exposed_sec

    @property
    def overhead(self) -> float:
        """The time that nodes wait for each other over all other time of a step."""
        return self.exposed_slow_sec / max(self.total_sec - self.exposed_slow_sec, 1e-12)


def own_time(
    profile: Profile,
    sizes: Mapping[str, int],
    examples: int,
    microbatches: int,
    machine: Machine,
    efficiency: Efficiency,
    tables: Costs | None = None,
) -> StepTime:
    """The time of a step whose replicas exchange nothing but what embedding tables need.

    `examples` are those of a device in a micro-batch; `tables` is what a step costs for tables, nothing of which is in
    the profile.
    """
    fsdp, tensor = ways(sizes, GATHER_AXES), ways(sizes, MODEL_AXES)
    passes = profile.passes_sec.at(fsdp, examples) / efficiency.compute
    compute = microbatches * passes + profile.other_sec.at(fsdp, 0) / efficiency.compute
    inner = 0.0
    if fsdp > 1:
        inner += _seconds(
            machine, GATHER_AXES[0], profile.fsdp_messages, fsdp - 1, profile.fsdp_bytes * (fsdp - 1) / fsdp
        )
    if tensor > 1:
        num_bytes = profile.tensor_bytes.at(fsdp, examples)
        inner += _seconds(machine, MODEL_AXES[0], profile.tensor_messages, 2 * (tensor - 1), num_bytes)
    inner *= microbatches
    hidden = efficiency.overlap * compute if machine.overlaps else 0.0
    exposed, slow = max(0.0, inner - hidden), 0.0
    if tables is not None:
        # Vectors are needed before the forward pass, and their gradients come after the backward pass.
        compute, inner, slow = compute + tables.memory_sec, inner + tables.inner_sec, tables.slow_sec
        exposed += tables.inner_sec + tables.slow_sec
    return StepTime(compute, inner, slow, exposed, slow, _BACKWARD * passes)


def with_exchange(
    step_time: StepTime, cost: Cost, machine: Machine, efficiency: Efficiency, *, delayed: bool
) -> StepTime:
    """The time of a step that also exchanges gradients at this cost; `delayed` ones are sent beside all kernels."""
    beside = step_time.compute_sec if delayed else step_time.backward_sec
    left = cost.beside(efficiency.overlap * beside) if machine.overlaps else cost
    return StepTime(
        step_time.compute_sec,
        step_time.inner_sec,
        step_time.slow_sec + cost.total_sec,
        step_time.exposed_sec + left.total_sec,
        step_time.exposed_slow_sec + left.total_sec,
        step_time.backward_sec,
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
