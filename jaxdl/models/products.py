"""Products of activations with weights, and sums with biases, whose gradients are summed in float32.

Where the batch is split over devices, XLA's partitioner sums the gradient of a weight over them right at the product
that makes it, in the dtype of its result, before any later conversion. So the dtype of the weight decides:

- a weight in the activations' dtype has the plain product, and its gradient is computed and summed in that dtype;
- a float32 weight is rounded to the dtype of 16-bit activations for the product. Its gradient is a product of 16-bit
  operands with a float32 result, so each device's part is not rounded, and the sum is float32.

GPUs multiply 16-bit matrices with float32 results. Their convolutions have results in the operands' dtype only (XLA
would convert the operands to float32, and lose the tensor cores): there each device's part of the gradient is rounded,
then summed in float32. The kernel gradient of a 1x1 convolution is a product of matrices, and rounded nowhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxdl.parallel import sharding
from jaxdl.parallel.collectives import fp8
from jaxdl.parallel.collectives.shards import float32_product, sum_of_rows, sum_of_shards
from jaxdl.parallel.precision import float32_matmul
from jaxdl.parallel.sharding import Layout, current_layout

PRODUCT = "product"
"""The name, for `jax.checkpoint_policies`, of a product's result."""
Pairs = tuple[tuple[int, int], ...]
"""The padding before and after each dimension of an image."""


def weight_product(
    x: jax.Array, kernel: jax.Array | fp8.Kernel, *, num_contracted: int = 1, float32_result: bool = False
) -> jax.Array:
    """`x` [batch..., contracted...] by `kernel` [contracted..., features...]: [batch..., features...].

    `num_contracted` dimensions are contracted. The result is in the dtype of `x`; with `float32_result` it is float32,
    not rounded to that dtype (for logits, whose softmax needs float32; one contracted dimension), and the cotangent is
    rounded.
    """
    assert num_contracted == 1 or not float32_result, "logits are the product with a matrix"
    if isinstance(kernel, fp8.Kernel):
        result = fp8.product(x, kernel, num_contracted)
    elif kernel.dtype != x.dtype:
        result = _wide_product(x, kernel, num_contracted, jnp.dtype(jnp.float32) if float32_result else x.dtype)
    elif float32_result:
        result = float32_matmul(x, kernel)
    else:
        result = _narrow_product(x, kernel, num_contracted, jax.config.values["jax_default_matmul_precision"])
    return checkpoint_name(result, PRODUCT)


