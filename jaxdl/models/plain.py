"""Networks without shortcuts, for images: AlexNet with batch normalization, and VGG.

Both end in three linear layers; the first reads a fixed grid, to which images of other sizes are averaged.
Neither has dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.layers import Head, Linear, Norm, NormConfig, conv, max_pool

_VGG = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Depth -> convolutions of each stage."""
_VGG_CHANNELS = (64, 128, 256, 512, 512)
_ALEXNET = ((96, 11, 4, True), (256, 5, 1, True), (384, 3, 1, False), (384, 3, 1, False), (256, 3, 1, True))
"""Channels, kernel size, stride, and whether a 3x3 max-pool with stride 2 follows."""


class PlainConfig(NormConfig, kind=None):
    """What `AlexNet` and `VGG` share."""

    modality: ClassVar[str] = "images"
    width: float = pydantic.Field(default=1.0, gt=0)
    """Factor of all channels and hidden units; 1 is the published network."""

    def channels(self, published: int) -> int:
        """A number of channels times `width`: a multiple of 8, at least 8."""
        return max(8, round(published * self.width / 8) * 8)


class AlexNet(PlainConfig, kind="alexnet"):
    """AlexNet (Krizhevsky et al. 2012) in one tower, without groups and dropout, and with batch norm after every layer.

    Batch norm in place of local response normalization is what You et al. (arXiv 1708.03888) needed for large batches;
    Jia et al. (arXiv 1807.11205) needed one more, after the last pooling, for 64 k images.
    """

    pool5_norm: bool = True
    """Batch norm after the last pooling (Jia et al.)."""

    def build(self, *, num_classes: int, channels: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `PlainModule` from random keys (stream `params`); it computes in `dtype`."""
        layers = [(self.channels(count), size, stride, pools) for count, size, stride, pools in _ALEXNET]
        return lambda rngs: PlainModule(
            self, layers, rngs, num_classes=num_classes, channels=channels, grid=6, pool=3, norms=True,
            norm_hidden=True, norm_grid=self.pool5_norm, biases=False, dtype=dtype,
        )  # fmt: skip


class VGG(PlainConfig, kind="vgg"):
    """VGG (Simonyan and Zisserman, arXiv 1409.1556), configurations D and E, without dropout."""

    depth: Literal[16, 19] = 16
    """Weighted layers."""
    batch_norm: bool = True
    """Batch norm after every convolution. Without it the network is as published, and hard to train."""

    @pydantic.model_validator(mode="after")
    def _norm_fits(self) -> VGG:
        if not self.batch_norm and (
            self.norm_span != type(self).model_fields["norm_span"].default or self.norm_momentum is not None
        ):
            raise ValueError("norm_span and norm_momentum have no effect with batch_norm = False. Remove them.")
        return self

    def build(self, *, num_classes: int, channels: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `PlainModule` from random keys (stream `params`); it computes in `dtype`."""
        layers = [
            (self.channels(count), 3, 1, number == repeats - 1)
            for count, repeats in zip(_VGG_CHANNELS, _VGG[self.depth], strict=True)
            for number in range(repeats)
        ]
        return lambda rngs: PlainModule(
            self, layers, rngs, num_classes=num_classes, channels=channels, grid=7, pool=2, norms=self.batch_norm,
            norm_hidden=False, norm_grid=False, biases=True, dtype=dtype,
        )  # fmt: skip


class PlainModule(nnx.Module):
    """Convolutions, poolings, and three linear layers: the network of an `AlexNet` or `VGG` config."""

    def __init__(
        self,
        config: PlainConfig,
        layers: list[tuple[int, int, int, bool]],
        rngs: nnx.Rngs,
        *,
        num_classes: int,
        channels: int,
        grid: int,
        pool: int,
        norms: bool,
        norm_hidden: bool,
        norm_grid: bool,
        biases: bool,
        dtype: DTypeLike,
    ):
        """`layers`: channels, kernel size, stride, whether pooled. The linear layers read `grid` x `grid` places."""
        incoming, self.pools, self.pool, self.grid = channels, tuple(layer[3] for layer in layers), pool, grid
        for number, (outgoing, size, stride, _) in enumerate(layers, start=1):
            setattr(self, f"conv{number}", conv(incoming, outgoing, size, stride, rngs, dtype=dtype, use_bias=biases))
            if norms:
                setattr(self, f"norm{number}", Norm(config, outgoing, rngs, dtype=dtype))
            incoming = outgoing
        self.norms, self.norm_hidden, self.norm_grid = norms, norm_hidden, norm_grid
        if norm_grid:
            self.grid_norm = Norm(config, incoming, rngs, dtype=dtype)
        hidden, incoming = config.channels(4096), incoming * grid * grid
        for number in (1, 2):
            setattr(self, f"hidden{number}", _linear(incoming, hidden, rngs, use_bias=not norm_hidden, dtype=dtype))
            if norm_hidden:
                setattr(self, f"hidden_norm{number}", Norm(config, hidden, rngs, dtype=dtype))
            incoming = hidden
        self.head = Head(hidden, num_classes, rngs, dtype=dtype)

    def __call__(self, image: jax.Array, *, train: bool) -> jax.Array:
        """Normalized image [batch, height, width, channel] -> logits, float32 [batch, num_classes].

        Raises ConfigError for images too small for the poolings.
        """
        x = image
        for number, pooled in enumerate(self.pools, start=1):
            x = getattr(self, f"conv{number}")(x)
            x = getattr(self, f"norm{number}")(x, train=train, relu=True) if self.norms else nnx.relu(x)
            if pooled:
                x = max_pool(x, self.pool, 2)
        if 0 in x.shape:
            raise ConfigError(
                f"{image.shape[1]} x {image.shape[2]} pixels: too small, nothing is left after the poolings"
            )
        if self.norm_grid:
            x = self.grid_norm(x, train=train)
        x = averaged(x, self.grid)
        x = x.reshape(x.shape[0], -1)
        for number in (1, 2):
            x = getattr(self, f"hidden{number}")(x)
            x = getattr(self, f"hidden_norm{number}")(x, train=train, relu=True) if self.norm_hidden else nnx.relu(x)
        return self.head(x)


def averaged(x: jax.Array, grid: int) -> jax.Array:
    """[batch, height, width, channel] -> [batch, grid, grid, channel]: the means of equal, perhaps overlapping parts.

    As PyTorch's adaptive average pooling: part i reaches from floor(i n / grid) to ceil((i + 1) n / grid).
    """
    for axis in (1, 2):
        size = x.shape[axis]
        if size != grid:
            edges = [(i * size // grid, -(-(i + 1) * size // grid)) for i in range(grid)]
            weights = jnp.array([[(a <= j < b) / (b - a) for j in range(size)] for a, b in edges], jnp.float32)
            x = jnp.moveaxis(jnp.tensordot(weights.astype(x.dtype), x, axes=([1], [axis])), 0, axis)
    return x


def _linear(incoming: int, outgoing: int, rngs: nnx.Rngs, *, use_bias: bool, dtype: DTypeLike) -> Linear:
    return Linear(
        incoming,
        outgoing,
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_in", "normal"),
        kernel_metadata={"axes": ("channel_in", "channel_out")},
        bias_metadata={"axes": ("norm",)},
        rngs=rngs,
    )
