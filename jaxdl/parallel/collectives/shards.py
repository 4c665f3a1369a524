"""Products and sums over the devices that a batch is split over, in float32 where XLA would round to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxdl.parallel.collectives.primitive import region_axes


def sum_of_shards(
    function: Callable[..., jax.Array], axes: tuple[str, ...], *batches: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """The sum over the devices of `axes` of `function(*their shards of the batches)`: float32, whole on each device.

    `batches` are split along their first dimension. The sum is float32 whatever `function` returns: XLA's partitioner
    would move it before a conversion that follows. `mesh` is None inside of a `shard_map`, whose mesh it then is;
    axes that are not in `axes` stay as they are, manual or automatic.
    """

    def one_device(*shards: jax.Array) -> jax.Array:
        return lax.psum(function(*shards).astype(jnp.float32), axes)

    summed = jax.shard_map(
        one_device,
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
        axis_names=region_axes(axes, mesh),
    )
    return summed(*batches)


def float32_product(x: jax.Array, y: jax.Array, dims: Any, precision: lax.Precision | None = None) -> jax.Array:
    """`lax.dot_general` of operands of one dtype with a float32 result."""

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    def widened(x: jax.Array, y: jax.Array) -> jax.Array:
        # XLA on CPUs fails at run time on some products of 16-bit matrices with a float32 result (jaxlib 0.10).
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return lax.platform_dependent(x, y, cpu=widened, default=product)


_ONES = 8
"""Columns of ones in a product that sums rows: XLA turns a product with fewer into the reduction that it replaces."""


def sum_of_rows(x: jax.Array, num_features: int = 1) -> jax.Array:
    """The float32 sum of `x` [rows..., features...] over its rows; the last `num_features` dimensions are features.

    XLA's reduction over rows on a GPU takes several times as long as reading `x`; the product of 16-bit numbers with
    ones does not, and sums in float32 too.
    """
    rows = tuple(range(x.ndim - num_features))
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return _reduce_rows(x, rows)
    return lax.platform_dependent(x, cuda=lambda x: _rows_by_ones(x, rows), default=lambda x: _reduce_rows(x, rows))


def _reduce_rows(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    return jnp.sum(x, axis=rows, dtype=jnp.float32)


def _rows_by_ones(x: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    ones = jnp.ones((*x.shape[: len(rows)], _ONES), x.dtype)
    # The barrier keeps XLA from computing `x` inside the product, for which it searches tiles for minutes, and from
    # joining all that is multiplied by ones in one array.
    ones, x = lax.optimization_barrier((ones, x))
    return float32_product(ones, x, ((rows, rows), ((), ())))[0]
