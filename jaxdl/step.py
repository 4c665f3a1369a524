"""One training step: a single jitted function of `(state, batch)`.

Its parts, in order:

1. local gradients: `shard_map`, manual over `replica` alone; XLA shards the rest over `fsdp` and `tensor`;
2. the exchange: a second `shard_map`, manual over every axis, where each device exchanges its own shard; the finite
   check of all replicas' gradients and the sums of metrics go with it, in one small message;
3. the update: plain `jit` on sharded gradients, so that norms are global and its work is split over the devices;
4. the choice between the new and the old state when the step's numbers are bad. It comes last: a condition before the
   exchange would wait for all gradients, and the exchange could not overlap the backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pydantic
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.collectives.halves import all_reduce_sent_bytes
from jaxdl.config import Config
from jaxdl.data import DataSpec
from jaxdl.exchange import Exchange, by_name, exchanged_on_mesh
from jaxdl.guard import GuardConfig, choose
from jaxdl.mesh import Axis, batch_sharding
from jaxdl.models.network import Network
from jaxdl.optim import Rates, Trainable, averaged, num_updates
from jaxdl.optim.norms import global_norm
from jaxdl.precision import Precision, cast_weights
from jaxdl.sharding import Grads, Layout, Params, Specs, gather_params, is_spec, named, spec_axes, use_layout
from jaxdl.state import ModelState, StateSpec, TrainState, replicated
from jaxdl.tasks import Task

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]
"""Sums over a batch, as `Task.sums` gives them."""
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class StepConfig(Config):
    """What happens in one training step besides the model and the optimizer."""

    microbatches: int = pydantic.Field(default=1, ge=1)
    """Split the batch into this many parts, one after the other, and accumulate their gradients: saves memory."""
    clip_norm: float | None = pydantic.Field(default=None, gt=0)
    """Scale gradients down to this global norm when theirs is larger."""
    ema_decay: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the parameters with this decay a step, and evaluate that."""
    freeze: tuple[str, ...] = pydantic.Field(default=(), exclude_if=lambda value: not value)
    """Patterns, such as `stem*` or `*.bias`, of the names of parameters that are not trained: they have no gradients,
    no optimizer state and no weight decay. Batch norm still updates its running statistics."""


@dataclass(frozen=True)
class Parts:
    """All parts of a step; built once by `jaxdl.run.build.make_parts`."""

    network: Network
    task: Task
    data_spec: DataSpec
    trainable: Trainable
    """Which parameters have gradients; the others are frozen."""
    optimizer: optax.GradientTransformationExtraArgs
    rates: Callable[[jax.typing.ArrayLike], Rates]
    """Learning rate and momentum of the next update, by the number of updates made so far."""
    exchange: Exchange
    precision: Precision
    layout: Layout
    state_spec: StateSpec
    config: StepConfig
    guard: GuardConfig
    sum_dtype: DTypeLike | None = None
    """The dtype in which the backward pass of a loop over layers itself sums their gradients over replicas; with None
    the exchange does. See `jaxdl.run.overlap`."""

    @property
    def summed(self) -> Any:
        """For each parameter, whether its gradient is a mean over replicas before the exchange."""
        return jax.tree.map(lambda looped: looped and self.sum_dtype is not None, self.network.looped)


