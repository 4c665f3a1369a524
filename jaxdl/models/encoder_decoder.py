"""The encoder-decoder transformer of Vaswani et al. 2017 ("Attention is all you need", arXiv 1706.03762).

It reads rows of packed pairs: a token attends to tokens of its own pair alone, and positions begin again with each
text. Source, target and output share one table of embeddings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.models.attention import attend, attention_remarks, portable_attention
from jaxdl.models.blocks import MLP, Attention, MLPKind, NormKind, make_norm
from jaxdl.models.cache import KeyValues, attend_cached, empty_cache
from jaxdl.models.config import Model
from jaxdl.models.dropout import RowKeys, dropout, fold
from jaxdl.models.logits import Logits
from jaxdl.models.loop import through_layers
from jaxdl.models.remat import Remat
from jaxdl.models.rotary import Angles, positions_of, rotary_angles
from jaxdl.parallel import sharding, token_vectors
from jaxdl.parallel.collectives.attention import Pattern
from jaxdl.parallel.gathering import gather_layer

_LONGEST = 10_000.0
"""Wavelengths of the positions run from 2 pi to 2 pi times this (Vaswani et al., section 3.5; Su et al. 2021)."""
_SOURCE, _ENCODER, _TARGET, _DECODER = range(4)
"""Where a row's random keys are used."""


