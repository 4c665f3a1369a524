"""Collectives over the mesh axes of a node and the slow one, so that each byte crosses the slow axis once.

One collective over all axes leaves that to the library below XLA, which may not know the nodes. Inside a `shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.mesh import Axis

_SLOW = Axis.REPLICA.value


def split(axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the slow axis, the others) among some mesh axes."""
    return tuple(axis for axis in axes if axis == _SLOW), tuple(axis for axis in axes if axis != _SLOW)


def all_gather(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """`x` of all devices along the axes, which are in the mesh's order: `[device, ...]`."""
    slow, others = split(axes)
    if not slow or not others:
        return lax.all_gather(x, tuple(axes))
    # First between nodes, where each device of a node sends its own part.
    gathered = lax.all_gather(lax.all_gather(x, slow), others)
    return jnp.moveaxis(gathered, 0, 1).reshape(-1, *x.shape)


def all_reduce(x: jax.Array, axes: Sequence[str], sizes: Mapping[str, int]) -> jax.Array:
    """The sum of `x` over the axes: summed in parts inside the node, these between nodes, gathered inside."""
    slow, others = split(axes)
    ways = math.prod(sizes[axis] for axis in others)
    if not slow or sizes[_SLOW] == 1 or ways == 1:
        return lax.psum(x, tuple(axes))
    padded = jnp.pad(x.reshape(-1), (0, -x.size % ways))
    part = lax.psum(lax.psum_scatter(padded, others, tiled=True), slow)
    return lax.all_gather(part, others, tiled=True)[: x.size].reshape(x.shape)
