"""Speculative decoding: a small network drafts several tokens, which a large one checks in one pass.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1: what is written has exactly the distribution of the large
network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.inference.decoding.beam import Step
from jaxdl.inference.decoding.row_sampling import filter_logits, mark_seen, penalize
from jaxdl.inference.decoding.settings import RowSettings

Check = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
"""The large network: (tokens int32 [rows, num], cache, position [rows]) -> (logits [rows, num, vocab], cache)."""
_DRAFTED, _ACCEPTED, _REPLACED = 1, 2, 3
"""Folded with the key of a token: what it decides."""


class Drafted(NamedTuple):
    """Sequences that are being written. All but the caches and `seen` are [rows]."""

    cache: Any
    draft_cache: Any
    tokens: jax.Array
    """The newest token of each sequence, which neither network has read yet, int32."""
    positions: jax.Array
    """Its position in the sequence, int32."""
    counts: jax.Array
    """How many tokens have been drawn, int32."""
    left: jax.Array
    """How many more may be written, int32."""
    keys: jax.Array
    """The data of a random key of each row; the n-th token is decided by the key folded with n."""
    seen: jax.Array | None
    """With a repetition penalty: the tokens that have been read or are in the prompt, bool [rows, vocab]."""


def speculate(
    check: Check, draft: Step, rows: Drafted, settings: RowSettings, stop: jax.Array, *, num_drafted: int, rounds: int,
    num_sorted: int,
) -> tuple[Drafted, jax.Array, jax.Array]:  # fmt: skip
    """`(rows, written int32 [rows, rounds * (num_drafted + 1)], accepted int32 [rows])` after so many rounds.

    A function to trace. `written` has -1 where there is no token, also between tokens; `accepted` counts those that
    were drafted. In a round the draft writes `num_drafted` tokens of each row, and the network reads all of them. The
    first ones are kept, each with probability min(1, p / q), where p and q are the network's and the draft's; the first
    that is not is drawn anew from max(0, p - q), or one more from p where all are kept. So a round writes from 1 to
    `num_drafted + 1` tokens. A row whose newest token is one of `stop`, int32 [any], has none left.
    """
    num_rows, size = rows.tokens.shape[0], num_drafted + 1
    written = jnp.full((num_rows, rounds * size), -1, jnp.int32)
    odds_of = _odds_of(settings, num_sorted)

    def one_round(carry: Any) -> Any:
        index, rows, written, accepted = carry
        tokens, seen, odds, draft_cache = _draft(draft, rows, odds_of, num_drafted)
        logits, cache = check(tokens, rows.cache, rows.positions)
        odds_after = odds_of(logits, seen)
        num, last = _accept(rows, tokens[:, 1:], odds_after, odds)
        drafted = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        place = jnp.arange(size)
        made = jnp.where(place == num[:, None], last[:, None], drafted)
        ends = jnp.isin(made, stop) & (place <= num[:, None])
        until_end = jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, size)
        count = jnp.minimum(jnp.minimum(num + 1, until_end), rows.left)
        new = jnp.where(place < count[:, None], made, -1)
        newest = jnp.take_along_axis(made, jnp.maximum(count - 1, 0)[:, None], 1)[:, 0]
        stopped = jnp.any(ends & (place < count[:, None]), 1)
        after = Drafted(
            cache=cache,
            draft_cache=draft_cache,
            tokens=jnp.where(count > 0, newest, rows.tokens),
            positions=rows.positions + count,
            counts=rows.counts + count,
            left=jnp.where(stopped, 0, rows.left - count),
            keys=rows.keys,
            seen=None if seen is None or rows.seen is None else _after(rows.seen, seen, count),
        )
        written = lax.dynamic_update_slice(written, new, (0, index * size))
        return index + 1, after, written, accepted + jnp.minimum(num, count)

    def goes_on(carry: Any) -> jax.Array:
        return (carry[0] < rounds) & jnp.any(carry[1].left > 0)

    start = (jnp.int32(0), rows, written, jnp.zeros(num_rows, jnp.int32))
    _, rows, written, accepted = lax.while_loop(goes_on, one_round, start)
    return rows, written, accepted


def _odds_of(settings: RowSettings, num_sorted: int) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
    """From logits [rows, num, vocab] and the tokens that each place has seen, [num, rows, vocab], to probabilities."""

    def one(logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        logits = logits.astype(jnp.float32)
        if seen is not None:
            logits = penalize(logits, settings.repetition_penalty, seen)
        odds = jax.nn.softmax(filter_logits(logits, settings, num_sorted=num_sorted))
        likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
        return jnp.where(settings.temperature[:, None] > 0, odds, likeliest)

    def every(logits: jax.Array, seen: jax.Array | None) -> jax.Array:
        return jax.vmap(one, in_axes=(1, None if seen is None else 0), out_axes=1)(logits, seen)

    return every


def _draft(
    draft: Step, rows: Drafted, odds_of: Callable[..., jax.Array], num: int
) -> tuple[jax.Array, jax.Array | None, jax.Array, Any]:
    """`(tokens [rows, num + 1], seen [num + 1, rows, vocab], odds [rows, num, vocab], cache)`.

    The tokens are the newest one, then those drafted, and the odds those that the latter were drawn with. The draft
    reads the last one too, so that its cache has all that may be kept.
    """

    def one(carry: Any, index: jax.Array) -> Any:
        tokens, cache, seen = carry
        logits, cache = draft(tokens, cache, rows.positions + index)
        seen = None if seen is None else mark_seen(seen, tokens)
        odds = odds_of(logits[:, None], None if seen is None else seen[None])[:, 0]
        drawn = _drawn(odds, _keys(rows.keys, rows.counts + index, _DRAFTED))
        return (drawn, cache, seen), (tokens, seen, odds)

    carry = (rows.tokens, rows.draft_cache, rows.seen)
    (_, cache, _), (tokens, seen, odds) = lax.scan(one, carry, jnp.arange(num + 1))
    return tokens.T, seen, jnp.moveaxis(odds, 0, 1)[:, :num], cache


def _accept(rows: Drafted, tokens: jax.Array, odds: jax.Array, drafted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(num, token)`, int32 [rows] each: how many of the drafted `tokens` [rows, num] are kept, and what follows them.

    `odds` [rows, num + 1, vocab] are the network's, `drafted` [rows, num, vocab] those that they were drawn with.
    """
    num = tokens.shape[1]
    places = rows.counts[:, None] + jnp.arange(num)
    keys = jax.vmap(lambda keys, counts: _keys(keys, counts, _ACCEPTED), in_axes=(None, 1), out_axes=1)(
        rows.keys, places
    )
    chance = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    of_token = [jnp.take_along_axis(x[:, :num], tokens[..., None], 2)[..., 0] for x in (odds, drafted)]
    kept = chance * of_token[1] < of_token[0]
    count = jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
    at = count[:, None, None]
    here = jnp.take_along_axis(odds, at, 1)[:, 0]
    # After all of them nothing was drafted: what is drawn there has the network's odds.
    there = jnp.take_along_axis(jnp.pad(drafted, ((0, 0), (0, 1), (0, 0))), at, 1)[:, 0]
    rest = jnp.maximum(here - there, 0)
    # Where both are equal up to rounding nothing may be left, and the token was as good as kept.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, here)
    return count, _drawn(rest, _keys(rows.keys, rows.counts + count, _REPLACED))


def _drawn(odds: jax.Array, keys: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.categorical)(keys, jnp.log(odds)).astype(jnp.int32)


def _keys(keys: jax.Array, counts: jax.Array, what: int) -> jax.Array:
    """The random key [rows] with which the token after `counts` ones is decided."""
    of_token = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), counts)
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(of_token, what)


def _after(before: jax.Array, seen: jax.Array, count: jax.Array) -> jax.Array:
    """The tokens seen by the last one of `count` that were kept, bool [rows, vocab]; where none was, those before."""
    kept = jnp.take_along_axis(seen, jnp.maximum(count - 1, 0)[None, :, None], 0)[0]
    return jnp.where((count > 0)[:, None], kept, before)
