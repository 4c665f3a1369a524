"""Batch normalization, with what surrounds it in a residual network, in few passes over memory.

On a GPU it costs the bytes that it moves, not its arithmetic. Here

- `batch_norm` reads its input once for both moments and once for the result, and in the backward pass input and
  cotangent once for both sums and once for the gradient (Ioffe and Szegedy, arXiv 1502.03167, section 3); the
  derivative that JAX makes of the formula reads them three times. The rectifier's mask is computed again from the
  input, so nothing but the input is kept for the backward pass.
- `batch_norm_of_product` takes the moments of x W, the result of a 1x1 convolution, from those of x, which has fewer
  channels, and its backward pass does not read x W at all. Where one device has all examples x W is never stored: the
  moments are known before it is computed, so that cuDNN's convolution adds the bias and the shortcut, and rectifies.
  What it subtracts is rounded to bfloat16 there: a channel's mean is off by at most 2^-8 of mean / deviation.

All sums and moments are float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdl.models.products import grouped_products
from jaxdl.parallel.collectives.neighbours import Neighbours


@dataclass(frozen=True)
class BatchNormOptions:
    """What the functions of this module compute, but for their arrays."""

    epsilon: float
    """Added to the variance before the square root."""
    dtype: DTypeLike
    """Of the result."""
    relu: bool = False
    """Whether the result is max(0, ...), taken after the shortcut is added."""
    groups: int = 1
    """Number of groups of consecutive examples, each with statistics of its own."""
    replicas: Neighbours | None = None
    """The replicas that share statistics; None shares nothing."""
    parts: int = 1
    """Of each group, whose moments `batch_norm_of_product` takes apart: the examples of a device are of one part."""

    @property
    def alone(self) -> bool:
        """Whether all examples are those of one device, and of one group."""
        return self.groups == self.parts == 1 and self.replicas is None

    def shared(self, *means: jax.Array) -> tuple[jax.Array, ...]:
        """The means over the replicas that share statistics, in one message."""
        return means if self.replicas is None else self.replicas.mean(*means)


Normalized = tuple[jax.Array, jax.Array, jax.Array]
"""A result, and the mean and the (biased) variance that it was normalized with, float32 [group, channel]."""


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, shortcut: jax.Array | None, options: BatchNormOptions
) -> Normalized:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, plus `shortcut`, rectified if the options say so.

    `x` and `shortcut` are [batch, ..., channel], `scale` and `bias` float32 [channel]. The moments have no gradient.
    """
    out, mean, variance = cast(Normalized, _batch_norm(x, scale, bias, shortcut, options))
    return out, lax.stop_gradient(mean), lax.stop_gradient(variance)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, shortcut: jax.Array | None, options: BatchNormOptions
) -> Normalized:
    return _forward(x, scale, bias, shortcut, options)[0]


def _forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, shortcut: jax.Array | None, options: BatchNormOptions
) -> tuple[Normalized, Any]:
    wide = _grouped(x, options).astype(jnp.float32)
    within = tuple(range(1, wide.ndim - 1))
    mean, mean_square = options.shared(wide.mean(within), jnp.square(wide).mean(within))
    variance = jnp.maximum(0, mean_square - jnp.square(mean))
    inverse = lax.rsqrt(variance + options.epsilon)
    out = _normalized(x, scale, bias, mean, inverse, shortcut, options)
    # Without a shortcut the mask is computed again from x, which is kept anyway.
    kept = _kept(out) if options.relu and shortcut is not None else None
    return (out if kept is None else kept, mean, variance), (x, scale, bias, mean, inverse, kept, shortcut is not None)


