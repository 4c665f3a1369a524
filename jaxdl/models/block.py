"""The block of a decoder-only transformer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.models.attention import Weighing
from jaxdl.models.blocks import Attention, Init, make_norm
from jaxdl.models.cache import KeyValues
from jaxdl.models.dropout import dropout, fold
from jaxdl.models.layer_kinds import UNPLACED, Place
from jaxdl.parallel import sharding
from jaxdl.parallel.zigzag import Zigzag

Mix = Callable[[jax.Array, KeyValues, Weighing], tuple[jax.Array, KeyValues]]
"""(queries, keys and values of the same tokens, ...) -> (the heads' mixed values, the cache with these tokens)."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); `config` is a `jaxdl.models.Transformer`.

    Its `norm_place` puts norms after the branches, x + norm(attention(x)), in place of those before or besides; with
    `parallel_residual` both branches read the same x.
    """

    def __init__(self, config: Any, rngs: nnx.Rngs, *, dtype: DTypeLike):
        # The 2 num_layers projections that add to the residual stream: Radford et al. 2019, section 2.3.
        init = Init(config.init_stddev, 1 / math.sqrt(2 * config.num_layers))
        embed, norm = config.embed_dim, functools.partial(make_norm, config.norm, epsilon=config.norm_epsilon)
        before, after = config.norm_place != "after", config.norm_place != "before"
        if before:
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
            norms_plus_one=config.norm == "rms_plus_one",
            init=init,
            dropout=config.attention_dropout,
            scale=config.attention_scale,
            cap=config.attention_cap,
            sinks=config.attention_sinks,
        )
        if before:
            self.mlp_norm = norm(size=embed, dtype=dtype)
        self.mlp = config.make_mlp(rngs, init)
        if after:
            self.attention_out_norm, self.mlp_out_norm = (norm(size=embed, dtype=dtype) for _ in range(2))
        self.norms_before, self.norms_after, self.is_parallel = before, after, config.parallel_residual
        self.dropout = config.dropout
        config.lora.add(self, rngs)

    def __call__(
        self,
        x: jax.Array,
        place: Place = UNPLACED,
        segments: jax.Array | None = None,
        keys: jax.Array | None = None,
        order: Zigzag | None = None,
    ) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]; `keys` are the random keys of the rows in this layer.

        `segments` and `order` are those of `jaxdl.models.attention.attend`.
        """
        hidden = self.attention_norm(x) if self.norms_before else x
        mixed = self.attention(hidden, **place._asdict(), segments=segments, keys=fold(keys, 0), order=order)
        return self.after(x, mixed, keys, order)

    def cached(self, x: jax.Array, place: Place, mix: Mix) -> tuple[jax.Array, KeyValues]:
        """`(x, cache)` after this layer, whose attention `mix` computes with the cache."""
        hidden = self.attention_norm(x) if self.norms_before else x
        new = KeyValues(*self.attention.keys_values(hidden, place.angles))
        mixed, cache = mix(self.attention.queries(hidden, place.angles), new, self.attention.weighing)
        return self.after(x, self.attention.merged(mixed)), cache

    def after(
        self, x: jax.Array, mixed: jax.Array, keys: jax.Array | None = None, order: Zigzag | None = None
    ) -> jax.Array:
        """What comes after attention: x + mixed, then the MLP."""
        mixed = self.attention_out_norm(mixed) if self.norms_after else mixed
        read, x = x, self.plus(x, mixed, fold(keys, 1), order)
        read = read if self.is_parallel else x
        hidden = self.mlp(self.mlp_norm(read) if self.norms_before else read)
        return self.plus(x, self.mlp_out_norm(hidden) if self.norms_after else hidden, fold(keys, 2), order)

    def plus(self, x: jax.Array, branch: jax.Array, keys: jax.Array | None, order: Zigzag | None = None) -> jax.Array:
        """The residual stream after a branch."""
        return sharding.constrain(x + dropout(branch, self.dropout, keys, order), "batch", "length", "embed")
