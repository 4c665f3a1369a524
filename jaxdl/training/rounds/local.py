"""A local step: each replica takes a step of its own. Nothing is communicated over `replica`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange import exchanged_on_mesh
from jaxdl.parallel.mesh import Axis, batch_sharding
from jaxdl.parallel.sharding import Grads, Layout
from jaxdl.parallel.squares import are_finite
from jaxdl.report.skips import NONFINITE
from jaxdl.training.state import Own, TrainState, replicated
from jaxdl.training.step import (
    Batch,
    Metrics,
    Parts,
    Sums,
    choose_state,
    ema_decay,
    local_gradients,
    nonzero,
    update_state,
)

REPLICA = Axis.REPLICA.value
OWN = PartitionSpec(REPLICA)
JOINED = "joined/"
"""Begins the names of totals over all replicas."""
_HIDDEN = ("bad_steps", "skipped_steps")
"""Counters of each replica, of which a merge gives the sum."""


def make_local_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted local step `(state, batch) -> (state, metrics)`; the state is donated.

    Batches are sharded as for `jaxdl.training.step.make_train_step`, and a replica trains on its own rows of them.
    Metrics are those of that function, but each is `[replica]`, of each replica, and there is none of an exchange.
    """
    return _jitted(parts, functools.partial(local_step, parts))


