"""Emulated staleness: gradients of replicas at earlier parameters, and what helps against their age."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import Grads, Params
from jaxdl.training.state import PAST, Past, TrainState
from jaxdl.training.step.gradients import own_param_specs
from jaxdl.training.step.parts import Parts

_REPLICA = Axis.REPLICA.value


def draw_staleness(parts: Parts, state: TrainState, key: jax.Array) -> jax.Array | None:
    """How many steps old each replica's parameters are, `[replica]`; None where gradients are never stale.

    `key` is that of the step.
    """
    if not parts.agreement.num_past:
        return None
    # Folded with 3: the step itself takes 0, 1 and 2.
    key, num_replicas = jax.random.fold_in(key, 3), parts.layout.mesh.shape[_REPLICA]
    return _on_all(parts, parts.agreement.staleness(key, state.past.num_kept, num_replicas))


def stale_params(parts: Parts, state: TrainState, staleness: jax.Array) -> Params:
    """The parameters at which each replica takes its gradient: the trained ones `[replica, ...]`."""
    past, num_past = state.past, parts.agreement.num_past
    places = (past.num_kept - staleness) % num_past

    def one_replica(now: Params, versions: Params, place: jax.Array, steps: jax.Array) -> Params:
        now, versions = lax.pcast((now, versions), _REPLICA, to="varying")

        def chosen(x: jax.Array, earlier: jax.Array) -> jax.Array:
            old = lax.dynamic_index_in_dim(earlier, place[0], keepdims=False)
            return jnp.where(steps[0] == 0, x, old)[None]

        return jax.tree.map(chosen, now, versions)

    whole, each = PartitionSpec(), PartitionSpec(_REPLICA)
    stale = jax.shard_map(
        one_replica,
        mesh=parts.layout.mesh,
        in_specs=(whole, whole, each, each),
        out_specs=parts.trainable.of(own_param_specs(parts)),
        axis_names={_REPLICA},
    )(parts.trainable.of(state.params), past.versions, places, staleness)
    return parts.trainable.merged(stale, state.params)


def remedy(
    parts: Parts, state: TrainState, grads: Grads, stale: Params, staleness: jax.Array
) -> tuple[Grads, jax.Array | None]:
    """`(gradients to exchange, factor of the learning rate)` from those of each replica, `[replica, ...]`, at `stale`.

    The gradients are not multiplied by the loss scale any more: the compensation is not linear in them. The factor is
    the mean of the replicas' factors, and the gradients have weights of mean 1: so an optimizer that does not care for
    the size of gradients takes smaller steps too.
    """
    agreement, trainable = parts.agreement, parts.trainable
    grads = jax.tree.map(
        lambda g, now, past: agreement.compensate(g, now[None], past),
        grads,
        trainable.of(state.params),
        trainable.of(stale),
    )
    factors = agreement.rate_factors(staleness)
    if factors is None:
        return grads, None
    factors = _on_all(parts, factors)
    rate_factor = factors.mean()
    weights = factors / rate_factor
    return jax.tree.map(lambda g: g * weights.reshape(-1, *[1] * (g.ndim - 1)), grads), rate_factor


def _on_all(parts: Parts, x: jax.Array) -> jax.Array:
    """The same on all devices: else each replica might compute its own alone, and their mean would be a message."""
    return parts.layout.constrain(x, PartitionSpec())


def remember(parts: Parts, state: TrainState) -> dict[str, Any]:
    """`TrainState.agreement_state` after a step: the parameters before it take the place of the oldest ones."""
    if not parts.agreement.num_past:
        return state.agreement_state
    past, params = state.past, parts.trainable.of(state.params)
    place = past.num_kept % parts.agreement.num_past
    versions = jax.tree.map(
        lambda earlier, x: lax.dynamic_update_index_in_dim(earlier, x, place, 0), past.versions, params
    )
    return {PAST: Past(versions, past.num_kept + 1)}
