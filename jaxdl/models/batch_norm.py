"""Batch normalization, with what surrounds it in a residual network, in few passes over memory.

On a GPU it costs the bytes that it moves, not its arithmetic. Here

- `batch_norm` reads its input once for both moments and once for the result, and in the backward pass input and
  cotangent once for both sums and once for the gradient (Ioffe and Szegedy, arXiv 1502.03167, section 3); the
  derivative that JAX makes of the formula reads them three times. The rectifier's mask is computed again from the
  input, so nothing but the input is kept for the backward pass.
- `batch_norm_of_product` never reads the result of the 1x1 convolution that it normalizes: the moments of x W follow
  from those of x, which has fewer channels, so the normalization is a factor of the kernel and a bias.

All sums and moments are float32.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdl.collectives.neighbours import Neighbours
from jaxdl.models.products import add_bias, gram, weight_convolution


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
    out, mean, variance = _batch_norm(x, scale, bias, shortcut, options)
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
    out = _normalized(x, scale, bias, mean, inverse, options)
    if shortcut is not None:
        out = out + _grouped(shortcut, options).astype(jnp.float32)
    out = (jnp.maximum(out, 0) if options.relu else out).astype(options.dtype).reshape(x.shape)
    kept = None
    if options.relu and shortcut is not None:
        kept = out = _kept(out)
    return (out, mean, variance), (x, scale, bias, mean, inverse, kept, shortcut is not None)


def _backward(options: BatchNormOptions, saved: Any, cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array | None, ...]:
    x, scale, bias, mean, inverse, out, has_shortcut = saved
    recomputed = options.relu and out is None

    def masked(cotangent: jax.Array, x: jax.Array) -> jax.Array:
        """The cotangent of what the rectifier read."""
        if not options.relu:
            return cotangent
        if out is None:
            # The result is positive: (x - mean) inverse scale + bias > 0, in the least operations.
            wide, factor = _grouped(x, options).astype(jnp.float32), inverse * scale
            positive = (wide * _along(factor, wide) > _along(mean * factor - bias, wide)).reshape(x.shape)
        else:
            positive = out > 0
        return jnp.where(positive, cotangent, jnp.zeros((), cotangent.dtype))

    cotangent = cotangents[0]
    if recomputed:
        # The barriers, here and below, keep XLA from storing the mask, or the masked cotangent, to save arithmetic.
        x, cotangent = lax.optimization_barrier((x, cotangent))
    inner = masked(cotangent, x)
    wide, centred = _grouped(inner, options).astype(jnp.float32), _centred(x, mean, options)
    within = tuple(range(1, wide.ndim - 1))
    own_sum, own_product = wide.sum(within), (wide * centred).sum(within)
    count = math.prod(wide.shape[dim] for dim in within)
    means = options.shared(own_sum / count, own_product / count)
    if recomputed:
        x, cotangent, means = lax.optimization_barrier((x, cotangent, means))
        wide, centred = _grouped(masked(cotangent, x), options).astype(jnp.float32), _centred(x, mean, options)
    mean_cotangent, mean_product = (_along(one, wide) for one in means)
    x_gradient = wide - mean_cotangent - centred * (_along(jnp.square(inverse), wide) * mean_product)
    x_gradient = (_along(inverse * scale, wide) * x_gradient).astype(x.dtype).reshape(x.shape)
    scale_gradient, bias_gradient = (own_product * inverse).sum(axis=0), own_sum.sum(axis=0)
    return x_gradient, scale_gradient, bias_gradient, inner if has_shortcut else None


_batch_norm.defvjp(_forward, _backward)


def _normalized(
    x: jax.Array, scale: jax.Array, bias: jax.Array, mean: jax.Array, inverse: jax.Array, options: BatchNormOptions
) -> jax.Array:
    """The formula; float32 [group, example, ..., channel]."""
    centred = _centred(x, mean, options)
    return centred * _along(inverse * scale, centred) + bias


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


def _kept(out: jax.Array) -> jax.Array:
    """A rectified `out` that the backward pass reads the mask from.

    Without the barrier XLA would read the mask from what was rectified: it computes that again, or stores it too.
    """
    return lax.optimization_barrier(out)


def batch_norm_of_product(
    x: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    shortcut: jax.Array | None,
    options: BatchNormOptions,
) -> Normalized:
    """`batch_norm` of x W: `x` [batch, height, width, channel_in] by `kernel` [channel_in, channel_out].

    With the mean m and the covariance C of x, x W has the mean m W and the variances diag(W' C W). So the normalized
    product is x (W f) + (bias - m W f) with f = scale / sqrt(variance + epsilon), one convolution with a bias, a
    shortcut and a rectifier. C takes channel_in / channel_out of the convolution's arithmetic, once forward and once
    backward, and its bytes are those of x. One group only: the factor is that of all examples.
    """
    assert options.groups == 1
    wide = kernel.astype(jnp.float32)
    count, within = x.size // x.shape[-1], tuple(range(x.ndim - 1))
    mean_x = x.astype(jnp.float32).mean(within)
    covariance = gram(x) / count - jnp.outer(mean_x, mean_x)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    mean = product(mean_x, wide)
    variance = jnp.maximum(0, (wide * product(covariance, wide)).sum(axis=0))
    if options.replicas is not None:
        mean, mean_square = options.shared(mean, variance + jnp.square(mean))
        variance = jnp.maximum(0, mean_square - jnp.square(mean))
    factor = scale * lax.rsqrt(variance + options.epsilon)
    folded = (wide * factor).astype(kernel.dtype)[None, None]
    out = add_bias(weight_convolution(x, folded, strides=(1, 1), padding=((0, 0), (0, 0))), bias - mean * factor)
    out = out if shortcut is None else out + shortcut
    out = _rectified(out) if options.relu else out
    return out, lax.stop_gradient(mean)[None], lax.stop_gradient(variance)[None]


@jax.custom_vjp
def _rectified(x: jax.Array) -> jax.Array:
    """max(0, x), whose derivative reads the result, not x: so x is never stored."""
    return jnp.maximum(x, 0)


def _rectified_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = _kept(jnp.maximum(x, 0))
    return out, out


def _rectified_backward(out: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(out > 0, cotangent, jnp.zeros((), cotangent.dtype)),)


_rectified.defvjp(_rectified_forward, _rectified_backward)
