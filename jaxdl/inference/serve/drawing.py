"""Draws the next token of texts that each have settings of their own, and says how likely it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.inference.decoding.loop import draw_next
from jaxdl.inference.decoding.row_sampling import filter_logits, mark_seen, penalize
from jaxdl.inference.decoding.settings import RowSettings

NUM_TOP = 20
"""Of so many likeliest tokens the log-probabilities can be asked for."""
_FEW = 64
"""The largest `top_k` for which not all tokens are sorted."""


class Penalties(NamedTuple):
    """What is taken from the logits of tokens that a text has, its prompt apart: numbers, or float32 [rows]."""

    presence: Any = 0.0
    """From each that it has."""
    frequency: Any = 0.0
    """From each so many times as it has it."""


NO_PENALTIES = Penalties()
"""None is taken."""


class Settings(NamedTuple):
    """How the texts of some rows are drawn: arrays [rows]."""

    keys: Any
    """The data of a random key of each row, see `jaxdl.inference.decoding.loop.Rows`."""
    sampling: RowSettings
    penalties: Penalties
    wants_top: Any
    """bool: whether log-probabilities are asked for."""


class Drawn(NamedTuple):
    """Tokens, and where a row wants them their log-probabilities by the network, before any setting."""

    token: Any
    """int32 [rows]."""
    logprob: Any
    """float32 [rows]."""
    top_tokens: Any
    """The likeliest tokens, the likeliest first, int32 [rows, NUM_TOP or the vocabulary]."""
    top_logprobs: Any
    """float32, as `top_tokens`."""


class Had(NamedTuple):
    """The tokens of each text so far."""

    seen: Any
    """Which it has, in its prompt too, bool [rows, vocab]."""
    times: Any
    """How often it has each behind its prompt, int32 [rows, vocab]."""

    def after(self, tokens: jax.Array) -> Had:
        """With one more token of each row, int32 [rows]; -1 is none."""
        is_token = jnp.arange(self.times.shape[1]) == tokens[:, None]
        return Had(mark_seen(self.seen, tokens), self.times + is_token.astype(jnp.int32))


def draw(logits: jax.Array, settings: Settings, counts: jax.Array, had: Had) -> Drawn:
    """The next token of each row from logits [rows, vocab]; `counts` tokens have been drawn before, int32 [rows].

    A function to trace.
    """
    logits, penalties = logits.astype(jnp.float32), settings.penalties
    penalized = penalize(logits, settings.sampling.repetition_penalty, had.seen)
    # OpenAI's reference, "frequency and presence penalties".
    penalized -= penalties.frequency[:, None] * had.times + penalties.presence[:, None] * (had.times > 0)
    filtered = _filtered(penalized, settings.sampling)
    drawn = draw_next(lambda x, keys: jax.vmap(jax.random.categorical)(keys, x), filtered, settings.keys, counts)
    greedy = jnp.argmax(penalized, axis=-1)
    token = jnp.where(settings.sampling.temperature > 0, drawn, greedy).astype(jnp.int32)
    return Drawn(token, *_likelihood(logits, token, settings.wants_top))


def _filtered(logits: jax.Array, sampling: RowSettings) -> jax.Array:
    """What `filter_logits` returns; sorted are as many as the rows need: most texts are drawn from all tokens."""
    vocab = logits.shape[1]
    sizes = (0, _FEW, vocab) if vocab > 4 * _FEW else (0, vocab)
    num = jnp.where(sampling.top_k > 0, sampling.top_k, jnp.where(sampling.top_p < 1, vocab, 0))
    branch = sum((jnp.max(num) > size).astype(jnp.int32) for size in sizes[:-1])
    return lax.switch(branch, [lambda num=num: filter_logits(logits, sampling, num_sorted=num) for num in sizes])


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
