"""Sharding rules: from the names of a parameter's dimensions to the mesh, for a whole state.

A parameter's logical axes (Flax's word), such as `("embed", "mlp")`, are the names of its dimensions; the rules map
them to mesh axes:

- an axis that splits parameters splits the first dimension that `ShardingConfig.rules` gives it and whose size it
  divides;
- `GATHER_AXES`, over which parameters are gathered for use, such as `fsdp`, split the largest remaining dimension that
  they divide together, for one message (or else one each, or the same one again);
- stacked `layers` are split over stages alone, and biases, norm scales and parameters below `min_shard_elements` over
  nothing else.

The dimensions of a parameter without logical axes are `UNNAMED`, so only `GATHER_AXES` split it.

Models call `constrain`, and what is in `jaxdl.parallel.gathering`, with logical names alone; the step says what these
mean, with `use_layout`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.core.config import Config, ConfigError
from jaxdl.parallel.mesh import BATCH_AXES, GATHER_AXES, LENGTH_AXES, MODEL_AXES, PARAM_AXES, STAGE_AXES, Axis, ways

Params = dict[str, Any]
"""Parameters by name: nested dictionaries of arrays, or of their shapes."""
Grads = dict[str, Any]
"""Gradients, a tree like the parameters."""
Specs = dict[str, Any]
"""PartitionSpecs, a tree like the parameters."""
LogicalAxes = dict[str, Any]
"""The logical names of each parameter's dimensions, a tuple of strings each; a tree like the parameters."""

STACKED = "layers"
"""The logical name of the leading dimension of parameters that are stacked over layers."""
UNNAMED = ""
"""The logical name of a dimension that the model does not name."""
UNNAMED_STACK = "stack"
"""The logical name of a leading dimension that counts layers, in a user's stack which has no names."""
LAYER_DIMS = (STACKED, UNNAMED_STACK)
"""The logical names of dimensions that count layers."""


EXPERT = "expert"
"""The logical name of a dimension that counts experts. `fsdp` splits it, and these parameters are not gathered: tokens
are brought to them. Where it does not divide it they are gathered as all others."""
ROUTER = "router"
"""The logical name of a dimension of a router's parameters, which are never rounded."""
_RULES = {"batch": BATCH_AXES, "length": LENGTH_AXES, STACKED: STAGE_AXES, EXPERT: (Axis.FSDP.value,)}
"""Logical dimension -> the mesh axes that split it, for those that no option names."""


class ShardingConfig(Config):
    """How parameters, their gradients and the optimizer's state are spread over `fsdp` and `tensor`."""

    param_sharding: Literal["sharded", "replicated"] = "sharded"
    """`sharded` splits parameters over `fsdp` (FSDP, ZeRO-3); `replicated` keeps them whole (plain data parallel)."""
    update_sharding: Literal["parameters", "sharded"] = "parameters"
    """How the update and the optimizer's state are sharded: `parameters`, like the parameters; `sharded`, over `fsdp`
    though the parameters are replicated (ZeRO-1): each device updates a part, and the parts are gathered. Never over
    `replica`, whose network is slow; so with fsdp 1 both are the same."""
    tensor_dims: tuple[str, ...] = ("heads", "kv_heads", "mlp", "vocab", "channel_out", "classes")
    """Logical dimensions that `tensor` splits."""
    min_shard_elements: int = pydantic.Field(default=256, ge=1)
    """Parameters with fewer elements (in one layer) stay whole on every device, as do those of one dimension: the
    messages would cost more than the memory."""

    @pydantic.model_validator(mode="after")
    def _update_can_be_split(self) -> ShardingConfig:
        if self.update_sharding == "sharded" and self.param_sharding == "sharded":
            raise ValueError(
                "update_sharding = sharded has no effect with param_sharding = sharded: the update is split as the "
                "parameters are. Remove it, or set param_sharding = replicated."
            )
        return self

    @property
    def rules(self) -> dict[str, tuple[str, ...]]:
        """Logical dimension -> the mesh axes that split it, of parameters and of activations."""
        return dict.fromkeys(self.tensor_dims, (Axis.TENSOR.value,)) | _RULES


