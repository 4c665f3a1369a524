"""A decoder that reads token after token, with the keys and values of those before in a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.models.attention import attend
from jaxdl.models.block import Block
from jaxdl.models.cache import KeyValues, attend_cached, attend_several, empty_cache, with_prompt
from jaxdl.models.logits import Logits
from jaxdl.parallel import sharding


def read_prompts(decoder: Any, tokens: jax.Array, lengths: jax.Array, slots: int) -> tuple[Logits, KeyValues]:
    """`TransformerModule.prefill` of a `decoder`."""
    config, (rows, length) = decoder.config, tokens.shape
    cache = empty_cache(
        config.num_layers, rows, slots, config.kv_heads, config.head_dim, dtype=decoder.dtype, window=config.window
    )

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int) -> Any:
        mixed = attend(query, new.key, new.value, causal=True, window=config.window)
        return mixed, with_prompt(cache, new, layer, lengths)

    x, cache = _cached(decoder, decoder.embed(tokens), jnp.arange(length)[None], cache, mix)
    return decoder.logits(jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)), cache


def read_token(decoder: Any, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
    """`TransformerModule.decode` of a `decoder`."""
    positions = jnp.broadcast_to(position, tokens.shape)[:, None]

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int) -> Any:
        return attend_cached(query, new, cache, layer, position)

    x, cache = _cached(decoder, decoder.embed(tokens[:, None], positions), positions, cache, mix)
    return decoder.logits(x), cache


def read_tokens(decoder: Any, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
    """`TransformerModule.extend` of a `decoder`."""
    positions = position[:, None] + jnp.arange(tokens.shape[1])

    def mix(query: jax.Array, new: KeyValues, cache: KeyValues, layer: jax.Array | int) -> Any:
        return attend_several(query, new, cache, layer, position)

    x, cache = _cached(decoder, decoder.embed(tokens, positions), positions, cache, mix)
    return decoder.logits(x), cache


def _cached(
    decoder: Any, x: jax.Array, positions: jax.Array, cache: KeyValues, mix: Callable[..., Any]
) -> tuple[jax.Array, KeyValues]:
    """`(x, cache)` after the layers, where `mix` is that of `Block.cached`, with cache and layer."""
    angles = decoder.angles(positions)

    def block(carry: Any, layer: Block, index: jax.Array | int) -> Any:
        x, cache = carry
        return layer.cached(x, angles, lambda query, new: mix(query, new, cache, index))

    return decoder.through_layers(block, (sharding.constrain(x, "batch", "length", "embed"), cache))[0]
