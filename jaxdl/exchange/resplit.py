"""An exchange's stored state on a mesh with another number of replicas, or other shards.

Residuals are shares of what is owed to the mean gradient, so what counts is their sum over replicas: it is preserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange.base import PER_REPLICA

Flat = dict[str, Any]
"""Arrays, or shape structs with shardings, by their path in the train state: `exchange_state.replica.residual...`."""


def readable(wanted: Flat, stored: Mapping[str, tuple[int, ...]]) -> Flat:
    """What to read of a stored state, of which `stored` has the shapes: shape structs, laid out for the new mesh.

    Left out is what cannot be carried over: what is not there, and the state of shards that are cut otherwise.
    """
    found: Flat = {}
    for name, x in wanted.items():
        shape = tuple(stored.get(name, ()))
        if shape == x.shape and name in stored:
            found[name] = x
        elif _of_replicas(name) and shape[1:] == x.shape[1:] and len(shape) == len(x.shape):
            # So many replicas need not divide the new mesh's: every replica reads all of them.
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None, *x.sharding.spec[1:]))
            found[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
    return found


def resplit(found: Flat, wanted: Flat, fresh: Callable[[], Flat]) -> Flat:
    """The state for the new mesh from what was read: each replica takes an equal part of the sum over replicas.

    What was not read comes from `fresh`, the state of a new run.
    """
    initial = fresh() if wanted.keys() - found.keys() else {}
    return {
        name: _equal_parts(found[name], x)
        if name in found and found[name].shape != x.shape
        else found.get(name, initial.get(name))
        for name, x in wanted.items()
    }


def _equal_parts(stored: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    def split(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.sum(x, axis=0, keepdims=True) / wanted.shape[0], wanted.shape)

    return jax.jit(split, out_shardings=wanted.sharding)(stored)


def changed(wanted: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What becomes of a stored state on the new mesh, in words; None when it goes on as it is."""
    now = {x.shape[0] for name, x in wanted.items() if _of_replicas(name)}
    before = {shape[0] for name, shape in stored.items() if _of_replicas(name)}
    if now == before:
        return None
    if not now:
        return f"the exchange's residuals of {before.pop()} replicas are dropped: one replica owes nothing"
    if not before:
        return f"the exchange's state starts anew: the checkpoint has none for {now.pop()} replicas"
    return f"the exchange's residuals of {before.pop()} replicas are split over {now.pop()}, their sum preserved"


def same_kind(wanted: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the names are those of the same exchange of the same network; none at all are those of one replica."""
    return not wanted or not stored or wanted.keys() == stored.keys()


def _of_replicas(name: str) -> bool:
    return name.split(".")[1:2] == [PER_REPLICA]
