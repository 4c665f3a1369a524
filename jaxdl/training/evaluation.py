"""Evaluation: every example exactly once, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import Periodic, Several
from jaxdl.models.mode_check import Allowed
from jaxdl.models.network import Call
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.mesh import batch_sharding
from jaxdl.parallel.sharding import Params
from jaxdl.training.measures import Measure
from jaxdl.training.state import REFERENCE, ModelState, TrainState, replicated
from jaxdl.training.step import Batch, Parts, apply_network, num_stages, pipelined_sums, split, with_reference

EvalStep = Callable[[Params, ModelState, Batch], tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]]
"""(the task's sums over a batch, what it needs of each example: `Task.of_each`)."""
NormStep = Callable[[Params, ModelState, jax.Array, Batch], ModelState]

_MODEL = 2**31 + 1
"""Folded with the key of a batch this gives that of the network; below are those of the augmented rows."""
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
    """Before each evaluation, replace batch norm's running statistics by the means over this many training batches, at
    the parameters that are evaluated (Wu and Johnson, arXiv 2105.07576: precise batch norm). They are saved with them.
    Other state of a network stays as it is. None keeps the running ones, which lag behind when a run has few steps."""
    patience: int | None = pydantic.Field(default=None, ge=1)
    """End the run when so many evaluations in a row were no better than the best before them, by the metric that
    checkpoints are compared by (early stopping). Each evaluation that is the best so far is saved. None: train to the
    end."""
    measures: tuple[Measure, ...] = ()
    """What is measured besides: `lm_eval`, tasks of lm-evaluation-harness (needs jaxdl[lm-eval]), whose options are
    `--evaluation.measures.lm-eval.tasks` and so on; or kinds of your own."""
    allows: tuple[Allowed, ...] = ()
    """What a network of your own may do in evaluation though it looks like training: `random`, draw random numbers, as
    a sampled model does, the same ones for each batch; `state`, change what it keeps, which is then dropped. Otherwise
    such a network is refused, since it would be evaluated with dropout on, or by the statistics of the batch."""

    @pydantic.field_validator("measures", mode="before")
    @classmethod
    def _make_measures(cls, value: Any) -> Any:
        return value.build(Measure) if isinstance(value, Several) else value


def make_eval_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted function `(params, model_state, batch) -> (sums, of_each)` of the task.

    Sums are float32 scalars; of each example there is something in one process alone. The state is
    `TrainState.eval_state`.
    Padding in the batch is masked out by the task. Batch leaves are sharded as by `batch_sharding`.
    """
    shardings = parts.state_spec.shardings

    def eval_step(params: Params, model_state: ModelState, batch: Batch) -> Any:
        if num_stages(parts.layout) > 1:
            return pipelined_sums(parts, params, model_state, batch), {}
        batch = with_reference(parts, params, model_state.get(REFERENCE), model_state, batch)
        call = Call(train=False, materialize_logits=parts.task.takes_arrays)
        outputs, _ = apply_network(parts, parts.layout, params, model_state, batch, call)
        of_each = parts.task.of_each(outputs, batch) if jax.process_count() == 1 else {}
        return parts.task.sums(outputs, batch, train=False), of_each

    examples = batch_sharding(parts.layout.mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings.params, shardings.eval_state, examples),
        out_shardings=(replicated(parts.layout), examples),
    )


def make_norm_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted function `(params, model_state, key, batch) -> model_state`: the batch statistics of a training batch.

    The batch is augmented as in training, and it is one batch of all replicas. With micro-batches the statistics are
    the means of theirs, so it takes no more memory than a training step.
    """
    shardings, num_parts = parts.state_spec.shardings, parts.config.microbatches

    def norm_step(params: Params, model_state: ModelState, key: jax.Array, batch: Batch) -> ModelState:
        batch = parts.task.augmented(batch, key)

        def statistics(batch: Batch, key: jax.Array | None) -> ModelState:
            call = Call(train=True, key=key, reset_batch_stats=True)
            return apply_network(parts, parts.layout, params, model_state, batch, call)[1]

        model_key = jax.random.fold_in(key, _MODEL) if parts.network.is_random else None
        if num_parts == 1:
            return statistics(batch, model_key)
        keys = jax.random.split(model_key, num_parts) if model_key is not None else None
        batches = {name: split(x, num_parts) for name, x in batch.items()}
        every = jax.lax.map(lambda part: statistics(*part), (batches, keys))
        return jax.tree.map(lambda x: x.mean(axis=0), every)

    return jax.jit(
        norm_step,
        in_shardings=(
            shardings.params,
            shardings.model_state,
            replicated(parts.layout),
            batch_sharding(parts.layout.mesh),
        ),
        out_shardings=shardings.model_state,
    )


_add = jax.jit(lambda total, new: jax.tree.map(jnp.add, total, new))
_divide = jax.jit(lambda total, count: jax.tree.map(lambda x: x / count, total))


def estimate_norms(
    norm_step: NormStep,
    state: TrainState,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> TrainState:
    """The state with the means of the batch statistics over `batches`, at the parameters to evaluate.

    One batch at a time; each is augmented with its own key, derived from the state's step. `poll` is that of
    `evaluate`.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    total, count = None, 0
    for batch in batches:
        if total is None:
            wait_for_all()  # As before the first training batch: Gloo waits for less long than reading may take.
        poll()
        new = norm_step(state.eval_params, state.model_state, jax.random.fold_in(key, count), batch)
        total, count = new if total is None else _add(total, new), count + 1
        jax.block_until_ready(total)
    return state.replace(model_state=_divide(total, jnp.float32(count)))


def evaluate(
    parts: Parts,
    eval_step: EvalStep,
    params: Params,
    model_state: ModelState,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The task's metrics over all batches, each example counted once."""
    sums, of_each = total_sums(eval_step, params, model_state, batches, poll=poll)
    return parts.task.metrics(sums | of_each, parts.data_spec)


def total_sums(
    eval_step: EvalStep,
    params: Params,
    model_state: ModelState,
    batches: Iterable[Batch],
    *,
    poll: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the task's sums over all batches, floats or float64 arrays; what it needs of each example, of all batches).

    The sums are fetched once, at the end; the rest leaves the devices batch by batch. `poll` is called before each
    batch; what it raises ends the evaluation.
    """
    sums, of_each, most = [], [], max_in_flight()
    for batch in batches:
        if len(sums) >= most:
            jax.block_until_ready(sums[-most])
            of_each[-most] = jax.device_get(of_each[-most])
        if not sums:
            wait_for_all()
        poll()
        new_sums, new_of_each = eval_step(params, model_state, batch)
        sums.append(new_sums)
        of_each.append(new_of_each)
    fetched, of_each = jax.device_get((sums, of_each))
    totals = {name: np.sum([batch[name] for batch in fetched], axis=0, dtype=np.float64) for name in fetched[0]}
    joined = {name: np.concatenate([values[name] for values in of_each]) for name in of_each[0]}
    return {name: x if np.ndim(x) else float(x) for name, x in totals.items()}, joined
