"""Dropout (Srivastava et al. 2014) whose masks are the same on every mesh.

A mask is a function of the step's key, the row's number in the global batch, the layer and the place in the row. Which
device computes it makes no difference: so losses agree across meshes, and remat computes the same masks again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdl.parallel import sharding
from jaxdl.parallel.zigzag import Zigzag


class RowKeys(nnx.RngState):
    """Random keys of a network, one for each row of its inputs, [batch]; `Network.call` sets them."""

    def __init__(self) -> None:
        super().__init__(jax.random.key(0), tag="rows")


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """A key for each row, [batch], from its number in the global batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold(keys: jax.Array | None, number: jax.Array | int) -> jax.Array | None:
    """Other keys, for the layer or the place of this number; None stays None."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def kept(keys: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """Which of the numbers of `shape` [batch, ...] stay, bool; each does with probability 1 - rate."""
    # In steps of 2^-16, of half as many random bits as floats take: on CPUs they cost a tenth of a step.
    drawn = jax.vmap(lambda key: jax.random.bits(key, shape[1:], jnp.uint16))(keys)
    return drawn >= round(rate * 2**16)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, order: Zigzag | None = None) -> jax.Array:
    """`x` [batch, length, embed] with numbers replaced by 0 at this rate, and the others divided by 1 - rate.

    `keys` [batch] are random; None, or a rate of 0, gives `x` itself. `order` is that of the tokens.
    """
    if keys is None or not rate:
        return x
    mask = kept(keys, rate, x.shape)
    # Of a text that is split each device draws all, and takes its part.
    mask = sharding.constrain(mask if order is None else order.stored_whole(mask), "batch", "length", "embed")
    return jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)
