"""Beam search: the likeliest sequences that a model continues a start token with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""One step of a decoder: (tokens int32 [rows], cache, position) -> (logits float32 [rows, vocab], cache).

The leaves of the cache are [layers, rows, ...]; the position is that of the tokens, an int32 scalar or [rows].
"""


class _Search(NamedTuple):
    """What the loop carries. Scores that are -inf belong to no hypothesis."""

    length: jax.Array
    """Tokens of each open hypothesis, int32 scalar."""
    open_tokens: jax.Array
    """int32 [rows, beams, max_length]."""
    open_scores: jax.Array
    """Sums of log-probabilities, float32 [rows, beams], the largest first."""
    ended_tokens: jax.Array
    """int32 [rows, beams, max_length]."""
    ended_scores: jax.Array
    """Sums of log-probabilities divided by the length penalty, float32 [rows, beams], the largest first."""
    num_ended: jax.Array
    """Hypotheses that have ended, int32 [rows]; only the best `beams` are kept."""
    cache: Any


def beam_search(
    step: Step,
    cache: Any,
    *,
    num_rows: int,
    num_beams: int,
    start: int | jax.Array,
    end: int,
    max_length: int,
    length_penalty: float = 0.6,
) -> tuple[jax.Array, jax.Array]:
    """`(tokens int32 [rows, beams, max_length], scores float32 [rows, beams])`, the best hypothesis of each row first.

    A function to trace: all steps are one loop, and `step` is called on all `num_rows * num_beams` hypotheses, beams of
    one row beside each other. The leaves of `cache` are [layers, rows, ...], and are repeated for the beams here; what
    does not change, such as the keys of cross-attention, belongs in the closure of `step` (see `per_beam`). `start` is
    the first token that the model reads, at position 0; or one for each row. It is not in the result. `end` is, and
    fills the rest of its row.

    A step extends each open hypothesis by every token. Of all of a row's continuations, those among the best
    `num_beams` that end are put aside, and the best `num_beams` others stay open. A row is done when `num_beams`
    hypotheses have ended, or at `max_length`; so one beam is greedy decoding. The score is that of Wu et al. 2016,
    section 7, without coverage: log P / ((5 + length) / 6)^length_penalty, `end` counted in the length. Hypotheses that
    have not ended at `max_length` come after all that have; where there are too few of both, the score is -inf.
    """
    state = _begin(cache, num_rows, num_beams, end, max_length)

    def one_step(state: _Search) -> _Search:
        last = lax.dynamic_index_in_dim(state.open_tokens, jnp.maximum(state.length - 1, 0), 2, keepdims=False)
        first = jnp.broadcast_to(jnp.reshape(jnp.asarray(start, jnp.int32), (-1, 1)), last.shape)
        tokens = jnp.where(state.length == 0, first, last)
        logits, cache = step(tokens.reshape(-1), state.cache, state.length)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(num_rows, num_beams, -1)
        return _extend(state, log_probs, cache, end, length_penalty)

    def is_open(state: _Search) -> jax.Array:
        return (state.length < max_length) & jnp.any(_rows_open(state))

    state = lax.while_loop(is_open, one_step, state)
    # An ended hypothesis is better than an open one, which may be as likely only because it repeats itself.
    left = state.open_scores / _penalty(state.length, length_penalty)
    place = jnp.arange(num_beams)
    num_ended = state.num_ended[:, None]
    after = jnp.maximum(place - num_ended, 0)
    left, left_tokens = jnp.take_along_axis(left, after, 1), jnp.take_along_axis(state.open_tokens, after[..., None], 1)
    is_ended = place < num_ended
    return (
        jnp.where(is_ended[..., None], state.ended_tokens, left_tokens),
        jnp.where(is_ended, state.ended_scores, left),
    )


def per_beam(tree: Any, num_beams: int) -> Any:
    """Leaves [layers, rows, ...] with each row repeated for its beams: [layers, rows * num_beams, ...]."""
    return jax.tree.map(lambda x: jnp.repeat(x, num_beams, axis=1), tree)


def _begin(cache: Any, num_rows: int, num_beams: int, end: int, max_length: int) -> _Search:
    none = jnp.full((num_rows, num_beams), -jnp.inf)
    tokens = jnp.full((num_rows, num_beams, max_length), end, jnp.int32)
    return _Search(
        length=jnp.int32(0),
        open_tokens=tokens,
        open_scores=none.at[:, 0].set(0.0),  # The beams are equal: all but one would be the same hypothesis.
        ended_tokens=tokens,
        ended_scores=none,
        num_ended=jnp.zeros(num_rows, jnp.int32),
        cache=per_beam(cache, num_beams),
    )


def _rows_open(state: _Search) -> jax.Array:
    """Whether each row is still searched, bool [rows]."""
    return (state.num_ended < state.open_scores.shape[1]) & (state.open_scores[:, 0] > -jnp.inf)


def _extend(state: _Search, log_probs: jax.Array, cache: Any, end: int, length_penalty: float) -> _Search:
    """The search after one more token, whose `log_probs` are [rows, beams, vocab]. Rows that are done stay."""
    rows, beams, vocab = log_probs.shape
    every = (state.open_scores[..., None] + log_probs).reshape(rows, beams * vocab)
    # At most one continuation of a beam ends, so that `beams` of these do not.
    scores, places = lax.top_k(every, min(2 * beams, beams * vocab))
    parents, tokens = places // vocab, (places % vocab).astype(jnp.int32)
    sequences = jnp.take_along_axis(state.open_tokens, parents[..., None], 1)
    sequences = lax.dynamic_update_slice_in_dim(sequences, tokens[..., None], state.length, 2)

    going = _rows_open(state)[:, None]
    ends = (tokens == end) & (jnp.arange(tokens.shape[1]) < beams) & (scores > -jnp.inf) & going
    final = jnp.where(ends, scores / _penalty(state.length + 1, length_penalty), -jnp.inf)
    ended_scores, kept = lax.top_k(jnp.concatenate([state.ended_scores, final], 1), beams)
    ended_tokens = jnp.take_along_axis(jnp.concatenate([state.ended_tokens, sequences], 1), kept[..., None], 1)

    open_scores, stay = lax.top_k(jnp.where(tokens == end, -jnp.inf, scores), beams)
    open_tokens = jnp.take_along_axis(sequences, stay[..., None], 1)
    return _Search(
        length=state.length + 1,
        open_tokens=jnp.where(going[..., None], open_tokens, state.open_tokens),
        open_scores=jnp.where(going, open_scores, state.open_scores),
        ended_tokens=ended_tokens,
        ended_scores=ended_scores,
        num_ended=state.num_ended + jnp.sum(ends, 1, dtype=jnp.int32),
        cache=reorder_cache(cache, jnp.take_along_axis(parents, stay, 1)),
    )


def reorder_cache(cache: Any, parents: jax.Array) -> Any:
    """The cache whose beam j of row i is that of beam `parents[i, j]` of the same row."""
    rows, beams = parents.shape
    if beams == 1:
        return cache

    def one(x: jax.Array) -> jax.Array:
        split = x.reshape(x.shape[0], rows, beams, *x.shape[2:])
        # Row by row, so that nothing is sent between devices that have different rows.
        return jax.vmap(lambda row, order: row[:, order], in_axes=(1, 0), out_axes=1)(split, parents).reshape(x.shape)

    return jax.tree.map(one, cache)


def _penalty(length: jax.Array, length_penalty: float) -> jax.Array:
    return ((5 + length) / 6) ** length_penalty
