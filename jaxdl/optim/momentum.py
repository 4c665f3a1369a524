"""Momentum whose strength changes over the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Momentum = Callable[[jax.typing.ArrayLike], jax.Array]
"""The momentum of a step (0 = first update); can be traced."""


class ChangingMomentum(NamedTuple):
    """State of `changing_momentum`."""

    count: jax.Array
    """Updates made so far, int32."""
    trace: Any
    """The moving sum, shaped like the parameters, float32."""


def cycled(momentum: float, at_peak: float, cycle: Callable[[jax.typing.ArrayLike], jax.Array]) -> Momentum:
    """`momentum` where `cycle` is 0, `at_peak` where it is 1, a straight line between; see `Schedule.cycle`."""
    return lambda step: momentum + (at_peak - momentum) * cycle(step)


def changing_momentum(momentum: Momentum, nesterov: bool) -> optax.GradientTransformation:
    """As `optax.trace`, with a momentum that depends on the step: m = momentum(step) m + u.

    The update is m, or with Nesterov's momentum u + momentum(step) m.
    """

    def init(params: Any) -> ChangingMomentum:
        return ChangingMomentum(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, ChangingMomentum]:
        del params
        strength = momentum(state.count)
        trace = jax.tree.map(lambda u, m: u + strength * m, updates, state.trace)
        new = jax.tree.map(lambda u, m: u + strength * m, updates, trace) if nesterov else trace
        return new, ChangingMomentum(state.count + 1, trace)

    return optax.GradientTransformation(init, update)
