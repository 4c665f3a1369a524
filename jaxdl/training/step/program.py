"""One training step: a single jitted function of `(state, batch)`.

Its parts, in order:

1. local gradients: `shard_map`, manual over `replica` alone; XLA shards the rest over the other axes;
2. the exchange: a second `shard_map`, manual over every axis, where each device exchanges its own shard; the finite
   check of all replicas' gradients and the sums of metrics go with it, in one small message;
3. the update: plain `jit` on sharded gradients, so that norms are global and its work is split over the devices;
4. the choice between the new and the old state when the step's numbers are bad. It comes last: a condition before the
   exchange would wait for all gradients, and the exchange could not overlap the backward pass.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.exchange import by_name, exchanged_on_mesh, leaf_names
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes
from jaxdl.parallel.embedding import LocatedIds
from jaxdl.parallel.mesh import Axis, batch_sharding
from jaxdl.parallel.sharding import Grads, named, spec_axes
from jaxdl.report.skips import NONFINITE
from jaxdl.training.state import TrainState, replicated
from jaxdl.training.step.gradients import local_gradients
from jaxdl.training.step.lookup import locate_ids, look_up, touched_rows, update_tables
from jaxdl.training.step.parts import NEXT, Batch, Metrics, Parts, Sums
from jaxdl.training.step.reference import with_reference
from jaxdl.training.step.stale import draw_staleness, remedy, remember, stale_params
from jaxdl.training.step.update import choose_state, nonzero, update_state


def make_train_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted train step `(state, batch) -> (state, metrics)`.

    The state is donated and comes back in the same shardings; `batch` leaves are `[global batch, ...]`, sharded as by
    `batch_sharding`. Metrics are float32 scalars: the task's sums as `sums/...`, `grad_norm`, `learning_rate`,
    `momentum` where it changes, `exchange/...`, `skip_reason` (see `choose_state`), with float16 `loss_scale` and
    `skipped_steps`, and with the guard `bad_steps` (so far) and `bad_in_row`; `grad_norm` and `exchange/...` are NaN in
    a skipped step. With emulated staleness `agreement/staleness` is its mean over the replicas. With the guard or
    float16 there is `NONFINITE`, `[gradients]` as `gradient_names`: not 0 where one of some replica is not finite.
    """
    shardings = parts.state_spec.shardings

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return _step(parts, state, batch, None)

    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(parts.layout.mesh)),
        out_shardings=(shardings, replicated(parts.layout)),
    )


def make_ahead_step(parts: Parts) -> jax.stages.Wrapped:
    """The same of a network with tables, `(state, located, batch) -> (state, metrics, located of the next batch)`.

    `located` are where the ids of the batch are; it also has those of the next batch, which are sent meanwhile.
    """
    shardings, mesh = parts.state_spec.shardings, parts.layout.mesh
    assert parts.tables is not None
    everywhere = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))

    def train_step(state: TrainState, located: LocatedIds, batch: Batch) -> tuple[TrainState, Metrics, LocatedIds]:
        following = {name.removeprefix(NEXT): x for name, x in batch.items() if name.startswith(NEXT)}
        batch = {name: x for name, x in batch.items() if not name.startswith(NEXT)}
        state, metrics = _step(parts, state, batch, located)
        return state, metrics, locate_ids(parts, following)

    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, everywhere, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(parts.layout), everywhere),
    )


def _step(parts: Parts, state: TrainState, batch: Batch, located: LocatedIds | None) -> tuple[TrainState, Metrics]:
    tables, reference, state = state.tables, state.reference, state.replace(tables={}, reference={})
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    augment_key, exchange_key = jax.random.split(key)
    batch = parts.task.augmented(batch, augment_key)
    batch, located = look_up(parts, tables, batch, key, located)
    batch = with_reference(parts, state.params, reference, state.model_state, batch, parts.config.microbatches)
    scale = state.loss_scale["scale"] if state.loss_scale else jnp.float32(1)
    # Folded with 2: a split into two folds with 0 and 1.
    model_key = jax.random.fold_in(key, 2) if parts.network.is_random else None
    weight = parts.task.weight(batch)
    factor = scale / nonzero(weight)
    staleness, params, rate_factor = draw_staleness(parts, state, key), state.params, None
    if staleness is not None:
        params = stale_params(parts, state, staleness)
    grads, sums, model_state, pooled_grads = local_gradients(
        parts, params, state.model_state, batch, factor, model_key, stale=staleness is not None
    )
    # Unscaled: the residual must not depend on the loss scale of the step.
    unscaled = jax.tree.map(lambda g: g / scale, grads) if state.loss_scale else grads
    if staleness is not None:
        unscaled, rate_factor = remedy(parts, state, unscaled, params, staleness)
    mean, exchange_state, of_exchange = _exchange(parts, unscaled, sums, state, exchange_key)
    flags = of_exchange.pop("nonfinite", None)
    metrics = {f"sums/{name}": of_exchange.pop(f"sums/{name}") for name in sums}
    if staleness is not None:
        metrics["agreement/staleness"] = staleness.astype(jnp.float32).mean()
    touched, squares = touched_rows(parts, located, pooled_grads, scale, key)
    changed, more = update_state(parts, state, mean, parts.layout, rate_factor, squares)
    changed = changed.replace(model_state=model_state, exchange_state=exchange_state)
    more |= {f"exchange/{name}": value for name, value in of_exchange.items()}
    finite = jnp.bool_(True) if flags is None else jnp.all(flags == 0)
    if flags is not None:
        metrics[NONFINITE] = _flags(parts, flags, more["grad_norm"], squares)
    loss = metrics["sums/loss"] / nonzero(metrics["sums/weight"])
    # Not `weight`, the number of rows that count: all of them may have the weight 0.
    counted = metrics["sums/weight"]
    changed, of_choice, kept = choose_state(parts, state, changed, more, loss=loss, weight=counted, finite=finite)
    tables = update_tables(parts, tables, touched, state, more, kept)
    # Also after a skipped step: a version's age is the number of steps since.
    changed = changed.replace(step=state.step + 1, agreement_state=remember(parts, state), tables=tables)
    changed = changed.replace(reference=reference)
    return changed, metrics | of_choice


