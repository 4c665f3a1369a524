"""Optimizers that train at one point and evaluate at another: the schedule-free ones of optax.

Their averaged parameters take the place of the moving average in the train state, so that evaluations, prediction and
everything else that reads `TrainState.eval_params` use them.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax.contrib import ScheduleFreeState


def keeps_average(opt_state: optax.OptState) -> bool:
    """Whether an optimizer with this state (or its shapes) has averaged parameters to evaluate."""
    return any(map(_is_average, jax.tree.leaves(opt_state, is_leaf=_is_average)))


def average_params(opt_state: optax.OptState, params: Any) -> Any:
    """The parameters to evaluate, of an optimizer for which `keeps_average` holds; `params` are those it updated.

    x = (y - (1 - b1) z) / b1, as `optax.contrib.schedule_free_eval_params` has it (Defazio et al., arXiv 2405.15682),
    for the parameters that the schedule-free optimizer has; the others, of `optax.multi_transform`, are unchanged.
    """
    for state in filter(_is_average, jax.tree.leaves(opt_state, is_leaf=_is_average)):

        def evaluated(z: Any, y: Any, b1: Any = state.b1) -> Any:
            return y if _is_masked(z) else (y - (1 - b1) * z) / b1

        params = jax.tree.map(evaluated, state.z, params, is_leaf=_is_masked)
    return params


def _is_average(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
