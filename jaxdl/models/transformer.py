"""A decoder-only transformer for language modelling: of the Llama kind by default, or of that of GPT-2.

Pre-norm blocks (Xiong et al. 2020) of the parts in `jaxdl.models.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import pydantic
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.models.attention import attention_remarks
from jaxdl.models.blocks import MLP, Biases, Init, MLPKind, NormKind
from jaxdl.models.config import Model
from jaxdl.models.decoder import TransformerModule
from jaxdl.models.lora import LoRA
from jaxdl.models.remat import Remat
from jaxdl.models.rotary import RopeScaling
from jaxdl.parallel.sharding import Params


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
    def mlp_weights(self) -> int:
        """Weights of an MLP by which a token is multiplied."""
        return (3 if self.mlp == "swiglu" else 2) * self.embed_dim * self.hidden_dim

    def output_layers(self, *, vocab_size: int, **sizes: Any) -> float:
        """By the weights of both."""
        del sizes
        attention = 2 * self.embed_dim * self.head_dim * (self.num_heads + self.kv_heads)
        return (self.vocab_size or vocab_size) * self.embed_dim / (attention + self.mlp_weights)

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
