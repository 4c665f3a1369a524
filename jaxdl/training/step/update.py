"""The update of a step, and the choice between the new and the old state: regions 3 and 4 of a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.optim import average_params, num_updates
from jaxdl.optim.norms import global_norm
from jaxdl.parallel.sharding import Grads, Layout, Specs, is_spec
from jaxdl.report.skips import REASON, Skip
from jaxdl.training.guard import choose
from jaxdl.training.state import TrainState
from jaxdl.training.step.parts import Metrics, Parts, StepConfig


def update_state(
    parts: Parts,
    state: TrainState,
    grads: Grads,
    layout: Layout,
    rate_factor: jax.Array | None = None,
    more_squares: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """Region 3: clipping, the optimizer, and the moving average of the parameters; also of one replica alone.

    `rate_factor` multiplies the learning rate. `more_squares` are the sum of squares of gradients besides these, which
    count in the norm.
    """
    config = parts.config
    grad_norm = global_norm(grads)
    if more_squares is not None:
        grad_norm = jnp.sqrt(grad_norm**2 + more_squares)
    if config.clip_norm is not None:
        factor = clip_factor(config, grad_norm)
        grads = jax.tree.map(lambda g: g * factor, grads)
    spec, trainable = parts.state_spec, parts.trainable
    old = _reshard(parts, layout, trainable.of(state.params), spec.update)
    # The optimizer's own count: a skipped step restores it with the rest of the state, and the schedule waits.
    num_made = num_updates(state.opt_state)
    rates = parts.rates(num_made)
    if rate_factor is not None:
        rates = rates._replace(learning_rate=rates.learning_rate * rate_factor)
    updates, opt_state = parts.optimizer.update(grads, state.opt_state, old, rates=rates)
    # Without the first resharding XLA may gather the updates, not the parameters, and every device adds all of them.
    new = _reshard(parts, layout, optax.apply_updates(old, updates), spec.update)
    trained = _reshard(parts, layout, new, trainable.of(spec.params))
    params, average = trainable.merged(trained, state.params), state.ema_params
    if config.ema_decay is not None:
        decay = ema_decay(config.ema_decay, num_made)
        moved = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, trainable.of(average), trained)
        average = trainable.merged(moved, average)
    elif average:
        trained_average = _reshard(parts, layout, average_params(opt_state, new), trainable.of(spec.params))
        average = trainable.merged(trained_average, average)
    metrics = {"grad_norm": grad_norm, "learning_rate": rates.learning_rate}
    if rates.momentum is not None:
        metrics["momentum"] = rates.momentum
    return state.replace(params=params, opt_state=opt_state, ema_params=average), metrics


def clip_factor(config: StepConfig, grad_norm: jax.Array) -> jax.Array:
    """By how much gradients of this norm are multiplied."""
    if config.clip_norm is None:
        return jnp.float32(1)
    return jnp.minimum(1.0, config.clip_norm / jnp.maximum(grad_norm, jnp.finfo(jnp.float32).tiny))


def ema_decay(decay: float, num_updates: jax.Array) -> jax.Array:
    """The decay of the moving average after `num_updates` updates: early on it is the mean of the steps so far."""
    return jnp.minimum(decay, (1.0 + num_updates) / (10.0 + num_updates))


def _reshard(parts: Parts, layout: Layout, params: optax.Params, specs: Specs) -> Any:
    """The parameters, resharded to `specs` where the update is sharded unlike them."""
    if parts.state_spec.update == parts.trainable.of(parts.state_spec.params):
        return params
    return jax.tree.map(lambda spec, x: layout.constrain(x, spec), specs, params, is_leaf=is_spec)


def nonzero(weight: jax.Array) -> jax.Array:
    """The weight of a batch to divide by: 1 where nothing in the batch counts."""
    return jnp.where(weight == 0, 1, weight)


def choose_state(
    parts: Parts,
    state: TrainState,
    changed: TrainState,
    more: Metrics,
    *,
    loss: jax.Array,
    weight: jax.Array,
    finite: jax.Array,
) -> tuple[TrainState, Metrics, jax.Array]:
    """Region 4: `(state, metrics, kept)`, the changed state, or the old one if the step is skipped, with new counters.

    `loss` is the mean over the batch, whose `weight` is 0 if nothing in it counts: then there is no update, whatever
    the guard, and neither a bad step nor another loss scale. The metrics have `skip_reason`
    (`jaxdl.report.skips.Skip`).
    """
    empty, spike = weight == 0, parts.guard.is_spike(state.guard, loss)
    loss_fine = jnp.isfinite(loss) & ~spike
    # A gradient may also leave the range of float32 on its way to the update; then its norm does.
    finite = finite & jnp.isfinite(more["grad_norm"])
    kept = loss_fine & finite & ~empty
    overflow = jnp.bool_(False)
    if state.loss_scale:
        overflow = loss_fine & ~finite & (state.loss_scale["scale"] > (parts.precision.lowest_scale or 0))
        if not state.guard:
            overflow = ~kept
    elif not state.guard:
        kept = ~empty
    overflow = overflow & ~empty
    bad = ~kept & ~overflow & ~empty
    bits = {Skip.LOSS: ~jnp.isfinite(loss), Skip.SPIKE: spike, Skip.GRADIENT: ~finite & ~overflow}
    bits = {bit: on & ~empty for bit, on in bits.items()} | {Skip.OVERFLOW: overflow, Skip.EMPTY: empty}
    reason = sum((jnp.where(on, jnp.float32(bit), 0) for bit, on in bits.items()), jnp.float32(0))
    planned = {name: more[name] for name in ("learning_rate", "momentum") if name in more}
    more = jax.tree.map(lambda x: jnp.where(kept, x.astype(jnp.float32), jnp.nan), more) | planned
    changed = choose(kept, changed, state)
    guard = parts.guard.next_guard(state.guard, loss, kept=kept, bad=bad, empty=empty)
    more |= {name: guard[name].astype(jnp.float32) for name in ("bad_steps", "bad_in_row") if guard}
    scale = state.loss_scale
    if scale:
        # A bad loss says nothing about the loss scale: leave it unchanged.
        scale = choose(bad | empty, scale, parts.precision.next_loss_scale(scale, kept))
        more |= {name: scale[name].astype(jnp.float32) for name in ("skipped_steps",)} | {"loss_scale": scale["scale"]}
    return changed.replace(guard=guard, loss_scale=scale), more | {REASON: reason}, kept
