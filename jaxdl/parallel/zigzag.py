"""The order in which devices that split the length of texts store their tokens.

A text is cut into two chunks for each device, and device r of P has chunks r and 2P - 1 - r: one early, one late. So
each computes as much of causal attention as any other. Attention alone needs to know; all else goes token by token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdl.parallel.mesh import LENGTH_AXES, ways
from jaxdl.parallel.sharding import UNNAMED, Layout, constrain, current_layout, entry_names


@dataclass(frozen=True)
class Zigzag:
    """Texts over `num` devices, in arrays whose dimension `dim` counts the tokens of a text, a multiple of 2 `num`."""

    num: int

    def stored(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """`x`, in the order of the text, in the order of storage."""
        chunks = self._cut(x, dim, (2 * self.num,))
        early, late = jnp.split(chunks, 2, axis=dim)
        return jnp.stack([early, jnp.flip(late, dim)], axis=dim + 1).reshape(x.shape)

    def stored_whole(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """`stored` of what each device has of whole texts, [batch, length, ...] or [length, ...], and keeps of them.

        Else XLA would first give each device its part of the text, and then send it on to where it is stored.
        """
        names = tuple("batch" if place < dim else UNNAMED for place in range(x.ndim))
        return constrain(self.stored(constrain(x, *names), dim), *names)

    def natural(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """`x`, in the order of storage, in the order of the text."""
        early, late = jnp.split(self._cut(x, dim, (self.num, 2)), 2, axis=dim + 1)
        return jnp.concatenate([early, jnp.flip(late, dim)], axis=dim).reshape(x.shape)

    def _cut(self, x: jax.Array, dim: int, chunks: tuple[int, ...]) -> jax.Array:
        return x.reshape(*x.shape[:dim], *chunks, -1, *x.shape[dim + 1 :])


def split_axes(layout: Layout | None, length: int) -> tuple[str, ...]:
    """The automatic mesh axes over which texts of this length are split, each with several devices."""
    if layout is None:
        return ()
    (entry,) = layout.activation_spec(("length",), (length,))
    return tuple(axis for axis in entry_names(entry) if layout.mesh.shape[axis] > 1)


def current_order(length: int) -> Zigzag | None:
    """The order of texts of this length in the surrounding layout; None: that of the text itself.

    That is also where the length cannot be cut into two chunks for each device.
    """
    layout = current_layout()
    axes = split_axes(layout, length)
    if layout is None or not axes:
        return None
    num = ways(layout.mesh.shape, axes)
    return Zigzag(num) if length % (2 * num) == 0 else None


def num_length_shards(length: int) -> int:
    """Over how many devices texts of this length are split; 1 without a layout."""
    layout = current_layout()
    return 1 if layout is None else ways(layout.mesh.shape, split_axes(layout, length))


def length_unit(sizes: Mapping[str, int]) -> int:
    """What the length of texts has to be a multiple of on a mesh of these sizes; 1 for any."""
    num = ways(sizes, LENGTH_AXES)
    return 2 * num if num > 1 else 1
