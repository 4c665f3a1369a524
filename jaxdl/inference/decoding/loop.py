"""Sampling of many sequences side by side, several tokens in one loop on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.inference.decoding.beam import Step

Draw = Callable[[jax.Array, jax.Array], jax.Array]
"""Tokens int32 [rows] from (logits [rows, vocab], a random key of each row)."""


Place = int | tuple[int, int]
"""Which text is written: the number of its prompt among all; and which of several that continue it, from 0."""
_SAMPLES = 2**31
"""Folded with a key these and what is above give those of further samples; below are those of prompts."""


class Rows(NamedTuple):
    """Sequences that are being written. All but the cache are [rows]."""

    cache: Any
    """What the decoder has read: leaves [layers, rows, ...]."""
    tokens: jax.Array
    """The newest token of each sequence, which the decoder has not read yet, int32."""
    positions: jax.Array
    """Its position in the sequence, int32."""
    counts: jax.Array
    """How many tokens have been drawn, int32."""
    done: jax.Array
    """Whether the sequence has ended, bool."""
    keys: jax.Array
    """The data of a random key of each row; the n-th token is drawn with the key folded with n."""


def row_keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """The data of the random key of each row, from its number among all prompts: so rows do not depend on others."""
    return jax.random.key_data(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers))


def sample_key(seed: int, sample: int) -> jax.Array:
    """The key of which those of all prompts are made, for the text of this number of those that continue a prompt."""
    key = jax.random.key(seed)
    return jax.random.fold_in(key, _SAMPLES + sample) if sample else key


def text_keys(seed: int, places: Sequence[Place], num_rows: int) -> jax.Array:
    """The data of the random keys of texts, of which each has its own, with those of rows up to `num_rows` that are
    only filled.
    """
    places = [place if isinstance(place, tuple) else (place, 0) for place in places]
    places += [(places[0][0] + row, 0) for row in range(len(places), num_rows)]
    numbers, samples = np.asarray(places).T
    keys = row_keys(sample_key(seed, 0), jnp.asarray(numbers))
    for sample in {sample for _, sample in places} - {0}:
        of_sample = row_keys(sample_key(seed, sample), jnp.asarray(numbers))
        keys = jnp.where((samples == sample)[:, None], of_sample, keys)
    return keys


def draw_next(draw: Draw, logits: jax.Array, keys: jax.Array, counts: jax.Array) -> jax.Array:
    """The tokens after `counts` drawn ones, int32 [rows]; `keys` are those of `Rows`."""
    return draw(logits, jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), counts))


def write_on(
    step: Step, draw: Draw, rows: Rows, num_tokens: jax.Array, *, most: int, stop: jax.Array
) -> tuple[Rows, jax.Array]:
    """`(rows, written int32 [rows, most])`: the rows after `num_tokens` (at most `most`) more tokens each.

    A function to trace. A row whose newest token is one of `stop`, int32 [any], is done, and has -1 in `written` from
    then on. The loop ends when all rows are done.
    """
    written = jnp.full((rows.tokens.shape[0], most), -1, jnp.int32)

    def one_step(carry: tuple[jax.Array, Rows, jax.Array]) -> tuple[jax.Array, Rows, jax.Array]:
        index, rows, written = carry
        logits, cache = step(rows.tokens, rows.cache, rows.positions)
        tokens = draw_next(draw, logits, rows.keys, rows.counts)
        written = lax.dynamic_update_slice(written, jnp.where(rows.done, -1, tokens)[:, None], (0, index))
        going = (~rows.done).astype(jnp.int32)
        after = Rows(
            cache=cache,
            tokens=jnp.where(rows.done, rows.tokens, tokens),
            positions=rows.positions + going,
            counts=rows.counts + going,
            done=rows.done | jnp.isin(tokens, stop),
            keys=rows.keys,
        )
        return index + 1, after, written

    def goes_on(carry: tuple[jax.Array, Rows, jax.Array]) -> jax.Array:
        return (carry[0] < num_tokens) & ~jnp.all(carry[1].done)

    _, rows, written = lax.while_loop(goes_on, one_step, (jnp.int32(0), rows, written))
    return rows, written
