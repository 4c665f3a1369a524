"""Evaluation: every example exactly once, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import pydantic

from jaxdl.config import Config
from jaxdl.mesh import batch_sharding
from jaxdl.state import replicated
from jaxdl.step import Batch, Parts, apply_network

_MAX_IN_FLIGHT = 4
"""Batches handed to the devices before the first of them is awaited: keeps them busy, and their memory free."""


def max_in_flight(most: int = _MAX_IN_FLIGHT) -> int:
    """How many computations may be under way at once: `most`, but one on CPUs.

    XLA's virtual CPU devices share their threads, so the collectives of two computations can wait for each other.
    """
    return 1 if jax.default_backend() == "cpu" else most


class EvaluationConfig(Config):
    """When the held-out data is evaluated, and how. It always is at the end of a run."""

    every_epochs: float | None = pydantic.Field(default=None, gt=0)
    """Evaluate every this many epochs; every epoch when neither this nor `every_steps` is set."""
    every_steps: int | None = pydantic.Field(default=None, ge=1)
    """Evaluate every this many steps."""
    batch_size: int | None = pydantic.Field(default=None, ge=1)
    """Global batch size of the evaluation; None takes that of the training."""

    @pydantic.model_validator(mode="after")
    def _one_period(self) -> EvaluationConfig:
        if self.every_steps is not None and self.every_epochs is not None:
            raise ValueError("set every_steps or every_epochs, not both.")
        return self

    def period_steps(self, steps_per_epoch: float) -> float:
        """Steps between two evaluations; a fraction where an epoch is not a whole number of steps."""
        return self.every_steps or (self.every_epochs or 1.0) * steps_per_epoch


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
