"""Causal attention with a window, of texts whose length is split over devices: each gathers all keys and values.

A chunk of queries sees the keys of its own tokens and of a window before it. cuDNN's kernel masks from the first query
and the first key on, so the queries of a chunk stand behind as many empty ones as there are keys before them, and the
block is the attention of a stretch of text to itself. With a window of w tokens and chunks of c, a chunk computes w + c
queries where c count.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.attention_blocks import NEVER, Kernel, Part
from jaxdl.parallel.collectives.packed_attention import Packed, packed_attention
from jaxdl.parallel.collectives.ring_attention import Gradients
from jaxdl.parallel.zigzag import Zigzag


@dataclass(frozen=True)
class Gathered:
    """Attention on one device of a `shard_map` that is manual over `axes`, of `num` devices together.

    `window` is that of `Kernel.forward`; without one each chunk computes queries for the whole text.
    """

    axes: tuple[str, ...]
    num: int
    kernel: Kernel
    window: int | None

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> Part:
        """As `jaxdl.parallel.collectives.ring_attention.Ring.forward`."""
        keys, values = self._whole(key), self._whole(value)
        parts = []
        for chunk, mine in zip(self._stretches(query), jnp.split(query, 2, axis=1), strict=True):
            stretch = chunk.placed(mine), chunk.of(keys), chunk.of(values)
            if segments is None:
                part = self.kernel.forward(*stretch, causal=True, window=self.window)
                parts.append(Part(chunk.back(part.result), chunk.back(part.log_sum, 2)))
            else:
                result = chunk.back(packed_attention(*stretch, (chunk.of(segments),) * 2, self._packed))
                # Its backward pass computes the sums again.
                parts.append(Part(result, jnp.zeros((*result.shape[:3:2], result.shape[1]), jnp.float32)))
        return Part(*(jnp.concatenate(pair, dim) for *pair, dim in zip(*parts, (1, 2), strict=True)))

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None,
        whole: Part,
        cotangent: jax.Array,
    ) -> Gradients:
        """As `jaxdl.parallel.collectives.ring_attention.Ring.backward`."""
        keys, values = self._whole(key), self._whole(value)
        query_gradients, of_keys, of_values = [], jnp.float32(0), jnp.float32(0)
        halves = [jnp.split(x, 2, axis=dim) for x, dim in zip((query, *whole, cotangent), (1, 1, 2, 1), strict=True)]
        for chunk, mine, result, log_sum, upper in zip(self._stretches(query), *halves, strict=True):
            stretch, upper = (chunk.placed(mine), chunk.of(keys), chunk.of(values)), chunk.placed(upper)
            if segments is None:
                part = Part(chunk.placed(result), chunk.placed(log_sum, 2, NEVER))
                grads = self.kernel.backward(*stretch, part, upper, causal=True, window=self.window)
            else:
                attend = functools.partial(packed_attention, segments=(chunk.of(segments),) * 2, how=self._packed)
                grads = jax.vjp(attend, *stretch)[1](upper)
            query_gradients.append(chunk.back(grads[0]).astype(query.dtype))
            of_keys, of_values = of_keys + chunk.added(grads[1]), of_values + chunk.added(grads[2])
        own = (
            lax.psum_scatter(Zigzag(self.num).stored(x), self.axes, scatter_dimension=1, tiled=True).astype(like.dtype)
            for x, like in ((of_keys, key), (of_values, value))
        )
        return jnp.concatenate(query_gradients, axis=1), *own

    @property
    def _packed(self) -> Packed:
        return Packed(causal=True, window=self.window, implementation=self.kernel.implementation)

    def _whole(self, x: jax.Array) -> jax.Array:
        """Keys or values of all devices, in the order of the text."""
        return Zigzag(self.num).natural(lax.all_gather(x, self.axes, axis=1, tiled=True))

    def _stretches(self, query: jax.Array) -> list[_Stretch]:
        """Those of the device's two chunks."""
        size, rank = query.shape[1] // 2, lax.axis_index(self.axes)
        length = 2 * self.num * size
        before = length - size
        if self.window is not None:  # An even number of tokens, which kernels prefer.
            before = min(before, -(-(self.window - 1) // 64) * 64)
        starts = (rank * size, (2 * self.num - 1 - rank) * size)
        return [_Stretch(start, size, before, length) for start in starts]


@dataclass(frozen=True)
class _Stretch:
    """A chunk of `size` tokens from `start` on, in texts of `length` tokens, with `before` tokens before it.

    Where there are fewer it has others behind it, which the chunk does not see.
    """

    start: jax.Array
    size: int
    before: int
    length: int

    @property
    def _first(self) -> jax.Array:
        return jnp.maximum(self.start - self.before, 0)

    def of(self, x: jax.Array) -> jax.Array:
        """The stretch of whole texts [batch, length, ...]."""
        return lax.dynamic_slice_in_dim(x, self._first, self.before + self.size, axis=1)

    def placed(self, x: jax.Array, dim: int = 1, fill: float = 0.0) -> jax.Array:
        """What the chunk has for each token at its place in the stretch, in which all else is `fill`."""
        shape = (*x.shape[:dim], self.before + self.size, *x.shape[dim + 1 :])
        empty = jnp.full_like(x, fill, shape=shape)
        return lax.dynamic_update_slice_in_dim(empty, x, self.start - self._first, axis=dim)

    def back(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """The chunk of the stretch."""
        return lax.dynamic_slice_in_dim(x, self.start - self._first, self.size, axis=dim)

    def added(self, x: jax.Array) -> jax.Array:
        """The stretch's numbers at their places in whole texts, float32, in which all else is 0."""
        empty = jnp.full_like(x, 0, shape=(x.shape[0], self.length, *x.shape[2:]), dtype=jnp.float32)
        return lax.dynamic_update_slice_in_dim(empty, x.astype(jnp.float32), self._first, axis=1)
