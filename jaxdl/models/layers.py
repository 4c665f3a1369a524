"""Layers of the image networks: normalization, convolutions, the linear layer of the logits."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, cast

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl import sharding
from jaxdl.config import ConfigError
from jaxdl.models.config import Model
from jaxdl.models.products import Pairs, add_bias, weight_convolution, weight_product

_KERNEL_AXES = ("height", "width", "channel_in", "channel_out")


class NormConfig(Model, kind=None):
    """The normalization of an image network: batch normalization, or what `uses_group_norm` says."""

    norm_span: Literal["replica", "mesh"] | Annotated[int, pydantic.Field(ge=2)] = "replica"
    """Examples in each batch norm statistic in training: those of one replica, of the whole mesh (an all-reduce for
    each layer), or so many consecutive ones, such as those of 1, 2 or 4 devices: the same groups on every mesh."""
    norm_momentum: float | None = pydantic.Field(default=None, ge=0, lt=1)
    """Part of batch norm's running statistics that a step keeps; None takes 0.9."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the variance before the square root."""

    @property
    def uses_group_norm(self) -> bool:
        """Whether it is group normalization."""
        return False


class Norm(nnx.Module):
    """Batch or group normalization of [batch, height, width, channel].

    Statistics and arithmetic are float32; only the result is in `dtype`. In a 16-bit dtype flax would also round the
    running statistics before it uses them in evaluation.
    """

    def __init__(self, config: NormConfig, channels: int, rngs: nnx.Rngs, *, dtype: DTypeLike, zero_init: bool = False):
        self.dtype = dtype
        common: dict[str, Any] = {
            "epsilon": config.norm_epsilon,
            "dtype": jnp.float32,
            "scale_init": nnx.initializers.zeros if zero_init else nnx.initializers.ones,
            "scale_metadata": {"axes": ("norm",)},
            "bias_metadata": {"axes": ("norm",)},
            "rngs": rngs,
        }
        self.norm: nnx.GroupNorm | nnx.BatchNorm
        self.span = config.norm_span
        if config.uses_group_norm:
            self.norm = nnx.GroupNorm(channels, num_groups=math.gcd(32, channels), **common)
        else:
            momentum = 0.9 if config.norm_momentum is None else config.norm_momentum
            self.norm = nnx.BatchNorm(channels, momentum=momentum, **common)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """The normalized x; in training batch norm uses and updates the statistics of this batch."""
        if isinstance(self.norm, nnx.BatchNorm):
            if isinstance(self.span, int) and train:
                return self._normalized_in_groups(self.norm, x, self.span).astype(self.dtype)
            if self.span == "mesh" and train:
                self.norm.axis_name = sharding.statistics_axis()
            return self.norm(x, use_running_average=not train).astype(self.dtype)
        return self.norm(x).astype(self.dtype)

    @staticmethod
    def _normalized_in_groups(norm: nnx.BatchNorm, x: jax.Array, span: int) -> jax.Array:
        """Batch norm with the statistics of each group of `span` consecutive examples; float32.

        The running statistics move towards the means over the groups. A group larger than this
        replica's batch includes neighbouring replicas.
        """
        num = x.shape[0]
        if num % span and span % num:
            raise ConfigError(f"norm_span = {span}: a batch of {num} examples cannot be divided into such groups")
        groups = max(1, num // span)
        grouped = x.astype(jnp.float32).reshape(groups, num // groups, *x.shape[1:])
        within = tuple(range(1, grouped.ndim - 1))
        moments = jnp.stack([grouped.mean(within), jnp.square(grouped).mean(within)])
        if span > num:
            moments = sharding.mean_of_neighbours(moments, span // num)
        mean, variance = moments[0], jnp.maximum(0, moments[1] - jnp.square(moments[0]))
        for running, new in ((norm.mean, mean), (norm.var, variance)):
            running[...] = norm.momentum * running[...] + (1 - norm.momentum) * jax.lax.stop_gradient(new.mean(axis=0))
        assert norm.scale is not None
        assert norm.bias is not None
        factor = norm.scale[...] * jax.lax.rsqrt(variance + norm.epsilon)
        shape = (groups, *(1,) * len(within), x.shape[-1])
        return ((grouped - mean.reshape(shape)) * factor.reshape(shape) + norm.bias[...]).reshape(x.shape)


class Head(nnx.Module):
    """The linear layer of the logits: operands in `dtype`; result and bias in float32."""

    def __init__(self, channels: int, num_classes: int, rngs: nnx.Rngs, *, dtype: DTypeLike, stddev: float = 0.01):
        kernel = nnx.initializers.normal(stddev)(rngs.params(), (channels, num_classes), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=("channel_in", "classes"))
        self.bias = nnx.Param(jnp.zeros((num_classes,), jnp.float32), axes=("classes",))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, channel] -> [batch, class]."""
        return weight_product(x.astype(self.dtype), self.kernel[...], float32_result=True) + self.bias[...]


class Conv(nnx.Conv):
    """A convolution whose gradients are summed as in `jaxdl.models.products`; the padding is numeric."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[batch, height, width, channel_in] -> [batch, height', width', channel_out]."""
        # Flax declares all that it accepts; `conv` passes only these types.
        strides, padding = cast(tuple[int, int], self.strides), cast(Pairs, self.padding)
        x = weight_convolution(inputs.astype(self.dtype), self.kernel[...], strides=strides, padding=padding)
        return x if self.bias is None else add_bias(x, self.bias[...])


class Linear(nnx.Linear):
    """x kernel + bias, with gradients summed as in `jaxdl.models.products`."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., channel_in] -> [..., channel_out]."""
        x = weight_product(inputs.astype(self.dtype), self.kernel[...])
        return x if self.bias is None else add_bias(x, self.bias[...])


def conv(
    incoming: int, outgoing: int, size: int, stride: int, rngs: nnx.Rngs, *, dtype: DTypeLike, use_bias: bool = False
) -> Conv:
    """A convolution. The same padding on both sides: "SAME" would shift the image when the stride is 2.

    No padding when the stride is the kernel's size.
    """
    padding = 0 if size == stride else size // 2
    return Conv(
        incoming,
        outgoing,
        (size, size),
        strides=(stride, stride),
        padding=((padding, padding),) * 2,
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        kernel_metadata={"axes": _KERNEL_AXES},
        bias_metadata={"axes": ("norm",)},
        rngs=rngs,
    )