def _backward(options: BatchNormOptions, saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    x, scale, bias, mean, inverse, out, has_shortcut = saved
    recomputed = options.relu and out is None

    def masked(cotangent: jax.Array, x: jax.Array) -> jax.Array:
        """The cotangent of what the rectifier read."""
        if not recomputed:
            return _masked(cotangent, out)
        # The result is positive: (x - mean) inverse scale + bias > 0, in the least operations.
        wide, factor = _grouped(x, options).astype(jnp.float32), inverse * scale
        positive = (wide * _along(factor, wide) > _along(mean * factor - bias, wide)).reshape(x.shape)
        return jnp.where(positive, cotangent, jnp.zeros((), cotangent.dtype))

    cotangent = cotangents[0]
    if recomputed:
        # The barriers, here and below, keep XLA from storing the mask, or the masked cotangent, to save arithmetic.
        x, cotangent = lax.optimization_barrier((x, cotangent))
    inner = masked(cotangent, x)
    wide, centred = _grouped(inner, options).astype(jnp.float32), _centred(x, mean, options)
    within = tuple(range(1, wide.ndim - 1))
    own_sum, own_product = _of_groups(wide.sum(within), (wide * centred).sum(within))
    count = math.prod(wide.shape[dim] for dim in within)
    means = options.shared(own_sum / count, own_product / count)
    if recomputed:
        x, cotangent, means = lax.optimization_barrier((x, cotangent, means))
        wide, centred = _grouped(masked(cotangent, x), options).astype(jnp.float32), _centred(x, mean, options)
    mean_cotangent, mean_product = (_along(group_mean, wide) for group_mean in means)
    x_gradient = wide - mean_cotangent - centred * (_along(jnp.square(inverse), wide) * mean_product)
    x_gradient = (_along(inverse * scale, wide) * x_gradient).astype(x.dtype).reshape(x.shape)
    scale_gradient, bias_gradient = (own_product * inverse).sum(axis=0), own_sum.sum(axis=0)
    return x_gradient, scale_gradient, bias_gradient, inner if has_shortcut else None


_batch_norm.defvjp(_forward, _backward)


def batch_norm_of_product(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> Normalized:
    """`batch_norm` of x W: `x` [batch, height, width, channel_in] by `kernel` W [channel_in, channel_out].

    With the mean m and the covariance C of x, x W has the mean m W and the variances diag(W' C W), W rounded as for the
    product. In the backward pass the sums over examples follow from x' d, which the gradient of W needs anyway, for the
    cotangent d of the result. So x W is written once and read once, or neither (see above); reading x for C costs
    channel_in / channel_out of a reading of x W. Devices that share a group send each other the moments and sums of
    their parts, beside the
    products x W and d W'.
    """
    out, mean, variance = cast(Normalized, _batch_norm_of_product(x, kernel, scale, bias, shortcut, options))
    return out, lax.stop_gradient(mean), lax.stop_gradient(variance)


def pays_for_product(positions: int, incoming: int, outgoing: int) -> bool:
    """Whether `batch_norm_of_product` saves time on a GPU; `positions` are those of one part of a group.

    The products of matrices [channel, channel] in float32, 4 channel_in^2 channel_out operations, at 60e12 a second,
    against four readings or writings of 16-bit x W at 3.35e12 bytes a second.
    """
    return outgoing >= 2 * incoming and 32 * positions >= incoming**2


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _batch_norm_of_product(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> Normalized:
    return _product_forward(x, kernel, scale, bias, shortcut, options)[0]


def _product_forward(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> tuple[Normalized, Any]:
    narrow, rows = kernel.astype(x.dtype), _parts(x, options)
    wide = narrow.astype(jnp.float32)
    mean_x = rows.astype(jnp.float32).mean(axis=1)
    covariance = grouped_products(rows, rows) / rows.shape[1] - mean_x[:, :, None] * mean_x[:, None]
    with_product = _exact(covariance, wide)
    mean, variance = _exact(mean_x, wide), jnp.maximum(0, (wide * with_product).sum(axis=1))
    if options.alone:
        inverse = lax.rsqrt(variance + options.epsilon)
        out = lax.platform_dependent(
            x,
            cuda=lambda x: _of_folded_kernel(x, wide, inverse * scale, bias, mean_x, shortcut, options),
            default=lambda x: _normalized(jnp.matmul(x, narrow), scale, bias, mean, inverse, shortcut, options),
        )
    else:
        product, *sums = _over_parts(options, jnp.matmul(x, narrow), mean, variance + jnp.square(mean))
        if options.parts > 1 or options.replicas is not None:
            mean, mean_square = options.shared(*(x / options.parts for x in sums))
            variance = jnp.maximum(0, mean_square - jnp.square(mean))
        inverse = lax.rsqrt(variance + options.epsilon)
        out = _normalized(product, scale, bias, mean, inverse, shortcut, options)
    out = _kept(out) if options.relu else out
    kept = (x, kernel, scale, mean_x, with_product, mean, inverse)
    return (out, mean, variance), (*kept, out if options.relu else None, shortcut is not None)


def _of_folded_kernel(
    x: jax.Array,
    wide: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    mean_x: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> jax.Array:
    """The result, by the convolution with `wide` times `factor`, scale / deviation, which cuDNN does in one kernel."""
    folded = (wide * factor).astype(x.dtype)
    # Of the rounded kernel, whose rounding so does not move the mean.
    offset = bias - _exact(mean_x, folded.astype(jnp.float32))[0]
    out = _one_kernel(x, folded, offset, shortcut)
    return jnp.maximum(out, 0) if options.relu else out


def _one_kernel(x: jax.Array, kernel: jax.Array, offset: jax.Array, addend: jax.Array | None) -> jax.Array:
    """x W + offset + addend, in the order that XLA makes one kernel of: `x` is [batch, height, width, channel]."""
    out = lax.conv_general_dilated(x, kernel[None, None], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    out = out + offset.astype(x.dtype)
    return out if addend is None else out + addend


def _product_backward(
    options: BatchNormOptions, saved: Any, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array | None, ...]:
    x, kernel, scale, mean_x, with_product, mean, inverse, out, has_shortcut = saved
    wide, rows = kernel.astype(x.dtype).astype(jnp.float32), _parts(x, options)
    inner = _masked(cotangents[0], out)
    cotangent, count = _parts(inner, options), rows.shape[1]
    (own_sum,), crossed = _of_groups(cotangent.astype(jnp.float32).sum(axis=1)), grouped_products(rows, cotangent)
    own_product = (wide * crossed).sum(axis=1) - _of_parts(mean, options) * own_sum
    factor = _of_parts(inverse * scale, options)
    folded = (kernel.astype(jnp.float32) * factor[:, None]).astype(x.dtype)
    flipped = folded.swapaxes(1, 2)
    x_gradient = None  # Where one device has all examples, what is added to it is added in the same kernel.
    if not options.alone:
        x_gradient, own_sum, own_product = _over_parts(options, jnp.matmul(cotangent, flipped), own_sum, own_product)
    means = options.shared(*(x / (options.parts * count) for x in (own_sum, own_product)))
    scale_gradient, bias_gradient = (own_product * inverse).sum(axis=0), own_sum.sum(axis=0)
    mean_cotangent, mean_product, mean, inverse = (_of_parts(x, options) for x in (*means, mean, inverse))
    # The gradient of x W is factor cotangent - slope (x W - mean W of this group) - constant; here it is only implied.
    slope = factor * jnp.square(inverse) * mean_product
    constant = factor * mean_cotangent + slope * (_exact(mean_x, wide) - mean)
    kernel_gradient = crossed * factor[:, None] - count * (
        with_product * slope[:, None] + mean_x[:, :, None] * constant[:, None]
    )
    within = _exact(wide * -slope[:, None], wide.T).astype(x.dtype)
    # Of the rounded matrix, so that the mean of this part of the gradient is zero.
    offset = _exact(constant, wide.T) + _exact(mean_x[:, None], within.astype(jnp.float32))[:, 0]
    of_x = jnp.matmul(rows, within)

    def whole(x_gradient: jax.Array) -> jax.Array:
        return ((x_gradient + of_x).astype(jnp.float32) - offset[:, None]).astype(x.dtype).reshape(x.shape)

    if x_gradient is None:
        x_gradient = lax.platform_dependent(
            inner,
            cuda=lambda inner: _one_kernel(inner, flipped[0], -offset[0], of_x.reshape(x.shape)),
            default=lambda inner: whole(jnp.matmul(_parts(inner, options), flipped)),
        )
    else:
        x_gradient = whole(x_gradient)
    kernel_gradient = kernel_gradient.sum(axis=0).astype(kernel.dtype)
    return x_gradient, kernel_gradient, scale_gradient, bias_gradient, inner if has_shortcut else None


_batch_norm_of_product.defvjp(_product_forward, _product_backward)

_exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""A product of float32 matrices, not rounded to TF32."""


def _normalized(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    mean: jax.Array,
    inverse: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> jax.Array:
    """The result, in the dtype of the options."""
    centred = _centred(x, mean, options)
    out = centred * _along(inverse * scale, centred) + bias
    if shortcut is not None:
        out = out + _grouped(shortcut, options).astype(jnp.float32)
    return (jnp.maximum(out, 0) if options.relu else out).astype(options.dtype).reshape(x.shape)


def _centred(x: jax.Array, mean: jax.Array, options: BatchNormOptions) -> jax.Array:
    """x - mean; float32 [group, example, ..., channel]."""
    wide = _grouped(x, options).astype(jnp.float32)
    return wide - _along(mean, wide)


def _grouped(x: jax.Array, options: BatchNormOptions) -> jax.Array:
    """[batch, ..., channel] -> [group, example, ..., channel]."""
    return x.reshape(options.groups, -1, *x.shape[1:])


def _along(values: jax.Array, like: jax.Array) -> jax.Array:
    """[group, channel] with dimensions of size 1 between, for arithmetic with `like` [group, ..., channel]."""
    return values.reshape(values.shape[0], *(1,) * (like.ndim - 2), values.shape[1])


def _parts(x: jax.Array, options: BatchNormOptions) -> jax.Array:
    """[batch, ..., channel] -> [part, position, channel], the parts of all groups."""
    return x.reshape(options.groups * options.parts, -1, x.shape[-1])


def _over_parts(options: BatchNormOptions, beside: jax.Array, *values: jax.Array) -> tuple[jax.Array, ...]:
    """`beside`, and the sums over the parts of each group: [part, channel] -> [group, channel].

    Devices send one message for all sums, while they compute `beside`: without the barrier XLA often waits before that.
    """
    if options.parts == 1:
        return beside, *values
    sums = jnp.stack(values).reshape(len(values), options.groups, options.parts, -1).sum(axis=2)
    beside, sums = lax.optimization_barrier((beside, sums))
    return beside, *sums


def _of_parts(values: jax.Array, options: BatchNormOptions) -> jax.Array:
    """[group, channel] -> [part, channel], that of its group for each part."""
    return jnp.repeat(values, options.parts, axis=0)


def _of_groups(*sums: jax.Array) -> tuple[jax.Array, ...]:
    """Sums [group, channel], of which later also the sums over groups are taken.

    Without the barrier XLA would take these from all numbers, and read them once more.
    """
    return lax.optimization_barrier(sums)


def _kept(out: jax.Array) -> jax.Array:
    """A rectified `out` that the backward pass reads the mask from.

    Without the barrier XLA would read the mask from what was rectified: it computes that again, or stores it too.
    """
    return lax.optimization_barrier(out)


def _masked(cotangent: jax.Array, out: jax.Array | None) -> jax.Array:
    """The cotangent of what the rectifier read; without `out` there is none."""
    return cotangent if out is None else jnp.where(out > 0, cotangent, jnp.zeros((), cotangent.dtype))
