"""The learning rate and the momentum of an update. The step computes them once and hands them to the optimizer.

They are an extra argument, `rates`, of an optimizer's `update`. The updates are counted in one place, by the state of
`scale_by_learning_rate` or `follow_rates`; a step that is skipped keeps the whole optimizer state, and with it the
count.
"""

from __future__ import annotations

from collections.abc import Callable
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


class FollowedState(NamedTuple):
    """State of `follow_rates`."""

    count: jax.Array
    """Updates made so far, int32."""
    inner: Any
    """The state of the transformation."""


def follow_rates(
    make: Callable[[Any], optax.GradientTransformation], peak: float
) -> optax.GradientTransformationExtraArgs:
    """The transformation `make(learning_rate)`, at the learning rate of each update; it also counts the updates.

    It is made again in each trace of an update, with `rates.learning_rate`, so it is right wherever the transformation
    uses the rate. (`optax.inject_hyperparams` does the same.) Its state is initialized at the `peak`.
    """

    def init(params: Any) -> FollowedState:
        return FollowedState(jnp.int32(0), make(peak).init(params))

    def update(updates: Any, state: Any, params: Any = None, *, rates: Rates | None = None, **extra: Any) -> Any:
        assert rates is not None, "the update needs its rates"
        inner = optax.with_extra_args_support(make(rates.learning_rate))
        updates, inner_state = inner.update(updates, state.inner, params, rates=rates, **extra)
        return updates, FollowedState(jnp.asarray(optax.safe_increment(state.count)), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_factors(
    optimizer: optax.GradientTransformationExtraArgs, factors: Any
) -> optax.GradientTransformationExtraArgs:
    """The optimizer with its updates times `factors`, a number for each parameter; the state is the optimizer's own."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = optimizer.update(updates, state, params, **extra)
        return jax.tree.map(lambda factor, u: u if factor == 1 else factor * u, factors, updates), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def num_updates(opt_state: optax.OptState) -> jax.Array:
    """How many updates an optimizer with this state has made, int32: the one count that `num_counts` finds."""
    (counter,) = _counters(opt_state)
    return counter.count


def num_counts(opt_state: optax.OptState) -> int:
    """How many transformations count the updates in an optimizer with this state."""
    return len(_counters(opt_state))


def _counters(opt_state: optax.OptState) -> list[Any]:
    """The states of `scale_by_learning_rate`, and of `follow_rates`, whose inner state has other counts."""

    def counts(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState | FollowedState)

    return list(filter(counts, jax.tree.leaves(opt_state, is_leaf=counts)))


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
