"""Beam search over the continuations of texts, whose hypotheses are judged as transformers does."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.inference.decoding.beam import Step, per_beam, reorder_cache

_NONE = -1e9
"""The score of what is no hypothesis."""


class Beams(NamedTuple):
    """The best hypotheses of each row, the best first."""

    tokens: jax.Array
    """Int32 [rows, beams, max_length], with what ended it; -1 after the end."""
    scores: jax.Array
    """log P / length^length_penalty, float32 [rows, beams]; -1e9 where there is no hypothesis."""


class _Search(NamedTuple):
    """What the loop carries."""

    length: jax.Array
    """Tokens of each open hypothesis, int32 scalar."""
    open: Beams
    """Those that go on; their scores are log P."""
    ended: Beams
    is_ended: jax.Array
    """Which of `ended` are hypotheses, bool [rows, beams]."""
    goes_on: jax.Array
    """Whether an open hypothesis of the row may still become one of the best, bool [rows]."""
    cache: Any


def search_texts(
    step: Step,
    cache: Any,
    *,
    start: jax.Array,
    stop: jax.Array,
    lengths: jax.Array,
    num_beams: int,
    max_length: int,
    length_penalty: jax.Array,
) -> Beams:
    """The best `num_beams` continuations of each row.

    A function to trace: all steps are one loop. `step` is called on `rows * num_beams` hypotheses, beams of one row
    beside each other, and gives log-probabilities [rows * num_beams, vocab], which need not sum to 1; its position is
    the number of tokens written, from 0. The leaves of `cache` are [layers, rows, ...], and are repeated for the beams
    here. `start` int32 [rows] are the last tokens of the prompts, which the step reads first, `stop` int32 [any] those
    that end a text, and a row's hypotheses end after `lengths` tokens, int32 [rows], at most `max_length`, too.

    Each step extends every open hypothesis by every token. Of the best (1 + number of `stop`) * num_beams (at least
    twice as many as beams) those among the first `num_beams` that end are kept if they are among the best that have
    ended, and the best others stay open. A row is done when the best open one, judged at its present length, is not
    better than the worst of `num_beams` that have ended: transformers' search with `early_stopping=False`.
    """
    rows = start.shape[0]
    none = jnp.full((rows, num_beams), _NONE)
    tokens = jnp.full((rows, num_beams, max_length), -1, jnp.int32)
    state = _Search(
        length=jnp.int32(0),
        open=Beams(tokens, none.at[:, 0].set(0.0)),  # The beams are equal: all but one would be the same hypothesis.
        ended=Beams(tokens, none),
        is_ended=jnp.zeros((rows, num_beams), bool),
        goes_on=lengths > 0,
        cache=per_beam(cache, num_beams),
    )

    def one_step(state: _Search) -> _Search:
        last = lax.dynamic_index_in_dim(state.open.tokens, jnp.maximum(state.length - 1, 0), 2, keepdims=False)
        newest = jnp.where(state.length == 0, start[:, None], last)
        log_probs, cache = step(newest.reshape(-1), state.cache, state.length)
        log_probs = log_probs.reshape(rows, num_beams, -1)
        return _extend(state._replace(cache=cache), log_probs, stop, lengths, length_penalty)

    state = lax.while_loop(lambda state: (state.length < max_length) & jnp.any(state.goes_on), one_step, state)
    return state.ended


def _extend(
    state: _Search, log_probs: jax.Array, stop: jax.Array, lengths: jax.Array, length_penalty: jax.Array
) -> _Search:
    """The search after one more token, whose `log_probs` are [rows, beams, vocab]."""
    rows, beams, vocab = log_probs.shape
    every = (state.open.scores[..., None] + log_probs).reshape(rows, beams * vocab)
    num = min(max(2, 1 + stop.shape[0]) * beams, beams * vocab)
    scores, places = lax.top_k(every, num)
    parents, tokens = places // vocab, (places % vocab).astype(jnp.int32)
    sequences = jnp.take_along_axis(state.open.tokens, parents[..., None], 1)
    sequences = lax.dynamic_update_slice_in_dim(sequences, tokens[..., None], state.length, 2)
    ends = jnp.isin(tokens, stop) | (state.length + 1 >= lengths)[:, None]

    length = (state.length + 1).astype(jnp.float32)
    counts = ends & (jnp.arange(num) < beams) & (scores > _NONE / 2) & state.goes_on[:, None]
    final = jnp.where(counts, scores / length**length_penalty, _NONE)
    ended_scores, kept = lax.top_k(jnp.concatenate([state.ended.scores, final], 1), beams)
    ended_tokens = jnp.take_along_axis(jnp.concatenate([state.ended.tokens, sequences], 1), kept[..., None], 1)
    is_ended = jnp.take_along_axis(jnp.concatenate([state.is_ended, counts], 1), kept, 1)

    open_scores, stay = lax.top_k(jnp.where(ends, _NONE, scores), beams)
    # It is judged as if it ended here: with length_penalty above 0 that is no bound, but transformers' rule.
    best, worst = open_scores[:, 0] / length**length_penalty, ended_scores[:, -1]
    may_gain = (open_scores[:, 0] > _NONE / 2) & (~jnp.all(is_ended, 1) | (best > worst))
    return _Search(
        length=state.length + 1,
        open=Beams(jnp.take_along_axis(sequences, stay[..., None], 1), open_scores),
        ended=Beams(ended_tokens, ended_scores),
        is_ended=is_ended,
        goes_on=state.goes_on & may_gain & (state.length + 1 < lengths),
        cache=reorder_cache(state.cache, jnp.take_along_axis(parents, stay, 1)),
    )