class EncoderDecoder(Model, kind="encoder_decoder"):
    """An encoder-decoder transformer; the defaults are the base model of Vaswani et al. 2017, table 3.

    Their big one: embed_dim 1,024, num_heads 16, mlp_dim 4,096, dropout 0.3.
    """

    modality: ClassVar[str] = "pairs"
    num_encoder_layers: int = pydantic.Field(default=6, ge=1)
    """Blocks that read the source (self-attention and MLP)."""
    num_decoder_layers: int = pydantic.Field(default=6, ge=1)
    """Blocks that write the target (self-attention, attention to the encoded source, and MLP)."""
    embed_dim: int = pydantic.Field(default=512, ge=2)
    """Size of the residual stream; a multiple of num_heads."""
    num_heads: int = pydantic.Field(default=8, ge=1)
    """Number of heads of each attention, of size embed_dim / num_heads."""
    mlp_dim: int | None = pydantic.Field(default=None, ge=1)
    """Size of the MLPs' hidden layers; None takes 4 embed_dim."""
    norm_position: Literal["post", "pre"] = "post"
    """`post`, as in the paper: norm(x + part(x)). `pre`: x + part(norm(x)), and a norm after the last block; it trains
    without a long warm-up (Xiong et al. 2020)."""
    norm: NormKind = "layer"
    """`layer` (LayerNorm, with a bias) or `rms` (RMSNorm)."""
    mlp: MLPKind = "relu"
    """`relu`, `gelu` or `swiglu`."""
    biases: bool = True
    """Whether the products with weights add biases."""
    positions: Literal["sinusoidal", "rotary"] = "sinusoidal"
    """`sinusoidal`, as in the paper: sines and cosines are added to the embeddings. `rotary` rotates the queries and
    keys of self-attention."""
    dropout: float = pydantic.Field(default=0.1, ge=0, lt=1)
    """Dropout of the embeddings with their positions, and of what each part of a block adds."""
    attention_dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Dropout of the weights of attention."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the variance (or mean square) before the square root."""
    former_names: ClassVar[Mapping[str, str]] = {"layers_per_turn": "scan_unroll"}
    may_change: ClassVar[tuple[str, ...]] = ("scan_unroll",)
    scan_unroll: int | None = pydantic.Field(default=None, ge=1)
    """Layers that one turn of a loop over layers computes; all of them is no loop. None takes all on a GPU, where a
    loop copies parameters and gradients, and one on CPUs, of more than 64, and with remat `block` or `offload`."""
    remat: Remat = "none"
    """What is kept of a block for the backward pass, which computes the rest again: everything (`none`), its input
    (`block`), also the results of its products and of attention (`dots`), or these in the host's memory (`offload`)."""

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> EncoderDecoder:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim = {self.embed_dim} cannot be divided by num_heads = {self.num_heads}. "
                "Change one so that the heads share embed_dim equally."
            )
        pairs, what = (self.head_dim, "embed_dim / num_heads") if self.positions == "rotary" else (
            self.embed_dim, "embed_dim"
        )  # fmt: skip
        if pairs % 2:
            raise ValueError(
                f"{what} = {pairs} is odd: positions {self.positions} take pairs of numbers. Make it even."
            )
        return self

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Size of the MLPs' hidden layers, resolved."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    def remarks(self, mesh: Mesh, dtype: DTypeLike) -> tuple[str, ...]:
        """The kernel of attention, but not of a class of the user's, which may have another."""
        if self.users_name:
            return ()
        pattern = Pattern(causal=False, packed=True)  # Rows are of packed pairs, whichever part attends.
        return attention_remarks(mesh, dtype, self.head_dim, pattern, dropout=self.attention_dropout)

    def build(self, *, vocab_size: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `EncoderDecoderModule` from random keys (stream `params`), computing in `dtype`."""
        return lambda rngs: EncoderDecoderModule(self, rngs, vocab_size=vocab_size, dtype=dtype)


class _Rows(NamedTuple):
    """What attention must know of the rows: the numbers of their pairs, and the angles of rotary positions."""

    segments: jax.Array
    angles: Angles | None


class Block(nnx.Module):
    """One block of the encoder, or with `cross` of the decoder."""

    def __init__(self, config: EncoderDecoder, rngs: nnx.Rngs, *, dtype: DTypeLike, cross: bool):
        embed, norm = config.embed_dim, functools.partial(make_norm, config.norm, config.embed_dim, config.norm_epsilon)
        attention = functools.partial(
            Attention,
            rngs,
            embed_dim=embed,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            biases="all" if config.biases else "none",
            dropout=config.attention_dropout,
        )
        self.attention_norm, self.attention = norm(dtype=dtype), attention(causal=cross)
        if cross:
            self.cross_norm, self.cross = norm(dtype=dtype), attention(causal=False)
        self.mlp_norm = norm(dtype=dtype)
        self.mlp = MLP(rngs, config.mlp, embed_dim=embed, hidden_dim=config.hidden_dim, biases=config.biases)
        self.is_pre, self.dropout = config.norm_position == "pre", config.dropout

    def encoded(self, x: jax.Array, rows: _Rows, keys: jax.Array | None) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]; `keys` are the random keys of the rows in this layer."""
        self_attention = functools.partial(
            self.attention, angles=rows.angles, segments=rows.segments, keys=fold(keys, 3)
        )
        return self.add("mlp", self.add("attention", x, self_attention, keys), self.mlp, keys)

    def decoded(
        self, x: jax.Array, rows: _Rows, memory: jax.Array, source_segments: jax.Array, keys: jax.Array | None
    ) -> jax.Array:
        """As `encoded`; `memory` [batch, source_length, embed] is what the encoder made of the sources."""
        self_attention = functools.partial(
            self.attention, angles=rows.angles, segments=rows.segments, keys=fold(keys, 3)
        )
        other = functools.partial(
            self.cross, source=memory, segments=rows.segments, key_segments=source_segments, keys=fold(keys, 4)
        )
        x = self.add("cross", self.add("attention", x, self_attention, keys), other, keys)
        return self.add("mlp", x, self.mlp, keys)

    def add(
        self, name: str, x: jax.Array, part: Callable[[jax.Array], jax.Array], keys: jax.Array | None = None
    ) -> jax.Array:
        """The residual stream after a part, "attention", "cross" or "mlp", with its norm before or after the sum."""
        norm: Callable[[jax.Array], jax.Array] = getattr(self, f"{name}_norm")
        own_keys = fold(keys, ("attention", "cross", "mlp").index(name))
        total = x + dropout(part(norm(x) if self.is_pre else x), self.dropout, own_keys)
        return sharding.constrain(total if self.is_pre else norm(total), "batch", "length", "embed")


class EncoderDecoderModule(nnx.Module):
    """The network of an `EncoderDecoder` config: `encoder` and `decoder` are stacks of blocks."""

    def __init__(self, config: EncoderDecoder, rngs: nnx.Rngs, *, vocab_size: int, dtype: DTypeLike):
        # Times sqrt(embed_dim), an embedding has entries of variance 1.
        table = nnx.initializers.normal(config.embed_dim**-0.5)(
            rngs.params(), (vocab_size, config.embed_dim), jnp.float32
        )
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))

        def stack(num_layers: int, *, cross: bool) -> Block:
            @nnx.split_rngs(splits=num_layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stacked(layer_rngs: nnx.Rngs) -> Block:
                return Block(config, layer_rngs, dtype=dtype, cross=cross)

            return stacked(rngs)

        self.encoder = stack(config.num_encoder_layers, cross=False)
        self.decoder = stack(config.num_decoder_layers, cross=True)
        if config.norm_position == "pre":
            norm = functools.partial(make_norm, config.norm, config.embed_dim, config.norm_epsilon, dtype=dtype)
            self.encoder_norm, self.decoder_norm = norm(), norm()
        self.row_keys = RowKeys() if config.dropout or config.attention_dropout else None
        self.config, self.dtype = config, dtype

    def __call__(
        self,
        source: jax.Array,
        source_segments: jax.Array,
        target: jax.Array,
        target_segments: jax.Array,
        *,
        train: bool,
    ) -> Logits:
        """Logits of each token after those of `target`, [batch, target_length, vocab].

        All are int32: `source` and `source_segments` [batch, source_length], the others [batch, target_length]. The
        segments number the pairs of a row from 1; 0 is padding.
        """
        keys = self.row_keys[...] if train and self.row_keys is not None else None
        memory = self.encode(source, source_segments, keys)
        x, rows = self._embedded(target, target_segments, fold(keys, _TARGET))
        layer_keys = fold(keys, _DECODER)

        def block(x: jax.Array, layer: Block, index: jax.Array | int) -> jax.Array:
            return layer.decoded(x, rows, memory, source_segments, fold(layer_keys, index))

        return self._logits(self._through(self.decoder, block, x))

    def encode(self, source: jax.Array, segments: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """What the encoder makes of source tokens, [batch, length, embed]; `keys` are the random keys of the rows."""
        x, rows = self._embedded(source, segments, fold(keys, _SOURCE))
        layer_keys = fold(keys, _ENCODER)

        def block(x: jax.Array, layer: Block, index: jax.Array | int) -> jax.Array:
            return layer.encoded(x, rows, fold(layer_keys, index))

        x = self._through(self.encoder, block, x)
        return self.encoder_norm(x) if self.config.norm_position == "pre" else x

    def begin(self, source: jax.Array, lengths: jax.Array, slots: int) -> tuple[KeyValues, KeyValues]:
        """`(keys and values of the decoder's attention to sources, an empty cache for `slots` target tokens)`.

        `source`, int32 [rows, length], has one text in each row, of `lengths` [rows] tokens.
        """
        exists = jnp.arange(source.shape[1]) < lengths[:, None]
        memory = self.encode(source, exists.astype(jnp.int32))
        graphdef, state = nnx.split(self.decoder)

        def one(_: None, layer: Any) -> tuple[None, KeyValues]:
            return None, KeyValues(*nnx.merge(graphdef, gather_layer(layer)).cross.keys_values(memory))

        config = self.config
        sizes = (config.num_decoder_layers, len(source), slots, config.num_heads, config.head_dim)
        return lax.scan(one, None, state)[1], empty_cache(*sizes, dtype=self.dtype)

    def next_logits(
        self, tokens: jax.Array, cache: KeyValues, position: jax.Array, source: KeyValues, lengths: jax.Array
    ) -> tuple[Logits, KeyValues]:
        """One more token of each target, int32 [rows] -> (logits of the next, [rows, 1, vocab]; the cache with it).

        It is at `position`, int32 scalar or [rows]. `source` is what `begin` made of sources of `lengths` tokens.
        """
        positions = jnp.broadcast_to(position, tokens.shape)[:, None]
        x, rows = self._embedded(tokens[:, None], jnp.ones_like(positions), positions=positions)

        def block(carry: Any, layer: Block, index: jax.Array | int) -> Any:
            x, cache = carry

            def own(y: jax.Array) -> jax.Array:
                nonlocal cache
                query = layer.attention.queries(y, rows.angles)
                new = KeyValues(*layer.attention.keys_values(y, rows.angles))
                mixed, cache = attend_cached(query, new, cache, index, position)
                return layer.attention.merged(mixed)

            def other(y: jax.Array) -> jax.Array:
                key, value = (lax.dynamic_index_in_dim(stacked, index, keepdims=False) for stacked in source)
                with portable_attention():  # As in `attend_cached`.
                    mixed = attend(layer.cross.queries(y), key, value, causal=False, key_lengths=lengths)
                return layer.cross.merged(mixed)

            x = layer.add("mlp", layer.add("cross", layer.add("attention", x, own), other), layer.mlp)
            return x, cache

        x, cache = self._through(self.decoder, block, (x, cache))
        return self._logits(x), cache

    def _embedded(
        self,
        tokens: jax.Array,
        segments: jax.Array,
        keys: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, _Rows]:
        """What the first block reads, [batch, length, embed]; `positions` are those in each text by default."""
        config = self.config
        positions = positions_of(segments) if positions is None else positions
        x, angles = token_vectors.lookup(self.embedding[...], tokens, self.dtype) * math.sqrt(config.embed_dim), None
        if config.positions == "rotary":
            angles = rotary_angles(positions, config.head_dim, _LONGEST)
        else:
            waves = rotary_angles(positions, config.embed_dim, _LONGEST)
            x = x + jnp.concatenate([waves.sin, waves.cos], axis=-1).astype(self.dtype)
        x = dropout(sharding.constrain(x, "batch", "length", "embed"), config.dropout, keys)
        return x, _Rows(segments, angles)

    def _through(self, layers: Block, block: Callable[[Any, Block, jax.Array | int], Any], x: Any) -> Any:
        """`x`, activations or a tree with them, after all layers of a stack."""
        graphdef, state = nnx.split(layers)

        def body(x: jax.Array, layer: Any, index: jax.Array | int) -> jax.Array:
            return block(x, nnx.merge(graphdef, gather_layer(layer)), index)

        return through_layers(body, x, state, remat=self.config.remat, scan_unroll=self.config.scan_unroll)[0]

    def _logits(self, x: jax.Array) -> Logits:
        return Logits(self.decoder_norm(x) if self.config.norm_position == "pre" else x, self.embedding[...].T)
