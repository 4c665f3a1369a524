"""The interface of every gradient exchange, and how its state is sharded over a mesh."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.collectives.primitive import alike
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import is_spec, spec_axes
from jaxdl.parallel.squares import are_finite

ExchangeMetrics = dict[str, jax.Array]
"""Scalars of one exchange, float32, the same on all devices:

- `bytes_sent/AXIS`: bytes that one device sends over each axis in the exchange's own collectives, by ring algorithms
  (what XLA adds inside a replica, such as the reduce-scatter of the gradients, is not in them);
- `compression`: bytes of a dense float32 exchange over those sent over the slow axis;
- `density`: the share of the gradient's elements that one device hands to the collective;
- `residual_norm`, `residual_ratio`: norm of the residuals (error feedback), and its ratio to that of the gradients.
"""

ExchangeState = dict[str, dict[str, Any]]
"""The state in up to three parts; empty parts are left out:

- `replica`: name -> {gradient's name: array of the gradient's local shape}, each replica its own;
- `shard`: name -> {gradient's name: array of any shape}, one for each shard, the same in all replicas;
- `common`: name -> array, the same everywhere.
"""


Leaves = dict[str, jax.Array]
"""Gradients, or what belongs to them, by name."""

_SQUARES = _RESIDUAL, _GRADIENT = "own_squares/residual", "own_squares/gradient"

Updated = tuple[Any, ExchangeState, ExchangeMetrics]
"""(mean gradients, new state, metrics): what `Exchange.update` returns."""

PER_REPLICA = Axis.REPLICA.value
"""The part of an exchange's state that each replica has its own of."""


PIECE = "@"
"""In the name of a part of a gradient this comes after the gradient's name."""


class Exchange(Protocol):
    """A gradient exchange over one mesh axis; built by `Dense().build()`, `TopK().build()` and the like."""

    def init(self, grads: Any) -> ExchangeState:
        """The state for one device's gradient shards, which may be shape structs."""
        ...

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """(mean gradients, new state, metrics), inside a manual `shard_map`.

        `grads` are one device's shards of one replica's gradients; the mean is over `axis`, in the gradients' dtypes.
        `key` is the same on all devices, another one in each step.
        """
        ...


@dataclass(frozen=True)
class GradientLayout:
    """What an exchange may know of the gradients besides their local shapes.

    Without one, no gradient is sharded, as in plain data parallel training.
    """

    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    """A gradient's name (its path, `stem/kernel`) -> how it is sharded inside a replica."""
    inner: Mapping[str, int] = field(default_factory=dict)
    """The mesh axes inside a replica, with their sizes. A gradient that is not sharded over an axis is
    divided among its devices for the exchange."""
    order: tuple[str, ...] = ()
    """The names in the order in which the backward pass finishes them; without it, the last ones come first."""
    stacked: frozenset[str] = frozenset()
    """Names of gradients whose leading dimension counts layers."""
    at_once: bool = False
    """Whether all are ready at once, as what replicas merge is, and not one after the other in a backward pass: then
    no message waits for another, so that all of them together fit beside one loop of XLA's."""

    def used(self, name: str) -> tuple[str, ...]:
        """The inner axes over which a gradient is split, outermost first."""
        split = spec_axes(self.specs.get(name, PartitionSpec()))
        return tuple(axis for axis in self.inner if axis in split)

    def whole(self, name: str) -> tuple[str, ...]:
        """The inner axes of several devices that all hold the same of a gradient."""
        split = spec_axes(self.specs.get(name, PartitionSpec()))
        return tuple(axis for axis, size in self.inner.items() if size > 1 and axis not in split)

    def num_elements(self, name: str, shape: tuple[int, ...]) -> int:
        """Elements of all shards of a gradient of this local shape."""
        return math.prod(shape) * self.ways(self.used(name))

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many devices these inner axes have together."""
        return math.prod(self.inner[axis] for axis in axes)


def leaf_names(tree: Any) -> list[str]:
    """The names of a tree's leaves in its order: their paths, `stem/kernel`."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)[0]
    ]


