"""How many bytes a device needs for a training step, before it is compiled.

State and gradients follow from the shapes of the parameters and the rules of `jaxdl.parallel.sharding`. What the
forward pass leaves to the backward pass, and what XLA keeps besides, follows from a step that was compiled
(`jaxdl.performance.planner.trial`): a part that every device has, a part that is divided over `fsdp`, and a part for
each example of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxdl.exchange.base import Exchange, GradientLayout, by_name, leaf_names
from jaxdl.exchange.cost import Gradients
from jaxdl.parallel.mesh import GATHER_AXES, LENGTH_AXES, STAGE_AXES, Axis, inner_sizes, ways
from jaxdl.parallel.sharding import STACKED, Layout, LogicalAxes, Params, ShardingConfig, is_names, spec_axes
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.tables import Costs
from jaxdl.training.step.turns import kept_inputs

FLOAT_BYTES = 4
MOST_OF_DEVICE = 0.9
"""The share of a device's memory that a plan may need: XLA's allocator and the buffers of collectives have the rest."""


@dataclass(frozen=True)
class Parameters:
    """What a device keeps of a model in every step."""

    axes: LogicalAxes
    shapes: Params
    """Of the trained parameters."""
    optimizer_copies: float = 0.0
    """Bytes of the optimizer's state over those of the trained parameters."""
    average: bool = False
    """Whether an average of the parameters is kept."""
    other_bytes: int = 0
    """Model state, whole on every device."""
    frozen: tuple[tuple[Any, Any], ...] = ()
    """Logical axes and shape of each parameter that is not trained; it is kept as trained ones are."""
    order: tuple[str, ...] = ()
    """Their names in the order in which the backward pass finishes their gradients."""

    def with_layers(self, number: int) -> Parameters:
        """The same with stacks of so many layers: for as many all stages together have room."""

        def one(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
            return (number, *shape[1:]) if STACKED in names else tuple(shape)

        shapes = jax.tree.map(
            lambda names, x: jax.ShapeDtypeStruct(one(names, x.shape), x.dtype),
            self.axes,
            self.shapes,
            is_leaf=is_names,
        )
        frozen = tuple((names, one(names, shape)) for names, shape in self.frozen)
        return replace(self, shapes=shapes, frozen=frozen)

    def gradients(self, layout: Layout) -> Gradients:
        """What one device sees of the gradients while they are exchanged over `replica`."""
        axes = jax.tree.leaves(self.axes, is_leaf=is_names)
        names, shapes = leaf_names(self.shapes), [x.shape for x in jax.tree.leaves(self.shapes)]
        specs = [layout.grad_spec(axis, shape) for axis, shape in zip(axes, shapes, strict=True)]
        sizes = layout.mesh.shape
        local = {name: shard_shape(shape, spec, sizes) for name, shape, spec in zip(names, shapes, specs, strict=True)}
        stacked = frozenset(name for name, axis in zip(names, axes, strict=True) if STACKED in axis)
        gradient_layout = GradientLayout(dict(zip(names, specs, strict=True)), inner_sizes(sizes), self.order, stacked)
        return Gradients(local, sizes[Axis.REPLICA.value], gradient_layout)

    def common_bytes(self, layout: Layout) -> float:
        """Bytes on a device of the gradients of parameters that are in no layer, which all stages have."""
        axes = jax.tree.leaves(self.axes, is_leaf=is_names)
        shapes = [x.shape for x in jax.tree.leaves(self.shapes)]
        local = [
            shard_shape(shape, layout.grad_spec(names, shape), layout.mesh.shape)
            for names, shape in zip(axes, shapes, strict=True)
            if STACKED not in names
        ]
        return float(FLOAT_BYTES * sum(map(math.prod, local)))

    def frozen_bytes(self, layout: Layout) -> float:
        """Bytes on a device of the parameters that are not trained."""
        sizes = layout.mesh.shape
        return float(
            sum(
                x.dtype.itemsize * math.prod(shard_shape(x.shape, layout.param_spec(names, x.shape), sizes))
                for names, x in self.frozen
            )
        )

    def bytes(self, layout: Layout) -> dict[str, float]:
        """Bytes on a device of float32 parameters, as they are kept, exchanged (`gradients`) and updated (`update`)."""
        num_bytes: dict[str, float] = dict.fromkeys(("parameters", "gradients", "update"), 0.0)
        rules = {"parameters": layout.param_spec, "gradients": layout.grad_spec, "update": layout.update_spec}
        axes = jax.tree.leaves(self.axes, is_leaf=is_names)
        for names, x in zip(axes, jax.tree.leaves(self.shapes), strict=True):
            for what, rule in rules.items():
                shape = shard_shape(x.shape, rule(names, x.shape), layout.mesh.shape)
                num_bytes[what] += FLOAT_BYTES * math.prod(shape)
        return num_bytes


def shard_shape(shape: tuple[int, ...], spec: Any, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """What one device has of an array of this shape that is split by a PartitionSpec."""
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    ways = [
        math.prod(sizes[axis] for axis in spec_axes(jax.sharding.PartitionSpec(entry))) if entry else 1
        for entry in entries
    ]
    return tuple(size // way for size, way in zip(shape, ways, strict=True))


def described_layout(config: ShardingConfig, sizes: Mapping[str, int]) -> Layout:
    """The rules of sharding on a mesh of these sizes, of which there need be no devices."""
    return Layout(config, AbstractMesh(tuple(sizes.values()), tuple(sizes)))  # pyright: ignore[reportArgumentType]


def sharding_of(config: ShardingConfig, param_sharding: str) -> ShardingConfig:
    """The config with parameters sharded so; an update that is split already needs no setting of its own."""
    changes: dict[str, Any] = {"param_sharding": param_sharding}
    if param_sharding == "sharded":
        changes["update_sharding"] = "parameters"
    return config.replaced(changes)


@dataclass(frozen=True)
class Fit:
    """A quantity of a device, bytes or seconds, in a step of one replica without micro-batches."""

    fixed: float = 0.0
    """On every device, whatever the mesh."""
    divided: float = 0.0
    """Divided by the size of `fsdp`, if parameters are sharded over it."""
    of_example: float = 0.0
    """For each example of a device's micro-batch."""

    def at(self, fsdp: int, examples: float) -> float:
        """In a step with so many devices of `fsdp`, and so many examples of a device in a micro-batch."""
        return max(0.0, self.fixed + self.divided / fsdp + self.of_example * examples)

    def scaled(self, factor: float) -> Fit:
        """So many times as much."""
        return Fit(factor * self.fixed, factor * self.divided, factor * self.of_example)


def fit_memory(runs: Mapping[tuple[int, int], float]) -> Fit:
    """The line through measurements, by the size of `fsdp` and the examples of a device.

    Two different numbers of examples, at the same `fsdp`, give the part of an example; two sizes of `fsdp`, at the same
    number of examples, what is divided. What was not varied is taken for fixed, or for an example's (one number only).
    """
    by_fsdp: dict[int, dict[int, float]] = {}
    for (fsdp, examples), value in sorted(runs.items()):
        by_fsdp.setdefault(fsdp, {})[examples] = value
    smallest = min(by_fsdp)
    line = sorted(by_fsdp[smallest].items())
    (first, low), (last, high) = line[0], line[-1]
    slope = (high - low) / (last - first) if last > first else low / max(first, 1)
    rest = {fsdp: min(line.items())[1] - slope * min(line) for fsdp, line in by_fsdp.items()}
    largest = max(rest)
    if largest == smallest:
        return Fit(rest[smallest], 0.0, slope)
    divided = (rest[smallest] - rest[largest]) / (1 / smallest - 1 / largest)
    return Fit(rest[smallest] - divided / smallest, divided, slope)


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, part by part."""

    state: float
    """Parameters, optimizer's state, average, the exchange's state, model state."""
    temporary: float
    """Activations, gradients, gathered parameters and all else that a step needs while it runs."""
    batch: float
    """Two batches: the next one is there while a step runs."""
    tables: float = 0.0
    """Embedding tables, their rows' state, and what a step or an evaluation needs for them beyond the rest."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.state + self.temporary + self.batch + self.tables


@dataclass(frozen=True)
class Step:
    """What the memory of a step depends on besides the model."""

    sizes: Mapping[str, int]
    sharding: ShardingConfig
    microbatches: int
    examples: int
    """Of a device in a micro-batch."""
    exchange: Exchange | None = None
    """None sends nothing and keeps nothing."""
    decoder: Decoder | None = None
    """Needed for stages."""
    buffers: float = 0.0
    """Temporary bytes that a device needs since experts are spread over devices."""
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", described_layout(self.sharding, self.sizes))


def memory(
    parameters: Parameters,
    temporary: Fit,
    step: Step,
    example_bytes: float = 0.0,
    tables: Costs | None = None,
    exchanging: float | None = None,
) -> Memory:
    """The bytes of a device in a step.

    `temporary` is that of a step with the mesh's size of `tensor`; `example_bytes` are those of an example's inputs;
    `tables` are what embedding tables cost. Micro-batches add a sum of gradients. Several replicas add `exchanging`
    bytes on one device of `fsdp`, on each of several its share of the gradients of that; None: the gradients once more.
    """
    sizes = parameters.bytes(step.layout)
    state = sizes["parameters"] * (2 if parameters.average else 1) + sizes["update"] * parameters.optimizer_copies
    state += parameters.other_bytes + parameters.frozen_bytes(step.layout)
    if step.exchange is not None:
        state += exchange_bytes(step.exchange, parameters.gradients(step.layout))
    running = _temporary(temporary, step) + step.buffers
    if ways(step.sizes, STAGE_AXES) > 1 and step.decoder is not None and ways(step.sizes, GATHER_AXES) > 1:
        # A stage gathers its parameters once a step.
        running += sizes["parameters"] * ways(step.sizes, GATHER_AXES) * step.decoder.itemsize / FLOAT_BYTES
    if step.microbatches > 1:
        running += sizes["gradients"]
    if step.sizes[Axis.REPLICA.value] > 1:
        added = sizes["gradients"]
        if exchanging is not None:
            whole = described_layout(step.sharding, {**step.sizes, **dict.fromkeys(GATHER_AXES, 1)})
            added *= exchanging / max(parameters.bytes(whole)["gradients"], 1.0)
        running = max(0.0, running + added)
    batch = 2 * example_bytes * step.examples * step.microbatches / ways(step.sizes, LENGTH_AXES)
    if tables is None:
        return Memory(state, running, batch)
    # A step updates the tables when activations are gone; the evaluation has activations too.
    forward = running + max(tables.vector_bytes / step.microbatches, tables.evaluation_bytes)
    return Memory(state, running, batch, tables.device_bytes + max(forward, tables.update_bytes) - running)


def _temporary(temporary: Fit, step: Step) -> float:
    """The temporary bytes of a step without an exchange and without sums over micro-batches.

    A stage has its part of the layers, and the last one also the output layer; inputs of micro-batches wait for their
    backward pass.
    """
    gathered, stages = ways(step.sizes, GATHER_AXES), ways(step.sizes, STAGE_AXES)
    examples = step.examples / ways(step.sizes, LENGTH_AXES)
    if stages == 1 or step.decoder is None:
        return temporary.at(gathered, examples)
    decoder = step.decoder
    kept, (each, last) = decoder.params_share(stages), decoder.shares(stages)
    part = max((1 - decoder.head_share) * each, decoder.head_share + (1 - decoder.head_share) * last)
    stage = Fit(kept * temporary.fixed, kept * temporary.divided, part * temporary.of_example)
    inputs = kept_inputs(stages) * decoder.tokens(examples) * decoder.width * decoder.itemsize
    return stage.at(gathered, examples) + inputs


def exchange_bytes(exchange: Exchange, gradients: Gradients) -> float:
    """Bytes of the state of an exchange on one device, such as residuals."""
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in gradients.shapes.items()}
    state = jax.eval_shape(exchange.init, shapes)
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in by_name(state).values()))
