"""Vision transformers: Dosovitskiy et al. (arXiv 2010.11929), with the simpler parts of Beyer et al. (2205.01580).

Patches are embedded by one linear layer; their positions are fixed sines and cosines, so images may have any size that
is a multiple of the patch; a linear head reads the mean of the tokens. No class token, no dropout.

As the first paper has it, and most published networks: `class_token`, `pool` = token and learned positions. These have
a table for the images of the training; for others it is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.blocks import LayerNorm
from jaxdl.models.config import Model
from jaxdl.models.layers import Head
from jaxdl.models.loop import through_layers
from jaxdl.models.products import add_bias, weight_product
from jaxdl.models.remat import Remat
from jaxdl.parallel import sharding
from jaxdl.parallel.gathering import gather_layer

_SIZES = {"tiny": (12, 192, 3), "small": (12, 384, 6), "base": (12, 768, 12), "large": (24, 1024, 16)}
"""Size -> blocks, embedding, heads."""
_SMALL = 0.02
"""Standard deviation of a new class token and of new learned positions."""
_LONGEST = 10_000.0
"""Wavelengths of the positions run from 2 pi to 2 pi times this."""


class ViT(Model, kind="vit"):
    """A vision transformer for image classification: ViT-S/16 by default."""

    modality: ClassVar[str] = "images"
    size: Literal["tiny", "small", "base", "large"] = "small"
    """Blocks, embedding and heads: tiny 12, 192, 3; small 12, 384, 6; base 12, 768, 12; large 24, 1024, 16."""
    patch: int = pydantic.Field(default=16, ge=1)
    """Height and width of a patch, in pixels; a divisor of every image size."""
    num_layers: int | None = pydantic.Field(default=None, ge=1)
    """Blocks; None takes the size's."""
    norm_epsilon: float = pydantic.Field(default=1e-6, gt=0)
    """Added to the variance before the square root."""
    class_token: bool = False
    """Add a learned token before those of the patches."""
    pool: Literal["mean", "token", "mean_first"] = "mean"
    """What the head reads. mean: the mean of the normalized tokens of patches; token: the class token, normalized;
    mean_first: the mean of the tokens of patches, normalized after it is taken."""
    positions: Literal["sines", "learned"] = "sines"
    """Positions of the patches: fixed sines and cosines, or a learned table."""
    grid: int | None = pydantic.Field(default=None, ge=1)
    """Rows and columns of the learned table: the size of images over `patch`. The table is interpolated for others."""
    remat: Remat = "none"
    """What is kept of a block for the backward pass, which computes the rest again: everything (`none`), its input
    (`block`), also the results of its products and of attention (`dots`), or these in the host's memory (`offload`)."""

    @pydantic.model_validator(mode="after")
    def _parts_fit(self) -> ViT:
        if self.pool == "token" and not self.class_token:
            raise ValueError("pool = token: there is no class token. Set class_token too.")
        if (self.grid is None) != (self.positions == "sines"):
            raise ValueError(
                f"grid = {self.grid}: positions = {self.positions} "
                + (
                    "have no table. Remove it."
                    if self.grid
                    else "need its rows, such as 14 for 224 pixels in patches of 16."
                )
            )
        return self

    @property
    def embed_dim(self) -> int:
        """Size of a token."""
        return _SIZES[self.size][1]

    @property
    def blocks(self) -> int:
        """Number of blocks, resolved."""
        return self.num_layers or _SIZES[self.size][0]

    def build(self, *, num_classes: int, channels: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `ViTModule` from random keys (stream `params`); it computes in `dtype`."""
        return lambda rngs: ViTModule(self, rngs, num_classes=num_classes, channels=channels, dtype=dtype)


class Attention(nnx.Module):
    """Self-attention of all tokens with all."""

    def __init__(self, embed: int, heads: int, rngs: nnx.Rngs, *, dtype: DTypeLike):
        head_dim = embed // heads
        for name in ("query", "key", "value"):
            kernel = _xavier(rngs, (embed, heads, head_dim), ("embed", "heads", "head_dim"), embed, embed)
            setattr(self, name, kernel)
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros((embed,), jnp.float32), axes=("norm",)))
        self.out = _xavier(rngs, (heads, head_dim, embed), ("heads", "head_dim", "embed"), embed, embed)
        self.out_bias = nnx.Param(jnp.zeros((embed,), jnp.float32), axes=("norm",))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, token, embed] -> [batch, token, embed]."""
        parts = []
        for name in ("query", "key", "value"):
            kernel, bias = getattr(self, name)[...], getattr(self, f"{name}_bias")[...].reshape(self.out.shape[:2])
            part = add_bias(weight_product(x, kernel), bias)
            parts.append(sharding.constrain(part, "batch", "length", "heads", "head_dim"))
        if self.dtype == jnp.float16 and jax.default_backend() == "cpu":
            # JAX requests float16 products with float32 sums by name ("F16_F16_F32"), which XLA lacks on CPUs.
            parts = [part.astype(jnp.float32) for part in parts]
        mixed = jax.nn.dot_product_attention(*parts).astype(self.dtype)
        mixed = sharding.constrain(mixed, "batch", "length", "heads", "head_dim")
        return add_bias(weight_product(mixed, self.out[...], num_contracted=2), self.out_bias[...])


class MLP(nnx.Module):
    """Two linear layers with GELU between them; the hidden one is four times as wide."""

    def __init__(self, embed: int, rngs: nnx.Rngs):
        hidden = 4 * embed
        self.up = _xavier(rngs, (embed, hidden), ("embed", "mlp"), embed, hidden)
        self.down = _xavier(rngs, (hidden, embed), ("mlp", "embed"), hidden, embed)
        bias = nnx.initializers.normal(1e-6)
        self.up_bias = nnx.Param(bias(rngs.params(), (hidden,), jnp.float32), axes=("norm",))
        self.down_bias = nnx.Param(bias(rngs.params(), (embed,), jnp.float32), axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, token, embed] -> [batch, token, embed]."""
        hidden = jax.nn.gelu(add_bias(weight_product(x, self.up[...]), self.up_bias[...]), approximate=False)
        hidden = sharding.constrain(hidden, "batch", "length", "mlp")
        return add_bias(weight_product(hidden, self.down[...]), self.down_bias[...])


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ViT, embed: int, heads: int, rngs: nnx.Rngs, *, dtype: DTypeLike):
        self.attention_norm = LayerNorm(embed, config.norm_epsilon, dtype=dtype)
        self.attention = Attention(embed, heads, rngs, dtype=dtype)
        self.mlp_norm = LayerNorm(embed, config.norm_epsilon, dtype=dtype)
        self.mlp = MLP(embed, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, token, embed] -> [batch, token, embed]."""
        x = sharding.constrain(x + self.attention(self.attention_norm(x)), "batch", "length", "embed")
        return sharding.constrain(x + self.mlp(self.mlp_norm(x)), "batch", "length", "embed")


class ViTModule(nnx.Module):
    """The network of a `ViT` config. Its blocks are one stacked parameter tree, `layers`, and a loop over it."""

    def __init__(self, config: ViT, rngs: nnx.Rngs, *, num_classes: int, channels: int, dtype: DTypeLike):
        _, embed, heads = _SIZES[config.size]
        patch = config.patch
        self.embedding = nnx.Param(
            nnx.initializers.lecun_normal(in_axis=(0, 1, 2))(
                rngs.params(), (patch, patch, channels, embed), jnp.float32
            ),
            axes=("height", "width", "channel_in", "embed"),
        )
        self.embedding_bias = nnx.Param(jnp.zeros((embed,), jnp.float32), axes=("norm",))
        small = nnx.initializers.normal(_SMALL)
        if config.class_token:
            self.class_token = nnx.Param(small(rngs.params(), (embed,), jnp.float32), axes=("norm",))
        if config.grid is not None:
            rows = config.grid**2 + config.class_token
            self.position_embedding = nnx.Param(
                small(rngs.params(), (rows, embed), jnp.float32), axes=("position", "embed")
            )

        @nnx.split_rngs(splits=config.blocks)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(layer_rngs: nnx.Rngs) -> Block:
            return Block(config, embed, heads, layer_rngs, dtype=dtype)

        self.layers = stacked(rngs)
        self.final_norm = LayerNorm(embed, config.norm_epsilon, dtype=jnp.float32)
        self.head = Head(embed, num_classes, rngs, stddev=0.0, dtype=dtype)
        self.remat: Remat = config.remat
        self.patch, self.dtype, self.grid = patch, dtype, config.grid
        self.pool, self.num_before = config.pool, int(config.class_token)

    def __call__(self, image: jax.Array, *, train: bool) -> jax.Array:
        """Normalized image [batch, height, width, channel] -> logits, float32 [batch, num_classes].

        Raises ConfigError for images that are no whole number of patches.
        """
        del train  # The same in training and evaluation; every network has the argument.
        batch, height, width, channels = image.shape
        patch = self.patch
        if height % patch or width % patch:
            raise ConfigError(f"{height} x {width} pixels are no whole number of patches of {patch} x {patch}")
        rows, columns = height // patch, width // patch
        # One product, not a convolution: the patches do not overlap.
        tokens = image.reshape(batch, rows, patch, columns, patch, channels).transpose(0, 1, 3, 2, 4, 5)
        tokens = tokens.reshape(batch, rows * columns, patch * patch * channels).astype(self.dtype)
        kernel = self.embedding[...].reshape(patch * patch * channels, -1)
        x = add_bias(weight_product(tokens, kernel), self.embedding_bias[...])
        x = self._placed(x, rows, columns)
        x = sharding.constrain(x, "batch", "length", "embed")
        graphdef, state = nnx.split(self.layers)

        def body(x: jax.Array, layer_state: Any, _: Any) -> jax.Array:
            return nnx.merge(graphdef, gather_layer(layer_state))(x)

        x, _ = through_layers(body, x, state, remat=self.remat)
        return self.head(self._pooled(x))

    def _placed(self, x: jax.Array, rows: int, columns: int) -> jax.Array:
        """The tokens of patches with their positions, [batch, token, embed], after the class token if there is one."""
        if self.grid is None:
            x = x + positions(rows, columns, x.shape[-1]).astype(self.dtype)
        else:
            table = interpolated(self.position_embedding[...][self.num_before :], self.grid, rows, columns)
            x = x + table.astype(self.dtype)
        if not self.num_before:
            return x
        first = self.class_token[...] if self.grid is None else self.class_token[...] + self.position_embedding[...][0]
        first = jnp.broadcast_to(first.astype(self.dtype), (x.shape[0], 1, x.shape[-1]))
        return jnp.concatenate([first, x], axis=1)

    def _pooled(self, x: jax.Array) -> jax.Array:
        """What the head reads, float32 [batch, embed], of all tokens."""
        if self.pool == "token":
            return self.final_norm(x[:, 0]).astype(jnp.float32)
        patches = x[:, self.num_before :]
        if self.pool == "mean_first":
            return self.final_norm(jnp.mean(patches, axis=1, dtype=jnp.float32))
        return jnp.mean(self.final_norm(patches), axis=1, dtype=jnp.float32)


def interpolated(table: jax.Array, grid: int, rows: int, columns: int) -> jax.Array:
    """A learned table [grid * grid, embed] for other images, [rows * columns, embed]: bicubic, antialiased.

    It is what timm does with a checkpoint that is loaded for another size (`resample_abs_pos_embed`).
    """
    if (rows, columns) == (grid, grid):
        return table
    square = table.reshape(grid, grid, -1)
    return jax.image.resize(square, (rows, columns, square.shape[-1]), "cubic").reshape(rows * columns, -1)


def positions(rows: int, columns: int, size: int) -> jax.Array:
    """Positions of a grid of tokens, float32 [rows * columns, size]: sines and cosines of the column, and of the row.

    `size` is a multiple of 4. Source: Chen et al., arXiv 2104.02057, section 5.
    """
    assert size % 4 == 0, f"{size} is no multiple of 4"
    frequency = _LONGEST ** (-jnp.arange(size // 4, dtype=jnp.float32) / (size // 4 - 1))
    row, column = jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing="ij")
    angles = [place.reshape(-1, 1).astype(jnp.float32) * frequency for place in (column, row)]
    return jnp.concatenate([wave(angle) for angle in angles for wave in (jnp.sin, jnp.cos)], axis=-1)


def _xavier(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int, fan_out: int
) -> nnx.Param[jax.Array]:
    """A kernel that is uniform within sqrt(6 / (fan_in + fan_out)) of 0 (Glorot and Bengio 2010)."""
    limit = (6 / (fan_in + fan_out)) ** 0.5
    return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -limit, limit), axes=axes)