def by_name(tree: Any) -> dict[str, Any]:
    """A tree's leaves by their names."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree, is_leaf=is_spec), strict=True))


def nonempty(tree: Any) -> dict[str, Any]:
    """The leaves that have elements, by their names: an exchange passes empty ones through."""
    return {name: x for name, x in by_name(tree).items() if math.prod(x.shape)}


def shares_of(leaves: Mapping[str, jax.Array], axis: str) -> dict[str, jax.Array]:
    """This replica's summands of the mean, float32: its gradients over the number of replicas."""
    return {name: x.astype(jnp.float32) / jax.lax.axis_size(axis) for name, x in leaves.items()}


def with_momentum(momentum: Leaves, shares: Leaves, factor: float) -> Leaves:
    """The momentum after a step with these shares."""
    return {name: factor * momentum[name] + x for name, x in shares.items()}


def like(grads: Any, values: Mapping[str, jax.Array]) -> Any:
    """The named values as a tree like the gradients, in their dtypes; empty gradients need no value."""
    return jax.tree.unflatten(
        jax.tree.structure(grads),
        [values[name].astype(x.dtype) if x.size else jnp.zeros(x.shape, x.dtype) for name, x in by_name(grads).items()],
    )


def rounding_of(total: jax.Array, dtype: Any) -> jax.Array:
    """The rounding error of float32 numbers that `like` returns in `dtype`, float32; zero where they become infinite.

    Not by converting back and forth: XLA may remove both conversions as redundant.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return jnp.zeros_like(total)
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if dtype == jnp.float16:
        # `reduce_precision` makes numbers below the normal ones zero, a conversion keeps them as multiples of 2^-24.
        rounded = jnp.where(jnp.abs(total) < 2.0**-14, jnp.round(total * 2.0**24) * 2.0**-24, rounded)
    return jnp.where(jnp.isfinite(rounded), total - rounded, 0)


def residual_squares(
    shares: Mapping[str, jax.Array], residual: Mapping[str, jax.Array], *, layout: GradientLayout, axis: str
) -> ExchangeMetrics:
    """`own_squares/...` (see `SummedLater.update_own`); without a residual its norm, zero, which takes no message."""
    if not residual:
        return {"residual_norm": jnp.float32(0), "residual_ratio": jnp.float32(0)}
    axes = (axis, *layout.inner)

    def squared(leaves: Mapping[str, jax.Array]) -> jax.Array:
        # Each of the devices that hold the same gradient counts it.
        sums = [jnp.sum(x**2) / layout.ways(layout.whole(name)) for name, x in leaves.items()]
        return sum(alike(axes, *sums), jnp.float32(0))

    return {_RESIDUAL: squared(residual), _GRADIENT: squared(shares)}


def _with_norms(metrics: ExchangeMetrics, total: Mapping[str, jax.Array]) -> ExchangeMetrics:
    """The metrics with `residual_norm` and `residual_ratio`, if `total` has the sums of the `own_squares/...`."""
    others = {name: x for name, x in metrics.items() if name not in _SQUARES}
    if _RESIDUAL not in total:
        return others
    norm, tiny = jnp.sqrt(total[_RESIDUAL]), jnp.finfo(jnp.float32).tiny
    ratio = norm / jnp.maximum(jnp.sqrt(total[_GRADIENT]), tiny)
    return others | {"residual_norm": norm, "residual_ratio": ratio}


class SummedLater(abc.ABC):
    """An exchange whose caller may sum its metrics over the devices, with what else it has to sum."""

    layout: GradientLayout

    @abc.abstractmethod
    def update_own(self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array) -> Updated:
        """`update`, but its metrics may have `own_squares/residual` and `own_squares/gradient` in place of the
        `residual_...`: this device's parts of the squared norms, to be summed over all devices."""

    def update(self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array) -> Updated:
        """(mean gradients, new state, metrics), inside a manual `shard_map`."""
        mean, state, metrics = self.update_own(grads, state, axis=axis, key=key)
        local_squares = {name: metrics[name] for name in _SQUARES if name in metrics}
        total = (
            jax.lax.psum(jnp.stack(list(local_squares.values())), (axis, *self.layout.inner)) if local_squares else ()
        )
        return mean, state, _with_norms(metrics, dict(zip(local_squares, total, strict=True)))


