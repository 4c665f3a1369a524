"""Residual networks for images: He et al., "Deep Residual Learning for Image Recognition" (2015), sections 3.3 and 4.2.

The ImageNet family has four stages; from depth 50 on its blocks are bottlenecks with the stride in the 3x3 convolution
("v1.5", as in Goyal et al. 2017, section 5.1). The CIFAR family has depth 6n + 2: three stages of n basic blocks.
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
from jaxdl.models.layers import Head, Norm, NormConfig, conv, max_pool
from jaxdl.models.products import weight_convolution

_IMAGENET_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_BOTTLENECK_FROM_DEPTH = 50
_BOTTLENECK_EXPANSION = 4
_STEMS = {"imagenet": (7, 2), "cifar": (3, 1), "patch2": (3, 2), "patch4": (4, 4)}
"""Stem -> (kernel size, stride) of its convolution."""


class ResNet(NormConfig, kind="resnet"):
    """A residual network for image classification."""

    modality: ClassVar[str] = "images"
    depth: int = 50
    """Weighted layers: 18, 34, 50, 101, 152 (ImageNet family); 6n + 2 otherwise: 8, 14, 20, 26... (CIFAR family)."""
    width: int | None = pydantic.Field(default=None, ge=1)
    """Channels of the first stage, doubled at each later one; None takes 64 (ImageNet family) or 16 (CIFAR family)."""
    stem: Literal["imagenet", "cifar", "patch2", "patch4"] | None = None
    """First layers. imagenet: 7x7 stride 2, then 3x3 max-pool stride 2; cifar: 3x3 stride 1; patch2: 3x3 stride 2;
    patch4: 4x4 stride 4 without padding (Liu et al., arXiv 2201.03545, section 2.3); None takes the family's."""
    space_to_depth: bool = False
    """Compute the 7x7 convolution of the imagenet stem as one of 4x4 on 2x2 blocks of pixels (12 channels): the same
    function and parameters. For images of even height and width."""
    norm: Literal["batch", "group"] = "batch"
    """Batch normalization, or group normalization (statistics of one example; at most 32 groups)."""
    zero_init_residual: bool = True
    """Start the last norm's scale of each block at zero, so that a block starts as its shortcut (Goyal et al. 2017)."""

    @pydantic.model_validator(mode="after")
    def _depth_is_known(self) -> ResNet:
        if self.depth not in _IMAGENET_BLOCKS and (self.depth < 8 or self.depth % 6 != 2):
            raise ValueError(
                f"depth = {self.depth}: no family has it. Choose {', '.join(map(str, _IMAGENET_BLOCKS))} (ImageNet), "
                "or 6n + 2 with n of 1 or more, such as 8, 14, 20, 26, 32 (CIFAR)."
            )
        return self

    @pydantic.model_validator(mode="after")
    def _norm_fits(self) -> ResNet:
        for name, what in (("norm_span", "statistics over the batch"), ("norm_momentum", "running statistics")):
            value = getattr(self, name)
            if self.norm == "group" and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value}: group norm has no {what}. Remove it or set norm = batch.")
        return self

    @pydantic.model_validator(mode="after")
    def _stem_fits(self) -> ResNet:
        family = "imagenet" if self.depth in _IMAGENET_BLOCKS else "cifar"
        if self.space_to_depth and (self.stem or family) != "imagenet":
            raise ValueError(
                "space_to_depth = True: it applies only to the 7x7 convolution of the imagenet stem. Remove it."
            )
        return self

    @property
    def uses_group_norm(self) -> bool:
        """Whether `norm` is "group"."""
        return self.norm == "group"

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of residual blocks of each stage."""
        return _IMAGENET_BLOCKS.get(self.depth, ((self.depth - 2) // 6,) * 3)

    @property
    def is_bottleneck(self) -> bool:
        """Whether a block is 1x1, 3x3, 1x1 convolutions rather than two 3x3."""
        return self.depth in _IMAGENET_BLOCKS and self.depth >= _BOTTLENECK_FROM_DEPTH

    def build(self, *, num_classes: int, channels: int, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `ResNetModule` from random keys (stream `params`); it computes in `dtype`."""
        return lambda rngs: ResNetModule(self, rngs, num_classes=num_classes, channels=channels, dtype=dtype)


