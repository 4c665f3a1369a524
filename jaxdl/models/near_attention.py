"""Attention to the tokens on both sides within a window, without the scores of all pairs of tokens.

cuDNN's flash kernel has windows of causal attention alone. A text is cut into blocks that are at least as long as one
side of the window, so a token sees its own block and the two beside it, and nothing else (Beltagy et al., arXiv
2004.05150). The memory of the scores is that of the length times three blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LEAST = 64
"""Tokens of a block: products of fewer are slow."""


def block_size(window: int) -> int:
    """Tokens of a block, where a token sees the `window - 1` tokens on each side of it."""
    return max(window - 1, _LEAST)


def near_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, window: int, key_lengths: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of `query` [batch, length, heads, head_dim] to near keys of the same text: shaped like it.

    `key` and `value` are [batch, length, kv_heads, head_dim]. A token sees itself and the `window - 1` tokens on each
    side, of those that exist: the first `key_lengths`, int32 [batch]; None: all. The result of a token that sees none
    has no meaning.
    """
    length, size = query.shape[1], block_size(window)
    num = -(-length // size)
    query, key, value = (_blocks(x, num, size) for x in (query, key, value))
    key, value = _with_neighbours(key), _with_neighbours(value)
    at, offset = jnp.arange(size)[:, None], jnp.arange(3 * size)[None] - size
    place = size * jnp.arange(num)[:, None, None] + offset  # Of a key in its text.
    ends = jnp.asarray([length]) if key_lengths is None else key_lengths
    exists = (place >= 0) & (place < ends[:, None, None, None])
    mask = (jnp.abs(offset - at) < window) & exists  # [batch or 1, num, size, 3 size].

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask)

    mixed = jax.vmap(attend, in_axes=1, out_axes=1)(query, key, value, mask[:, :, None])
    return mixed.reshape(mixed.shape[0], num * size, *mixed.shape[3:])[:, :length]


def _blocks(x: jax.Array, num: int, size: int) -> jax.Array:
    """[batch, length, heads, head_dim] -> [batch, num, size, heads, head_dim], with zeros at the end."""
    x = jnp.pad(x, ((0, 0), (0, num * size - x.shape[1]), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], num, size, *x.shape[2:])


def _with_neighbours(x: jax.Array) -> jax.Array:
    """Each block behind the one before it and in front of the one after it: [batch, num, 3 size, heads, head_dim]."""
    x = jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0), (0, 0)))
    return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
