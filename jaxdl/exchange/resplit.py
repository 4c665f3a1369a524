"""An exchange's, and an agreement's, stored state on a mesh with another number of replicas, or other shards.

The sum of the residuals over replicas is the part of the mean gradients that has not been applied: it is preserved. So
are the sums of momentum and of pending gradients, and the counters of the warm-ups. A single replica has the same state
as several; it adds part of the residual to each of its gradients (`jaxdl.exchange.wrapped`).

Replicas that have parameters of their own (`jaxdl.exchange.agreement`) all go on from the mean of the stored ones, and
so do their optimizers; a replica counts as it would in a merge now, and one with numbers that are not finite does not.
The anchor stays, so the mean change of the replicas since the last merge, which the next merge hands to the outer
optimizer, is preserved too. Sums (what replicas have trained on, skipped steps) are preserved, other counters are the
largest, and the loss scale is the smallest, as after a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange.base import PER_REPLICA
from jaxdl.exchange.wrapped import RESIDUAL_PART

Flat = dict[str, Any]
"""Arrays, or shape structs with shardings, by their path in the train state: `exchange_state.replica.residual...`."""

_OWN = "agreement_state."
_SUMS = "agreement_state.replica.since."
_COUNTS = ("agreement_state.replica.guard.bad_steps", "agreement_state.replica.loss_scale.skipped_steps")
_LOSS_SCALE = "agreement_state.replica.loss_scale.scale"
_WEIGHTS = ("agreement_state.replica.share.weight", "agreement_state.replica.since.merge_weight")
"""What a replica counts in a merge: in gossip, and where merges move an anchor."""


def readable(wanted: Flat, stored: Mapping[str, tuple[int, ...]]) -> Flat:
    """The shape structs with which to read a stored state of the shapes `stored`, sharded for the new mesh.

    All of it has to be read; arrays that cannot be carried over (see `resplit`) are read unsharded, and dropped.
    """
    structs: Flat = {}
    mesh: Any = next((x.sharding.mesh for x in wanted.values()), None)
    for name, shape in stored.items() if mesh else ():
        x = wanted.get(name)
        if x is not None and shape == x.shape:
            structs[name] = x
        elif x is not None and _carries(name, shape, x.shape):
            # The stored number of replicas need not divide the new one: every replica reads all of them.
            sharding = NamedSharding(mesh, PartitionSpec(None, *x.sharding.spec[1:]))
            structs[name] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        else:
            # The dtype of an unwanted array follows from its part: counters, or parts of gradients.
            unwanted = jnp.int32 if name.split(".")[1:2] == ["common"] else jnp.float32
            dtype = unwanted if x is None else x.dtype
            structs[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    return structs


def resplit(arrays: Flat, wanted: Flat, fresh: Callable[[], Flat]) -> Flat:
    """The state for the new mesh from what was read: each replica takes an equal part of the sum over replicas.

    Missing arrays, and the state of shards that are cut otherwise, come from `fresh`, the state of a new run.
    """
    kept = {name for name, x in wanted.items() if name in arrays and _carries(name, arrays[name].shape, x.shape)}
    initial = fresh() if wanted.keys() - kept else {}
    return {
        name: initial[name]
        if name not in kept
        else arrays[name]
        if arrays[name].shape == x.shape
        else _of_as_many(name, arrays[name], x, _weight(arrays))
        for name, x in wanted.items()
    }


def _carries(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a stored array serves as one of the wanted shape: as it is, or with another number of replicas."""
    return stored == wanted or (_of_replicas(name) and len(stored) == len(wanted) and stored[1:] == wanted[1:])


def _weight(arrays: Flat) -> jax.Array | None:
    """What each stored replica counts in a mean, `[replica]`; None if all count the same."""
    weight = next((arrays[name] for name in _WEIGHTS if name in arrays), None)
    return None if weight is None else jnp.reshape(weight, (weight.shape[0], -1)).mean(axis=1)


