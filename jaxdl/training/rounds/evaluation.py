"""Evaluation of replicas that have parameters of their own."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.models.network import Call
from jaxdl.parallel.mesh import INNER_BATCH_AXES, Axis, batch_sharding
from jaxdl.parallel.sharding import Layout
from jaxdl.training.state import replicated
from jaxdl.training.step import Batch, Parts, apply_network, one_replica_params, own_param_specs


def make_own_eval_step(parts: Parts) -> jax.stages.Wrapped:
    """The jitted function `(params, model_state, batch) -> (sums, {})` of the task.

    Trained parameters are `[replica, ...]`.

    Each replica evaluates its own rows of the batch with its own parameters. As `make_eval_step` of
    `jaxdl.training.evaluation` otherwise.
    """
    replica, mesh = Axis.REPLICA.value, parts.layout.mesh
    layout = Layout(parts.layout.config, mesh, manual=frozenset({replica}), apart=True)
    shardings = parts.state_spec.shardings
    params_sharding = parts.trainable.merged(shardings.own.params, shardings.params)

    def one_replica(params: Any, model_state: Any, batch: Batch) -> dict[str, jax.Array]:
        params, model_state = one_replica_params(parts, params), jax.tree.map(lambda x: x[0], model_state)
        batch = {name: lax.with_sharding_constraint(x, PartitionSpec(INNER_BATCH_AXES)) for name, x in batch.items()}
        call = Call(train=False, materialize_logits=parts.task.takes_arrays)
        outputs, _ = apply_network(parts, layout, params, model_state, batch, call)
        return jax.tree.map(lambda x: lax.psum(x, replica), parts.task.sums(outputs, batch, train=False))

    def own_eval_step(params: Any, model_state: Any, batch: Batch) -> Any:
        each = PartitionSpec(replica)
        sums = jax.shard_map(
            one_replica,
            mesh=mesh,
            in_specs=(own_param_specs(parts), each, each),
            out_specs=PartitionSpec(),
            axis_names={replica},
            check_vma=False,
        )(params, model_state, dict(batch))
        return sums, {}

    return jax.jit(
        own_eval_step,
        in_shardings=(params_sharding, shardings.own.model_state, batch_sharding(mesh)),
        out_shardings=replicated(parts.layout),
    )
