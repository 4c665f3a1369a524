"""Vectors of tokens, looked up in a table that may be sharded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxdl.parallel.mesh import ways
from jaxdl.parallel.sharding import Layout, current_layout, entry_names


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _lookup(
    table: jax.Array, tokens: jax.Array, like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None
) -> jax.Array:
    table = table.astype(dtype)
    if layout is not None:
        # The rows are read from a whole table: XLA aborts when it partitions a lookup in a table split by rows inside a
        # partly manual shard_map (jaxlib 0.10).
        table = layout.constrain(table, PartitionSpec(None, None))
    return jnp.take(table, tokens, axis=0)


def _lookup_forward(
    table: jax.Array, tokens: jax.Array, like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None
) -> tuple[jax.Array, jax.Array]:
    return _lookup(table, tokens, like, dtype, layout), tokens


def _lookup_backward(
    like: jax.ShapeDtypeStruct, dtype: DTypeLike, layout: Layout | None, tokens: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None]:
    # The plain transpose is one scatter-add of all examples, for which XLA gathers the cotangent of the whole batch,
    # [batch, length, embed]. With dimensions for the data shards each device adds up its own tokens, and what is sent
    # is the gradient of the table.
    spec = layout.activation_spec(("batch", "length"), tokens.shape) if layout else PartitionSpec(None, None)
    rows, columns = (ways(layout.mesh.shape, entry_names(entry)) if layout else 1 for entry in spec)

    def shards(x: jax.Array) -> jax.Array:
        """[shard of the batch, shard of the length, tokens, ...]."""
        cut = x.reshape(rows, tokens.shape[0] // rows, columns, tokens.shape[1] // columns, *x.shape[2:])
        return jnp.swapaxes(cut, 1, 2).reshape(rows, columns, -1, *x.shape[2:])

    def split(x: jax.Array) -> jax.Array:
        return layout.constrain(x, PartitionSpec(*spec, None, None)) if layout else x

    def shard_sum(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.zeros(like.shape, jnp.float32).at[tokens].add(rows)

    sums = split(jax.vmap(jax.vmap(shard_sum))(shards(tokens), split(shards(cotangent.astype(jnp.float32)))))
    return sums.sum(axis=(0, 1)).astype(like.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def lookup(table: jax.Array, tokens: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """The rows of `table`, [vocab, embed], at `tokens`, int [batch, length]: [batch, length, embed].

    The result is in `dtype` (None takes the table's), the gradient in the table's.

    Its gradient is summed in float32, first on each device over its own tokens, then over the devices.
    """
    like = jax.ShapeDtypeStruct(table.shape, table.dtype)
    return _lookup(table, tokens, like, table.dtype if dtype is None else dtype, current_layout())
