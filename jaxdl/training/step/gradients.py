"""Gradients of one replica: region 1 of a step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from jaxdl.models.network import Call
from jaxdl.parallel.mesh import INNER_BATCH_AXES, Axis
from jaxdl.parallel.sharding import Grads, Layout, Params, is_spec
from jaxdl.training.state import ModelState
from jaxdl.training.step.network import apply_network
from jaxdl.training.step.parts import VECTORS, Batch, Parts, Sums
from jaxdl.training.step.pipeline import Pipeline, split, stage_specs
from jaxdl.training.step.stage import STAGE, num_stages
from jaxdl.training.step.update import nonzero

LocalGradients = tuple[Grads, Sums, ModelState, jax.Array | None]
"""What `local_gradients` returns, of all replicas or of one."""


def local_gradients(
    parts: Parts,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    factor: jax.Array,
    key: jax.Array | None,
    *,
    per_replica: bool = False,
    stale: bool = False,
) -> LocalGradients:
    """Region 1: `(grads, sums, model_state, pooled_grads)`; the first two are of each replica, `[replica, ...]`.

    Gradients in `parts.summed` are means over the replicas, without the leading dimension. The last are those of the
    batch's pooled vectors, `VECTORS`, with the same factor, `[global batch, columns]`; None where it has none.

    `factor` times the number of replicas multiplies the sum of losses, so that the mean of the gradients over
    `replica` is the gradient of the mean loss over the global batch, however the examples are spread. `key` is that of
    the step, from which each row has its own; None for a network that draws no random numbers.

    With `per_replica`, each replica has trained parameters and model state of its own, `[replica, ...]`, as the ones
    returned; its gradient is that of the mean loss over its own rows, times its `factor`, `[replica]`. Then nothing is
    communicated over `replica`. With `stale` it has trained parameters of its own, and nothing else.
    """
    replica, mesh = Axis.REPLICA.value, parts.layout.mesh
    if not per_replica:
        factor = factor * mesh.shape[replica]
    random = None if key is None else (jax.random.key_data(key), jnp.arange(len(next(iter(batch.values())))))
    shared, each = PartitionSpec(), PartitionSpec(replica)
    given = each if per_replica else shared
    of_params = own_param_specs(parts) if per_replica or stale else shared
    common = functools.partial(_common_gradients, parts, stale=stale)
    summed = jax.tree.map(lambda done: shared if done else each, parts.trainable.of(parts.summed))
    manual = {replica}
    if num_stages(parts.layout) > 1:
        manual.add(STAGE)
        of_params, given = (stage_specs(axes) for axes in (parts.network.axes, parts.network.state_axes))
        summed = stage_specs(parts.trainable.of(parts.network.axes), replica)
    return jax.shard_map(
        functools.partial(_own_gradients, parts) if per_replica else common,
        mesh=mesh,
        in_specs=(of_params, given, each, each if per_replica else shared, None if random is None else (shared, each)),
        out_specs=(summed, each, given, each),
        axis_names=manual,
        # With the check each scan needs a `lax.pcast` of its initial carry, which users' networks and losses lack.
        check_vma=parts.network.what is None and not parts.task.has_user_code,
    )(params, model_state, dict(batch), factor, random)


def _common_gradients(
    parts: Parts,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    factor: jax.Array,
    random: Any,
    *,
    stale: bool,
) -> LocalGradients:
    """One replica's, at the parameters that all replicas have in common, or else at `stale` ones of its own."""
    replica = Axis.REPLICA.value
    # Without this, differentiating would already sum over `replica` and the exchange would see no local gradient.
    model_state, factor = lax.pcast((model_state, factor), replica, to="varying")
    if stale:
        params = one_replica_params(parts, params)
    else:
        params = jax.tree.map(lambda x, sums: x if sums else lax.pcast(x, replica, to="varying"), params, parts.summed)
    grads, sums, model_state, pooled_grads = _replica_gradients(parts, params, model_state, batch, factor, random)
    # Running statistics are averaged over `replica`: each replica normalizes with those of its own batch.
    # Replicated first: XLA cannot reduce over a manual axis of size 1 what it has split over an automatic one.
    model_state = _pmean_at_once(lax.with_sharding_constraint(model_state, PartitionSpec()), replica)
    grads = jax.tree.map(lambda x, done: x if done else x[None], grads, parts.trainable.of(parts.summed))
    return grads, jax.tree.map(lambda x: x[None], sums), model_state, pooled_grads


def _own_gradients(
    parts: Parts, params: Params, model_state: ModelState, batch: Batch, factor: jax.Array, random: Any
) -> LocalGradients:
    """One replica's, at its own parameters."""
    model_state, factor = jax.tree.map(lambda x: x[0], (model_state, factor))
    params = one_replica_params(parts, params)
    factor = factor / nonzero(parts.task.weight(batch))
    gradients = _replica_gradients(parts, params, model_state, batch, factor, random, apart=True)
    return jax.tree.map(lambda x: x[None], gradients)


