"""Draws the next token of sequences side by side, each with its own settings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.inference.decoding.settings import RowSettings


def draw_rows(
    logits: jax.Array, keys: jax.Array, settings: RowSettings, seen: jax.Array | None = None, *, num_sorted: int
) -> jax.Array:
    """One token of each row, int32 [rows], from logits [rows, vocab], each row with its own random key [rows].

    `seen`, bool [rows, vocab], are the tokens of each row so far, its prompt's too; without it nothing is penalized.
    `num_sorted` is that of `jaxdl.inference.decoding.settings.num_sorted`. A row's token does not depend on the
    settings of others.
    """
    logits = logits.astype(jnp.float32)
    if seen is not None:
        logits = penalize(logits, settings.repetition_penalty, seen)
    drawn = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, settings, num_sorted=num_sorted))
    return jnp.where(settings.temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)


def penalize(logits: jax.Array, penalty: jax.Array, seen: jax.Array) -> jax.Array:
    """The logits with those of `seen` tokens divided by a row's penalty, or multiplied where they are negative.

    Keskar et al. 2019 (CTRL), section 4.1, as transformers has it. Logits [rows, vocab], penalty [rows].
    """
    penalty = penalty[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """`seen`, bool [rows, vocab], with one more token of each row, int32 [rows]; negative ones are none.

    It is no scatter, which takes longer on CPUs.
    """
    return seen | (jnp.arange(seen.shape[1]) == tokens[:, None])


def seen_in_rows(tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """Which tokens are in each row's first `lengths[row]`: bool [rows, vocab] from int32 [rows, length]."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, vocab_size)
    return jnp.zeros((tokens.shape[0], vocab_size), bool).at[rows, tokens].set(True, mode="drop")


def filter_logits(logits: jax.Array, settings: RowSettings, *, num_sorted: int) -> jax.Array:
    """Logits [rows, vocab] divided by the temperature, with -inf for each token that a row's settings leave out.

    `top_k` comes first (Fan et al. 2018), then `top_p` (Holtzman et al. 2020), then `min_p` (Nguyen et al. 2024), as in
    transformers. Of equal ones all are kept. What is drawn has the probabilities softmax(these).
    """
    logits = logits.astype(jnp.float32) / jnp.maximum(settings.temperature, 1e-6)[:, None]
    likeliest = jnp.max(logits, axis=-1, keepdims=True)
    least = likeliest + jnp.log(settings.min_p)[:, None]
    if num_sorted:
        least = jnp.maximum(least, _least_kept(logits, settings, num_sorted))
    return jnp.where(logits < least, -jnp.inf, logits)


def _least_kept(logits: jax.Array, settings: RowSettings, num_sorted: int) -> jax.Array:
    """The smallest logit that `top_k` and `top_p` keep in each row, [rows, 1]; -inf where they keep all."""
    vocab, top_k = logits.shape[-1], settings.top_k[:, None]
    falling = jnp.sort(logits, axis=-1, descending=True) if num_sorted == vocab else lax.top_k(logits, num_sorted)[0]
    num = jnp.where(top_k > 0, jnp.minimum(top_k, num_sorted), num_sorted)
    least = jnp.where(top_k > 0, jnp.take_along_axis(falling, num - 1, axis=-1), -jnp.inf)
    # Of all that top-k keeps: what is as likely as the last of the k counts too, but need not be sorted.
    kept = jnp.where(logits < least, -jnp.inf, logits)
    odds = jnp.exp(falling - jax.nn.logsumexp(kept, axis=-1, keepdims=True))
    before = jnp.cumsum(odds, axis=-1) - odds
    # A token is kept while those before it do not reach p together; the first always is.
    left = ((before < settings.top_p[:, None]) | (odds == odds[:, :1])) & (jnp.arange(num_sorted) < num)
    of_mass = jnp.min(jnp.where(left, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(settings.top_p[:, None] < 1, of_mass, least)
