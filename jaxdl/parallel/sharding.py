"""Sharding rules: from the logical axes that models name to the mesh, for a whole state.

A parameter's logical axes, such as `("embed", "mlp")`, name its dimensions; the rules map them to the mesh:

- `tensor` splits the first dimension whose name is in `tensor_dims` and whose size it divides;
- `fsdp` splits the largest remaining dimension that it divides (or else the same one again);
- stacked `layers` are never split, and neither are biases, norm scales and parameters below `min_shard_elements`.

The dimensions of a parameter without logical axes are `UNNAMED`: `fsdp` splits its largest dimension that it divides,
and `tensor` keeps it whole.

Models call `constrain` and `gather_layer` with logical names alone; the step says what these mean, with `use_layout`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.core.config import Config, ConfigError
from jaxdl.parallel.mesh import Axis

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


@dataclass(frozen=True)
class Layout:
    """The rules on one mesh. `manual` names the manual axes of the surrounding `shard_map`.

    `wire_dtype` is the dtype in which parameters are gathered for use; None takes their own. `sum_dtype` is the dtype
    in which the backward pass of a loop over layers sums their gradients over `replica`; with None it does not.
    """

    config: ShardingConfig
    mesh: Mesh
    manual: frozenset[str] = frozenset()
    wire_dtype: DTypeLike | None = None
    sum_dtype: DTypeLike | None = None

    def param_spec(self, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of a parameter with these logical axes and this shape."""
        assert len(axes) == len(shape), (axes, shape)
        tensor, fsdp = self.mesh.shape[Axis.TENSOR], self.mesh.shape[Axis.FSDP]
        dims = [dim for dim, name in enumerate(axes) if name not in LAYER_DIMS]
        placed: dict[int, tuple[str, ...]] = {}
        # Gathering biases and norm scales for every use would cost more in messages than keeping them whole in memory.
        if len(dims) < 2 or math.prod(shape[dim] for dim in dims) < self.config.min_shard_elements:
            return PartitionSpec()
        if tensor > 1:
            fits = [dim for dim in dims if axes[dim] in self.config.tensor_dims and shape[dim] % tensor == 0]
            placed = dict.fromkeys(fits[:1], (Axis.TENSOR.value,))
        if fsdp > 1 and self.config.param_sharding == "sharded":
            free = [dim for dim in dims if dim not in placed and shape[dim] % fsdp == 0]
            again = [dim for dim in placed if shape[dim] % (fsdp * tensor) == 0]
            for dim in sorted(free, key=lambda dim: (shape[dim], dim))[-1:] or again:
                placed[dim] = (*placed.get(dim, ()), Axis.FSDP.value)
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
        """The PartitionSpec of an activation: batch over the automatic data axes, tensor dimensions over `tensor`."""
        entries: list[Any] = []
        for name, size in zip(names, shape, strict=True):
            wanted: tuple[str, ...] = ()
            if name == "batch":
                wanted = (Axis.REPLICA.value, Axis.FSDP.value)
            elif name in self.config.tensor_dims:
                wanted = (Axis.TENSOR.value,)
            wanted = tuple(axis for axis in wanted if axis not in self.manual)
            ways = math.prod(self.mesh.shape[axis] for axis in wanted)
            entries.append(wanted if wanted and size % ways == 0 else None)
        return PartitionSpec(*entries)

    def batch_axes(self, num: int) -> tuple[str, ...]:
        """The automatic mesh axes over which a batch of `num` examples is split; none where they cannot divide it.

        An axis of one device splits nothing.
        """
        return tuple(axis for axis in spec_axes(self.activation_spec(("batch",), (num,))) if self.mesh.shape[axis] > 1)

    def constrained(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """`x` sharded as `spec`, in plain `jit` as well as inside a partly manual `shard_map`."""
        if self.manual:  # There the mesh is the surrounding one, with some axes manual: a bare spec refers to it.
            return lax.with_sharding_constraint(x, spec)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def without_axis(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """`spec` without one mesh axis."""
    kept = []
    for entry in spec:
        names = tuple(name for name in entry_names(entry) if name != axis)
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
    return x if layout is None else layout.constrained(x, layout.activation_spec(names, x.shape))


def num_batch_shards(num: int) -> int:
    """Over how many devices XLA splits a batch of `num` examples; 1 without a layout."""
    layout = _layout.get()
    return 1 if layout is None else math.prod(layout.mesh.shape[axis] for axis in layout.batch_axes(num))


def statistics_axis() -> str | None:
    """The mesh axis over which statistics of the batch must be averaged to be those of the whole mesh, or None.

    Only over a manual `replica` axis does each call see a part of the batch; over the other axes XLA sums by itself. So
    it is None without a layout, where `replica` is not manual, and with one replica (there is nothing to average, and
    XLA of jaxlib 0.10 fails to compile it where channels are sharded).
    """
    layout, axis = _layout.get(), Axis.REPLICA.value
    if layout is None or axis not in layout.manual or layout.mesh.shape[axis] == 1:
        return None
    return axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, layout: Layout, spec: PartitionSpec) -> jax.Array:
    narrow = x if layout.wire_dtype is None else x.astype(layout.wire_dtype)
    return layout.constrained(narrow, without_axis(spec, Axis.FSDP)).astype(x.dtype)


def _gather_forward(x: jax.Array, layout: Layout, spec: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather(x, layout, spec), None


def _gather_backward(layout: Layout, spec: PartitionSpec, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # The plain transpose would all-reduce the gradient to every device; sharded like the parameter, it is
    # reduce-scattered. It is not rounded to `wire_dtype`.
    return (layout.constrained(cotangent, spec),)


_gather.defvjp(_gather_forward, _gather_backward)


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A parameter all-gathered over `fsdp` for use; its gradient is sharded, in the parameter's dtype.

    A float32 parameter that is gathered in the layout's smaller `wire_dtype` comes out as float32 numbers rounded to
    it. Without a layout, or if it is not split, it is unchanged.
    """
    layout = _layout.get()
    if layout is None:
        return x
    spec = layout.param_spec(axes, x.shape)
    return _gather(x, layout, spec) if Axis.FSDP in spec_axes(spec) else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _lookup(
    table: jax.Array, tokens: jax.Array, like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None
) -> jax.Array:
    table = table.astype(dtype)
    if layout is not None:
        # The rows are read from a whole table: XLA aborts when it partitions a lookup in a table split by rows inside a
        # partly manual shard_map (jaxlib 0.10).
        table = layout.constrained(table, PartitionSpec(None, None))
    return jnp.take(table, tokens, axis=0)


def _lookup_forward(
    table: jax.Array, tokens: jax.Array, like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None
) -> tuple[jax.Array, jax.Array]:
    return _lookup(table, tokens, like, dtype, layout), tokens


def _lookup_backward(
    like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None, tokens: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    # The plain transpose is one scatter-add of all examples, for which XLA gathers the cotangent of the whole batch,
    # [batch, length, embed]. With a dimension for the data shards each device adds up its own examples, and what
    # travels is the gradient of the table.
    batch = layout.activation_spec(("batch",), tokens.shape[:1]) if layout else PartitionSpec()
    shards = math.prod(layout.mesh.shape[axis] for axis in spec_axes(batch)) if layout else 1
    embed_dim = cotangent.shape[-1]

    def split(x: jax.Array) -> jax.Array:
        return layout.constrained(x, PartitionSpec(*batch, None, None)) if layout else x

    def shard_sum(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros(like.shape, jnp.float32).at[tokens].add(rows)

    rows = split(cotangent.astype(jnp.float32).reshape(shards, -1, embed_dim))
    sums = split(jax.vmap(shard_sum)(tokens.reshape(shards, -1), rows))
    return sums.sum(axis=0).astype(like.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def lookup(table: jax.Array, tokens: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """The rows of `table`, [vocab, embed], at `tokens`, int [batch, length]: [batch, length, embed].

    The result is in `dtype` (None takes the table's), the gradient in the table's.

    Its gradient is summed in float32, first on each device over its own examples, then over the devices.
    """
    like = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return _lookup(table, tokens, like, table.dtype if dtype is None else dtype, _layout.get())


def gather_layer(layer_state: nnx.State) -> nnx.State:
    """The parameters of one layer of a scanned stack, all-gathered over `fsdp` inside the scan's body.

    So no more than one layer is whole at a time.
    """

    def one(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("axes")
        return variable if axes is None else variable.replace(gather(variable[...], axes))

    return jax.tree.map(one, layer_state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def gather_params(params: Params, axes: LogicalAxes) -> Params:
    """`params`, all-gathered over `fsdp` except those stacked over layers: `gather_layer` gathers these."""
    return jax.tree.map(lambda names, x: x if STACKED in names else gather(x, names), axes, params, is_leaf=is_names)


def param_specs(layout: Layout, axes: LogicalAxes, shapes: Params) -> Specs:
    """The tree of PartitionSpecs of the parameters; `axes` their logical names, `shapes` arrays or shape structs.

    Raises ConfigError when the mesh has a tensor axis that no parameter uses, unless the model names no dimension.
    """
    specs = _specs(layout, axes, shapes)
    tensor = layout.mesh.shape[Axis.TENSOR]
    if tensor > 1 and Axis.TENSOR not in _used_axes(layout, axes, shapes) and has_names(axes):
        sizes = sorted({size for name, size in _named_sizes(axes, shapes) if name in layout.config.tensor_dims})
        every = dataclasses.replace(layout, config=layout.config.replaced({"min_shard_elements": 1}))
        if layout.config.min_shard_elements > 1 and Axis.TENSOR in _used_axes(every, axes, shapes):
            raise ConfigError(
                f"--mesh.tensor {tensor}: it would split only parameters of fewer than "
                f"{layout.config.min_shard_elements} elements, and these stay whole on every device: messages would "
                "cost more than the memory. Choose --mesh.tensor 1, or a smaller --sharding.min-shard-elements."
            )
        there = f"it divides none of the dimensions that may be split (their sizes are {', '.join(map(str, sizes))})"
        if not sizes:
            own = ", ".join(sorted({name for name, _ in _named_sizes(axes, shapes) if name != UNNAMED}))
            there = f"none of the model's logical axes ({own}) is among --sharding.tensor-dims"
        raise ConfigError(f"--mesh.tensor {tensor}: {there}. Choose another size or other names, or --mesh.tensor 1.")
    return specs


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
