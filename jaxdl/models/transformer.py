"""A decoder-only transformer for language modelling, of the Llama kind.

Pre-norm blocks (Xiong et al. 2020) with RMSNorm (Zhang and Sennrich 2019), rotary position embeddings (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023) and SwiGLU (Shazeer 2020). No biases, no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl import sharding
from jaxdl.models.attention import attend, attention_remarks
from jaxdl.models.config import Model
from jaxdl.models.logits import Logits
from jaxdl.models.loop import BESIDE_LOOP, through_layers
from jaxdl.models.products import weight_product

_TABLE_STDDEV = 0.02


class Transformer(Model, kind="transformer"):
    """A decoder-only transformer."""

    modality: ClassVar[str] = "text"
    num_layers: int = pydantic.Field(default=4, ge=1)
    """Number of blocks (attention and MLP)."""
    embed_dim: int = pydantic.Field(default=256, ge=1)
    """Size of the residual stream; a multiple of num_heads."""
    num_heads: int = pydantic.Field(default=4, ge=1)
    """Number of query heads; each has size embed_dim / num_heads, which must be even."""
    num_kv_heads: int | None = pydantic.Field(default=None, ge=1)
    """Number of key and value heads, a divisor of num_heads (grouped-query attention); None takes num_heads."""
    mlp_dim: int | None = pydantic.Field(default=None, ge=1)
    """Size of the MLP's hidden layer; None takes 8/3 of embed_dim, rounded up to a multiple of 64."""
    tied_embeddings: bool = True
    """Use the embedding table as the output layer too."""
    rope_theta: float = pydantic.Field(default=10_000.0, gt=1)
    """Base of the rotary wavelengths, which run from 2 pi to 2 pi theta positions."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the mean square before the square root."""
    scan_layers: bool = True
    """Stack the layers' parameters and scan over them: compile time no longer grows with num_layers."""
    remat: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""

    @pydantic.model_validator(mode="after")
    def _heads_fit(self) -> Transformer:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"embed_dim = {self.embed_dim} cannot be divided by num_heads = {self.num_heads}. "
                "Change one so that the heads share embed_dim equally."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"embed_dim / num_heads = {self.head_dim} is odd: rotary embeddings rotate pairs of numbers. "
                "Change embed_dim or num_heads so that it is even."
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}. "
                "Choose a divisor: each key and value head serves an equal number of query heads."
            )
        return self

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_dim(self) -> int:
        """Size of the MLP's hidden layer, resolved."""
        return math.ceil(8 * self.embed_dim / 3 / 64) * 64 if self.mlp_dim is None else self.mlp_dim

    def remarks(self, mesh: Mesh, dtype: DTypeLike) -> tuple[str, ...]:
        """The kernel of attention, but not of a class of the user's, which may have another."""
        return () if self.users_name else attention_remarks(mesh, dtype, self.head_dim)

    def build(self, *, vocab_size: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `TransformerModule` from random keys (stream `params`); it computes in `dtype`."""
        return lambda rngs: TransformerModule(self, rngs, vocab_size=vocab_size, dtype=dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dimension, in float32; the result is in `dtype`."""

    def __init__(self, config: Transformer, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((config.embed_dim,), jnp.float32), axes=("norm",))
        self.epsilon = config.norm_epsilon
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., embed] -> [..., embed]."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse * self.scale[...]).astype(self.dtype)


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary embeddings.

    The kernels keep heads and head_dim as separate dimensions, so that heads can be sharded without a reshape.
    """

    def __init__(self, config: Transformer, rngs: nnx.Rngs, *, dtype: DTypeLike):
        heads, kv_heads, embed, head_dim = config.num_heads, config.kv_heads, config.embed_dim, config.head_dim
        self.query = _kernel(rngs, (embed, heads, head_dim), ("embed", "heads", "head_dim"), fan_in=embed)
        self.key = _kernel(rngs, (embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), fan_in=embed)
        self.value = _kernel(rngs, (embed, kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), fan_in=embed)
        self.out = _kernel(
            rngs,
            (heads, head_dim, embed),
            ("heads", "head_dim", "embed"),
            fan_in=heads * head_dim,
            scale=_residual_scale(config),
        )
        self.rope_theta = config.rope_theta
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        query, key, value = (weight_product(x, kernel[...]) for kernel in (self.query, self.key, self.value))
        positions = jnp.arange(x.shape[1])
        query = sharding.constrain(rotate(query, positions, self.rope_theta), "batch", "length", "heads", "head_dim")
        key = sharding.constrain(rotate(key, positions, self.rope_theta), "batch", "length", "kv_heads", "head_dim")
        value = sharding.constrain(value, "batch", "length", "kv_heads", "head_dim")
        mixed = attend(query, key, value, causal=True)
        mixed = sharding.constrain(mixed, "batch", "length", "heads", "head_dim")
        return weight_product(mixed, self.out[...], num_contracted=2)


class MLP(nnx.Module):
    """SwiGLU: (silu(x gate) * (x up)) down."""

    def __init__(self, config: Transformer, rngs: nnx.Rngs):
        embed, hidden = config.embed_dim, config.hidden_dim
        self.gate = _kernel(rngs, (embed, hidden), ("embed", "mlp"), fan_in=embed)
        self.up = _kernel(rngs, (embed, hidden), ("embed", "mlp"), fan_in=embed)
        self.down = _kernel(rngs, (hidden, embed), ("mlp", "embed"), fan_in=hidden, scale=_residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        hidden = jax.nn.silu(weight_product(x, self.gate[...])) * weight_product(x, self.up[...])
        return weight_product(sharding.constrain(hidden, "batch", "length", "mlp"), self.down[...])


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Transformer, rngs: nnx.Rngs, *, dtype: DTypeLike):
        self.attention_norm = RMSNorm(config, dtype=dtype)
        self.attention = Attention(config, rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config, dtype=dtype)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, length, embed] -> [batch, length, embed]."""
        x = sharding.constrain(x + self.attention(self.attention_norm(x)), "batch", "length", "embed")
        return sharding.constrain(x + self.mlp(self.mlp_norm(x)), "batch", "length", "embed")


