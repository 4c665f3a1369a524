"""The block of a decoder-only transformer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.models.blocks import Attention, Init, make_norm
from jaxdl.models.cache import KeyValues
from jaxdl.models.dropout import dropout, fold
from jaxdl.models.rotary import Angles
from jaxdl.parallel import sharding
from jaxdl.parallel.zigzag import Zigzag

Mix = Callable[[jax.Array, KeyValues], tuple[jax.Array, KeyValues]]
"""(queries, keys and values of the same tokens) -> (the heads' mixed values, the cache with these tokens)."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `config` is a `jaxdl.models.Transformer`."""

    def __init__(self, config: Any, rngs: nnx.Rngs, *, dtype: DTypeLike):
        # The 2 num_layers projections that add to the residual stream: Radford et al. 2019, section 2.3.
        init = Init(config.init_stddev, 1 / math.sqrt(2 * config.num_layers))
        embed, norm = config.embed_dim, functools.partial(make_norm, config.norm, epsilon=config.norm_epsilon)
        self.attention_norm = norm(size=embed, dtype=dtype)
        self.attention = Attention(
            rngs,
            embed_dim=embed,
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            causal=True,
            window=config.window,
            biases=config.biases,
            qk_norm_epsilon=config.norm_epsilon if config.qk_norm else None,
            norms_all_heads=config.qk_norm == "all",
            init=init,
            dropout=config.attention_dropout,
        )
        self.mlp_norm = norm(size=embed, dtype=dtype)
        self.mlp = config.make_mlp(rngs, init)
        self.dropout = config.dropout
        config.lora.add(self, rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: Angles | None = None,
        segments: jax.Array | None = None,
        keys: jax.Array | None = None,
        order: Zigzag | None = None,
    ) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]; `keys` are the random keys of the rows in this layer.

        `segments` and `order` are those of `jaxdl.models.attention.attend`.
        """
        hidden = self.attention_norm(x)
        mixed = self.attention(hidden, angles=angles, segments=segments, keys=fold(keys, 0), order=order)
        return self.after(x, mixed, keys, order)

    def cached(self, x: jax.Array, angles: Angles | None, mix: Mix) -> tuple[jax.Array, KeyValues]:
        """`(x, cache)` after this layer, whose attention `mix` computes with the cache."""
        hidden = self.attention_norm(x)
        new = KeyValues(*self.attention.keys_values(hidden, angles))
        mixed, cache = mix(self.attention.queries(hidden, angles), new)
        return self.after(x, self.attention.merged(mixed)), cache

    def after(
        self, x: jax.Array, mixed: jax.Array, keys: jax.Array | None = None, order: Zigzag | None = None
    ) -> jax.Array:
        """What comes after attention: x + mixed, then the MLP."""
        x = self.plus(x, mixed, fold(keys, 1), order)
        return self.plus(x, self.mlp(self.mlp_norm(x)), fold(keys, 2), order)

    def plus(self, x: jax.Array, branch: jax.Array, keys: jax.Array | None, order: Zigzag | None = None) -> jax.Array:
        """The residual stream after a branch."""
        return sharding.constrain(x + dropout(branch, self.dropout, keys, order), "batch", "length", "embed")
