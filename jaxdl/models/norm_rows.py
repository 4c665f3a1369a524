"""Batch norms whose statistics, in training, are those of a single row of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen, nnx

from jaxdl.models.layers import Norm
from jaxdl.models.network import Network


def row_norms(network: Network, inputs: Sequence[Any], *, num_replicas: int) -> dict[str, int]:
    """The batch norms of a network with statistics of one row, and how many values of it each statistic has.

    `inputs` are shapes of one row, all that a replica has at a time. The norms of flax and those of jaxdl are known, by
    the path of the module; not those over several replicas, those that use their running statistics, and what a user
    computes without such a layer.
    """
    counts: dict[str, int] = {}
    watched = network.changed(lambda module: _watch(module, counts, num_replicas))

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, x = context.module, args[0] if args else kwargs.get("x")
        if isinstance(module, linen.BatchNorm) and context.method_name == "__call__" and hasattr(x, "ndim"):
            average = kwargs.get("use_running_average", args[1] if args[1:] else None)
            _count(counts, "/".join(module.path), module, x, average)
        return call(*args, **kwargs)

    def apply(params: Any, state: Any, *inputs: Any) -> Any:
        return watched.apply(params, state, *inputs, train=True)

    with linen.intercept_methods(intercept):
        jax.eval_shape(apply, watched.param_shapes, watched.state_shapes, *inputs)
    return counts


def _watch(module: nnx.Module, counts: dict[str, int], num_replicas: int) -> None:
    """Makes the batch norms of a module tell the sizes of their statistics when they are called."""
    for path, part in list(nnx.iter_graph(module)):
        name = "/".join(map(str, path)) or type(part).__name__
        if isinstance(part, nnx.BatchNorm):
            _become(part, nnx.BatchNorm, _flax_norm(counts, name))
        elif isinstance(part, Norm) and not isinstance(part.span, int) and (part.span != "mesh" or num_replicas == 1):
            _become(part, Norm, _own_norm(counts, name))


def _become(part: nnx.Module, base: Any, watched: Any) -> None:
    """Gives a module a class in which the class `watched` comes just before `base`, which it or its class is."""
    cls: Any = type(part)
    made = watched if cls is base else type(cls)(cls.__name__, (cls, watched), {})
    object.__setattr__(part, "__class__", made)


def _flax_norm(counts: dict[str, int], name: str) -> type[nnx.BatchNorm]:
    class Watched(nnx.BatchNorm):
        def __call__(self, x: jax.Array, use_running_average: bool | None = None, **options: Any) -> jax.Array:
            _count(counts, name, self, x, use_running_average)
            return super().__call__(x, use_running_average, **options)

    return Watched


def _own_norm(counts: dict[str, int], name: str) -> type[Norm]:
    class Watched(Norm):
        def _updated(self, normalize: Any, *operands: jax.Array, **options: Any) -> jax.Array:
            counts[name] = math.prod(operands[0].shape[:-1])
            return super()._updated(normalize, *operands, **options)

    return Watched


def _count(counts: dict[str, int], name: str, norm: Any, x: jax.Array, average: bool | None) -> None:
    """Notes how many values of `x` a statistic of flax's batch norm has, which is called with `use_running_average`."""
    counts.pop(name, None)  # What a subclass was called with.
    if (norm.use_running_average if average is None else average) or norm.axis_name is not None:
        return
    features = {axis % x.ndim for axis in (norm.axis if isinstance(norm.axis, Sequence) else (norm.axis,))}
    counts[name] = math.prod(size for axis, size in enumerate(x.shape) if axis not in features)
