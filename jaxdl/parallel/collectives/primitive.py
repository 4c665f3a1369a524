"""The common part of jaxdl's primitives: registration, batching, and truthful types in `shard_map`.

A primitive here is an implementation in plain JAX for operands without batch dimensions, and a rule for the shapes of
its results. `define` registers the rest: eager evaluation, abstract evaluation, a lowering for each platform, and
`vmap`, also over the very axis that a collective talks over.

In `shard_map` a value is typed *varying* over the axes where its devices may hold different values, else *invariant*.
JAX does not compare these types with what a primitive does; the tests do, shard by shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import Mesh

Axis = str | tuple[str, ...]
"""One mesh axis, or several that act as one."""

Implementation = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True)
class Result:
    """Shape and dtype of one result without batch dimensions; `same` when all devices of the axes hold the same."""

    shape: tuple[int, ...]
    dtype: Any
    same: bool = False


def define(
    name: str,
    implementation: Implementation,
    results: Callable[..., Sequence[Result]],
    *,
    core_ndims: tuple[int, ...],
    platforms: Mapping[str, Implementation] | None = None,
) -> Primitive:
    """A primitive with several results, all rules registered.

    `implementation(*operands, **params)` and the other ones for `platforms` work on operands of `core_ndims`
    dimensions; `results(*shapes, **params)` gets shape structs of those, checks them, and says what comes out. A
    parameter `axes` makes it a collective over these mesh axes.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.partial(jax.jit, static_argnames=("_params",))
    def run(*operands: jax.Array, _params: tuple[tuple[str, Any], ...]) -> Sequence[jax.Array]:
        return primitive.bind(*operands, **dict(_params))

    primitive.def_impl(lambda *operands, **params: run(*operands, _params=tuple(params.items())))
    primitive.def_abstract_eval(functools.partial(_abstract, name, results, core_ndims))
    for platform, platform_variant in {None: implementation, **(platforms or {})}.items():
        lowered = mlir.lower_fun(_batched(platform_variant, core_ndims), multiple_results=True)
        mlir.register_lowering(primitive, lowered, platform=platform)

    def batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        fronted = [
            jnp.asarray(batching.bdim_at_front(x, dim, axis_data.size)) for x, dim in zip(operands, dims, strict=True)
        ]
        if axis_data.name not in params.get("axes", ()):
            outputs = primitive.bind(*fronted, **params)
            return outputs, [0] * len(outputs)
        # `vmap(axis_name=...)` stands in for the devices.
        cores = [jax.ShapeDtypeStruct(_core(x, ndim), x.dtype) for x, ndim in zip(fronted, core_ndims, strict=True)]
        same = [result.same for result in results(*cores, **params)]
        device_function = functools.partial(_batched(implementation, core_ndims), **params)
        outputs = jax.vmap(device_function, axis_name=axis_data.name)(*fronted)
        outputs = [x[0] if once else x for x, once in zip(outputs, same, strict=True)]
        return outputs, [None if once else 0 for once in same]

    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def _core(x: Any, ndim: int) -> tuple[int, ...]:
    """The shape of an operand without batch dimensions."""
    return tuple(x.shape[x.ndim - ndim :]) if ndim else ()


def _abstract(
    name: str, results: Callable[..., Sequence[Result]], core_ndims: tuple[int, ...], *avals: Any, **params: Any
) -> list[Any]:
    """The abstract values of the results: shapes, dtypes, and over which axes they vary."""
    first = avals[0]
    batch = first.shape[: first.ndim - core_ndims[0]]
    for aval, ndim in zip(avals, core_ndims, strict=True):
        if aval.ndim < ndim or aval.shape != (*batch, *_core(aval, ndim)):
            raise ValueError(f"{name}: operands of shapes {[a.shape for a in avals]} do not fit together.")
    cores = [jax.ShapeDtypeStruct(_core(aval, ndim), aval.dtype) for aval, ndim in zip(avals, core_ndims, strict=True)]
    axes = frozenset(params.get("axes", ()))
    seen = frozenset().union(*(aval.mat.varying for aval in avals))
    return [
        first.update(
            shape=(*batch, *result.shape),
            dtype=np.dtype(result.dtype),
            weak_type=False,
            manual_axis_type=first.mat.update(varying=seen - axes if result.same else seen),
        )
        for result in results(*cores, **params)
    ]


def _batched(implementation: Implementation, core_ndims: tuple[int, ...]) -> Implementation:
    """An implementation for operands with the same leading batch dimensions."""

    def run(*operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
        mapped: Any = functools.partial(implementation, **params)
        for _ in range(operands[0].ndim - core_ndims[0]):
            mapped = jax.vmap(mapped)
        return mapped(*operands)

    return run


_in_one = Primitive("in_one")
_in_one.multiple_results = True
_in_one.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
mlir.register_lowering(
    _in_one, mlir.lower_fun(lambda *operands, jaxpr: jaxpr_as_fun(jaxpr)(*operands), multiple_results=True)
)


def in_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one operation, which is not differentiated, and of which JAX takes nothing out.

    JAX computes apart what depends on no argument of a loop's body. In a `shard_map` inside of another one it then
    splits that by the axes of both (0.10), in an order that XLA refuses.
    """

    def one(*args: Any) -> Any:
        operands, structure = jax.tree.flatten(args)
        jaxpr, shape = jax.make_jaxpr(lambda *xs: function(*jax.tree.unflatten(structure, xs)), return_shape=True)(
            *operands
        )
        return jax.tree.unflatten(jax.tree.structure(shape), _in_one.bind(*operands, jaxpr=jaxpr))

    return one


def axis_names(axis: Axis) -> tuple[str, ...]:
    """An axis or several as a tuple of names. Raises ValueError for none and NameError for one that is not bound."""
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    if not names:
        raise ValueError("axis=(): a collective needs an axis to talk over. Name one of the mesh.")
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise NameError(
                f"axis {name!r} is not bound here. Call this inside jax.shard_map over a mesh that has it."
            ) from None
    return names


def alike(axes: Sequence[str], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, all typed varying over `axes` and over what any of them varies over; values stay.

    JAX's own collectives do this to their operands; a primitive's `bind` does not.
    """
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    wanted = set(axes).union(*(jax.typeof(x).mat.varying for x in operands)) & manual

    def one(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - jax.typeof(x).mat.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return tuple(one(x) for x in operands)


def region_axes(axes: Iterable[str], mesh: Mesh | None = None) -> set[str]:
    """The axes that a region for these is manual over: also those of one device, of the mesh, or of that around it.

    Where any axis is left automatic, even one of a single device, XLA on CPUs aborts at a sum of 16 bits.
    """
    around = jax.sharding.get_abstract_mesh()
    sizes = around.shape if mesh is None else mesh.shape
    return set(axes) | {axis for axis, size in sizes.items() if size == 1 and axis not in around.manual_axes}


def all_gather_same(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`[device, ...]`: what every device of the axes has, typed as the same on all of them."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes)
    return lax.all_gather(x, axes, to="invarying" if set(axes) <= manual else "varying")


def num_devices(axes: Sequence[str]) -> int:
    """How many devices the axes have together."""
    return math.prod(lax.axis_size(name) for name in axes)


def key_bits(key: jax.Array | None) -> jax.Array:
    """A random key, typed or raw, as uint32 `[2]`; that of seed 0 for None."""
    if key is None:
        return jnp.zeros(2, jnp.uint32)
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data.reshape(-1)[-2:].astype(jnp.uint32)