def own_update(exchange: Exchange) -> Callable[..., Updated]:
    """`update_own` of an exchange that has it; else `update`, also of a class that overrides it."""
    later = getattr(type(exchange), "update", None) is SummedLater.update
    return getattr(exchange, "update_own") if later else exchange.update  # noqa: B009


def check_local(grads: Mapping[str, jax.Array], axis: str) -> None:
    """Raises ValueError for gradients that are the sum over `axis` already, where types tell (`check_vma=True`)."""
    if axis not in jax.typeof(jax.lax.axis_index(axis)).mat.varying:
        return
    for name, x in grads.items():
        if axis not in jax.typeof(x).mat.varying:
            raise ValueError(
                f"gradient {name}: it is the same on all devices of {axis!r}, so there is nothing to exchange. "
                "jax.grad sums over the axis by itself for parameters that do not vary over it; let them: "
                f'params = jax.lax.pcast(params, {axis!r}, to="varying") before jax.grad.'
            )


def init_on_mesh(exchange: Exchange, shapes: Any, specs: Any, mesh: Mesh | AbstractMesh) -> ExchangeState:
    """The exchange's state on a mesh; `shapes` are those of the global gradients, `specs` their PartitionSpecs inside
    a replica.

    Leaves of `replica` are `[replica, *gradient's shape]`; those of `shard` have a leading dimension for each mesh
    axis over which the gradient is split.
    """
    out_specs = state_specs(exchange, shapes, specs, mesh)

    def one_device() -> Any:
        return _reshaped(exchange.init(_local_shapes(shapes, specs, mesh)), out_specs, stacked=True)

    # Zeros vary over no axis, yet each replica has its own: the types cannot express that.
    return jax.shard_map(one_device, mesh=mesh, in_specs=(), out_specs=out_specs, check_vma=False)()


def _local_shapes(shapes: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    return jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype),
        specs,
        shapes,
        is_leaf=is_spec,
    )


def state_specs(exchange: Exchange, shapes: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The PartitionSpecs of the state that `init_on_mesh` makes; see `ExchangeState` for its parts."""
    gradient_specs = by_name(specs)
    place = {
        PER_REPLICA: lambda name: PartitionSpec(Axis.REPLICA.value, *gradient_specs[name]),
        "shard": lambda name: PartitionSpec(*(a for a in mesh.axis_names if a in spec_axes(gradient_specs[name]))),
    }
    specs_by_part: dict[str, Any] = {}
    for where, entries in jax.eval_shape(lambda: exchange.init(_local_shapes(shapes, specs, mesh))).items():
        if where == "common":
            specs_by_part[where] = jax.tree.map(lambda _: PartitionSpec(), entries)
        else:
            specs_by_part[where] = {
                name: {leaf: place[where](leaf) for leaf in entry} for name, entry in entries.items()
            }
    return specs_by_part


def _reshaped(state: ExchangeState, specs: Any, *, stacked: bool) -> ExchangeState:
    """One device's state with the leading dimensions that it has on a mesh (`stacked`), or without them."""

    def one(where: str, spec: PartitionSpec, x: jax.Array) -> jax.Array:
        num_leading = {PER_REPLICA: 1, "shard": len(spec), "common": 0}[where]
        return x.reshape((1,) * num_leading + x.shape if stacked else x.shape[num_leading:])

    return {
        where: jax.tree.map(functools.partial(one, where), specs[where], entry, is_leaf=is_spec)
        for where, entry in state.items()
    }


def gather_like(grads: Any, specs: Any, wanted: Any) -> tuple[Any, dict[str, float]]:
    """One device's gradients, split as `specs`, gathered over the axes that `wanted` does not split them by.

    This ends the exchange of gradients whose parameters are not sharded: reduce-scatter, exchange, all-gather. Also
    returns the bytes that one device sends over each axis.
    """
    sent: dict[str, float] = {}

    def one(x: jax.Array, spec: PartitionSpec, wanted: PartitionSpec) -> jax.Array:
        for dim, entry in enumerate(spec):
            for axis in reversed(spec_axes(PartitionSpec(entry))):
                if axis not in spec_axes(wanted):
                    sent[axis] = sent.get(axis, 0.0) + (jax.lax.axis_size(axis) - 1) * x.size * x.dtype.itemsize
                    x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, to="invarying")
        return x

    return jax.tree.map(one, grads, specs, wanted), sent


