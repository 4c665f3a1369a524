"""Layers of the image networks: normalization, convolutions, the linear layer of the logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.batch_norm import (
    BatchNormOptions,
    Normalized,
    batch_norm,
    batch_norm_of_product,
    pays_for_product,
)
from jaxdl.models.config import Model
from jaxdl.models.products import Pairs, add_bias, weight_convolution, weight_product
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.neighbours import Neighbours

_KERNEL_AXES = ("height", "width", "channel_in", "channel_out")


class NormConfig(Model, kind=None):
    """The normalization of an image network: batch normalization, or what `uses_group_norm` says."""

    norm_span: Literal["replica", "mesh"] | Annotated[int, pydantic.Field(ge=2)] = "replica"
    """Examples in each batch norm statistic in training: those of one replica, of the whole mesh (an all-reduce for
    each layer), or this many consecutive ones, such as those of 1, 2 or 4 devices: the same groups on every mesh."""
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

    def __call__(
        self, x: jax.Array, *, train: bool, relu: bool = False, shortcut: jax.Array | None = None
    ) -> jax.Array:
        """The normalized x, plus `shortcut`; with `relu` max(0, ...) of it.

        In training batch norm uses the statistics of this batch and moves the running ones towards them.
        """
        norm, options = self.norm, self._options(x.shape[0], relu) if train else None
        if options is not None:
            return self._updated(batch_norm, x, shortcut=shortcut, options=options)
        out = norm(x, use_running_average=True) if isinstance(norm, nnx.BatchNorm) else norm(x)
        out = out.astype(self.dtype) if shortcut is None else out.astype(self.dtype) + shortcut
        return nnx.relu(out) if relu else out

    def of_convolution(
        self, conv: Conv, x: jax.Array, *, train: bool, relu: bool = False, shortcut: jax.Array | None = None
    ) -> jax.Array:
        """norm(conv(x)), for a convolution without a bias.

        In training in bfloat16 batch norm takes the statistics of a 1x1 convolution to more channels from those of its
        input. Float16 has too small a range for the backward pass, and TF32 too few digits for the forward one.
        """
        size, _, incoming, outgoing = conv.kernel.shape
        options = self._options(x.shape[0], relu) if train and size == 1 and self.dtype == jnp.bfloat16 else None
        if options is not None:
            assert conv.bias is None
            down, right = cast(tuple[int, int], conv.strides)
            read = x[:, ::down, ::right].astype(self.dtype)
            shards = sharding.num_batch_shards(x.shape[0])
            options = replace(options, parts=max(1, shards // options.groups))
            num = options.groups * options.parts
            if num % shards == 0 and pays_for_product(read.size // incoming // num, incoming, outgoing):
                kernel = conv.kernel[...][0, 0]
                return self._updated(batch_norm_of_product, read, kernel, shortcut=shortcut, options=options)
        return self(conv(x), train=train, relu=relu, shortcut=shortcut)

    def _options(self, num: int, relu: bool) -> BatchNormOptions | None:
        """Those of batch norm over a batch of `num` examples, all that this replica has; None for group norm."""
        if not isinstance(self.norm, nnx.BatchNorm):
            return None
        span, groups, axis, neighbours = self.span, 1, None, None
        if span == "mesh":
            axis = sharding.statistics_axis()
        elif isinstance(span, int):
            if num % span and span % num:
                raise ConfigError(f"norm_span = {span}: a batch of {num} examples cannot be divided into such groups")
            groups, neighbours = max(1, num // span), span // num
            axis = sharding.statistics_axis() if span > num else None
        replicas = None if axis is None else Neighbours(axis, neighbours)
        return BatchNormOptions(self.norm.epsilon, self.dtype, relu, groups, replicas)

    def _updated(
        self,
        normalize: Callable[..., Normalized],
        *operands: jax.Array,
        shortcut: jax.Array | None,
        options: BatchNormOptions,
    ) -> jax.Array:
        """The result of `normalize`; the running statistics move towards the means over its groups."""
        norm = cast(nnx.BatchNorm, self.norm)
        assert norm.scale is not None
        assert norm.bias is not None
        out, mean, variance = normalize(*operands, norm.scale[...], norm.bias[...], shortcut, options)
        for running, new in ((norm.mean, mean), (norm.var, variance)):
            running[...] = norm.momentum * running[...] + (1 - norm.momentum) * new.mean(axis=0)
        return out


def max_pool(x: jax.Array, size: int, stride: int, padding: int = 0) -> jax.Array:
    """[batch, height, width, channel] -> [batch, height', width', channel]: the largest of `size` x `size` values each.

    Windows begin `stride` apart; `padding` values of minus infinity are added on each side. Of equal values the first
    has the gradient. Where no window fits nothing is left.
    """
    if min(x.shape[1:3]) + 2 * padding < size:
        return x[:, :0, :0]
    return _max_pool(x, size, stride, padding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _max_pool(x: jax.Array, size: int, stride: int, padding: int) -> jax.Array:
    return _max_pool_forward(x, size, stride, padding)[0]


def _max_pool_forward(x: jax.Array, size: int, stride: int, padding: int) -> tuple[jax.Array, Any]:
    # XLA's derivative of a window's maximum is a window of pairs and a scatter with atomic sums. The place of the
    # maximum in one byte lets the backward pass gather instead.
    around = (0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)
    padded = lax.pad(x, jnp.array(-jnp.inf, x.dtype), around)
    rows, columns = ((padded.shape[dim] - size) // stride for dim in (1, 2))
    largest, place = None, None
    for number in range(size * size):
        down, right = divmod(number, size)
        last = x.shape[0], down + stride * rows + 1, right + stride * columns + 1, x.shape[3]
        candidates = lax.slice(padded, (0, down, right, 0), last, (1, stride, stride, 1))
        if largest is None or place is None:
            largest, place = candidates, jnp.zeros(candidates.shape, jnp.uint8)
        else:
            place = jnp.where(candidates > largest, jnp.uint8(number), place)
            largest = jnp.maximum(largest, candidates)
    assert largest is not None
    # The barrier lets XLA compute both in one kernel, not the places in one that reads x again.
    largest, place = lax.optimization_barrier((largest, place))
    return largest, (place, x.shape)


def _max_pool_backward(size: int, stride: int, padding: int, saved: Any, cotangent: jax.Array) -> tuple[jax.Array]:
    place, shape = saved
    zero, total = jnp.zeros((), jnp.float32), 0
    for number in range(size * size):
        part = jnp.where(place == number, cotangent.astype(jnp.float32), zero)
        spread = [(0, 0, 0)]
        for start, dim in zip(divmod(number, size), (1, 2), strict=True):
            before = start - padding
            after = shape[dim] - before - (stride * (part.shape[dim] - 1) + 1)
            spread.append((before, after, stride - 1))
        total = total + lax.pad(part, zero, (*spread, (0, 0, 0)))
    return (jnp.asarray(total, cotangent.dtype),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


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