def make_train_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted train step `(state, batch) -> (state, metrics)`.

    The state is donated and comes back in the same shardings; `batch` leaves are `[global batch, ...]`, sharded over
    `(replica, fsdp)`. Metrics are float32 scalars: the task's sums as `sums/...`, `grad_norm`, `learning_rate`,
    `momentum` where it changes, `exchange/...`, with float16 `loss_scale` and `skipped_steps`, and with the guard
    `bad_steps` (so far) and `bad_in_row`; `grad_norm` and `exchange/...` are NaN in a skipped step.
    """
    shardings = parts.state_spec.shardings

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        augment_key, exchange_key = jax.random.split(key)
        batch = parts.task.augmented(batch, augment_key)
        scale = state.loss_scale["scale"] if state.loss_scale else jnp.float32(1)
        # Folded with 2: a split into two folds with 0 and 1.
        model_key = jax.random.fold_in(key, 2) if parts.network.is_random else None
        grads, sums, model_state = _local_gradients(parts, state, batch, scale / parts.task.weight(batch), model_key)
        # Unscaled: the residual must not depend on the loss scale of the step.
        unscaled = jax.tree.map(lambda g: g / scale, grads) if state.loss_scale else grads
        mean, exchange_state, of_exchange = _exchange(parts, unscaled, sums, state, exchange_key)
        finite = of_exchange.pop("nonfinite", jnp.float32(0)) == 0
        metrics = {f"sums/{name}": of_exchange.pop(f"sums/{name}") for name in sums}
        changed, more = _update(parts, state, mean)
        changed = changed.replace(model_state=model_state, exchange_state=exchange_state)
        more |= {f"exchange/{name}": value for name, value in of_exchange.items()}
        if state.loss_scale or state.guard:
            loss = metrics["sums/loss"] / metrics["sums/weight"]
            changed, more = _guarded(parts, state, changed, more, loss, finite)
        return changed.replace(step=state.step + 1), metrics | more

    return jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, batch_sharding(parts.layout.mesh)),
        out_shardings=(shardings, replicated(parts.layout)),
    )


def make_update(parts: Parts) -> jax.stages.Wrapped:
    """The jitted update of a step alone, `(state, grads) -> state`, from exchanged gradients.

    The state is donated.
    """
    spec = parts.state_spec

    def update(state: TrainState, grads: Grads) -> TrainState:
        return _update(parts, state, grads)[0]

    shardings = (spec.shardings, named(parts.layout.mesh, spec.update))
    return jax.jit(update, donate_argnums=0, in_shardings=shardings, out_shardings=spec.shardings)


def apply_network(
    parts: Parts,
    layout: Layout,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    *,
    train: bool,
    forget: bool = False,
    key: jax.Array | None = None,
    rows: jax.Array | None = None,
    whole: bool = True,
) -> tuple[Any, ModelState]:
    """`(outputs, model_state)` of the network on a batch, in the precision's dtype, sharded by `layout`.

    `train`, `forget`, `key`, `rows` and `whole` are those of `Network.apply`.
    """
    with _precise(parts, layout):
        inputs = parts.task.inputs(batch, parts.data_spec)
    how = {"train": train, "forget": forget, "key": key, "rows": rows, "whole": whole}
    return run_network(parts, layout, params, model_state, *inputs, **how)


def run_network(
    parts: Parts, layout: Layout, params: Params, model_state: ModelState, *inputs: Any, **how: Any
) -> tuple[Any, ModelState]:
    """`apply_network` on the network's own inputs; `how` are the further arguments of `Network.apply`."""
    with _precise(parts, layout):
        used = cast_weights(params, parts.network.axes, parts.precision.weight_dtype)
        used = gather_params(used, parts.network.axes)
        return parts.network.apply(used, model_state, *inputs, **how)


@contextlib.contextmanager
def _precise(parts: Parts, layout: Layout) -> Iterator[None]:
    """Context of what a network computes: the layout, and the precision of products."""
    layout = dataclasses.replace(layout, wire_dtype=parts.precision.dtype)
    matmul = (
        jax.default_matmul_precision(parts.precision.matmul) if parts.precision.matmul else jax.named_scope("model")
    )
    with use_layout(layout), matmul:
        yield