class Block(nnx.Module):
    """A residual block: relu(shortcut + convolutions), with a projection shortcut where the shape changes.

    Basic: 3x3 (stride), 3x3. Bottleneck: 1x1, 3x3 (stride), 1x1 to 4 times the width.
    """

    def __init__(self, config: ResNet, channels: int, width: int, stride: int, rngs: nnx.Rngs, *, dtype: DTypeLike):
        if config.is_bottleneck:
            layers = [(1, 1, width), (3, stride, width), (1, 1, width * _BOTTLENECK_EXPANSION)]
        else:
            layers = [(3, stride, width), (3, 1, width)]
        self.num_convs = len(layers)
        incoming = channels
        for index, (size, step, outgoing) in enumerate(layers, start=1):
            is_last = index == len(layers)
            setattr(self, f"conv{index}", conv(incoming, outgoing, size, step, rngs, dtype=dtype))
            zero_init = is_last and config.zero_init_residual
            setattr(self, f"norm{index}", Norm(config, outgoing, rngs, dtype=dtype, zero_init=zero_init))
            incoming = outgoing
        self.has_projection = stride != 1 or channels != incoming
        if self.has_projection:
            self.shortcut_conv = conv(channels, incoming, 1, stride, rngs, dtype=dtype)
            self.shortcut_norm = Norm(config, incoming, rngs, dtype=dtype)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """[batch, height, width, channels_in] -> [batch, height / stride, width / stride, channels_out]."""
        shortcut = x
        if self.has_projection:
            shortcut = self.shortcut_norm.of_convolution(self.shortcut_conv, x, train=train)
        for index in range(1, self.num_convs + 1):
            conv, norm = getattr(self, f"conv{index}"), getattr(self, f"norm{index}")
            added = shortcut if index == self.num_convs else None
            x = norm.of_convolution(conv, x, train=train, relu=True, shortcut=added)
        return x


class ResNetModule(nnx.Module):
    """The network of a `ResNet` config.

    Batch norm in training uses the batch of one replica (synchronized inside the replica), of all replicas with
    norm_span = mesh, or of norm_span examples; `jaxdl.parallel.sharding.use_layout` says what the replicas are. Its
    running variance is the biased one.
    """

    def __init__(self, config: ResNet, rngs: nnx.Rngs, *, num_classes: int, channels: int, dtype: DTypeLike):
        is_imagenet = config.depth in _IMAGENET_BLOCKS
        width = config.width or (64 if is_imagenet else 16)
        stem = config.stem or ("imagenet" if is_imagenet else "cifar")
        size, stride = _STEMS[stem]
        self.pools, self.space_to_depth, self.dtype = stem == "imagenet", config.space_to_depth, dtype
        self.stem_conv = conv(channels, width, size, stride, rngs, dtype=dtype)
        self.stem_norm = Norm(config, width, rngs, dtype=dtype)
        self.block_names = tuple(
            f"stage{stage}_block{block}"
            for stage, num_blocks in enumerate(config.blocks, start=1)
            for block in range(1, num_blocks + 1)
        )
        incoming = width
        for name in self.block_names:
            stage, block = (int(part) for part in name.removeprefix("stage").split("_block"))
            stage_width = width * 2 ** (stage - 1)
            stride = 2 if stage > 1 and block == 1 else 1
            setattr(self, name, Block(config, incoming, stage_width, stride, rngs, dtype=dtype))
            incoming = stage_width * (_BOTTLENECK_EXPANSION if config.is_bottleneck else 1)
        self.head = Head(incoming, num_classes, rngs, dtype=dtype)

    def __call__(self, image: jax.Array, *, train: bool) -> jax.Array:
        """Normalized image [batch, height, width, channel] -> logits, float32 [batch, num_classes]."""
        x = self._deep_stem(image) if self.space_to_depth else self.stem_conv(image)
        x = self.stem_norm(x, train=train, relu=True)
        if self.pools:
            x = max_pool(x, 3, 2, padding=1)
        for name in self.block_names:
            x = getattr(self, name)(x, train=train)
        return self.head(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))

    def _deep_stem(self, image: jax.Array) -> jax.Array:
        """The stem's convolution, from blocks of 2x2 pixels.

        An output reads rows 2i - 3 to 2i + 3 of the image. With a row of zeros before the kernel they are 2i - 4 to
        2i + 3, the blocks i - 2 to i + 1.
        """
        batch, height, width, channels = image.shape
        if height % 2 or width % 2:
            raise ConfigError(f"{height} x {width} pixels, with space_to_depth height and width must be even")
        blocks = image.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        blocks = blocks.reshape(batch, height // 2, width // 2, 4 * channels)
        kernel = jnp.pad(self.stem_conv.kernel[...], ((1, 0), (1, 0), (0, 0), (0, 0)))
        kernel = kernel.reshape(4, 2, 4, 2, channels, -1).transpose(0, 2, 1, 3, 4, 5).reshape(4, 4, 4 * channels, -1)
        return weight_convolution(blocks.astype(self.dtype), kernel, strides=(1, 1), padding=((2, 1), (2, 1)))