def exchanged_on_mesh(
    exchange: Exchange, specs: Any, places: Any, mesh: Mesh | AbstractMesh, *, wanted: Any = None, checked: bool = False
) -> Callable[..., tuple[Any, ExchangeState, ExchangeMetrics]]:
    """`function(grads, state, key, sums={}) -> (mean, state, metrics)` on a mesh, which may be abstract: region 2 of
    the step.

    Gradients are `[replica, *shape]`, each replica's own, and are split as `specs`; the state is sharded as `places`
    (`state_specs`). The mean is split as the gradients are, or as `wanted`, which splits it over fewer axes.

    The metrics have also the total over replicas of each of `sums`, float32 `[replica, ...]`, as `sums/NAME`, and with
    `checked`, as `nonfinite`, of each gradient the number of devices whose own one is not finite, `[gradients]`: a
    compressor can hide it. All that a step sums besides gradients goes in one all-reduce, for each has to wait for the
    slowest device.
    """
    replica, axes = Axis.REPLICA.value, tuple(mesh.axis_names)
    inner = tuple(axis for axis in axes if axis != replica)
    wanted = specs if wanted is None else wanted

    def one_device(grads: Any, state: ExchangeState, key: jax.Array, sums: dict[str, jax.Array]) -> Any:
        local_grads = jax.tree.map(lambda x: x[0], grads)
        # All devices of a replica have its sums: one of them adds them.
        first = jax.lax.axis_index(inner) == 0
        small = {f"sums/{name}": jnp.where(first, x[0].astype(jnp.float32), 0) for name, x in sums.items()}
        leaves = jax.tree.leaves(local_grads) if checked else []
        flags = list(jnp.where(are_finite(alike(axes, *leaves)), 0.0, 1.0)) if leaves else []
        own_state = _reshaped(state, places, stacked=False)
        mean, new_state, metrics = own_update(exchange)(local_grads, own_state, axis=replica, key=key)
        mean, sent = gather_like(mean, specs, wanted)
        for axis, num_bytes in sent.items():
            metrics[f"bytes_sent/{axis}"] = metrics.get(f"bytes_sent/{axis}", 0) + jnp.float32(num_bytes)
        small |= {name: metrics[name] for name in _SQUARES if name in metrics}
        if small or flags:
            flat, split = ravel_pytree((list(alike(axes, *small.values())), list(alike(axes, *flags))))
            totals, flags = split(jax.lax.psum(flat, axes))
            small = dict(zip(small, totals, strict=True))
        others = {name: x for name, x in small.items() if name not in _SQUARES}
        others |= {"nonfinite": jnp.stack(flags)} if leaves else {}
        return mean, _reshaped(new_state, places, stacked=True), _with_norms(metrics, small) | others

    stacked = jax.tree.map(lambda spec: PartitionSpec(replica, *spec), specs, is_leaf=is_spec)
    region = jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=(stacked, places, PartitionSpec(), PartitionSpec(replica)),
        out_specs=(wanted, places, PartitionSpec()),
    )
    return lambda grads, state, key, sums=None: region(grads, state, key, sums or {})