def make_joint_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted step in which all replicas, equal so far, take the mean of their gradients, and stay equal.

    The mean is that of the dense exchange. Otherwise as `make_local_step`, but the anchor moves along; and a third
    result is what the step has joined of all replicas, named as in `make_merge`.
    """
    return _jitted(parts, functools.partial(_joint_step, parts), replicated(parts.layout))


def _jitted(parts: Parts, step: Callable[[TrainState, Batch], Any], *more: NamedSharding) -> jax.stages.Wrapped:
    """`more` are the shardings of what it returns besides the state and the metrics."""
    shardings, mesh = parts.state_spec.shardings, parts.layout.mesh
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, OWN), *more),
    )


def local_step(parts: Parts, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """The state after a step of each replica, and its metrics: see `make_local_step`; traced.

    The loss of a replica is the mean over its own rows.
    """
    replicas = state.own
    augment_key, _, model_key = _keys(parts, state)
    batch = parts.task.augmented(batch, augment_key)
    params = parts.trainable.merged(replicas.params, state.params)
    scale = _loss_scale(parts, replicas)
    grads, sums, model_state, _ = local_gradients(
        parts, params, replicas.model_state, batch, scale, model_key, per_replica=True
    )
    grads = jax.tree.map(lambda g: g / scale.reshape(-1, *[1] * (g.ndim - 1)), grads) if replicas.loss_scale else grads
    new, _, metrics = _own_update(parts, replicas, grads, sums, model_state, judged=sums)
    return state.with_own(new).replace(step=state.step + 1), _name(sums, metrics)


def _joint_step(parts: Parts, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics, Metrics]:
    """The state after a joint step, its metrics, and what is joined of them; traced.

    It has the gradients of `jaxdl.training.step.make_train_step`, and an update in each replica.
    """
    replicas, spec, mesh = state.own, parts.state_spec, parts.layout.mesh
    augment_key, exchange_key, model_key = _keys(parts, state)
    batch = parts.task.augmented(batch, augment_key)
    scale = _loss_scale(parts, replicas)[0]
    factor = scale / nonzero(parts.task.weight(batch))
    grads, sums, model_state, _ = local_gradients(parts, state.params, state.model_state, batch, factor, model_key)
    grads = jax.tree.map(lambda g: g / scale, grads) if replicas.loss_scale else grads
    assert parts.joint_exchange is not None, "replicas that agree in every step have no such steps"
    exchange = exchanged_on_mesh(parts.joint_exchange, spec.grads, {}, mesh, wanted=spec.update)
    mean, _, of_exchange = exchange(grads, {}, exchange_key, sums)

    def spread(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (mesh.shape[REPLICA], *x.shape))

    judged = {name: of_exchange[f"sums/{name}"] for name in ("loss", "weight")}
    mean, model_state, judged = jax.tree.map(spread, (mean, model_state, judged))
    new, anchor, metrics = _own_update(parts, replicas, mean, sums, model_state, judged=judged)
    params = parts.trainable.merged(anchor.params, state.params)
    new = dataclasses.replace(new, since=replicas.since)  # All of it has been joined.
    changed = state.with_own(new).replace(params=params, model_state=anchor.model_state, step=state.step + 1)
    if parts.config.ema_decay is not None:
        decay = ema_decay(parts.config.ema_decay, state.step)
        decay = jnp.where(of_exchange["sums/weight"] == 0, 1, decay)  # No update.
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.ema_params, params)
        changed = changed.replace(ema_params=average)
    kept = anchor.guard["bad_in_row"] == 0 if replicas.guard else jnp.bool_(True)
    joined = {
        f"{JOINED}sums/{name}": jnp.where(kept, of_exchange[f"sums/{name}"], 0) for name in replicas.since["sums"]
    }
    return changed, _name(sums, metrics), joined | {f"{JOINED}seen": of_exchange["sums/weight"]}


def _keys(parts: Parts, state: TrainState) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Those of the augmentation, the exchange and the network, as in `jaxdl.training.step.make_train_step`."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    return *jax.random.split(key), jax.random.fold_in(key, 2) if parts.network.is_random else None


def _loss_scale(parts: Parts, replicas: Own) -> jax.Array:
    """That of each replica, `[replica]`."""
    ones = jnp.ones(parts.layout.mesh.shape[REPLICA], jnp.float32)
    return replicas.loss_scale["scale"] if replicas.loss_scale else ones


def _name(sums: Sums, metrics: Metrics) -> Metrics:
    shown = {name: value for name, value in metrics.items() if name not in _HIDDEN}
    return {f"sums/{name}": value for name, value in sums.items()} | shown


def _own_update(
    parts: Parts, replicas: Own, grads: Grads, sums: Sums, model_state: Any, *, judged: Sums
) -> tuple[Own, Own, Metrics]:
    """Each replica's update: `(own, one, metrics)`; `one` is any replica's, without the dimension of the replicas.

    `judged`, `[replica]`, are the sums by which the guard judges.
    """
    mesh = parts.layout.mesh
    layout = Layout(parts.layout.config, mesh, manual=frozenset({REPLICA}))
    # The moving average is that of the anchor.
    parts = dataclasses.replace(parts, config=parts.config.replaced({"ema_decay": None}))

    def one_replica(*given: Any) -> tuple[Own, Own, Metrics]:
        new, metrics = _updated_replica(parts, layout, *jax.tree.map(lambda x: x[0], given))
        stacked = jax.tree.map(lambda x: x[None], (new, metrics))
        return stacked[0], new, stacked[1]

    return jax.shard_map(
        one_replica,
        mesh=mesh,
        in_specs=(OWN, OWN, OWN, OWN, OWN),
        out_specs=(OWN, PartitionSpec(), OWN),
        axis_names={REPLICA},
        # An optimizer may have loops of its own, whose initial carry would need a `lax.pcast`.
        check_vma=False,
    )(replicas, grads, sums, model_state, {name: judged[name] for name in ("loss", "weight")})


def _updated_replica(
    parts: Parts, layout: Layout, replica: Own, grads: Grads, sums: Sums, model_state: Any, judged: Sums
) -> tuple[Own, Metrics]:
    """One replica after its update, or as it was if the step was bad or nothing in its rows counts."""
    state = TrainState(
        step=jnp.int32(0),
        params=replica.params,
        model_state=replica.model_state,
        ema_params={},
        opt_state=replica.opt_state,
        exchange_state=(),
        loss_scale=replica.loss_scale,
        guard=replica.guard,
        key=(),
        agreement_state=replica.since,
    )
    changed, metrics = update_state(parts, state, grads, layout)
    since = {
        "sums": {name: x + sums[name] for name, x in replica.since["sums"].items()},
        "merge_weight": replica.since["merge_weight"] + sums["weight"],
        "seen": replica.since["seen"],
    }
    changed = changed.replace(model_state=model_state, agreement_state=since)
    leaves = jax.tree.leaves(grads) if replica.loss_scale or replica.guard else []
    flags = jnp.where(are_finite(leaves), 0.0, 1.0) if leaves else jnp.zeros(0)
    weight = judged["weight"]
    loss = judged["loss"] / nonzero(weight)
    finite = jnp.all(flags == 0)
    changed, metrics, _ = choose_state(parts, state, changed, metrics, loss=loss, weight=weight, finite=finite)
    metrics |= {NONFINITE: flags} if leaves else {}
    new = dataclasses.replace(
        replica,
        params=changed.params,
        model_state=changed.model_state,
        opt_state=changed.opt_state,
        loss_scale=changed.loss_scale,
        guard=changed.guard,
        since=changed.agreement_state | {"seen": replica.since["seen"] + sums["weight"]},
    )
    return new, metrics


def joinable(replicas: Own) -> dict[str, jax.Array]:
    """What replicas count, `[replica]`, by the names that the totals have among the metrics."""
    return {f"{JOINED}sums/{name}": x for name, x in replicas.since["sums"].items()} | {
        f"{JOINED}seen": replicas.since["seen"]
    }


def begin_anew(replicas: Own) -> dict[str, Any]:
    """What replicas count, begun anew."""
    return jax.tree.map(jnp.zeros_like, replicas.since)
