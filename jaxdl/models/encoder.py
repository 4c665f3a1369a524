"""Encoders that classify texts: BERT and RoBERTa, DistilBERT, ModernBERT.

Devlin et al. (arXiv 1810.04805), Liu et al. (1907.11692), Sanh et al. (1910.01108), Warner et al. (2412.13663). Every
token attends to all of its text, or in some layers to those near it; a head reads the first token, or the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import pydantic
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.core.errors import ConfigError
from jaxdl.models.attention import attention_remarks, near_remarks
from jaxdl.models.config import Model
from jaxdl.models.encoder_module import Activation, EncoderModule
from jaxdl.models.lora import LoRA
from jaxdl.models.remat import Remat
from jaxdl.parallel.collectives.attention import Pattern
from jaxdl.parallel.sharding import Params


class Encoder(Model, kind="encoder"):
    """An encoder that classifies texts; the defaults are the base model of BERT (`--model bert-base`)."""

    modality: ClassVar[str] = "labelled_texts"
    num_layers: int = pydantic.Field(default=12, ge=1)
    """Number of blocks (attention and MLP)."""
    embed_dim: int = pydantic.Field(default=768, ge=2)
    """Size of the residual stream, a multiple of num_heads."""
    num_heads: int = pydantic.Field(default=12, ge=1)
    """Number of heads, of size embed_dim / num_heads."""
    mlp_dim: int | None = pydantic.Field(default=None, ge=1)
    """Size of the MLPs' hidden layers; None takes 4 embed_dim."""
    activation: Activation = "gelu"
    """That of the MLPs: `gelu` (exact), `gelu_tanh`, `relu` or `silu`."""
    gated: bool = False
    """Whether an MLP computes (f(x gate) * (x up)) down, instead of f(x up) down."""
    norm_position: Literal["post", "pre"] = "post"
    """`post`, as in BERT: norm(x + part(x)). `pre`, as in ModernBERT: x + part(norm(x)), but x + attention(x) in the
    first layer, since the embeddings are normed already; and a norm after the last layer."""
    norm_epsilon: float = pydantic.Field(default=1e-12, gt=0)
    """Added to the variance before the square root."""
    norm_biases: bool = True
    """Whether norms have biases."""
    biases: bool = True
    """Whether the products inside of the blocks have biases."""
    positions: Literal["learned", "rotary"] = "learned"
    """`learned` adds a row of a table to each token, `rotary` turns queries and keys."""
    max_length: int = pydantic.Field(default=512, ge=1)
    """The longest text that the network can read, in tokens."""
    position_offset: int = pydantic.Field(default=0, ge=0)
    """The row of the first position: RoBERTa's is 2, the number of its padding and 1 more."""
    rope_theta: float = pydantic.Field(default=160_000.0, gt=1)
    """With rotary positions: base of the wavelengths in layers that attend to the whole text."""
    local_rope_theta: float = pydantic.Field(default=10_000.0, gt=1)
    """Base of the wavelengths in layers with a window."""
    window: int | None = pydantic.Field(default=None, ge=0)
    """In layers with a window a token attends to so many tokens on each side of it; None: no layer has one."""
    global_every: int = pydantic.Field(default=3, ge=1)
    """With a window: the first layer, and every so many layers another, attend to the whole text."""
    num_types: int = pydantic.Field(default=2, ge=0)
    """Rows of the table for the first and the second text of a pair; 0 is no table. RoBERTa has one row for both."""
    vocab_size: int | None = pydantic.Field(default=None, ge=1)
    """Rows of the embedding table, at least as many as the data has tokens; None takes that many."""
    pooling: Literal["first", "mean"] = "first"
    """What the head reads: the `first` token, or the `mean` of all."""
    head_activation: Activation = "tanh"
    """The head is f(x pooler) classifier; tanh in BERT and RoBERTa, relu in DistilBERT, gelu in ModernBERT."""
    head_norm: bool = False
    """Whether there is a norm after the activation of the head."""
    head_biases: bool = True
    """Whether the pooler of the head has a bias; the classifier always has."""
    dropout: float = pydantic.Field(default=0.1, ge=0, lt=1)
    """In training, the share of the embeddings' numbers, and of those that each part of a block adds, that become 0."""
    attention_dropout: float = pydantic.Field(default=0.1, ge=0, lt=1)
    """In training, the share of attention's weights that become 0."""
    head_dropout: float | None = pydantic.Field(default=None, ge=0, lt=1)
    """In training, the share of what the classifier reads that becomes 0; None takes that of dropout."""
    head_drops_input: bool = False
    """Whether as much of what the pooler reads becomes 0 too, as in RoBERTa."""
    init_stddev: float = pydantic.Field(default=0.02, gt=0)
    """Standard deviation of the initial tables and kernels."""
    remat: Remat = "none"
    """What is kept of a block for the backward pass, which computes the rest again: everything (`none`), its input
    (`block`), also the results of its products and of attention (`dots`), or these in the host's memory (`offload`)."""
    lora: LoRA = pydantic.Field(default=LoRA(), exclude_if=lambda value: not value.rank)
    """Low-rank adapters, to fine-tune a network (`--init-from`) of which all else but the head is frozen."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Encoder:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim = {self.embed_dim} cannot be divided by num_heads = {self.num_heads}. "
                "Change one so that the heads share embed_dim equally."
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"embed_dim / num_heads = {self.head_dim} is odd: rotary embeddings rotate pairs of numbers. Make it "
                "even."
            )
        if self.positions == "rotary" and self.position_offset:
            raise ValueError(
                f"position_offset = {self.position_offset} has no effect with positions = rotary, which have no table. "
                "Remove it, or set positions = learned."
            )
        return self

    @property
    def head_dim(self) -> int:
        """Size of one head of attention."""
        return self.embed_dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Size of the MLPs' hidden layers, resolved."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def classifier_dropout(self) -> float:
        """The dropout before the classifier, resolved."""
        return self.dropout if self.head_dropout is None else self.head_dropout

    @property
    def scan_layers(self) -> bool:
        """Whether the layers, being alike, are stacked in one array for each parameter."""
        return self.norm_position == "post" and self.window is None

    @property
    def num_stacked_layers(self) -> int | None:
        """Those of layers that are alike."""
        return self.num_layers if self.scan_layers else None

    def window_of(self, layer: int) -> int | None:
        """How many tokens on each side a token of a layer attends to; None for all."""
        return None if layer % self.global_every == 0 else self.window

    @property
    def trained(self) -> tuple[str, ...]:
        """Patterns of the parameters that are trained: with adapters these, and the head."""
        return (*self.lora.trained, "pooler*", "classifier*") if self.lora.rank else ()

    @property
    def needs_base(self) -> bool:
        """Whether the weights must come from another run: with adapters, unless a random network is allowed."""
        return bool(self.lora.rank) and not self.lora.random_base

    def merged(self, params: Params) -> tuple[Encoder, Params]:
        """The model without adapters, and its parameters: the matrices with their adapters added."""
        return (self.replaced({"lora": LoRA()}), self.lora.merged(params)) if self.lora.rank else (self, params)

    def remarks(self, mesh: Mesh, dtype: DTypeLike) -> tuple[str, ...]:
        """The kernel of attention, but not of a class of the user's, which may have another."""
        if self.users_name:
            return ()
        pattern, dropout = Pattern(causal=False, padded=True), self.attention_dropout
        remarks = attention_remarks(mesh, dtype, self.head_dim, pattern, dropout=dropout)
        if self.window is None:
            return remarks
        return remarks + near_remarks(mesh, self.window + 1, dropout)

    def build(
        self, *, vocab_size: int, num_classes: int, dtype: DTypeLike, num_types: int = 1
    ) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `EncoderModule` from random keys (stream `params`); it computes in `dtype`.

        Raises ConfigError when its tables have fewer rows than there are tokens, or types of texts.
        """
        rows = vocab_size if self.vocab_size is None else self.vocab_size
        if rows < vocab_size:
            raise ConfigError(
                f"--model.vocab-size {rows}: the data has {vocab_size} tokens. Give at least as many rows, or None; or "
                "the tokenizer of the network."
            )
        # A network with one type, or none, reads both texts of a pair alike.
        if 2 <= self.num_types < num_types:
            raise ConfigError(
                f"--model.num-types {self.num_types}: the tokenizer numbers the texts of a pair up to {num_types - 1}. "
                f"Give {num_types}, or the tokenizer of the network."
            )
        sizes: dict[str, Any] = {"vocab_size": rows, "num_classes": num_classes}
        return lambda rngs: EncoderModule(self, rngs, dtype=dtype, **sizes)
