"""Draws the next token of each sequence from its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike


def sample(
    logits: jax.Array,
    keys: jax.Array,
    temperature: ArrayLike,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """One token of each row, int32 [rows], from logits [rows, vocab], each row with its own random key [rows].

    The probabilities are softmax(logits / temperature). With `top_k` only the k likeliest tokens are drawn, and what is
    as likely as the last of them (Fan et al. 2018); of these, with `top_p`, only the likeliest whose probabilities
    together reach p (Holtzman et al. 2020). Temperature 0 takes the likeliest token, the lowest of equal ones.
    """
    logits = logits.astype(jnp.float32)
    scaled = mask_logits(logits / jnp.maximum(temperature, 1e-6), top_k=top_k, top_p=top_p)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled)
    return jnp.where(jnp.asarray(temperature) > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def mask_logits(logits: jax.Array, *, top_k: int | None, top_p: float | None) -> jax.Array:
    """The logits with -inf for each token that `top_k` and `top_p` leave out; see `sample`."""
    vocab = logits.shape[-1]
    num = vocab if top_k is None else min(top_k, vocab)
    mass = 1.0 if top_p is None else top_p
    if num == vocab and mass >= 1:
        return logits
    falling = jnp.sort(logits, axis=-1, descending=True) if num == vocab else lax.top_k(logits, num)[0]
    least = falling[..., -1:]
    if mass < 1:
        # Of all that top-k keeps: what is as likely as the last of the k counts too, but need not be sorted.
        kept = jnp.where(logits < least, -jnp.inf, logits)
        odds = jnp.exp(falling - jax.nn.logsumexp(kept, axis=-1, keepdims=True))
        before = jnp.cumsum(odds, axis=-1) - odds
        # A token is kept while those before it do not reach p together; the first always is.
        left = (before < mass) | (odds == odds[..., :1])
        least = jnp.min(jnp.where(left, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)
