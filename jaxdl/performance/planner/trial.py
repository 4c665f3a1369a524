"""Steps that are compiled, not run, to learn what a device needs for them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxdl.data import SyntheticImages
from jaxdl.exchange import Dense, ExchangeConfig
from jaxdl.exchange.cost import Machine
from jaxdl.optim import Constant
from jaxdl.parallel.compiler import hlo, overlap, roofline
from jaxdl.parallel.compiler.groups import sent_bytes
from jaxdl.parallel.embedding import Buffer, Tables
from jaxdl.parallel.embedding.traffic import Message, messages
from jaxdl.parallel.mesh import GATHER_AXES, MODEL_AXES, Axis, ways
from jaxdl.performance.planner.decoder import decoder_of
from jaxdl.performance.planner.expert_cost import (
    buffer_bytes,
    computes_again,
    gathered_bytes,
    kept_layers,
    layer_messages,
)
from jaxdl.performance.planner.h100 import compile_step
from jaxdl.performance.planner.memory import Fit, fit_memory
from jaxdl.performance.planner.steptime import Profile
from jaxdl.performance.planner.tables import costs_of_buffers
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import AsGiven
from jaxdl.training.run.plan.build import Plan

_IMAGENET_CLASSES = 1000
_LAUNCH_SEC = 3e-6
"""About the time from one kernel's end to the next one's beginning on a GPU: none takes less."""


def resident(experiment: Experiment, image_size: int | None) -> Experiment:
    """The experiment without phases and schedule, and with synthetic images instead of photographs.

    Ids of embedding tables are sent in the step of their batch, as nothing comes before it.
    """
    photos = getattr(experiment.data, "photos", None)
    changes: dict[str, Any] = {
        "epochs": None,
        "tokens": None,
        "steps": 10**6,
        "phases": (),
        "schedule": Constant(),
        "plan": AsGiven(),
        "embedding.ids_ahead": False,
        "evaluation.norm_batches": None,
        "report.profile_start_step": None,
        "report.profile_steps": 3,
    }
    if experiment.steps_within is not None:  # Its batch may be larger than its data.
        changes |= {"epochs": 1.0, "steps": None, "steps_within": (10**6, 10**6)}
    if photos is not None:
        size = image_size or photos.size
        count = experiment.batch_size
        changes["data"] = SyntheticImages(
            height=size, width=size, num_classes=_IMAGENET_CLASSES, num_train=count, num_test=count
        )
    return experiment.replaced(changes)


def planned_bytes(program: jax.stages.Compiled) -> int | None:
    """The bytes that a device needs for a program, by XLA's plan."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return kept + analysis.temp_size_in_bytes


def stand_in(experiment: Experiment) -> Experiment:
    """The experiment on made-up data of the same shapes, where those need no look at the files."""
    changed = resident(experiment, None)
    data = changed.data.stand_in(getattr(changed.model, "vocab_size", None))
    if data is not None:
        changed = changed.replaced({"data": data})
    if isinstance(getattr(changed.model, "norm_span", None), int):  # It needs more examples than a trial has.
        changed = changed.replaced({"model.norm_span": Axis.REPLICA.value})
    return changed


@dataclass(frozen=True)
class Setting:
    """What a step is compiled for, without micro-batches."""

    fsdp: int
    tensor: int
    examples: int
    """Of a device of `fsdp`."""
    remat: str | None
    """None for a model that has no such setting."""
    param_sharding: str
    replica: int = 1
    """One sends nothing; several exchange gradients as the experiment says."""


def trial_exchange(experiment: Experiment) -> ExchangeConfig:
    """The exchange of trial steps with several replicas: that of the experiment, or the dense one if it is open."""
    return experiment.exchange if isinstance(experiment.exchange, ExchangeConfig) else Dense()


def table_messages(plan: Plan) -> list[Message]:
    """What a plan's compiled step sends for its embedding tables."""
    tables = plan.parts.tables
    if tables is None:
        return []
    config, local = tables.config, plan.experiment.batch_size // tables.mesh.size
    return [
        message
        for buffer in _buffers(plan, tables)
        for message in messages(buffer, local, config.forward_wire, config.backward_wire)
    ]


def table_sec(plan: Plan, machine: Machine) -> float:
    """What the messages and the rows of a plan's embedding tables take in a step, by the planner's model."""
    tables = plan.parts.tables
    if tables is None:
        return 0.0
    local = plan.experiment.batch_size // tables.mesh.size
    return costs_of_buffers(_buffers(plan, tables), local, tables.config, machine).total_sec


def _buffers(plan: Plan, tables: Tables) -> tuple[Buffer, ...]:
    """Those of a plan's compiled step: with jagged features, for the ids of the first bucket."""
    return tables.buffers_for(next(iter(tables.buckets(plan.experiment.batch_size)), None))


class Measured(NamedTuple):
    """What one compiled step needs."""

    temporary: float
    passes: float
    """Least seconds of the forward and the backward pass."""
    other: float
    """Those of the rest of the step."""
    sent: dict[str, float]
    """Mesh axis -> bytes that a device sends."""
    messages: dict[str, float]
    """Mesh axis -> collectives."""


