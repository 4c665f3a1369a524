"""A decoder that reads token after token, with the keys and values of those before in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.models.attention import Weighing, attend
from jaxdl.models.block import Block
from jaxdl.models.cache import KeyValues, attend_cached, attend_several, empty_cache, with_prompt
from jaxdl.models.layer_kinds import Places
from jaxdl.models.logits import Logits
from jaxdl.parallel import sharding


def read_prompts(decoder: Any, tokens: jax.Array, lengths: jax.Array, slots: int) -> tuple[Logits, KeyValues]:
    """`TransformerModule.prefill` of a `decoder`."""
    config, (rows, length) = decoder.config, tokens.shape
    # Where some layers have no window, all have the slots of these.
    kept = None if config.full_layers else config.window
    cache = empty_cache(
        config.num_layers, rows, slots, config.kv_heads, config.head_dim, dtype=decoder.dtype, window=kept
    )

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int, **how: Any) -> Any:
        mixed = attend(query, new.key, new.value, causal=True, window=config.window, **how)
        return mixed, with_prompt(cache, new, layer, lengths)

    x, positions = decoder.embed(tokens), jnp.arange(length)[None]
    places = decoder.places(positions, lengths[:, None] if _depends_on_length(decoder) else None)
    x, cache = _cached(decoder, x, places, cache, mix)
    return decoder.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)), cache


def read_token(decoder: Any, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
    """`TransformerModule.decode` of a `decoder`."""
    positions = jnp.broadcast_to(position, tokens.shape)[:, None]

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int, **how: Any) -> Any:
        return attend_cached(query, new, cache, layer, position, window=decoder.config.window, **how)

    x = _embedded(decoder, tokens[:, None], positions)
    places = decoder.places(positions, positions + 1 if _depends_on_length(decoder) else None)
    x, cache = _cached(decoder, x, places, cache, mix)
    return decoder.logits(x), cache


def read_tokens(decoder: Any, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
    """`TransformerModule.extend` of a `decoder`."""
    positions = position[:, None] + jnp.arange(tokens.shape[1])

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int, **how: Any) -> Any:
        return attend_several(query, new, cache, layer, position, window=decoder.config.window, **how)

    x = _embedded(decoder, tokens, positions)
    places = decoder.places(positions, positions + 1 if _depends_on_length(decoder) else None)
    x, cache = _cached(decoder, x, places, cache, mix)
    return decoder.logits(x), cache


def _embedded(decoder: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """What the first layer reads of tokens at these positions.

    Drafted tokens may lie behind the last learned position, where a look-up gives NaN, which would stay in the cache.
    What is computed of such tokens is not used, so they get the last position.
    """
    last = decoder.config.max_length
    return decoder.embed(tokens, positions if last is None else jnp.minimum(positions, last - 1))


def _depends_on_length(decoder: Any) -> bool:
    """Whether tokens are read otherwise in longer texts."""
    return decoder.next_change(0) is not None


def _cached(
    decoder: Any, x: jax.Array, places: Places, cache: KeyValues, mix: Callable[..., Any]
) -> tuple[jax.Array, KeyValues]:
    """`(x, cache)` after the layers, where `mix` is that of `Block.cached`, with cache, layer and options."""

    def block(carry: Any, layer: Block, index: jax.Array | int) -> Any:
        x, cache = carry
        place = places.of(index)

        def attention(query: jax.Array, new: KeyValues, weighing: Weighing) -> Any:
            return mix(query, new, cache, index, limited=place.limited, weighing=weighing)

        return layer.cached(x, place, attention)

    return decoder.through_layers(block, (sharding.constrain(x, "batch", "length", "embed"), cache))[0]