def head_products(x: jax.Array, kernels: Sequence[Any], biases: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Queries, keys and values, [batch, length, heads, head_dim], of `x` [batch, length, embed] in one product.

    The three kernels are `[embed, heads, head_dim]`, the biases, of which there are three or none, `[heads head_dim]`.
    One product reads `x` once, and has its gradient in one product too. The kernels are joined for each key's head, so
    that heads may be sharded.
    """
    embed, num_keys, head_dim = kernels[1].shape
    group = kernels[0].shape[1] // num_keys
    parts = [part.reshape(embed, num_keys, -1, head_dim) for part in kernels]
    kernel = fp8.joined(parts, 2) if isinstance(parts[0], fp8.Kernel) else jnp.concatenate(parts, axis=2)
    product = sharding.constrain(weight_product(x, kernel), "batch", "length", "kv_heads", "", "head_dim")
    if biases:
        product = add_bias(product, jnp.concatenate([part.reshape(num_keys, -1, head_dim) for part in biases], axis=1))
    queries = product[..., :group, :].reshape(*x.shape[:-1], num_keys * group, head_dim)
    return queries, product[..., group, :], product[..., group + 1, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _narrow_product(x: jax.Array, kernel: jax.Array, num_contracted: int, precision: Any) -> jax.Array:
    """The product of operands of one dtype. `precision` is kept for the backward pass, which is traced elsewhere."""
    del precision
    return _product(x, kernel, num_contracted, x.dtype)


def _narrow_product_forward(
    x: jax.Array, kernel: jax.Array, num_contracted: int, precision: Any
) -> tuple[jax.Array, Any]:
    return _narrow_product(x, kernel, num_contracted, precision), (x, kernel)


def _narrow_product_backward(
    num_contracted: int, precision: Any, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # As JAX does it, but for the order of the operands of the kernel's gradient: JAX makes its transpose, for which XLA
    # on CPUs copies the larger operand, and twice the time (3,072 x 704 by 3,072 x 256: 70 ms and 31 ms on one core).
    x, kernel = residuals
    inner, batch = x.ndim - num_contracted, tuple(range(x.ndim - num_contracted))
    outer = tuple(range(inner, cotangent.ndim)), tuple(range(num_contracted, kernel.ndim))
    x_gradient = lax.dot_general(cotangent, kernel, (outer, ((), ())), precision=precision)
    return x_gradient, lax.dot_general(x, cotangent, ((batch, batch), ((), ())), precision=precision)


_narrow_product.defvjp(_narrow_product_forward, _narrow_product_backward)


def _product(x: jax.Array, kernel: jax.Array, num_contracted: int, result: DTypeLike) -> jax.Array:
    contracted = tuple(reversed(range(x.ndim - num_contracted, x.ndim))), tuple(reversed(range(num_contracted)))
    return lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _wide_product(x: jax.Array, kernel: jax.Array, num_contracted: int, result: DTypeLike) -> jax.Array:
    return _product(x, kernel.astype(x.dtype), num_contracted, result)


def _wide_product_forward(
    x: jax.Array, kernel: jax.Array, num_contracted: int, result: DTypeLike
) -> tuple[jax.Array, Any]:
    narrow = kernel.astype(x.dtype)
    return _product(x, narrow, num_contracted, result), (x, narrow)


def _wide_product_backward(
    num_contracted: int, result: DTypeLike, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, narrow = residuals
    cotangent = cotangent.astype(x.dtype)
    _, transpose = jax.vjp(lambda x: _product(x, narrow, num_contracted, x.dtype), x)
    return transpose(cotangent)[0], _summed_product(x, cotangent, x.ndim - num_contracted)


def _summed_product(x: jax.Array, y: jax.Array, num_summed: int) -> jax.Array:
    """`x` [summed..., m...] by `y` [summed..., n...]: [m..., n...], float32 also of 16-bit numbers."""
    summed = tuple(range(num_summed))
    return float32_product(x, y, ((summed, summed), ((), ())))


def grouped_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """x' y of each group: `x` [group, summed, m] by `y` [group, summed, n], float32 [group, m, n].

    Float32 operands are not rounded to TF32.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return float32_product(x, y, (((1,), (1,)), ((0,), (0,))), precision)


_wide_product.defvjp(_wide_product_forward, _wide_product_backward)


def weight_convolution(x: jax.Array, kernel: jax.Array, *, strides: tuple[int, ...], padding: Pairs) -> jax.Array:
    """`x` [batch, height, width, channel_in] convolved with `kernel` [height, width, channel_in, channel_out].

    [batch, height', width', channel_out] in the dtype of `x`; `strides` and `padding` are of height and width.
    """
    if kernel.dtype == x.dtype:
        return _convolution(x, kernel, strides, padding)
    return _wide_convolution(x, kernel, strides, padding, current_layout())


def _convolution(x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: Pairs) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _wide_convolution(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: Pairs, layout: Layout | None
) -> jax.Array:
    del layout
    return _convolution(x, kernel.astype(x.dtype), strides, padding)


def _wide_convolution_forward(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: Pairs, layout: Layout | None
) -> tuple[jax.Array, Any]:
    del layout
    narrow = kernel.astype(x.dtype)
    return _convolution(x, narrow, strides, padding), (x, narrow)


def _wide_convolution_backward(
    strides: tuple[int, ...],
    padding: Pairs,
    layout: Layout | None,
    residuals: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, narrow = residuals
    _, transpose = jax.vjp(lambda x: _convolution(x, narrow, strides, padding), x)
    (x_gradient,) = transpose(cotangent)
    if narrow.shape[:2] == strides == (1, 1):
        return x_gradient, _summed_product(x, cotangent, 3)[None, None]
    axes = layout.batch_axes(x.shape[0]) if layout else ()

    def kernel_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        # The kernel varies between the devices as they do, so that its transpose does not sum over them.
        varying = tuple(sorted(jax.typeof(x).mat.varying | jax.typeof(cotangent).mat.varying))
        kernel = lax.pcast(jnp.zeros(narrow.shape, narrow.dtype), varying, to="varying")
        _, transpose = jax.vjp(lambda kernel: _convolution(x, kernel, strides, padding), kernel)
        return transpose(cotangent)[0]

    if not layout or not axes:
        return x_gradient, kernel_gradient(x, cotangent).astype(jnp.float32)
    mesh = None if layout.manual else layout.mesh
    return x_gradient, sum_of_shards(kernel_gradient, axes, x, cotangent, mesh=mesh)


_wide_convolution.defvjp(_wide_convolution_forward, _wide_convolution_backward)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` [..., features...] + `bias` float32 [features...], in the dtype of `x`.

    The gradient of the bias is summed in float32.
    """
    return _add_bias(x, bias, bias.ndim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _add_bias(x: jax.Array, bias: jax.Array, ndim: int) -> jax.Array:
    del ndim
    return x + bias.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias: jax.Array, ndim: int) -> tuple[jax.Array, None]:
    return _add_bias(x, bias, ndim), None


def _add_bias_backward(ndim: int, _: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent, sum_of_rows(cotangent, ndim)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)
