"""Parameters that are split over `GATHER_AXES` become whole for use, and their gradients are split again."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxdl.parallel.mesh import GATHER_AXES
from jaxdl.parallel.sharding import (
    EXPERT,
    ROUTER,
    STACKED,
    Layout,
    LogicalAxes,
    Params,
    current_layout,
    entry_names,
    is_names,
    spec_axes,
    without_axes,
)


def _whole(x: jax.Array, layout: Layout, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """A parameter on each device, in the dtype in which it is sent."""
    narrow = x if layout.wire_dtype is None else x.astype(layout.wire_dtype)
    return layout.constrain(narrow, without_axes(spec, *axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, layout: Layout, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    return _whole(x, layout, spec, axes).astype(x.dtype)


def _gather_forward(x: jax.Array, layout: Layout, spec: PartitionSpec, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _gather(x, layout, spec, axes), None


def _gather_backward(
    layout: Layout, spec: PartitionSpec, axes: tuple[str, ...], _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    del axes
    # The plain transpose would all-reduce the gradient to every device; sharded like the parameter, it is
    # reduce-scattered. It is not rounded to `wire_dtype`.
    return (layout.constrain(cotangent, spec),)


_gather.defvjp(_gather_forward, _gather_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gathered:
    """A parameter that has been gathered before, for several uses. Indexed with `...` it is itself, as an array is."""

    whole: jax.Array
    """The parameter on each device, in the dtype in which it was sent."""
    shard: jax.Array
    """The parameter, for its gradient alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the parameter."""
        return self.shard.shape

    def __getitem__(self, index: Any) -> Gathered:
        assert index is ..., "a parameter is gathered whole"
        return self

    def astype(self, dtype: DTypeLike) -> Gathered:
        """The same, of a parameter in another dtype."""
        return Gathered(self.whole, self.shard.astype(dtype))


def whole_numbers(x: jax.Array, axes: tuple[str, ...]) -> jax.Array | None:
    """A parameter, perhaps stacked over layers, all-gathered in the layout's `wire_dtype`; None where `gather` sends
    nothing. It has no gradient."""
    how = _how(axes, x.shape)
    return None if how is None else _whole(lax.stop_gradient(x), *how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _in_use(whole: jax.Array, shard: jax.Array, layout: Layout, spec: PartitionSpec) -> jax.Array:
    del layout, spec
    return whole.astype(shard.dtype)


def _in_use_forward(whole: jax.Array, shard: jax.Array, layout: Layout, spec: PartitionSpec) -> tuple[jax.Array, None]:
    return _in_use(whole, shard, layout, spec), None


def _in_use_backward(layout: Layout, spec: PartitionSpec, _: None, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, layout.constrain(cotangent, spec)


_in_use.defvjp(_in_use_forward, _in_use_backward)


def gather(x: jax.Array | Gathered, axes: tuple[str, ...]) -> jax.Array:
    """A parameter all-gathered over `GATHER_AXES` for use; its gradient is sharded, in the parameter's dtype.

    A float32 parameter that is gathered in the layout's smaller `wire_dtype` comes out as float32 numbers rounded to
    it. Without a layout, or if it is not split, it is unchanged.
    """
    if isinstance(x, Gathered):
        layout = current_layout()
        assert layout is not None
        return _in_use(x.whole, x.shard, layout, layout.param_spec(axes, x.shape))
    how = _how(axes, x.shape)
    return x if how is None else _gather(x, *how)


def _how(axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Layout, PartitionSpec, tuple[str, ...]] | None:
    """How a parameter is gathered: the layout, its spec there, and over which mesh axes; None if nothing is sent."""
    layout = current_layout()
    if layout is None:
        return None
    spec = layout.param_spec(axes, shape)
    # Not over that of experts, to which tokens go.
    over = tuple(axis for axis in GATHER_AXES if axis != experts_axis(layout, axes, shape))
    if set(over).isdisjoint(spec_axes(spec)):
        return None
    return dataclasses.replace(layout, wire_dtype=None) if ROUTER in axes else layout, spec, over


def experts_axis(layout: Layout, axes: tuple[str, ...], shape: tuple[int, ...]) -> str | None:
    """The mesh axis over whose devices the experts of a parameter are spread; None if each has, or gathers, all."""
    if EXPERT not in axes:
        return None
    entries = (*layout.param_spec(axes, shape), *(None for _ in shape))
    return next((name for name in entry_names(entries[axes.index(EXPERT)]) if name in GATHER_AXES), None)


def gather_numbers(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Numbers for a parameter with these logical axes, all-gathered in their own dtype; they have no gradient."""
    layout = current_layout()
    if layout is None:
        return x
    return layout.constrain(x, without_axes(layout.param_spec(axes, x.shape), *GATHER_AXES))


def sharded_gradient(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A parameter itself, whose gradient is sharded as `gather` would shard it."""
    layout = current_layout()
    if layout is None:
        return x
    spec = layout.param_spec(axes, x.shape)
    return x if set(GATHER_AXES).isdisjoint(spec_axes(spec)) else _sharded_gradient(x, layout, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _sharded_gradient(x: jax.Array, layout: Layout, spec: PartitionSpec) -> jax.Array:
    del layout, spec
    return x


_sharded_gradient.defvjp(
    lambda x, layout, spec: (x, None), lambda layout, spec, _, cotangent: (layout.constrain(cotangent, spec),)
)


def gather_layer(layer_state: nnx.State) -> nnx.State:
    """The parameters of one layer of a scanned stack, all-gathered for use inside the scan's body.

    So no more than one layer is whole at a time.
    """
    return jax.tree.map(gather_variable, layer_state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def gather_variable(variable: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
    """One of these parameters, all-gathered."""
    axes = variable.get_metadata().get("axes")
    return variable if axes is None else variable.replace(gather(variable[...], axes))


def gather_params(params: Params, axes: LogicalAxes) -> Params:
    """`params`, all-gathered for use except those stacked over layers: `gather_layer` gathers these."""
    return jax.tree.map(lambda names, x: x if STACKED in names else gather(x, names), axes, params, is_leaf=is_names)
