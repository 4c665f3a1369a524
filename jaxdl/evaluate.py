"""Evaluation: every example exactly once, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.config import Periodic
from jaxdl.mesh import batch_sharding
from jaxdl.state import TrainState, replicated
from jaxdl.step import Batch, Parts, apply_network

_MAX_IN_FLIGHT = 4
"""Batches handed to the devices before the first of them is awaited: keeps them busy, and their memory free."""


def max_in_flight(most: int = _MAX_IN_FLIGHT) -> int:
    """How many computations may be under way at once: `most`, but one on CPUs.

    XLA's virtual CPU devices share their threads, so the collectives of two computations can wait for each other.
    """
    return 1 if jax.default_backend() == "cpu" else most


class EvaluationConfig(Periodic):
    """When the held-out data is evaluated, and how. It always is at the end of a run."""

    batch_size: int | None = pydantic.Field(default=None, ge=1)
    """Global batch size of the evaluation; None takes that of the training."""
    norm_batches: int | None = pydantic.Field(default=None, ge=1)
    """Before each evaluation, replace batch norm's running statistics by the means over so many training batches, at
    the parameters that are evaluated (Wu and Johnson, arXiv 2105.07576: precise batch norm). They are saved with them.
    None keeps the running ones, which lag behind when a run has few steps."""


def make_eval_step(parts: Parts) -> Any:
    """The jitted function `(params, model_state, batch) -> sums` of the task, float32 scalars.

    Padding in the batch is masked out by the task. Batch leaves are sharded over `(replica, fsdp)`.
    """
    shardings = parts.state_spec.shardings

    def eval_step(params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        outputs, _ = apply_network(parts, parts.layout, params, model_state, batch, train=False)
        return parts.task.sums(outputs, batch, train=False)

    return jax.jit(
        eval_step,
        in_shardings=(shardings.params, shardings.model_state, batch_sharding(parts.layout.mesh)),
        out_shardings=replicated(parts.layout),
    )


def make_norm_step(parts: Parts) -> Any:
    """The jitted function `(params, model_state, key, batch) -> model_state`: the batch statistics of a training batch.

    The batch is augmented as in training, and it is a single one, not one for each replica.
    """
    shardings = parts.state_spec.shardings

    def norm_step(params: Any, model_state: Any, key: jax.Array, batch: Batch) -> Any:
        batch = parts.task.augmented(batch, jax.random.wrap_key_data(key))
        return apply_network(parts, parts.layout, params, model_state, batch, train=True, forget=True)[1]

    return jax.jit(
        norm_step,
        in_shardings=(shardings.params, shardings.model_state, shardings.key, batch_sharding(parts.layout.mesh)),
        out_shardings=shardings.model_state,
    )


def estimate_norms(
    norm_step: Callable[..., Any],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> TrainState:
    """The state with the means of the batch statistics over `batches`, at the parameters to evaluate.

    One batch at a time; `poll` is that of `evaluate`.
    """
    add = jax.jit(lambda total, new: jax.tree.map(jnp.add, total, new))
    total, count = None, 0
    for batch in batches:
        poll()
        new = norm_step(state.eval_params, state.model_state, state.key, batch)
        total, count = new if total is None else add(total, new), count + 1
        jax.block_until_ready(total)
    return state.replace(model_state=jax.jit(lambda total: jax.tree.map(lambda x: x / count, total))(total))


def evaluate(
    parts: Parts,
    eval_step: Callable[..., Mapping[str, jax.Array]],
    params: Any,
    model_state: Any,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The task's metrics over all batches. Sums are fetched once, at the end, and added in float64.

    `poll` is called before each batch; what it raises ends the evaluation.
    """
    sums, most = [], max_in_flight()
    for batch in batches:
        if len(sums) >= most:
            jax.block_until_ready(sums[-most])
        poll()
        sums.append(eval_step(params, model_state, batch))
    fetched = jax.device_get(sums)
    totals = {name: float(np.sum([one[name] for one in fetched], dtype=np.float64)) for name in fetched[0]}
    return parts.task.metrics(totals, parts.data_spec)
