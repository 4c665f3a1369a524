"""Arithmetic on arrays `[replica, ...]`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import spec_axes

TINY = jnp.finfo(jnp.float32).tiny


def parts_in_mean(finite: jax.Array, weight: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(`healthy`, `factor`) of `Begun`: parts in proportion to the weight (of examples, or tokens) trained on.

    A replica has trained on nothing since all its steps were bad, or, if it has `seen` nothing, for want of examples.
    """
    healthy = finite & ((weight > 0) | (seen == 0))
    share = jnp.where(healthy, weight, 0)
    return healthy, share / jnp.maximum(share.sum(), TINY)


def finite_replicas(pieces: Mapping[str, jax.Array]) -> jax.Array:
    """Whether all numbers of a replica are finite, bool `[replica]`."""
    each = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in pieces.values()]
    return functools.reduce(jnp.logical_and, each)


def wide(factor: jax.Array, x: jax.Array) -> jax.Array:
    """`[replica]` shaped to broadcast against `x`, `[replica, ...]`."""
    return factor.reshape(-1, *[1] * (x.ndim - 1))


def where(condition: jax.Array, x: jax.Array, other: Any) -> jax.Array:
    """`x` for the replicas of which the condition holds, else `other`; nothing of one gets into the other."""
    return jnp.where(wide(condition, x), x, other)


def least_scale(scales: jax.Array, old: jax.Array) -> jax.Array:
    """The least of the loss scales of sound replicas, for all; of all, if none is sound."""
    least = jnp.min(scales)
    return jnp.broadcast_to(jnp.where(jnp.isfinite(least), least, jnp.min(old)), old.shape)


def copies_of(spec: PartitionSpec, mesh: Mesh) -> int:
    """How many devices of a replica have the same part of an array that is split so."""
    replica = Axis.REPLICA.value
    return math.prod(size for axis, size in mesh.shape.items() if axis != replica and axis not in spec_axes(spec))
