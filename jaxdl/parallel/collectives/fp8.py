"""Products with weights in FP8: a byte for each number of the operands, twice the speed on GPUs of sm89 and later.

Operands are scaled to the largest number that their dtype has, by the largest of the tensor at hand (current scaling),
and rounded: activations and weights to e4m3, which has three bits of mantissa, gradients to e5m2, which has the range.
The rounded operands go into `dot_general` as they are, and the scales are applied to its result (XLA turns what is
dequantized and then multiplied into a 16-bit product). The rounded operands are also what is kept for the backward
pass. The formats are those of Micikevicius et al., arXiv 2209.05433.

Activations and gradients have a scale for each device that tokens are split over, so that these need no message.
Where `tensor` splits the numbers that are summed, the largest is found over its devices. Gradients of weights are
float32 sums of the parts of the devices, as in other precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdl.parallel import sharding
from jaxdl.parallel.compiler.hlo import FP8_PRODUCT
from jaxdl.parallel.gathering import gather_numbers, sharded_gradient
from jaxdl.parallel.mesh import MODEL_AXES, ways
from jaxdl.parallel.zigzag import num_length_shards

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_LEAST = 2.0**-100
"""The largest number of a tensor counts as at least this: a tensor of zeros has a scale too."""


def weight_scale(largest: jax.Array) -> jax.Array:
    """The scale, float32, of a weight whose largest magnitude this is."""
    return _scale(largest, _FORWARD)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kernel:
    """A kernel whose products are in FP8. Indexed with `...` it is itself, as an array would be."""

    narrow: jax.Array
    """What is multiplied: e4m3, the whole kernel divided by `scale`."""
    scale: jax.Array
    """float32 scalar."""
    weight: jax.Array
    """The parameter, for its gradient alone; it may be sharded."""

    @classmethod
    def of(cls, weight: jax.Array, axes: tuple[str, ...], scale: jax.Array) -> Kernel:
        """The kernel of a parameter with these logical axes: rounded by its shards, then gathered."""
        rounded = _divided(lax.stop_gradient(weight), scale, _FORWARD)
        return cls(gather_numbers(rounded, axes), scale, sharded_gradient(weight, axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the kernel."""
        return self.narrow.shape

    def __getitem__(self, index: Any) -> Kernel:
        assert index is ..., "a kernel is used whole"
        return self

    def reshape(self, *shape: int) -> Kernel:
        """The same with another shape."""
        return Kernel(self.narrow.reshape(*shape), self.scale, self.weight.reshape(*shape))


def joined(kernels: Sequence[Kernel], axis: int) -> Kernel:
    """Kernels of one scale as one, along `axis`."""
    narrow, weight = (jnp.concatenate([getattr(x, name) for x in kernels], axis) for name in ("narrow", "weight"))
    return Kernel(narrow, kernels[0].scale, weight)


def product(x: jax.Array, kernel: Kernel, num_contracted: int) -> jax.Array:
    """`weight_product` of `x` [batch, ..., contracted...] in FP8, in the dtype of `x`."""
    layout = sharding.current_layout()
    # XLA scales a float32 result in the product's own kernel. Parts of a sum over `tensor` are sent before that.
    split = layout is not None and ways(layout.mesh.shape, MODEL_AXES) > 1
    result = x.dtype if split else jnp.dtype(jnp.float32)
    shards = sharding.num_batch_shards(x.shape[0]), num_length_shards(x.shape[1])
    how = _How(num_contracted, shards, result, x.dtype, kernel.weight.dtype)
    return _product(x, kernel.narrow, kernel.scale, kernel.weight, how)