@dataclass(frozen=True)
class Layout:
    """The rules on one mesh. `manual` names the manual axes of the surrounding `shard_map`.

    `wire_dtype` is the dtype in which parameters are gathered for use; None takes their own. `sum_dtype` is the dtype
    in which the backward pass of a loop over layers sums their gradients over `replica`; with None it does not.
    `fp8_size` is the least size of a product of a block that is computed in FP8; with None none is. With `apart` each
    replica has parameters of its own, and nothing may be communicated over `replica`. `stage_layers` is for how many
    layers each stage has room; the last one may have fewer.
    """

    config: ShardingConfig
    mesh: Mesh
    manual: frozenset[str] = frozenset()
    wire_dtype: DTypeLike | None = None
    sum_dtype: DTypeLike | None = None
    fp8_size: int | None = None
    apart: bool = False
    stage_layers: int | None = None

    def param_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a parameter with these logical axes and this shape."""
        assert len(axes) == len(shape), (axes, shape)
        sizes, rules = self.mesh.shape, self.config.rules
        dims = [dim for dim, name in enumerate(axes) if name not in LAYER_DIMS]
        placed: dict[int, tuple[str, ...]] = {}

        def place(joint: tuple[str, ...], candidates: Iterable[int]) -> bool:
            used = {dim: placed.get(dim, ()) for dim in candidates}
            fits = [dim for dim in used if shape[dim] % ways(sizes, (*used[dim], *joint)) == 0]
            placed.update({dim: (*used[dim], *joint) for dim in fits[:1]})
            return bool(fits)

        def dims_of(axis: str) -> list[int]:
            return [dim for dim, name in enumerate(axes) if axis in rules.get(name, ())]

        for axis in STAGE_AXES:
            if sizes.get(axis, 1) > 1 and axis not in self.manual:  # Where it is manual, these are a stage's layers.
                place((axis,), dims_of(axis))
        # Gathering biases and norm scales for every use would cost more in messages than keeping them whole in memory.
        if len(dims) >= 2 and math.prod(shape[dim] for dim in dims) >= self.config.min_shard_elements:
            gathered = GATHER_AXES if self.config.param_sharding == "sharded" else ()
            split = [axis for axis in PARAM_AXES if sizes.get(axis, 1) > 1 and axis in gathered + MODEL_AXES]
            for axis in split:
                place((axis,), [dim for dim in dims_of(axis) if dim in dims])
            rest = tuple(
                axis for axis in split if axis in gathered and not any(axis in used for used in placed.values())
            )
            free = [dim for dim in dims if dim not in placed]
            free.sort(key=lambda dim: (shape[dim], dim), reverse=True)
            also = [dim for dim in placed if dim in dims]
            if rest and not place(rest, (*free, *also)):
                for axis in sorted(rest, key=sizes.__getitem__, reverse=True):
                    place(
                        (axis,), (*(dim for dim in free if dim not in placed), *(dim for dim in placed if dim in dims))
                    )
        entries = [placed.get(dim) for dim in range(len(shape))]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry for entry in entries))

    def grad_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a parameter's gradient while it is exchanged over `replica`.

        With several replicas it is split over `fsdp` even if the parameter is not, so that each device exchanges a part
        of it: reduce-scatter, exchange, all-gather. It is also split where the update is.
        """
        alone = self.mesh.shape[Axis.REPLICA] == 1
        return self.update_spec(axes, shape) if alone else self._split_spec(axes, shape)

    def update_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a parameter and its optimizer state in the update."""
        split = self.config.update_sharding == "sharded"
        return self._split_spec(axes, shape) if split else self.param_spec(axes, shape)

    def _split_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a parameter when parameters are split over `fsdp`."""
        split = self.config.replaced({"param_sharding": "sharded", "update_sharding": "parameters"})
        return dataclasses.replace(self, config=split).param_spec(axes, shape)

    def activation_spec(self, names: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of an activation: split by the rules over the automatic axes."""
        entries: list[Any] = []
        rules, automatic = self.config.rules, set(self.mesh.axis_names) - self.manual
        for name, size in zip(names, shape, strict=True):
            wanted = tuple(axis for axis in rules.get(name, ()) if axis in automatic and self.mesh.shape[axis] > 1)
            entries.append(wanted if wanted and size % ways(self.mesh.shape, wanted) == 0 else None)
        return PartitionSpec(*entries)

    def batch_axes(self, num: int) -> tuple[str, ...]:
        """The automatic mesh axes over which a batch of `num` examples is split; none where they cannot divide it.

        An axis of one device splits nothing.
        """
        return tuple(axis for axis in spec_axes(self.activation_spec(("batch",), (num,))) if self.mesh.shape[axis] > 1)

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`x` sharded as `spec`, in plain `jit` as well as inside a partly manual `shard_map`."""
        if self.manual:  # There the mesh is the surrounding one, with some axes manual: a bare spec refers to it.
            return lax.with_sharding_constraint(x, spec)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def without_axes(spec: PartitionSpec, *axes: str) -> PartitionSpec:
    """`spec` without some mesh axes."""
    kept = []
    for entry in spec:
        names = tuple(name for name in entry_names(entry) if name not in axes)
        kept.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*kept)


