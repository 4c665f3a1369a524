"""Sums of squares that neither overflow nor underflow where their root is a float32 number."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGE, SMALL = np.float32(2.0**64), np.float32(2.0**-36)
"""Scaled by the first, numbers from 2^-126 to 1 have squares in range; by the second those from 2^-27 to 2^99."""


def square_sums(x: jax.Array, layer_dims: tuple[int, ...], scale: np.float32) -> jax.Array:
    """`[layers]`, float32: the sum of squares of each layer of `x` times `scale`; the dimensions `layer_dims` count
    layers."""
    squares = jnp.square(x.astype(jnp.float32) * scale)
    return squares.sum(axis=tuple(dim for dim in range(x.ndim) if dim not in layer_dims)).reshape(-1)


def are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Whether all of each array is finite, booleans [arrays].

    On a GPU it is read off the sums of squares that the norm of the gradients needs too, so that one pass serves both;
    then a number above 2^99, whose norm is infinite, is not finite either.
    """

    def each(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays])

    def by_squares(arrays: list[jax.Array]) -> jax.Array:
        # All sums in one array: a kernel for each scalar would take longer than the sums of small arrays do.
        return jnp.isfinite(jnp.concatenate([squares(x) for x in arrays]))

    def squares(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return square_sums(x, (), SMALL)
        return jnp.where(jnp.all(jnp.isfinite(x), keepdims=True).reshape(1), jnp.float32(0), jnp.inf)

    return lax.platform_dependent(list(arrays), cpu=each, default=by_squares)
