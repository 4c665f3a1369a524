"""What a network gives at the parameters that it had when the run began, for tasks that compare it with that.

Those parameters are kept in the train state, but only the trained ones: of a network with adapters these alone, so the
frozen network is there once. The pass is that of an evaluation, before the gradients of a step and apart from them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.models.network import Call
from jaxdl.parallel.mesh import BATCH_AXES
from jaxdl.parallel.sharding import Params
from jaxdl.training.state import ModelState
from jaxdl.training.step.gradients import unsplit
from jaxdl.training.step.network import apply_network
from jaxdl.training.step.parts import Batch, Parts
from jaxdl.training.step.pipeline import split


def with_reference(
    parts: Parts, params: Params, reference: Any, model_state: ModelState, batch: Batch, num_parts: int = 1
) -> Batch:
    """The batch with what the task needs of the network at its first parameters; itself if the task needs nothing.

    `reference` are the trained ones of those, the frozen ones are taken from `params`. The batch passes through the
    network in `num_parts` parts, one after the other, which takes no more memory than the micro-batches of a step.
    """
    task = parts.task
    if not task.needs_reference:
        return batch
    first = lax.stop_gradient(parts.trainable.merged(reference, params))

    def of_part(part: Batch) -> dict[str, jax.Array]:
        call = Call(train=False, materialize_logits=task.takes_arrays)
        outputs, _ = apply_network(parts, parts.layout, first, model_state, part, call)
        return task.reference(outputs, part)

    if num_parts == 1:
        return {**batch, **of_part(batch)}
    spec = PartitionSpec(None, BATCH_AXES)
    in_parts = {name: parts.layout.constrain(split(x, num_parts), spec) for name, x in batch.items()}
    return {**batch, **jax.tree.map(unsplit, lax.map(of_part, in_parts))}