class TransformerModule(nnx.Module):
    """The network of a `Transformer` config.

    Its blocks are `layers`, with a leading layer dimension in every parameter, or `layer_0`, `layer_1`... without
    `scan_layers`.
    """

    def __init__(self, config: Transformer, rngs: nnx.Rngs, *, vocab_size: int, dtype: DTypeLike):
        table = nnx.initializers.normal(_TABLE_STDDEV)
        shape = (vocab_size, config.embed_dim)
        self.embedding = nnx.Param(table(rngs.params(), shape, jnp.float32), axes=("vocab", "embed"))
        if config.scan_layers:

            @nnx.split_rngs(splits=config.num_layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stacked(layer_rngs: nnx.Rngs) -> Block:
                return Block(config, layer_rngs, dtype=dtype)

            self.layers = stacked(rngs)
        else:
            for index in range(config.num_layers):
                setattr(self, f"layer_{index}", Block(config, rngs, dtype=dtype))
        self.final_norm = RMSNorm(config, dtype=dtype)
        if not config.tied_embeddings:
            kernel = table(rngs.params(), shape[::-1], jnp.float32)
            self.head = nnx.Param(kernel, axes=("embed", "vocab"), **{BESIDE_LOOP: config.scan_layers})
        self.num_layers = config.num_layers
        self.scan_layers = config.scan_layers
        self.remat = config.remat
        self.tied_embeddings = config.tied_embeddings
        self.dtype = dtype

    def __call__(self, tokens: jax.Array, *, train: bool) -> Logits:
        """Tokens, int32 [batch, length] -> logits of each next token, [batch, length, vocab]."""
        del train  # The same in training and evaluation; every network has the argument.
        x = sharding.lookup(self.embedding[...], tokens, self.dtype)
        x, head = self._through_layers(sharding.constrain(x, "batch", "length", "embed"))
        x = self.final_norm(x)
        head = self.embedding[...].T if head is None else head
        return Logits(x, head)

    def _through_layers(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """`x` after the layers, and the output layer's kernel if it has one of its own."""
        head = None if self.tied_embeddings else self.head
        if self.scan_layers:
            graphdef, state = nnx.split(self.layers)
            return through_layers(self._body(graphdef), x, state, remat=self.remat, beside=head)
        for index in range(self.num_layers):
            graphdef, state = nnx.split(getattr(self, f"layer_{index}"))
            body = self._body(graphdef)
            x = (jax.checkpoint(body) if self.remat else body)(x, state)
        return x, None if head is None else head[...]

    def _body(self, graphdef: Any) -> Callable[[jax.Array, Any], jax.Array]:
        """One layer: (x, state of the layer) -> x."""
        # Gathered in here, so that only one layer's full parameters exist at a time, with remat in the backward pass
        # too.
        return lambda x, state: nnx.merge(graphdef, sharding.gather_layer(state))(x)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embeddings (Su et al. 2021, section 3.2.2) of x, [batch, length, heads, head_dim], in its dtype.

    Numbers i and i + head_dim / 2 are a pair, rotated by positions [length] * theta^(-2 i / head_dim) radians; so the
    product of a query and a key depends on the distance of their positions only.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions.astype(jnp.float32)[:, None] * frequency)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    # Without the barrier XLA fuses them into the products, and computes them again for every example and head.
    cos, sin = lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _kernel(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, scale: float = 1.0
) -> nnx.Param[jax.Array]:
    """A normal kernel of standard deviation scale / sqrt(fan_in)."""
    init = nnx.initializers.normal(scale / math.sqrt(fan_in))
    return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def _residual_scale(config: Transformer) -> float:
    """Factor for the 2 num_layers projections that add to the residual stream (Radford et al. 2019, section 2.3)."""
    return 1 / math.sqrt(2 * config.num_layers)
