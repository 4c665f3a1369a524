"""A decoder-only transformer for language modelling: of the Llama kind by default, or of that of GPT-2.

Pre-norm blocks (Xiong et al. 2020) of the parts in `jaxdl.models.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.models.attention import attention_remarks
from jaxdl.models.block import Block
from jaxdl.models.blocks import MLP, Biases, Init, MLPKind, NormKind, make_norm
from jaxdl.models.cache import KeyValues
from jaxdl.models.cached_decoder import read_prompts, read_token
from jaxdl.models.config import Model
from jaxdl.models.dropout import RowKeys, dropout, fold
from jaxdl.models.fp8 import bodies_of
from jaxdl.models.logits import Logits
from jaxdl.models.loop import BESIDE_LOOP, body_of, through_each, through_layers
from jaxdl.models.lora import LoRA
from jaxdl.models.products import add_bias
from jaxdl.models.remat import Remat
from jaxdl.models.rotary import Angles, RopeScaling, positions_of, rotary_angles
from jaxdl.parallel import sharding, token_vectors
from jaxdl.parallel.sharding import Params
from jaxdl.parallel.zigzag import Zigzag, current_order

_TABLE_STDDEV, _POSITIONS_STDDEV = 0.02, 0.01
"""As in OpenAI's code of GPT-2."""