def measure_step(plan: Plan) -> Measured:
    """The figures of a plan's step, which is compiled."""
    return figures(plan, compile_step(plan))


def figures(plan: Plan, compiled: jax.stages.Compiled) -> Measured:
    """The figures of a plan's compiled step; its kernels and what it sends are those without embedding tables."""
    analysis, module = compiled.memory_analysis(), hlo.parse(compiled.as_text() or "")
    seconds: dict[bool, float] = {False: 0.0, True: 0.0}
    for kernel in roofline.kernels(module):
        if kernel.part != "tables":
            seconds[kernel.part == "rest"] += kernel.times * max(kernel.least_sec, _LAUNCH_SEC)
    sent: dict[str, float] = defaultdict(float)
    num_messages: dict[str, float] = defaultdict(float)
    sizes = dict(plan.parts.layout.mesh.shape)
    if math.prod(sizes.values()) > 1:
        there = overlap.play(module, sizes, overlap.Links(math.inf)).messages
        for message in there:
            for axis in message.axes[:1]:
                sent[axis] += message.sent_bytes * message.times
                num_messages[axis] += message.times
        alone = Counter((message.kind, message.axes, message.sent_bytes) for message in there)
        for message in table_messages(plan):
            size = sent_bytes(message.kind, math.prod(sizes[axis] for axis in message.axes), message.num_bytes)
            sent[message.axes[0]] -= size
            if alone[key := (message.kind, message.axes, size)]:  # XLA joins small ones with others.
                alone[key] -= 1
                num_messages[message.axes[0]] -= 1
    temporary = float(analysis.temp_size_in_bytes) if analysis else 0.0
    return without_experts(plan, Measured(temporary, seconds[False], seconds[True], dict(sent), dict(num_messages)))


def without_experts(plan: Plan, measured: Measured) -> Measured:
    """The figures without what is only there since experts are spread over `fsdp`, or are gathered over it, by formula.

    How a plan brings tokens to experts, and of how many devices, differs from that of the step.
    """
    decoder, layout, axis = decoder_of(plan), plan.parts.layout, GATHER_AXES[0]
    mixture, size = decoder and decoder.mixture, layout.mesh.shape[axis]
    if mixture is None or size == 1 or layout.config.param_sharding == "replicated" or decoder is None:
        return measured
    sent, messages, temporary = dict(measured.sent), dict(measured.messages), measured.temporary
    if mixture.is_spread(size):
        remat, tensor = plan.experiment.model.remat, ways(layout.mesh.shape, MODEL_AXES)  # pyright: ignore
        tokens = decoder.tokens(plan.experiment.batch_size / size)
        way = mixture.way(size, tokens)
        num_bytes, count = layer_messages(mixture, way, size, tokens, again=computes_again(remat))
        num_bytes, count = mixture.num_layers * num_bytes, mixture.num_layers * count
        temporary -= buffer_bytes(mixture, way, size, tokens, tensor, kept_layers(remat, mixture.num_layers))
    else:
        num_bytes, count = gathered_bytes(mixture) * (size - 1) / size, 0
    sent[axis] = max(0.0, sent.get(axis, 0.0) - num_bytes)
    messages[axis] = max(0.0, messages.get(axis, 0.0) - count)
    return measured._replace(temporary=max(0.0, temporary), sent=sent, messages=messages)


def profile(
    measure: Callable[[Setting], Measured],
    *,
    tensor: int,
    most_fsdp: int,
    remat: str | None,
    param_sharding: str,
    examples: tuple[int, int],
) -> Profile:
    """What steps need, from three of them: with these two numbers of examples, and with `most_fsdp`.

    `measure` takes the figures of each.
    """
    few, many = examples
    wanted = dict.fromkeys([(1, few), (1, many), (most_fsdp, few)])
    measurements = {  # One device of `fsdp` has all parameters either way.
        (fsdp, number): measure(Setting(fsdp, tensor, number, remat, param_sharding if fsdp > 1 else "replicated"))
        for fsdp, number in wanted
    }

    def line(value: Callable[[Measured], float]) -> Fit:
        return fit_memory({key: value(measured) for key, measured in measurements.items()})

    spread, inner = measurements[most_fsdp, few], MODEL_AXES[0]
    share = (most_fsdp - 1) / most_fsdp
    return Profile(
        temporary=line(lambda measured: measured.temporary),
        passes_sec=line(lambda measured: measured.passes),
        other_sec=line(lambda measured: measured.other),
        fsdp_bytes=spread.sent.get(GATHER_AXES[0], 0.0) / share if share else 0.0,
        fsdp_messages=spread.messages.get(GATHER_AXES[0], 0.0),
        tensor_bytes=line(lambda measured: measured.sent.get(inner, 0.0)),
        tensor_messages=spread.messages.get(inner, 0.0),
    )


def exchange_bytes(measure: Callable[[Setting], Measured], *, tensor: int, remat: str | None, examples: int) -> float:
    """Temporary bytes that the exchange between replicas adds on one device of `fsdp`: of a step of two, and of one.

    They are less than none where XLA finds a better order.
    """
    one, two = (measure(Setting(1, tensor, examples, remat, "replicated", replica=count)) for count in (1, 2))
    return two.temporary - one.temporary
