"""Draws the next token of texts that each have settings of their own, and says how likely it was."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.inference.decoding.loop import draw_next

NUM_TOP = 20
"""Of so many likeliest tokens the log-probabilities can be asked for."""


class Settings(NamedTuple):
    """How the texts of some rows are drawn: arrays of the host, [rows] each."""

    keys: jax.Array
    """The data of a random key of each row, see `jaxdl.inference.decoding.loop.Rows`."""
    temperature: jax.Array
    """float32; 0 takes the likeliest token."""
    top_k: jax.Array
    """int32; the size of the vocabulary leaves none out."""
    top_p: jax.Array
    """float32; 1 leaves none out."""
    wants_top: jax.Array
    """bool: whether log-probabilities are asked for."""


class Drawn(NamedTuple):
    """Tokens, and where a row wants them their log-probabilities by the network, before temperature and limits."""

    token: jax.Array
    """int32 [rows]."""
    logprob: jax.Array
    """float32 [rows]."""
    top_tokens: jax.Array
    """The likeliest tokens, the likeliest first, int32 [rows, NUM_TOP or the vocabulary]."""
    top_logprobs: jax.Array
    """float32, as `top_tokens`."""


def draw(logits: jax.Array, settings: Settings, counts: jax.Array) -> Drawn:
    """The next token of each row from logits [rows, vocab]; `counts` tokens have been drawn before, int32 [rows].

    A row's token is that of `jaxdl.inference.decoding.sampling.sample` with the row's settings. A function to trace.
    """
    logits = logits.astype(jnp.float32)
    scaled = logits / jnp.maximum(settings.temperature, 1e-6)[:, None]
    limits = (settings.top_k < logits.shape[1]) | (settings.top_p < 1)
    # Sorting all tokens takes longer than all else, and most texts are drawn from all.
    scaled = lax.cond(jnp.any(limits), lambda: _limited(scaled, settings), lambda: scaled)
    drawn = draw_next(lambda x, keys: jax.vmap(jax.random.categorical)(keys, x), scaled, settings.keys, counts)
    token = jnp.where(settings.temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
    return Drawn(token, *_likelihood(logits, token, settings.wants_top))


def _limited(logits: jax.Array, settings: Settings) -> jax.Array:
    """The logits with -inf for what top-k and top-p leave out, as `jaxdl.inference.decoding.sampling.mask_logits`."""
    ranks = jnp.arange(logits.shape[1])
    falling = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.minimum(settings.top_k, logits.shape[1])[:, None] - 1
    least = jnp.take_along_axis(falling, last, axis=1)
    kept = jnp.where(logits < least, -jnp.inf, logits)
    odds = jnp.where(ranks <= last, jnp.exp(falling - jax.nn.logsumexp(kept, axis=-1, keepdims=True)), 0)
    before = jnp.cumsum(odds, axis=-1) - odds
    top_p = settings.top_p[:, None]
    left = ((before < top_p) | (odds == odds[:, :1])) & (ranks <= last)
    likely = jnp.min(jnp.where(left, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.where(top_p < 1, likely, least), -jnp.inf, logits)


def _likelihood(logits: jax.Array, token: jax.Array, wants_top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The last three of `Drawn`; zeros where no row wants them."""
    num = min(NUM_TOP, logits.shape[1])

    def found() -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits)
        top_logprobs, top_tokens = lax.top_k(logprobs, num)
        return jnp.take_along_axis(logprobs, token[:, None], 1)[:, 0], top_tokens, top_logprobs

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        zeros = jnp.zeros((token.shape[0], num), jnp.float32)
        return zeros[:, 0], zeros.astype(jnp.int32), zeros

    return lax.cond(jnp.any(wants_top), found, nothing)
