"""The facts printed before the first step, one line each: devices, data, model, steps, optimizer, exchange."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdl.core.config import Config
from jaxdl.parallel.mesh import Axis, batch_ways, mesh_text
from jaxdl.report.explanation import readable_bytes
from jaxdl.report.lines import format_number


def describe_config(config: Config, *always: str) -> str:
    """The kind of a config, its fields in `always`, and its fields with values other than their defaults.

    `sgd, learning rate 0.2, nesterov, weight decay 0.0005`. Nested configs are left out.
    """
    parts = [str(getattr(config, "kind", type(config).__name__.lower()))]
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Config) or (name not in always and value == field.default):
            continue
        words = name.replace("_", " ")
        if callable(value):  # A function or class of the user's, which has a name.
            parts.append(_plain(value))
        elif value is None or value is False:
            parts.append(f"{words} {'none' if value is None else 'off'}")
        elif value is True:
            parts.append(words)
        else:
            values = value if isinstance(value, tuple | list | dict) else (value,)
            values = [f"{key}={_plain(item)}" for key, item in value.items()] if isinstance(value, dict) else values
            parts.append(f"{words} {' '.join(_plain(item) for item in values)}")
    return ", ".join(parts)


def _plain(value: Any) -> str:
    if callable(value):
        return str(getattr(value, "__qualname__", value))
    return format_number(value) if isinstance(value, int | float) else str(value)


def devices_fact(mesh: Mesh) -> str:
    """`8 virtual CPU devices: replica 2 x fsdp 4 x tensor 1`."""
    first, count = mesh.devices.flat[0], mesh.devices.size
    kind = f"{'virtual ' if count > 1 else ''}CPU" if first.platform == "cpu" else first.device_kind
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{count:,} {kind} device{'s' if count > 1 else ''}{processes}: {mesh_text(mesh.shape)}"


def data_fact(config: Config, splits: Any) -> str:
    """`digits: 1,438 training and 359 held-out images of 8 x 8 x 1, 10 classes`; `splits` is the data."""
    spec = splits.train.spec
    noun, what = spec.described()
    name = getattr(config, "name", None)
    kind = f"{getattr(config, 'kind', 'data')}{f' {name}' if name else ''}"
    remark = splits.train.remark()
    num_train = "a stream of" if splits.train.is_endless else f"{len(splits.train):,}"
    counts = f"{num_train} training and {len(splits.test):,} held-out {noun}"
    left_out = splits.test.left_out()
    held_out = f"; held out: {left_out}" if left_out and left_out not in remark else ""
    return f"{kind}: {counts} of {what}{f'; {remark}' if remark else ''}{held_out}"


def plan_facts(plan: Any, end: int) -> Iterator[tuple[str, str]]:
    """(name, value) of the facts of a `jaxdl.training.run.plan.build.Plan`; the run ends after `end` steps."""
    experiment, parts = plan.experiment, plan.parts
    shapes = parts.network.filled.param_shapes
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    yield (
        "model",
        f"{describe_config(experiment.model)}: {sum(sizes):,} parameters ({readable_bytes(4 * sum(sizes))} in float32)",
    )
    left = [math.prod(leaf.shape) for leaf in jax.tree.leaves(parts.trainable.of(shapes))]
    if len(left) < len(sizes):
        spec = parts.state_spec
        kept = jax.tree.leaves(spec.filled().opt_state if spec.filled_shapes else spec.opt_shapes)
        state = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)
        yield (
            "trained",
            f"{len(left):,} of {len(sizes):,} arrays, {sum(left):,} of {sum(sizes):,} parameters (the others are "
            f"frozen); optimizer state {state:,} bytes",
        )
    objective = parts.task.objective
    if objective:
        yield "loss", f'{objective} in training, reported as "objective"; without it in evaluations'
    yield "length", _length(plan, end)
    optimizer = describe_config(experiment.optimizer, "transformation", "learning_rate")
    yield "optimizer", f"{optimizer}; schedule {describe_config(experiment.schedule)}"
    yield "precision", describe_config(experiment.precision)
    replicas = parts.layout.mesh.shape[Axis.REPLICA]
    exchange = describe_config(experiment.exchange, "wire_dtype", "density", "bits", "rank")
    chosen = " (chosen by auto)" if plan.asked.exchange != experiment.exchange else ""
    exchange += f", over {replicas} replicas{chosen}"
    yield "exchange", exchange if replicas > 1 else "none: there is one replica"


def _length(plan: Any, end: int) -> str:
    """`30 epochs = 675 steps, batch 64 (8 a device)`."""
    experiment, timeline = plan.experiment, plan.timeline
    epochs = (not experiment.steps_within and experiment.epochs) or timeline.epoch(plan.total_steps)
    shown = f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.4g}"
    text = f"{shown} epoch{'' if epochs == 1 else 's'} = {plan.total_steps:,} steps"
    asked = (experiment.epochs or 0) * timeline.steps_per_epoch
    if experiment.steps_within and abs(plan.total_steps - asked) >= 1:
        low, high = experiment.steps_within
        text += f" ({experiment.epochs:g} epochs, but --steps-within {low} {high})"
    if experiment.phases:
        sizes = ", ".join(f"{phase.size}" for phase in experiment.phases)
        text += f" in {len(experiment.phases)} phases of {sizes} pixels"
    batches = dict.fromkeys(segment.batch_size for segment in timeline.segments)
    ways = batch_ways(plan.parts.layout.mesh)
    text += f", batch {', then '.join(f'{size:,} ({size / ways:,.4g} a device)' for size in batches)}"
    if experiment.step.microbatches > 1:
        text += f" in {experiment.step.microbatches} micro-batches"
    return text + (f"; stops after {end:,} (--max-steps)" if end < plan.total_steps else "")
