"""What lookups and updates of embedding tables send: predicted, and counted in the compiled program."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.compiler.collectives import usual_collectives
from jaxdl.parallel.embedding import ROWS, EmbeddingConfig, Tables
from jaxdl.parallel.embedding.traffic import axis_bytes, messages, sent_bytes
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.planner.tables import Workload


def predicted_bytes(work: Workload, config: EmbeddingConfig, axis: str = Axis.REPLICA.value) -> float:
    """Bytes that one device sends along a mesh axis in a step: to other nodes, or inside its own."""
    sent_messages = [
        message
        for buffer in work.buffers(config)
        for message in messages(buffer, work.local_batch, config.forward_wire, config.backward_wire)
    ]
    return sent_bytes(sent_messages, work.sizes, axis)


def sent_along_axes(work: Workload, config: EmbeddingConfig) -> dict[str, tuple[float, float]]:
    """Mesh axis -> (`predicted_bytes` along it, the bytes that are counted in the compiled program)."""
    devices = jax.devices()[: math.prod(work.sizes.values())]
    mesh = Mesh(np.array(devices).reshape(tuple(work.sizes.values())), tuple(work.sizes))
    jagged = tuple(work.jagged[name] for name in work.num_ids) if work.jagged else ()
    tables = Tables(work.tables, work.num_ids, config, mesh, jagged)
    text = compiled_step(tables, work.batch_size, sum(work.num_ids.values()))
    counted = usual_collectives(text, work.sizes)
    return {
        axis: (
            predicted_bytes(work, config, axis),
            sum(axis_bytes(*collective, work.sizes, axis) for collective in counted),
        )
        for axis in work.sizes
    }


def compiled_step(tables: Tables, batch_size: int, num_ids: int) -> str:
    """The HLO of lookups and updates, compiled; as pooled vectors' gradients it takes the vectors themselves.

    Jagged ids are in the first bucket, others in `num_ids` columns.
    """
    shapes = [(batch_size, num_ids)]
    if buckets := tables.buckets(batch_size):
        shapes = [(batch_size, sum(buckets[0])), (batch_size, len(buckets[0]))]

    def step(state: Any, *ids: jax.Array) -> Any:
        key = jax.random.key(0)
        located = tables.locate(*ids)
        vectors = tables.lookup({name: arrays[ROWS] for name, arrays in state.items()}, located, key)
        gradients, square = tables.gradients(located, vectors, key)
        numbers = {"factor": jnp.float32(1), "learning_rate": jnp.float32(0.1), "count": jnp.int32(1)}
        return tables.update(state, gradients, kept=jnp.isfinite(square), **numbers)

    def struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    everywhere = NamedSharding(tables.mesh, PartitionSpec(tuple(tables.mesh.axis_names)))
    ids = [jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere) for shape in shapes]
    state = jax.tree.map(struct, tables.shapes, tables.shardings())
    return (
        jax.jit(step, donate_argnums=0, out_shardings=tables.shardings()).lower(state, *ids).compile().as_text() or ""
    )
