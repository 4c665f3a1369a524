"""Attention within the documents that are packed into one row, by cuDNN's flash kernel.

The kernel takes the documents of a row as a list of offsets and lengths, of which the program fixes how many there are:
here 16. A row of more takes the kernel several times, each time for the next 16 documents; so any row is exact, and no
number is to be chosen. The backward pass computes the forward pass again, since the kernel's sums of exponentials
would take memory for 16 whole rows in place of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.primitive import alike

_MOST_DOCUMENTS = 16
"""Of one row in one call of the kernel."""


@dataclass(frozen=True)
class Packed:
    """How documents are attended to; see `jaxdl.parallel.collectives.attention.Pattern`."""

    causal: bool
    window: int | None
    implementation: Literal["cudnn", "xla"]
    most: int = _MOST_DOCUMENTS


class Documents(NamedTuple):
    """Some documents of each row: what the kernel takes, and which tokens are theirs."""

    lengths: jax.Array
    """int32 [batch, most]; -1 for a document that the row has not."""
    offsets: jax.Array
    """Of the first token, int32 [batch, most + 1]; -1 for a document that the row has not, and at last."""
    tokens: jax.Array
    """bool [batch, length]."""


def documents(
    segments: jax.Array, key_segments: jax.Array, first: jax.Array | int, most: int
) -> tuple[Documents, Documents]:
    """The documents `first` to `first + most - 1` of the queries and of the keys, those that have both.

    Those are numbers in `segments` [batch, length] and `key_segments` [batch, key_length], each of neighbouring tokens.
    """
    sides = [x[:, :, None] == first + jnp.arange(most) for x in (segments, key_segments)]
    exists = sides[0].any(axis=1) & sides[1].any(axis=1)

    def of(tokens: jax.Array) -> Documents:
        lengths = jnp.where(exists, tokens.sum(axis=1, dtype=jnp.int32), -1)
        offsets = jnp.where(exists, jnp.argmax(tokens, axis=1).astype(jnp.int32), -1)
        ends = ((0, 0), (0, 1))
        return Documents(lengths, jnp.pad(offsets, ends, constant_values=-1), (tokens & exists[:, None]).any(axis=2))

    return of(sides[0]), of(sides[1])


Segments = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed_attention(query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments, how: Packed) -> jax.Array:
    """Softmax attention of `query` [batch, length, heads, head_dim] to the keys of its document: the same shape.

    `key` and `value` are [batch, key_length, kv_heads, head_dim]. `segments` number the documents of a row from 1, each
    of neighbouring tokens: of the queries [batch, length], and of the keys [batch, key_length]. The result of 0,
    padding, and of a document without keys is 0, and has no gradient.
    """

    def several(mine: Documents, others: Documents) -> tuple[jax.Array, ...]:
        return (_kernel(query, *_of_all_heads(query, key, value), mine, others, how),)

    return _by_turns(several, (query,), segments, how)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments, how: Packed) -> Any:
    return packed_attention(query, key, value, segments, how), (query, key, value, segments)


def _backward(how: Packed, residuals: Any, cotangent: jax.Array) -> Any:
    query, key, value, segments = residuals

    def several(mine: Documents, others: Documents) -> tuple[jax.Array, ...]:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return _kernel(query, *_of_all_heads(query, key, value), mine, others, how)

        return jax.vjp(attend, query, key, value)[1](cotangent)

    return *_by_turns(several, (query, key, value), segments, how), None


packed_attention.defvjp(_forward, _backward)


def _by_turns(
    several: Callable[[Documents, Documents], tuple[jax.Array, ...]],
    like: tuple[jax.Array, ...],
    segments: Segments,
    how: Packed,
) -> tuple[jax.Array, ...]:
    """The results of `several` documents at a time, shaped as `like`: the first of queries, the others of keys.

    The kernel's results for other tokens than those of its documents are any numbers; here they are 0.
    """

    def turn(carry: Any) -> Any:
        index, results = carry
        mine, others = documents(*segments, index * how.most + 1, how.most)
        new = several(mine, others)
        token_masks = [mine.tokens, *(others.tokens for _ in new[1:])]
        kept = zip(token_masks, new, results, strict=True)
        return index + 1, tuple(
            jnp.where(token_mask[:, :, None, None], now, before) for token_mask, now, before in kept
        )

    turns = -(-jnp.max(segments[0]) // how.most)
    zeros = tuple(alike((), jnp.zeros_like(x), *like, *segments)[0] for x in like)
    return lax.while_loop(lambda carry: carry[0] < turns, turn, (jnp.int32(0), zeros))[1]


def _of_all_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values for each query head: JAX (0.10) gives the kernel wrong offsets of fewer."""
    times = query.shape[2] // key.shape[2]
    return (key, value) if times == 1 else (jnp.repeat(key, times, axis=2), jnp.repeat(value, times, axis=2))


def _kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, mine: Documents, others: Documents, how: Packed
) -> jax.Array:
    if how.implementation == "xla":
        return _in_xla(query, key, value, mine, others, how)
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX's public function takes no offsets.

    result: Any = cudnn.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=mine.lengths,
        kv_seqlen=others.lengths,
        q_offsets=mine.offsets,
        kv_offsets=others.offsets,
        scale=1 / math.sqrt(query.shape[-1]),
        mask_type=cudnn.MaskType.PADDING_CAUSAL if how.causal else cudnn.MaskType.PADDING,
        sliding_window_length=how.window,
    )
    return result


def _in_xla(
    query: jax.Array, key: jax.Array, value: jax.Array, mine: Documents, others: Documents, how: Packed
) -> jax.Array:
    """What the kernel returns, for tests: not a number for the tokens of no document."""

    def tokens_of(side: Documents, length: int) -> jax.Array:
        at = jnp.arange(length)[None, :, None]
        return (at >= side.offsets[:, None, :-1]) & (at < (side.offsets[:, :-1] + side.lengths)[:, None])

    tokens, keys = tokens_of(mine, query.shape[1]), tokens_of(others, key.shape[1])
    mask = jnp.einsum("btm,bsm->bts", tokens, keys, preferred_element_type=jnp.int32) > 0
    if how.causal:
        mask &= jnp.tril(mask)
    if how.window is not None:
        mask &= ~jnp.tril(mask, -how.window)
    result = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
    return jnp.where(tokens.any(axis=-1)[:, :, None, None], result, jnp.nan)