def _local_gradients(
    parts: Parts, state: TrainState, batch: Batch, loss_factor: jax.Array, key: jax.Array | None
) -> tuple[Grads, Sums, ModelState]:
    """Part 1: `(grads, sums, model_state)`; grads and sums are each replica's own, leaves `[replica, ...]`.

    Gradients in `parts.summed` are means over the replicas, without the leading dimension.

    `loss_factor` times the number of replicas multiplies the sum of losses, so that the mean of the gradients over
    `replica` is the gradient of the mean loss over the global batch, however the examples are spread. `key` is that of
    the step, from which each row has its own; None for a network that draws no random numbers.
    """
    replica, mesh = Axis.REPLICA.value, parts.layout.mesh
    inside = Layout(parts.layout.config, mesh, manual=frozenset({replica}), sum_dtype=parts.sum_dtype)
    factor, summed = loss_factor * mesh.shape[replica], parts.trainable.of(parts.summed)
    random = None if key is None else (jax.random.key_data(key), jnp.arange(len(next(iter(batch.values())))))
    one_microbatch = functools.partial(_microbatch_gradients, parts, inside)

    def local(
        params: Params, model_state: ModelState, batch: Batch, factor: jax.Array, random: Any
    ) -> tuple[Grads, Sums, ModelState]:
        # Without this, differentiating would already sum over `replica` and the exchange would see no local gradient.
        model_state, factor = lax.pcast((model_state, factor), replica, to="varying")
        params = jax.tree.map(lambda x, sums: x if sums else lax.pcast(x, replica, to="varying"), params, parts.summed)
        batch = {name: lax.with_sharding_constraint(x, PartitionSpec(Axis.FSDP.value)) for name, x in batch.items()}
        key, rows = (None, None) if random is None else (jax.random.wrap_key_data(random[0]), random[1])
        if (num_parts := parts.config.microbatches) == 1:
            grads, sums, model_state = one_microbatch(params, model_state, batch, factor, key, rows)
        else:

            def body(carry: Any, part: tuple[Batch, jax.Array | None]) -> Any:
                total, model_state = carry
                grads, sums, model_state = one_microbatch(params, model_state, part[0], factor, key, part[1])
                return (jax.tree.map(jnp.add, total, grads), model_state), sums

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.trainable.of(params))
            zeros = lax.pcast(zeros, replica, to="varying")
            microbatches = jax.tree.map(lambda x: split(x, num_parts), (batch, rows))
            (grads, model_state), sums = lax.scan(body, (zeros, model_state), microbatches)
            sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
        # Running statistics are averaged over `replica`: each replica normalizes with those of its own batch.
        # Replicated first: XLA cannot reduce over a manual axis of size 1 what it has split over an automatic one.
        model_state = _pmean_at_once(lax.with_sharding_constraint(model_state, PartitionSpec()), replica)
        grads = jax.tree.map(lambda x, done: x if done else x[None], grads, summed)
        return grads, jax.tree.map(lambda x: x[None], sums), model_state

    whole, own = PartitionSpec(), PartitionSpec(replica)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, whole, own, whole, None if random is None else (whole, own)),
        out_specs=(jax.tree.map(lambda done: whole if done else own, summed), own, whole),
        axis_names={replica},
        # With the check each scan needs a `lax.pcast` of its initial carry, which users' networks and losses lack.
        check_vma=parts.network.what is None and not parts.task.has_user_code,
    )(state.params, state.model_state, dict(batch), factor, random)


def _microbatch_gradients(
    parts: Parts,
    layout: Layout,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    factor: jax.Array,
    key: jax.Array | None,
    rows: jax.Array | None,
) -> tuple[Grads, Sums, ModelState]:
    """`(grads, sums, model_state)` of one replica's micro-batch, the loss multiplied by `factor`.

    `rows` are the numbers of its rows in the global batch.
    """

    def objective(trained: Params) -> tuple[jax.Array, tuple[Sums, ModelState]]:
        used = parts.trainable.merged(trained, params)
        whole = parts.task.takes_arrays
        outputs, new_model_state = apply_network(
            parts, layout, used, model_state, batch, train=True, key=key, rows=rows, whole=whole
        )
        sums = parts.task.sums(outputs, batch, train=True)
        return sums["loss"] * factor, (sums, new_model_state)

    grads, (sums, new_model_state) = jax.grad(objective, has_aux=True)(parts.trainable.of(params))
    grads = jax.tree.map(
        lambda spec, g: lax.with_sharding_constraint(g, spec), parts.state_spec.grads, grads, is_leaf=is_spec
    )
    return grads, sums, new_model_state


def _pmean_at_once(tree: Any, axis: str) -> Any:
    """The mean of each leaf over the axis, in one all-reduce: a network has dozens of small statistics."""
    if not jax.tree.leaves(tree):
        return tree
    flat, as_tree = ravel_pytree(tree)
    return as_tree(lax.pmean(flat, axis))


def split(x: jax.Array, num_parts: int) -> jax.Array:
    """`[batch, ...]` -> `[num_parts, batch / num_parts, ...]`, every num_parts-th row to the same part.

    So the parts hold the same examples on every mesh, and no row has to move between devices.
    """
    return jnp.moveaxis(x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:]), 1, 0)


