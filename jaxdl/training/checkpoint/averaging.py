"""The mean of several checkpoints of one run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.core.runs import Which, steps_to_average
from jaxdl.training.checkpoint.manager import Checkpoints, Restored
from jaxdl.training.state import TrainState


def restore_mean(checkpoints: Checkpoints, abstract: TrainState, number: int, which: Which) -> Restored:
    """The newest of `number` checkpoints, with the means of the parameters and batch statistics of all of them.

    They are the last ones that are kept, up to the one that `which` names. The parameters are those that each
    checkpoint would be evaluated with, its moving average where there is one (Vaswani et al. 2017, section 6.1, average
    the last 5 or 20). Summed in float32, one checkpoint after the other, so that no more than two are in memory. Raises
    ConfigError if there are fewer, and what `Checkpoints.restore` raises if one of them is damaged.
    """
    checkpoints.choice(which)  # Raises if there is none of this step.
    steps = steps_to_average(checkpoints.choice("newest"), which, number)
    add = jax.jit(lambda sums, new: jax.tree.map(_sum, sums, new), donate_argnums=0)
    restored, sums = None, None
    for step in steps:
        restored = checkpoints.restore(abstract, items=("model",), which=step)
        assert restored is not None, "there is a checkpoint of this step"
        new = (restored.state.eval_params, restored.state.model_state)
        sums = new if sums is None else add(sums, new)
        restored = dataclasses.replace(restored, state=abstract)  # Frees what has been added.
    assert restored is not None
    params, model_state = jax.tree.map(lambda x: x / number if _is_number(x) else x, sums)
    return dataclasses.replace(
        restored, state=abstract.replace(params=params, model_state=model_state, ema_params={}), step=steps[-1]
    )


def _sum(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x if _is_number(x) else x


def _is_number(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