def own_param_specs(parts: Parts) -> Any:
    """How parameters are split over `replica` if each replica has trained ones of its own."""
    flags = parts.trainable.flags_of(parts.network.param_shapes)
    return jax.tree.map(lambda mine: PartitionSpec(Axis.REPLICA.value) if mine else PartitionSpec(), flags)


def one_replica_params(parts: Parts, params: Params) -> Params:
    """Those of one replica, without the leading dimension of the trained ones, inside a manual `shard_map`."""
    flags = parts.trainable.flags_of(parts.network.param_shapes)
    return jax.tree.map(lambda mine, x: x[0] if mine else lax.pcast(x, Axis.REPLICA.value, to="varying"), flags, params)


def _replica_gradients(
    parts: Parts,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    factor: jax.Array,
    random: Any,
    *,
    apart: bool = False,
) -> LocalGradients:
    """One replica's, of all micro-batches; with `apart` each has parameters of its own."""
    replica = Axis.REPLICA.value
    layout = dataclasses.replace(parts.layout, manual=frozenset({replica}), sum_dtype=parts.sum_dtype, apart=apart)
    batch = {name: lax.with_sharding_constraint(x, PartitionSpec(INNER_BATCH_AXES)) for name, x in batch.items()}
    key, rows = (None, None) if random is None else (jax.random.wrap_key_data(random[0]), random[1])
    num_parts = parts.config.microbatches
    if num_stages(layout) > 1:
        layout = dataclasses.replace(layout, manual=frozenset({replica, STAGE}))
        batch, rows = jax.tree.map(lambda x: split(x, num_parts), (batch, rows))
        return (*Pipeline(parts, layout, params, batch, key, rows).ready.gradients(model_state, factor), None)
    one_microbatch = functools.partial(_microbatch_gradients, parts, layout)
    if num_parts == 1:
        return one_microbatch(params, model_state, batch, factor, key, rows)

    def body(carry: Any, part: tuple[Batch, jax.Array | None]) -> Any:
        total, model_state = carry
        grads, sums, model_state, pooled_grads = one_microbatch(params, model_state, part[0], factor, key, part[1])
        return (jax.tree.map(jnp.add, total, grads), model_state), (sums, pooled_grads)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.trainable.of(params))
    zeros = lax.pcast(zeros, replica, to="varying")
    microbatches = jax.tree.map(lambda x: split(x, num_parts), (batch, rows))
    (grads, model_state), (sums, pooled_grads) = lax.scan(body, (zeros, model_state), microbatches)
    return grads, jax.tree.map(lambda x: x.sum(axis=0), sums), model_state, jax.tree.map(unsplit, pooled_grads)


def _microbatch_gradients(
    parts: Parts,
    layout: Layout,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    factor: jax.Array,
    key: jax.Array | None,
    rows: jax.Array | None,
) -> LocalGradients:
    """What one replica's micro-batch adds, the loss multiplied by `factor`.

    `rows` are the numbers of its rows in the global batch.
    """

    vectors = batch.get(VECTORS)
    batch = {name: x for name, x in batch.items() if name != VECTORS}

    def objective(trained: Params, vectors: jax.Array | None) -> tuple[jax.Array, tuple[Sums, ModelState]]:
        used = parts.trainable.merged(trained, params)
        call = Call(train=True, key=key, rows=rows, materialize_logits=parts.task.takes_arrays)
        outputs, new_model_state = apply_network(parts, layout, used, model_state, batch, call, vectors)
        sums = parts.task.sums(outputs, batch, train=True)
        return sums["loss"] * factor, (sums, new_model_state)

    differentiated = jax.grad(objective, argnums=(0, 1), has_aux=True)
    (grads, pooled_grads), (sums, new_model_state) = differentiated(parts.trainable.of(params), vectors)
    grads = jax.tree.map(
        lambda spec, g: lax.with_sharding_constraint(g, spec), parts.state_spec.grads, grads, is_leaf=is_spec
    )
    return grads, sums, new_model_state, pooled_grads


def _pmean_at_once(tree: Any, axis: str) -> Any:
    """The mean of each leaf over the axis, in one all-reduce: a network has dozens of small statistics."""
    if not jax.tree.leaves(tree):
        return tree
    flat, as_tree = ravel_pytree(tree)
    return as_tree(lax.pmean(flat, axis))


def unsplit(x: jax.Array) -> jax.Array:
    """The inverse of `jaxdl.training.step.pipeline.split`."""
    return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])
