"""Attention within the documents that are packed into one row, by cuDNN's flash kernel.

The kernel takes the documents of a row as a list of offsets and lengths, of which the program fixes how many there are:
here 16. A row of more takes the kernel several times, each time for the next 16 documents; so any row is exact, and no
number is to be chosen. The backward pass computes the forward pass again, since the kernel's sums of exponentials
would take memory for 16 whole rows in place of one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.collectives.primitive import alike

_MOST_DOCUMENTS = 16
"""Of one row in one call of the kernel."""


@dataclass(frozen=True)
class Packed:
    """How documents are attended to; see `jaxdl.collectives.attention.Pattern`."""

    causal: bool
    window: int | None
    implementation: Literal["cudnn", "xla"]
    most: int = _MOST_DOCUMENTS


def document_offsets(segments: jax.Array, first: jax.Array | int, most: int) -> tuple[jax.Array, jax.Array]:
    """`(lengths [batch, most], offsets [batch, most + 1])`, int32, of the documents `first` to `first + most - 1`.

    Those are numbers in `segments` [batch, length], each of neighbouring tokens. A document that a row has not, and the
    last offset, are -1.
    """
    tokens = segments[:, :, None] == first + jnp.arange(most)
    lengths = tokens.sum(axis=1, dtype=jnp.int32)
    exists = lengths > 0
    offsets = jnp.where(exists, jnp.argmax(tokens, axis=1).astype(jnp.int32), -1)
    return jnp.where(exists, lengths, -1), jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed_attention(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, how: Packed) -> jax.Array:
    """Softmax attention of each token of `query` [batch, length, heads, head_dim] within its document: the same shape.

    `key` and `value` are [batch, length, kv_heads, head_dim]; `segments` [batch, length] numbers the documents of a row
    from 1, each of neighbouring tokens. The result of 0, padding, is 0, and it has no gradient.
    """

    def several(first: jax.Array, _: Any) -> tuple[jax.Array, ...]:
        return (_kernel(query, *_of_all_heads(query, key, value), *document_offsets(segments, first, how.most), how),)

    return _by_turns(several, (query,), segments, how)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array, how: Packed) -> Any:
    return packed_attention(query, key, value, segments, how), (query, key, value, segments)


def _backward(how: Packed, residuals: Any, cotangent: jax.Array) -> Any:
    query, key, value, segments = residuals

    def several(first: jax.Array, _: Any) -> tuple[jax.Array, ...]:
        offsets = document_offsets(segments, first, how.most)

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return _kernel(query, *_of_all_heads(query, key, value), *offsets, how)

        return jax.vjp(attend, query, key, value)[1](cotangent)

    return *_by_turns(several, (query, key, value), segments, how), None


packed_attention.defvjp(_forward, _backward)


def _by_turns(several: Any, like: tuple[jax.Array, ...], segments: jax.Array, how: Packed) -> tuple[jax.Array, ...]:
    """The results of `several(first document, ...)`, which are shaped as `like`, each for the tokens of its documents.

    Of the other tokens the kernel's results are any numbers.
    """

    def turn(carry: Any) -> Any:
        index, results = carry
        own = ((segments - 1) // how.most == index)[:, :, None, None] & (segments > 0)[:, :, None, None]
        new = several(index * how.most + 1, None)
        return index + 1, tuple(jnp.where(own, one, old) for one, old in zip(new, results, strict=True))

    turns = -(-jnp.max(segments) // how.most)
    zeros = tuple(alike((), jnp.zeros_like(x), *like, segments)[0] for x in like)
    return lax.while_loop(lambda carry: carry[0] < turns, turn, (jnp.int32(0), zeros))[1]


def _of_all_heads(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values for each query head: JAX (0.10) gives the kernel wrong offsets of fewer."""
    times = query.shape[2] // key.shape[2]
    return (key, value) if times == 1 else (jnp.repeat(key, times, axis=2), jnp.repeat(value, times, axis=2))


def _kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, offsets: jax.Array, how: Packed
) -> jax.Array:
    if how.implementation == "xla":
        return _in_xla(query, key, value, lengths, offsets, how)
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # JAX's public function takes no offsets.

    result: Any = cudnn.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=1 / math.sqrt(query.shape[-1]),
        mask_type=cudnn.MaskType.PADDING_CAUSAL if how.causal else cudnn.MaskType.PADDING,
        sliding_window_length=how.window,
    )
    return result


def _in_xla(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, offsets: jax.Array, how: Packed
) -> jax.Array:
    """What the kernel returns, for tests; not a number for the tokens of no document."""
    at = jnp.arange(query.shape[1])[None, :, None]
    tokens = (at >= offsets[:, None, :-1]) & (at < (offsets[:, :-1] + lengths)[:, None])
    mask = jnp.einsum("btm,bsm->bts", tokens, tokens, preferred_element_type=jnp.int32) > 0
    if how.causal:
        mask &= jnp.tril(mask)
    if how.window is not None:
        mask &= ~jnp.tril(mask, -how.window)
    result = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
    return jnp.where(tokens.any(axis=-1)[:, :, None, None], result, jnp.nan)