class Transformer(Model, kind="transformer"):
    """A decoder-only transformer."""

    modality: ClassVar[str] = "text"
    splits_layers: ClassVar[bool] = True
    splits_length: ClassVar[bool] = True
    position_fields: ClassVar[tuple[str, ...]] = ("positions", "max_length", "rope_theta", "rope_scaling", "window")
    num_layers: int = pydantic.Field(default=4, ge=1)
    """Number of blocks (attention and MLP)."""
    embed_dim: int = pydantic.Field(default=256, ge=1)
    """Size of the residual stream; without head_size a multiple of num_heads."""
    num_heads: int = pydantic.Field(default=4, ge=1)
    """Number of query heads."""
    num_kv_heads: int | None = pydantic.Field(default=None, ge=1)
    """Number of key and value heads, a divisor of num_heads (grouped-query attention); None takes num_heads."""
    head_size: int | None = pydantic.Field(default=None, ge=1)
    """Size of each head; None takes embed_dim / num_heads. Rotary positions need an even one."""
    mlp: MLPKind = "swiglu"
    """What the MLP computes: `swiglu`, (silu(x gate) * (x up)) down; `gelu` (its tanh form) or `relu`, f(x up) down."""
    mlp_dim: int | None = pydantic.Field(default=None, ge=1)
    """Size of the MLP's hidden layer; None takes 8/3 of embed_dim, rounded up to a multiple of 64, and 4 times
    embed_dim without a gate."""
    norm: NormKind = "rms"
    """`rms` divides by the root of the mean square; `layer` subtracts the mean first, and has biases."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square, or to the variance, before the square root."""
    qk_norm: bool | Literal["all"] = False
    """RMSNorm of each query and key over its head, before they are rotated; `all`: over all heads of a token."""
    biases: Biases = "none"
    """Which products have biases: `none`, those of queries, keys and values (`qkv`), or `all` inside of the blocks."""
    positions: Literal["rotary", "learned"] = "rotary"
    """How positions are known: `rotary` turns queries and keys, `learned` adds a row of a table to each token."""
    max_length: int | None = pydantic.Field(default=None, ge=1)
    """With learned positions: rows of their table, the longest text that the network can read."""
    rope_theta: float = pydantic.Field(default=10_000.0, gt=1)
    """Base of the rotary wavelengths, which run from 2 pi to 2 pi theta positions."""
    rope_scaling: RopeScaling | None = None
    """Stretches the rotary wavelengths, for longer texts than the network was first trained on."""
    window: int | None = pydantic.Field(default=None, ge=1)
    """Each token attends to itself and the window - 1 tokens before it; None: to all before it."""
    tied_embeddings: bool = True
    """Use the embedding table as the output layer too."""
    vocab_size: int | None = pydantic.Field(default=None, ge=1)
    """Rows of the embedding table, at least as many as the data has tokens; None takes that many."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """In training, the share of the embedding's numbers, and of those that each branch adds, that become 0."""
    attention_dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """In training, the share of attention's weights that become 0. No flash kernel has it: all scores are in memory."""
    init_stddev: float | None = pydantic.Field(default=None, gt=0)
    """Standard deviation of the initial kernels; None takes 1 / sqrt(fan-in). Those that add to the residual stream are
    divided by sqrt(2 num_layers) besides."""
    scan_layers: bool = True
    """Stack the layers' parameters in one array each, and loop over them where `scan_unroll` has a loop."""
    former_names: ClassVar[Mapping[str, str]] = {"layers_per_turn": "scan_unroll"}
    may_change: ClassVar[tuple[str, ...]] = ("scan_unroll",)
    scan_unroll: int | None = pydantic.Field(default=None, ge=1)
    """Layers that one turn of the loop of `scan_layers` computes; all of them is no loop. None takes all on a GPU, as a
    loop copies parameters and gradients, and one on CPUs, of more than 64 layers, where the loop sums gradients over
    replicas, and with remat `block` or `offload`."""
    remat: Remat = "none"
    """What is kept of a block for the backward pass, which computes the rest again: everything (`none`), its input
    (`block`), also the results of its products and of attention (`dots`), or these in the host's memory (`offload`)."""
    lora: LoRA = pydantic.Field(default=LoRA(), exclude_if=lambda value: not value.rank)
    """Low-rank adapters, to fine-tune a network (`--init-from`) of which all else is frozen."""

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Transformer:
        if self.head_size is None and self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim = {self.embed_dim} cannot be divided by num_heads = {self.num_heads}. "
                "Change one so that the heads share embed_dim equally, or set head_size."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            what = "embed_dim / num_heads" if self.head_size is None else "head_size"
            raise ValueError(
                f"{what} = {self.head_dim} is odd: rotary embeddings rotate pairs of numbers. Make it even."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}. "
                "Choose a divisor: each key and value head serves an equal number of query heads."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _positions_fit(self) -> Transformer:
        if self.positions == "learned" and self.max_length is None:
            raise ValueError("positions = learned needs max_length, the rows of the table of positions.")
        if self.positions == "learned" and self.rope_scaling is not None:
            raise ValueError("rope_scaling has no effect with positions = learned: remove one of them.")
        if self.positions == "rotary" and self.max_length is not None:
            raise ValueError(
                f"max_length = {self.max_length} has no effect with positions = rotary, which have no table. Remove "
                "it, or set positions = learned."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _turns_have_a_loop(self) -> Transformer:
        if (self.scan_unroll or 1) > 1 and not self.scan_layers:
            raise ValueError(
                f"scan_unroll = {self.scan_unroll} has no effect without scan_layers, whose loop it is about. "
                "Remove one of them."
            )
        return self

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads if self.head_size is None else self.head_size

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_dim(self) -> int:
        """Size of the MLP's hidden layer, resolved."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return math.ceil(8 * self.embed_dim / 3 / 64) * 64 if self.mlp == "swiglu" else 4 * self.embed_dim

    def context(self, length: int) -> int | None:
        """The tokens that it reads at a time; None, any number, where a window limits what each token sees."""
        limited = self.positions == "learned" or self.window is None or self.window > length
        return super().context(length) if limited else None

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of the parameters that are trained: with adapters these alone."""
        return self.lora.trained

    @property
    def num_stacked_layers(self) -> int | None:
        """Those of `scan_layers`."""
        return self.num_layers if self.scan_layers else None

    @property
    def has_fp8(self) -> bool:
        """With stacked layers."""
        return self.scan_layers

    @property
    def needs_base(self) -> bool:
        """Whether the weights must come from another run: with adapters, unless a random network is allowed."""
        return bool(self.lora.rank) and not self.lora.random_base

    def merged(self, params: Params) -> tuple[Transformer, Params]:
        """The model without adapters, and its parameters: the matrices with their adapters added."""
        return (self.replaced({"lora": LoRA()}), self.lora.merged(params)) if self.lora.rank else (self, params)

    def remarks(self, mesh: Mesh, dtype: DTypeLike) -> tuple[str, ...]:
        """The kernel of attention, but not of a class of the user's, which may have another."""
        if self.users_name:
            return ()
        return attention_remarks(mesh, dtype, self.head_dim, window=self.window, dropout=self.attention_dropout)

    def make_mlp(self, rngs: nnx.Rngs, init: Init) -> Callable[[jax.Array], jax.Array]:
        """The MLP of a block, [batch, length, embed] -> [batch, length, embed]."""
        biases = self.biases == "all"
        return MLP(rngs, self.mlp, embed_dim=self.embed_dim, hidden_dim=self.hidden_dim, biases=biases, init=init)

    def build(self, *, vocab_size: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `TransformerModule` from random keys (stream `params`); it computes in `dtype`.

        Raises ConfigError when the embedding table has fewer rows than there are tokens.
        """
        rows = vocab_size if self.vocab_size is None else self.vocab_size
        if rows < vocab_size:
            raise ConfigError(
                f"--model.vocab-size {rows}: the data has {vocab_size} tokens. Give at least as many rows, or None; or "
                "the tokenizer of the network."
            )
        return lambda rngs: self.module(self, rngs, vocab_size=rows, dtype=dtype)

    @property
    def module(self) -> type[TransformerModule]:
        """The class of the network."""
        return TransformerModule


class TransformerModule(nnx.Module):
    """The network of a `Transformer` config.

    Its blocks are `layers`, with a leading layer dimension in every parameter, or `layer_0`, `layer_1`... without
    `scan_layers`.
    """

    block: ClassVar[type[Block]] = Block

    def __init__(self, config: Transformer, rngs: nnx.Rngs, *, vocab_size: int, dtype: DTypeLike):
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
        x, remarks, head = self._inside(x, 0, tokens, segments, train=train)
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
        self,
        x: jax.Array,
        first: jax.Array | int,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        *,
        train: bool,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`(x, remarks)` after the layers that the module has, of which `first` is the number in the whole network.

        The remarks of all stages together, added, are those of `Logits`.
        """
        return self._inside(x, first, tokens, segments, train=train)[:2]

    def leave(self, x: jax.Array, *, train: bool) -> Logits:
        """The logits from what the last layer gives."""
        del train
        return self._logits_of_text(x)

    def _logits_of_text(self, x: jax.Array, head: jax.Array | None = None) -> Logits:
        return replace(self.logits(x, head), order=current_order(x.shape[1]))

    def _inside(
        self, x: jax.Array, first: jax.Array | int, tokens: jax.Array, segments: jax.Array | None, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array | None]:
        """What `inside` returns, and the output layer's kernel if it has one of its own."""
        keys, (positions, order) = fold(self._keys(train), 1), _positions(tokens, segments)
        angles = self.angles(positions)

        def block(x: jax.Array, layer: Block, index: jax.Array | int) -> jax.Array:
            return layer(x, angles, segments, fold(keys, index + first), order)

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

    def embed(self, tokens: jax.Array, positions: jax.Array | None = None, order: Zigzag | None = None) -> jax.Array:
        """What the first layer reads, [batch, length, embed]. `positions`, int like `tokens`, are 0, 1... by default;
        `order` is that of both."""
        x = token_vectors.lookup(self.embedding[...], tokens, self.dtype)
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

    def angles(self, positions: jax.Array) -> Angles | None:
        """The angles of rotary positions, int [batch or 1, length]; None for learned ones."""
        config = self.config
        if config.positions != "rotary":
            return None
        angles = rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        return Angles(*(sharding.constrain(x, "batch", "length", "head_dim") for x in angles))

    def logits(self, x: jax.Array, head: jax.Array | None = None) -> Logits:
        """The logits from what the last layer gives; `head` is the kernel of an output layer of its own."""
        if head is None:
            head = self.embedding[...].T if self.config.tied_embeddings else self.head[...]
        return Logits(self.final_norm(x), head)

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