def _exchange(parts: Parts, grads: Grads, sums: Sums, state: TrainState, key: jax.Array) -> tuple[Grads, Any, Metrics]:
    """Part 2: the mean over `replica` of `[replica, ...]` gradients, by the exchange, shard by shard.

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


def _update(parts: Parts, state: TrainState, grads: Grads) -> tuple[TrainState, Metrics]:
    """Part 3: clipping, the optimizer, and the moving average of the parameters."""
    config = parts.config
    grad_norm = global_norm(grads)
    if config.clip_norm is not None:
        factor = jnp.minimum(1.0, config.clip_norm / jnp.maximum(grad_norm, jnp.finfo(jnp.float32).tiny))
        grads = jax.tree.map(lambda g: g * factor, grads)
    spec, trainable = parts.state_spec, parts.trainable
    old = _resharded(parts, trainable.of(state.params), spec.update)
    # The optimizer's own count: a skipped step restores it with the rest of the state, and the schedule waits.
    num_made = num_updates(state.opt_state)
    rates = parts.rates(num_made)
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, old, rates=rates)
    # Without the first resharding XLA may gather the updates, not the parameters, and every device adds all of them.
    updated = _resharded(parts, optax.apply_updates(old, updates), spec.update)
    trained = _resharded(parts, updated, trainable.of(spec.params))
    params, average = trainable.merged(trained, state.params), state.ema_params
    if config.ema_decay is not None:
        # Early on the average is over the steps so far, not dominated by the initial values.
        decay = jnp.minimum(config.ema_decay, (1.0 + num_made) / (10.0 + num_made))
        moved = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, trainable.of(average), trained)
        average = trainable.merged(moved, average)
    elif average:
        own = _resharded(parts, averaged(opt_state, updated), trainable.of(spec.params))
        average = trainable.merged(own, average)
    metrics = {"grad_norm": grad_norm, "learning_rate": rates.learning_rate}
    if rates.momentum is not None:
        metrics["momentum"] = rates.momentum
    return state.replace(params=params, opt_state=opt_state, ema_params=average), metrics


def _resharded(parts: Parts, params: optax.Params, specs: Specs) -> Any:
    """The parameters, resharded to `specs` where the update is sharded unlike them."""
    if parts.state_spec.update == parts.trainable.of(parts.state_spec.params):
        return params
    return lax.with_sharding_constraint(params, named(parts.layout.mesh, specs))


def _guarded(
    parts: Parts, state: TrainState, changed: TrainState, more: Metrics, loss: jax.Array, finite: jax.Array
) -> tuple[TrainState, Metrics]:
    """Part 4: the changed state, or the old one if the step is skipped; either with new counters and loss scale."""
    loss_fine = jnp.isfinite(loss) & ~parts.guard.is_spike(state.guard, loss)
    # A gradient may also leave the range of float32 on its way to the update; then its norm does.
    kept = loss_fine & finite & jnp.isfinite(more["grad_norm"])
    overflow = jnp.bool_(False)
    if state.loss_scale:
        overflow = loss_fine & ~finite & (state.loss_scale["scale"] > (parts.precision.lowest_scale or 0))
        if not state.guard:
            overflow = ~kept
    bad = ~kept & ~overflow
    planned = {name: more[name] for name in ("learning_rate", "momentum") if name in more}
    more = jax.tree.map(lambda x: jnp.where(kept, x.astype(jnp.float32), jnp.nan), more) | planned
    changed = choose(kept, changed, state)
    guard = parts.guard.next_guard(state.guard, loss, kept=kept, bad=bad)
    more |= {name: guard[name].astype(jnp.float32) for name in ("bad_steps", "bad_in_row") if guard}
    scale = state.loss_scale
    if scale:
        # A bad loss says nothing about the loss scale: leave it unchanged.
        scale = choose(bad, scale, parts.precision.next_loss_scale(scale, kept))
        more |= {name: scale[name].astype(jnp.float32) for name in ("skipped_steps",)} | {"loss_scale": scale["scale"]}
    return changed.replace(guard=guard, loss_scale=scale), more
