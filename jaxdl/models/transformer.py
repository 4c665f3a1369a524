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
from jaxdl.models.blocks import GATES, MLP, Biases, Init, MLPKind, NormKind
from jaxdl.models.config import Model
from jaxdl.models.decoder import TransformerModule
from jaxdl.models.lora import LoRA
from jaxdl.models.remat import Remat
from jaxdl.models.rotary import RopeScaling
from jaxdl.parallel.collectives.attention import Pattern
from jaxdl.parallel.sharding import Params


def _further(default: Any, **limits: Any) -> Any:
    """A field that is written only where it has another value: most networks do without it."""
    return pydantic.Field(default=default, exclude_if=lambda value: value == default, **limits)


class Transformer(Model, kind="transformer"):
    """A decoder-only transformer."""

    modality: ClassVar[str] = "text"
    splits_layers: ClassVar[bool] = True
    splits_length: ClassVar[bool] = True
    position_fields: ClassVar[tuple[str, ...]] = (
        "positions", "max_length", "rope_theta", "rope_scaling", "window", "full_layers", "window_rope_theta",
        "unrotated_layers", "rotary_dim",
    )  # fmt: skip
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
    """What the MLP computes: `swiglu`, (silu(x gate) * (x up)) down, or `geglu` with GELU (its tanh form) in place of
    silu; `gelu` (its tanh form), `gelu_erf` (its exact form) or `relu`, f(x up) down."""
    mlp_dim: int | None = pydantic.Field(default=None, ge=1)
    """Size of the MLP's hidden layer; None takes 8/3 of embed_dim, rounded up to a multiple of 64, and 4 times
    embed_dim without a gate."""
    norm: NormKind = "rms"
    """`rms` divides by the root of the mean square; `rms_plus_one` also multiplies by one more than its scales, which
    begin at 0 (Gemma); `layer` subtracts the mean first, and has biases."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square, or to the variance, before the square root."""
    qk_norm: bool | Literal["all"] = False
    """RMSNorm of each query and key over its head, before they are rotated; `all`: over all heads of a token."""
    biases: Biases = "none"
    """Which products have biases: `none`, those of queries, keys and values (`qkv`), also that of attention's output
    (`attention`), or `all` inside of the blocks."""
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
    full_layers: tuple[int, ...] = _further(())
    """With `window`: the numbers of the layers, from 0, that have none."""
    window_rope_theta: float | None = _further(None, gt=1)
    """With `full_layers`: rope_theta of the other layers, whose wavelengths are not stretched; None takes those of all.
    """
    unrotated_layers: tuple[int, ...] = _further(())
    """With rotary positions: the numbers of layers, from 0, that do not know positions."""
    rotary_dim: int | None = _further(None, ge=2)
    """With rotary positions: how many of the numbers of a head are turned, the leading ones; None turns all."""
    attention_scale: float | None = _further(None, gt=0)
    """The factor of attention's scores; None takes 1 / sqrt(size of a head)."""
    attention_cap: float | None = _further(None, gt=0)
    """Attention's scores s become cap * tanh(s / cap) (Gemma 2); no flash kernel has it."""
    attention_sinks: bool = _further(default=False)
    """Each head has a trained score of a key without a value, so that its weights may add up to less than 1 (gpt-oss);
    no flash kernel has it."""
    norm_place: Literal["before", "after", "both"] = _further("before")
    """Where the norms of a block are: `before` attention and MLP, `after` them, before they are added to the residual
    stream (OLMo 2), or `both` (Gemma 2)."""
    parallel_residual: bool = _further(default=False)
    """The MLP reads what attention reads, not what comes after it: x + attention(x) + mlp(x) (GPT-NeoX)."""
    scaled_embedding: bool = _further(default=False)
    """Multiply the embedding's vectors by sqrt(embed_dim) (Gemma)."""
    logit_cap: float | None = _further(None, gt=0)
    """The logits z become cap * tanh(z / cap) (Gemma 2)."""
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

    @pydantic.model_validator(mode="after")
    def _layers_fit(self) -> Transformer:
        for name in ("full_layers", "unrotated_layers"):
            layers = getattr(self, name)
            if layers and not (list(layers) == sorted(set(layers)) and 0 <= layers[0] <= layers[-1] < self.num_layers):
                raise ValueError(
                    f"{name} = {list(layers)}: give numbers of layers in their order, from 0 to {self.num_layers - 1}."
                )
        if self.full_layers and self.window is None:
            raise ValueError("full_layers has no effect without window, which the other layers have. Set it.")
        if self.full_layers and len(self.full_layers) == self.num_layers:
            raise ValueError("full_layers has all layers, so that window has no effect: remove both.")
        if self.window_rope_theta is not None and not self.full_layers:
            raise ValueError(
                "window_rope_theta is of the layers with a window beside full_layers, which are not given: set them, "
                "or set rope_theta alone."
            )
        if self.positions == "learned":
            for name in ("window_rope_theta", "unrotated_layers", "rotary_dim"):
                if getattr(self, name):
                    raise ValueError(f"{name} has no effect with positions = learned: remove one of them.")
        return self

    @pydantic.model_validator(mode="after")
    def _rotation_fits(self) -> Transformer:
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim > self.head_dim):
            raise ValueError(
                f"rotary_dim = {self.rotary_dim}: give an even number, at most the size of a head, {self.head_dim}."
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.form == "longrope" and 2 * len(scaling.long_factors) != self.rotated:
            raise ValueError(
                f"long_factors has {len(scaling.long_factors)} numbers: longrope needs {self.rotated // 2}, one for "
                "each pair of numbers of a head that is rotated."
            )
        if scaling is not None and scaling.form in ("yarn", "dynamic") and self.rotated < 4:
            raise ValueError(
                f"form = {scaling.form} needs at least 4 rotated numbers of a head: there are {self.rotated}."
            )
        return self

    @property
    def rotated(self) -> int:
        """How many numbers of a head rotary positions turn."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

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
        return math.ceil(8 * self.embed_dim / 3 / 64) * 64 if self.mlp in GATES else 4 * self.embed_dim

    def context(self, length: int) -> int | None:
        """The tokens that it reads at a time; None, any number, where a window limits what each token sees."""
        limited = self.positions == "learned" or self.window is None or self.window > length or self.full_layers
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
        return (3 if self.mlp in GATES else 2) * self.embed_dim * self.hidden_dim

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
        caps = {"cap of scores": self.attention_cap, "sinks": self.attention_sinks}
        return attention_remarks(
            mesh, dtype, self.head_dim, Pattern(window=self.window), dropout=self.attention_dropout,
            weighs=" or ".join(name for name, value in caps.items() if value),
        )  # fmt: skip

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