def entry_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec uses, in its order."""
    return tuple(name for entry in spec for name in entry_names(entry))


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("jaxdl_layout", default=None)


@contextlib.contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """Logical names of a model that is traced inside are mapped by `layout`."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def current_layout() -> Layout | None:
    """The layout of the surrounding `use_layout`; None outside of one."""
    return _layout.get()


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Shards an activation by the logical names of its dimensions; without a layout returns it unchanged."""
    layout = _layout.get()
    return x if layout is None else layout.constrain(x, layout.activation_spec(names, x.shape))


def num_batch_shards(num: int) -> int:
    """Over how many devices XLA splits a batch of `num` examples; 1 without a layout."""
    layout = _layout.get()
    return 1 if layout is None else ways(layout.mesh.shape, layout.batch_axes(num))


def statistics_axis() -> str | None:
    """The mesh axis over which statistics of the batch must be averaged to be those of the whole mesh, or None.

    Only over a manual `replica` axis does each call see a part of the batch; over the other axes XLA sums by itself. So
    it is None without a layout, where `replica` is not manual, where replicas are apart, and with one replica (there is
    nothing to average, and XLA of jaxlib 0.10 fails to compile it where channels are sharded).
    """
    layout, axis = _layout.get(), Axis.REPLICA.value
    if layout is None or layout.apart or axis not in layout.manual or layout.mesh.shape[axis] == 1:
        return None
    return axis


def first_layer(num_layers: int) -> jax.Array:
    """The number in the whole network of the first of the `num_layers` that this stage has; 0 where it has all."""
    layout = _layout.get()
    stages = () if layout is None else tuple(axis for axis in STAGE_AXES if axis in layout.manual)
    if layout is None or not stages:
        return jnp.int32(0)
    return (layout.stage_layers or num_layers) * lax.axis_index(stages)


def param_specs(layout: Layout, axes: LogicalAxes, shapes: Params) -> Specs:
    """The tree of PartitionSpecs of the parameters; `axes` their logical names, `shapes` arrays or shape structs.

    Raises ConfigError when an axis of `MODEL_AXES` splits no parameter, unless the model names no dimension.
    """
    for axis in MODEL_AXES if has_names(axes) else ():
        if layout.mesh.shape[axis] > 1 and axis not in _used_axes(layout, axes, shapes):
            raise ConfigError(_why_idle(axis, layout, axes, shapes))
    return _specs(layout, axes, shapes)


def _why_idle(axis: str, layout: Layout, axes: LogicalAxes, shapes: Params) -> str:
    """Why a mesh axis splits no parameter, and what to do about it."""
    option, least = f"--mesh.{axis}", layout.config.min_shard_elements
    size = layout.mesh.shape[axis]
    every = dataclasses.replace(layout, config=layout.config.replaced({"min_shard_elements": 1}))
    if least > 1 and axis in _used_axes(every, axes, shapes):
        return (
            f"{option} {size}: it would split only parameters of fewer than {least} elements, and these stay whole on "
            f"every device: messages would cost more than the memory. Choose {option} 1, or a smaller "
            "--sharding.min-shard-elements."
        )
    dims = {name for name, split in layout.config.rules.items() if axis in split}
    named = set(_named_sizes(axes, shapes))
    if sizes := sorted({size for name, size in named if name in dims}):
        why = f"it divides none of the dimensions that may be split (their sizes are {', '.join(map(str, sizes))})"
    else:
        names = ", ".join(sorted({name for name, _ in named if name != UNNAMED}))
        listed = f"--sharding.{axis}-dims" if f"{axis}_dims" in ShardingConfig.model_fields else ", ".join(sorted(dims))
        why = f"none of the model's logical axes ({names}) is among {listed}"
    return f"{option} {size}: {why}. Choose another size or other names, or {option} 1."


def _specs(layout: Layout, axes: LogicalAxes, shapes: Params) -> Specs:
    return jax.tree.map(lambda names, x: layout.param_spec(names, x.shape), axes, shapes, is_leaf=is_names)


def _used_axes(layout: Layout, axes: LogicalAxes, shapes: Params) -> set[str]:
    """The mesh axes that split any parameter."""
    specs = jax.tree.leaves(_specs(layout, axes, shapes), is_leaf=is_spec)
    return {axis for spec in specs for axis in spec_axes(spec)}


def grad_specs(layout: Layout, axes: LogicalAxes, shapes: Params) -> Specs:
    """The tree of PartitionSpecs of the gradients while they are exchanged; arguments as of `param_specs`."""
    return jax.tree.map(lambda names, x: layout.grad_spec(names, x.shape), axes, shapes, is_leaf=is_names)


def update_specs(layout: Layout, axes: LogicalAxes, shapes: Params) -> Specs:
    """The tree of PartitionSpecs of the parameters in the update; arguments as of `param_specs`."""
    return jax.tree.map(lambda names, x: layout.update_spec(names, x.shape), axes, shapes, is_leaf=is_names)


def _named_sizes(axes: LogicalAxes, shapes: Params) -> Iterator[tuple[str, int]]:
    for names, x in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(shapes), strict=True):
        yield from zip(names, x.shape, strict=True)


def has_names(axes: LogicalAxes) -> bool:
    """Whether any dimension of any parameter has a logical name."""
    return any(
        name not in (UNNAMED, UNNAMED_STACK) for names in jax.tree.leaves(axes, is_leaf=is_names) for name in names
    )


def is_names(node: Any) -> bool:
    """Whether a tree node is the tuple of a parameter's logical names, as `is_spec`."""
    return isinstance(node, tuple)


def is_spec(node: Any) -> bool:
    """Whether a tree node is a PartitionSpec (to be given to `jax.tree.map` as `is_leaf`)."""
    return isinstance(node, PartitionSpec)


def named(mesh: Mesh, specs: Any) -> Any:
    """A tree of PartitionSpecs as NamedShardings on the mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