def _of_as_many(name: str, stored: jax.Array, wanted: jax.ShapeDtypeStruct, weight: jax.Array | None) -> jax.Array:
    """A stored array, `[replica, ...]`, for as many replicas as are wanted: equal parts of its sum, or the mean."""
    number = wanted.shape[0]

    def split(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        if name in _COUNTS:
            total = jnp.sum(x, axis=0)
            return total // number + (jnp.arange(number) < total % number).astype(x.dtype)
        if not name.startswith(_OWN) or name.startswith(_SUMS):
            each = jnp.sum(x, axis=0) / number
        elif name == _LOSS_SCALE:
            each = jnp.min(x, axis=0)
        elif not jnp.issubdtype(x.dtype, jnp.floating):  # Counters, in which replicas hardly differ.
            each = jnp.max(x, axis=0)
        else:
            each = _mean(x, weight)
        return jnp.broadcast_to(each[None], wanted.shape)

    return jax.jit(split, out_shardings=wanted.sharding)(stored, weight)


def _mean(x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """The mean of `[replica, ...]` over the replicas whose numbers are finite, of these weights unless all are 0."""
    finite = jnp.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    finite = finite | ~finite.any()
    share = finite if weight is None else jnp.where(finite, weight, 0)
    share = jnp.where(share.sum() > 0, share, finite).astype(jnp.float32)
    share = (share / share.sum()).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.sum(jnp.where(share > 0, x * share, 0), axis=0)


def changed(wanted: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """Tells the user how a stored state changes on the new mesh; None when it does not."""
    agreement_names = {name for name in (*wanted, *stored) if name.startswith(_OWN)}
    note = _changed_replicas(
        {name: x for name, x in wanted.items() if name in agreement_names},
        {name: x for name, x in stored.items() if name in agreement_names},
    )
    wanted = {name: x for name, x in wanted.items() if name not in agreement_names}
    stored = {name: x for name, x in stored.items() if name not in agreement_names}
    kept = {name for name, x in wanted.items() if name in stored and _carries(name, stored[name], x.shape)}
    split = {name for name in kept if stored[name] != wanted[name].shape}
    parts = []
    if split:
        before, now = (_num_replicas({name: shapes[name] for name in split}) for shapes in (stored, _shapes(wanted)))
        held, replicas = _words(split), f"{before} replica{'s' if before > 1 else ''}"
        parts.append(f"the {held} of {replicas} is split over {now}, the sum preserved")
        if now == 1 and any(entry.endswith(".residual") for entry in _entries(split)):
            parts.append(
                f"the single replica adds 1/{1 / RESIDUAL_PART:g} of the remaining residual to each gradient, "
                "before clipping"
            )
    if stored.keys() - kept:
        parts.append(f"the checkpoint's {_words(stored.keys() - kept)} is dropped: this mesh does not use it")
    if wanted.keys() - kept:
        parts.append(f"the {_words(wanted.keys() - kept)} starts as in a new run")
    texts = [note] if note else []
    return "; ".join([*texts, f"exchange: {'; '.join(parts)}"] if parts else texts) or None


def _changed_replicas(wanted: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What becomes of replicas that have parameters of their own; None if there are as many as before."""
    before, now = _num_replicas(stored), _num_replicas(_shapes(wanted))
    if before == now or not before or not now:
        return None
    return (
        f"agreement: {now} replica{'s go' if now > 1 else ' goes'} on from the mean parameters and optimizer states of "
        f"{before}; the anchor stays"
    )


def same_kind(wanted: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a stored state is of the same exchange; older versions stored less of it with one replica.

    Its gradients may differ: which are compressed may depend on the size of their shards.
    """
    single_replica = 1 in (_num_replicas(stored), _num_replicas(_shapes(wanted)))
    # Shards of another mesh may all be too small for any factors, so those may be missing.
    kinds = [{entry for entry in _entries(names) if not entry.startswith("shard.")} for names in (wanted, stored)]
    return not wanted or not stored or single_replica or kinds[0] == kinds[1]


def _shapes(wanted: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in wanted.items()}


def _num_replicas(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of a state with these shapes; 0 where it does not show."""
    return next((shape[0] for name, shape in shapes.items() if _of_replicas(name)), 0)


def _words(names: Iterable[str]) -> str:
    """`momentum, residual`: the entries that the arrays of these names belong to."""
    return ", ".join(sorted({entry.split(".")[1] for entry in _entries(names)}))


def _entries(names: Iterable[str]) -> set[str]:
    """`replica.residual`, `shard.factor`, `common.num_updates`..."""
    return {".".join(name.split(".")[1:3]) for name in names}


def _of_replicas(name: str) -> bool:
    return name.split(".")[1:2] == [PER_REPLICA]