def gradient_names(parts: Parts) -> list[str]:
    """The parameters that the entries of the metric `NONFINITE` belong to, in this order; the tables, if any, last."""
    names = leaf_names(parts.trainable.of(parts.network.param_shapes))
    return names if parts.tables is None else [*names, "embedding tables"]


def _flags(parts: Parts, flags: jax.Array, norm: jax.Array, squares: jax.Array | None) -> jax.Array:
    """The metric `NONFINITE`, from the flags of the gradients that were exchanged, `squares` those of the tables.

    Gradients that the backward pass has summed already have no flag of their own: if none of the others explains a
    norm that is not finite, all of them get one.
    """
    of_tables = [] if squares is None else [jnp.where(jnp.isfinite(squares), 0.0, 1.0)]
    if parts.sum_dtype is not None:
        explained = jnp.any(flags > 0) | jnp.isfinite(norm) | (of_tables[0] > 0 if of_tables else False)
        summed = by_name(parts.trainable.of(parts.summed))
        left = dict(zip(sorted(name for name, done in summed.items() if not done), flags, strict=True))
        flags = jnp.stack([left.get(name, jnp.where(explained, 0.0, 1.0)) for name in summed])
    return jnp.concatenate([flags, *(x[None] for x in of_tables)])


def make_update(parts: Parts) -> jax.stages.Wrapped:
    """The jitted update of a step alone, `(state, grads) -> state`, from exchanged gradients.

    The state is donated.
    """
    spec = parts.state_spec

    def update(state: TrainState, grads: Grads) -> TrainState:
        return update_state(parts, state, grads, parts.layout)[0]

    shardings = (spec.shardings, named(parts.layout.mesh, spec.update))
    return jax.jit(update, donate_argnums=0, in_shardings=shardings, out_shardings=spec.shardings)


def _exchange(parts: Parts, grads: Grads, sums: Sums, state: TrainState, key: jax.Array) -> tuple[Grads, Any, Metrics]:
    """Region 2: the mean over `replica` of `[replica, ...]` gradients, by the exchange, shard by shard.

    Gradients in `parts.summed` are means already; one that is not finite shows in the norm of all.
    """
    spec, mesh, checked = parts.state_spec, parts.layout.mesh, bool(state.loss_scale or state.guard)
    make = functools.partial(
        exchanged_on_mesh, parts.exchange, places=spec.specs.exchange_state, mesh=mesh, checked=checked
    )
    if parts.sum_dtype is None:
        return make(specs=spec.grads, wanted=spec.update)(grads, state.exchange_state, key, sums)
    grads_of, specs, wanted, summed = (by_name(tree) for tree in (grads, spec.grads, spec.update, parts.summed))
    left = [name for name, done in summed.items() if not done]
    mine = [{name: tree[name] for name in left} for tree in (specs, wanted, grads_of)]
    mean, exchange_state, metrics = make(specs=mine[0], wanted=mine[1])(mine[2], state.exchange_state, key, sums)
    sent = f"bytes_sent/{Axis.REPLICA.value}"
    for name in summed.keys() - mean.keys():
        shard = math.prod(NamedSharding(mesh, specs[name]).shard_shape(grads_of[name].shape))
        metrics[sent] += all_reduce_sent_bytes(shard, mesh.shape[Axis.REPLICA], parts.sum_dtype)
        size = shard * grads_of[name].dtype.itemsize
        for axis in (axis for entry in specs[name] for axis in reversed(spec_axes(PartitionSpec(entry)))):
            if axis not in spec_axes(wanted[name]):
                num_bytes = metrics.get(f"bytes_sent/{axis}", 0) + jnp.float32((mesh.shape[axis] - 1) * size)
                metrics[f"bytes_sent/{axis}"], size = num_bytes, size * mesh.shape[axis]
        mean[name] = lax.with_sharding_constraint(grads_of[name], NamedSharding(mesh, wanted[name]))
    return jax.tree.unflatten(jax.tree.structure(grads), [mean[name] for name in summed]), exchange_state, metrics
