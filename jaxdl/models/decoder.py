"""The network of a decoder-only transformer, as a whole and in the parts that a pipeline of stages computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.models.block import Block
from jaxdl.models.blocks import make_norm
from jaxdl.models.cache import KeyValues
from jaxdl.models.cached_decoder import read_prompts, read_token, read_tokens
from jaxdl.models.dropout import RowKeys, dropout, fold
from jaxdl.models.fp8 import bodies_of
from jaxdl.models.layer_kinds import Places
from jaxdl.models.logits import Logits
from jaxdl.models.loop import BESIDE_LOOP, body_of, through_each, through_layers
from jaxdl.models.products import add_bias
from jaxdl.models.rotary import Angles, RopeScaling, lengths_of, positions_of, rotary_angles
from jaxdl.parallel import sharding, token_vectors
from jaxdl.parallel.zigzag import Zigzag, current_order

_TABLE_STDDEV, _POSITIONS_STDDEV = 0.02, 0.01
"""As in OpenAI's code of GPT-2."""


class TransformerModule(nnx.Module):
    """The network of a `config`, a `jaxdl.models.Transformer`.

    Its blocks are `layers`, with a leading layer dimension in every parameter, or `layer_0`, `layer_1`... without
    `scan_layers`.
    """

    block: ClassVar[type[Block]] = Block

    def __init__(self, config: Any, rngs: nnx.Rngs, *, vocab_size: int, dtype: DTypeLike):
        table = nnx.initializers.normal(_TABLE_STDDEV)
        shape = (vocab_size, config.embed_dim)
        self.embedding = nnx.Param(table(rngs.params(), shape, jnp.float32), axes=("vocab", "embed"))
        if config.scan_layers:

            @nnx.split_rngs(splits=config.num_layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stacked(layer_rngs: nnx.Rngs) -> Block:
                return self.block(config, layer_rngs, dtype=dtype)

            self.layers = stacked(rngs)
        else:
            for index in range(config.num_layers):
                setattr(self, f"layer_{index}", self.block(config, rngs, dtype=dtype))
        self.final_norm = make_norm(config.norm, config.embed_dim, config.norm_epsilon, dtype=dtype)
        if not config.tied_embeddings:
            kernel = table(rngs.params(), shape[::-1], jnp.float32)
            self.head = nnx.Param(kernel, axes=("embed", "vocab"), **{BESIDE_LOOP: config.scan_layers})
        if config.max_length is not None:
            rows = nnx.initializers.normal(_POSITIONS_STDDEV)(
                rngs.params(), (config.max_length, config.embed_dim), jnp.float32
            )
            self.position_embedding = nnx.Param(rows, axes=("position", "embed"))
        self.row_keys = RowKeys() if config.dropout or config.attention_dropout else None
        self.config, self.dtype = config, dtype

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None, *, train: bool) -> Logits:
        """Tokens, int32 [batch, length] -> logits of each next token, [batch, length, vocab].

        `segments`, int32 like the tokens, are the numbers of the packed documents in their rows, and 0 for padding:
        each document is read by itself. Raises ConfigError for more tokens than there are learned positions.
        """
        x = self.enter(tokens, segments, train=train)
        x, remarks, head = self._inside(x, tokens, segments, train=train)
        return self._logits_of_text(x, head).with_remarks(remarks)

    # What follows are the parts of a network in a pipeline: what the first stage does, what each does with its layers,
    # and what the last does.

    def enter(self, tokens: jax.Array, segments: jax.Array | None = None, *, train: bool) -> jax.Array:
        """What the first layer reads, [batch, length, embed]; arguments as of a call."""
        positions, order = _positions(tokens, segments)
        stored = tokens if order is None else order.stored_whole(tokens)
        x = self.embed(stored, None if segments is None else positions, order)
        x = dropout(x, self.config.dropout, fold(self._keys(train), 0), order)
        return sharding.constrain(x, "batch", "length", "embed")

    def inside(
        self, x: jax.Array, tokens: jax.Array, segments: jax.Array | None = None, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`(x, remarks)` after the layers that the module has, those of one stage.

        The remarks of all stages together, added, are those of `Logits`.
        """
        return self._inside(x, tokens, segments, train=train)[:2]

    def leave(self, x: jax.Array, *, train: bool) -> Logits:
        """The logits from what the last layer gives."""
        del train
        return self._logits_of_text(x)

    def _logits_of_text(self, x: jax.Array, head: jax.Array | None = None) -> Logits:
        return replace(self.logits(x, head), order=current_order(x.shape[1]))

    def _inside(
        self, x: jax.Array, tokens: jax.Array, segments: jax.Array | None, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array | None]:
        """What `inside` returns, and the output layer's kernel if it has one of its own."""
        keys, (positions, order) = fold(self._keys(train), 1), _positions(tokens, segments)
        places, first = self.places(positions, self._lengths(tokens, segments, order)), 0
        if self.config.scan_layers:
            first = sharding.first_layer(jax.tree.leaves(nnx.state(self.layers))[0].shape[0])

        def block(x: jax.Array, layer: Block, index: jax.Array | int) -> jax.Array:
            number = index + first
            return layer(x, places.of(number), segments, fold(keys, number), order)

        return self.blocks(block, x, train=train)

    def _keys(self, train: bool) -> jax.Array | None:
        """The random keys of the rows in training."""
        return self.row_keys[...] if train and self.row_keys is not None else None

    def blocks(
        self, block: Callable[[Any, Block, jax.Array | int], Any], x: jax.Array, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array | None]:
        """`(x, remarks, the kernel of the output layer)` after the layers, from what the first reads."""
        del train
        x, head = self.through_layers(block, x)
        return x, {}, head

    def prefill(self, tokens: jax.Array, lengths: jax.Array, slots: int) -> tuple[Logits, KeyValues]:
        """Prompts int32 [rows, length] -> (logits of the token after each, [rows, 1, vocab]; a cache of `slots`).

        A row's first `lengths[row]` tokens count, and the prompts are padded behind them.
        """
        return read_prompts(self, tokens, lengths, slots)

    def decode(self, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
        """One more token of each row, int32 [rows] -> (logits of the next, [rows, 1, vocab]; the cache with it).

        It is at `position`, int32 scalar or [rows], from 0.
        """
        return read_token(self, tokens, cache, position)

    def extend(self, tokens: jax.Array, cache: KeyValues, position: jax.Array) -> tuple[Logits, KeyValues]:
        """Several more tokens of each row, int32 [rows, num] -> (logits after each, [rows, num, vocab]; the cache).

        The first is at `position`, int32 [rows]. The cache must have a slot for each position: attention with a window
        has fewer.
        """
        return read_tokens(self, tokens, cache, position)

    def embed(self, tokens: jax.Array, positions: jax.Array | None = None, order: Zigzag | None = None) -> jax.Array:
        """What the first layer reads, [batch, length, embed]; `positions` are 0, 1... by default, int like `tokens`.

        `order` is that of both.
        """
        x = token_vectors.lookup(self.embedding[...], tokens, self.dtype)
        if self.config.scaled_embedding:
            x = x * jnp.asarray(math.sqrt(self.config.embed_dim), self.dtype)
        if self.config.max_length is None:
            return x
        if tokens.shape[1] > self.config.max_length:
            raise ConfigError(
                f"{tokens.shape[1]} tokens: there are learned positions for {self.config.max_length}. Shorten "
                "the text (--data.length), or train with more positions (--model.max-length)."
            )
        table = self.position_embedding[...]
        if positions is None:
            rows = table[: tokens.shape[1]]
            return add_bias(x, rows if order is None else order.stored_whole(rows, dim=0))
        return x + token_vectors.lookup(table, positions, self.dtype)

    def places(self, positions: jax.Array, lengths: jax.Array | int | None = None) -> Places:
        """Where tokens at these positions, int [batch or 1, length], are in each layer.

        `lengths` are those of their texts, see `jaxdl.models.rotary.RopeScaling.frequencies`.
        """
        config = self.config
        if config.positions != "rotary":
            return Places(config, None)

        def angles(theta: float, scaling: RopeScaling | None) -> Angles:
            made = rotary_angles(positions, config.rotated, theta, scaling, lengths)
            return Angles(*(sharding.constrain(x, "batch", "length", "head_dim") for x in made))

        windowed = None if config.window_rope_theta is None else angles(config.window_rope_theta, None)
        return Places(config, angles(config.rope_theta, config.rope_scaling), windowed)

    def _lengths(self, tokens: jax.Array, segments: jax.Array | None, order: Zigzag | None) -> jax.Array | int | None:
        """The length of each token's text, where rotary positions depend on it."""
        if self.next_change(0) is None:
            return None
        if segments is None:
            return tokens.shape[1]
        return lengths_of(segments) if order is None else order.stored_whole(lengths_of(segments))

    def next_change(self, length: int) -> int | None:
        """The next length of a text, above this one, of which all tokens are read otherwise; None: there is none."""
        scaling = self.config.rope_scaling
        return None if scaling is None else scaling.next_change(length)

    def logits(self, x: jax.Array, head: jax.Array | None = None) -> Logits:
        """The logits from what the last layer gives; `head` is the kernel of an output layer of its own."""
        if head is None:
            head = self.embedding[...].T if self.config.tied_embeddings else self.head[...]
        return Logits(self.final_norm(x), head, cap=self.config.logit_cap)

    def through_layers(
        self, block: Callable[[Any, Block, jax.Array | int], Any], x: Any
    ) -> tuple[Any, jax.Array | None]:
        """`x`, an array or a tree of them, after the layers, and the output layer's kernel if it has one of its own."""
        config = self.config
        head = None if config.tied_embeddings else self.head

        if config.scan_layers:
            graphdef, state = nnx.split(self.layers)
            bodies, unroll = bodies_of(block, graphdef, state), config.scan_unroll
            return through_layers(bodies, x, state, remat=config.remat, scan_unroll=unroll, beside=head)
        layers = [nnx.split(getattr(self, f"layer_{index}")) for index in range(config.num_layers)]
        # One for all, unless a subclass has layers that differ.
        bodies = {graphdef: body_of(block, graphdef) for graphdef, _ in layers}
        x = through_each([(bodies[graphdef], state) for graphdef, state in layers], x, config.remat)
        return x, None if head is None else head[...]


def _positions(tokens: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, Zigzag | None]:
    """`(positions, order)`: of each token in its document, in the order in which devices store texts."""
    positions, order = jnp.arange(tokens.shape[1])[None], current_order(tokens.shape[1])
    if segments is not None:
        positions = positions_of(segments)
    return positions if order is None else order.stored_whole(positions), order
