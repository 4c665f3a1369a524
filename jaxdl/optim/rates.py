"""The learning rate and the momentum of an update. The step computes them once and hands them to the optimizer.

They are an extra argument, `rates`, of an optimizer's `update`. The updates are counted in one place, by the state of
`scale_by_learning_rate`; a step that is skipped keeps the whole optimizer state, and with it the count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Rates(NamedTuple):
    """What an update takes from the schedule: float32 scalars."""

    learning_rate: jax.Array
    """The learning rate, peak included."""
    momentum: jax.Array | None = None
    """The momentum, where the optimizer changes it over the run."""


class ChangingMomentum(NamedTuple):
    """State of `changing_momentum`."""

    count: jax.Array
    """Updates made so far, int32. Nothing reads it; checkpoints have it."""
    trace: Any
    """The moving sum, shaped like the parameters, float32."""


def scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates by -`rates.learning_rate` and counts them; every optimizer has it once."""

    def init(params: Any) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(jnp.int32(0))

    def update(updates: Any, state: Any, params: Any = None, *, rates: Rates | None = None, **_: Any) -> Any:
        del params
        assert rates is not None, "the update needs its rates"
        scaled = jax.tree.map(lambda u: -rates.learning_rate * u, updates)
        return scaled, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """How many updates an optimizer with this state has made, int32: the count of its `scale_by_learning_rate`."""

    def counts(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    (counter,) = filter(counts, jax.tree.leaves(opt_state, is_leaf=counts))
    return counter.count


def changing_momentum(nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """As `optax.trace`, with the momentum of each step: m = rates.momentum m + u.

    The update is m, or with Nesterov's momentum u + rates.momentum m.
    """

    def init(params: Any) -> ChangingMomentum:
        return ChangingMomentum(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None, *, rates: Rates | None = None, **_: Any) -> Any:
        del params
        assert rates is not None and rates.momentum is not None, "the update needs its momentum"  # noqa: PT018
        strength = rates.momentum
        trace = jax.tree.map(lambda u, m: u + strength * m, updates, state.trace)
        new = jax.tree.map(lambda u, m: u + strength * m, updates, trace) if nesterov else trace
        return new, ChangingMomentum(state.count + 1, trace)

    return optax.GradientTransformationExtraArgs(init, update)