class _How(NamedTuple):
    num_contracted: int
    num_shards: tuple[int, int]
    """Devices over which the batch and the length are split."""
    result: jnp.dtype
    """The dtype of products before they are scaled; but for gradients of weights, which are float32."""
    input: jnp.dtype
    """That of `x`."""
    weight: jnp.dtype
    """That of the parameter."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _product(x: jax.Array, narrow: jax.Array, scale: jax.Array, weight: jax.Array, how: _How) -> jax.Array:
    return _forward(x, narrow, scale, weight, how)[0]


def _forward(x: jax.Array, narrow: jax.Array, scale: jax.Array, weight: jax.Array, how: _How) -> tuple[jax.Array, Any]:
    rounded, x_scale = _rounded(_split(x, how), _FORWARD)
    rows = rounded.ndim - how.num_contracted
    inner = tuple(range(rows, rounded.ndim)), tuple(range(how.num_contracted))
    result = _scaled(_dot(rounded, narrow, (inner, ((), ())), how.result), x_scale * scale).astype(x.dtype)
    return _joined(result, how), (rounded, x_scale, narrow, scale)


def _backward(how: _How, residuals: Any, cotangent: jax.Array) -> Any:
    rounded, x_scale, narrow, scale = residuals
    grad, grad_scale = _rounded(_split(cotangent, how), _BACKWARD)
    rows = rounded.ndim - how.num_contracted
    outer = tuple(range(rows, grad.ndim)), tuple(range(how.num_contracted, narrow.ndim))
    x_grad = _scaled(_dot(grad, narrow, (outer, ((), ())), how.result, exact=True), grad_scale * scale)
    # The part of each device has a scale of its own.
    summed = tuple(range(1, rows))
    parts = _dot(rounded, grad, ((summed, summed), ((0,), (0,))), jnp.dtype(jnp.float32), exact=True)
    weight_grad = jnp.sum(_scaled(parts, x_scale * grad_scale), axis=0).astype(how.weight)
    return _joined(x_grad.astype(how.input), how), None, None, weight_grad


_product.defvjp(_forward, _backward)


def _split(x: jax.Array, how: _How) -> jax.Array:
    """`x` [batch, length, ...] with a leading dimension for the devices over which its tokens are split."""
    rows, columns = how.num_shards
    if columns == 1:
        return x.reshape(rows, -1, *x.shape[1:])
    cut = jnp.swapaxes(x.reshape(rows, -1, columns, x.shape[1] // columns, *x.shape[2:]), 1, 2)
    return cut.reshape(rows * columns, *cut.shape[2:])


def _joined(x: jax.Array, how: _How) -> jax.Array:
    """The inverse of `_split`."""
    rows, columns = how.num_shards
    if columns == 1:
        return x.reshape(-1, *x.shape[2:])
    cut = jnp.swapaxes(x.reshape(rows, columns, *x.shape[1:]), 1, 2)
    return cut.reshape(cut.shape[0] * cut.shape[1], -1, *cut.shape[4:])


def _rounded(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """`(numbers in dtype, the scale of each x[i])`, of which the product is about x."""
    scale = _scale(jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim))), dtype)
    return _divided(x, scale.reshape(-1, *(1 for _ in x.shape[1:])), dtype), scale


def _scale(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The scale of a tensor whose largest magnitude this is; NaN or infinite as that is."""
    return jnp.maximum(largest.astype(jnp.float32), _LEAST) / float(jnp.finfo(dtype).max)


def _divided(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    # Conversions do not saturate: what rounding in the division brings above the largest number would be NaN.
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x[i] * scale[i]` in the dtype of `x`."""
    return (x.astype(jnp.float32) * scale.reshape(-1, *(1 for _ in x.shape[1:]))).astype(x.dtype)


def _dot(x: jax.Array, y: jax.Array, dims: Any, result: DTypeLike, *, exact: bool = False) -> jax.Array:
    """The product of FP8 operands; `exact` sums in float32 throughout, not in the fewer bits of Hopper's fast sums."""
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT

    def direct(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=result)

    def emulated(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x.astype(jnp.float32), y.astype(jnp.float32), dims).astype(result)

    with jax.named_scope(FP8_PRODUCT):
        return lax.platform_dependent(x, y, cpu=emulated, default=direct)
