"""Norms, gates and activations whose backward pass keeps nothing but their inputs.

JAX would keep their float32 intermediates, which take several times the memory of a 16-bit activation and as many
passes over it; they are cheap to compute again where the gradient needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdl.parallel.collectives.shards import sum_of_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, dtype: DTypeLike) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dimension, in float32; the result is in `dtype`."""
    unit, _ = _unit(x.astype(jnp.float32), epsilon)
    return (unit * scale).astype(dtype)


def _rms_norm_forward(
    x: jax.Array, scale: jax.Array, epsilon: float, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rms_norm(x, scale, epsilon, dtype), (x, scale)


def _rms_norm_backward(
    epsilon: float, dtype: DTypeLike, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del dtype
    x, scale = residuals
    unit, inverse = _unit(x.astype(jnp.float32), epsilon)
    x_gradient, scale_gradient = _gradients(unit, inverse, scale, cotangent)
    return x_gradient.astype(x.dtype), scale_gradient


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: DTypeLike) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last dimension, in float32; then in `dtype`."""
    unit, _ = _unit(_centred(x), epsilon)
    return (unit * scale + bias).astype(dtype)


def _layer_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return layer_norm(x, scale, bias, epsilon, dtype), (x, scale, bias)


def _layer_norm_backward(
    epsilon: float, dtype: DTypeLike, residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    del dtype
    x, scale, bias = residuals
    unit, inverse = _unit(_centred(x), epsilon)
    x_gradient, scale_gradient = _gradients(unit, inverse, scale, cotangent)
    bias_gradient = sum_of_rows(cotangent).astype(bias.dtype)
    return _centred(x_gradient).astype(x.dtype), scale_gradient, bias_gradient


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer 2020), computed in float32, in the dtype of `up`."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(up.dtype)


def _swiglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, wide = (x.astype(jnp.float32) for x in (*_again(residuals), cotangent))
    share = jax.nn.sigmoid(gate)
    gate_gradient = wide * up * share * (1 + gate * (1 - share))
    return gate_gradient.astype(residuals[0].dtype), (wide * gate * share).astype(residuals[1].dtype)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


@jax.custom_vjp
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu(gate) * up (Shazeer 2020) with the tanh form of GELU, computed in float32, in the dtype of `up`."""
    return (jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up).astype(up.dtype)


def _geglu_forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return geglu(gate, up), (gate, up)


def _geglu_backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    gate, up, wide = (x.astype(jnp.float32) for x in (*_again(residuals), cotangent))
    shrunk, transpose = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), gate)
    gate_gradient = transpose(wide * up)[0]
    return gate_gradient.astype(residuals[0].dtype), (wide * shrunk).astype(residuals[1].dtype)


geglu.defvjp(_geglu_forward, _geglu_backward)


def _gelu_of(*, approximate: bool) -> Callable[[jax.Array, jax.Array | None], jax.Array]:
    """GELU of `x` [..., features] + `bias`, like `x`, in its tanh form or in its exact one."""

    @jax.custom_vjp
    def gelu(x: jax.Array, bias: jax.Array | None) -> jax.Array:
        return jax.nn.gelu(_wide_sum(x, bias), approximate=approximate).astype(x.dtype)

    def forward(x: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
        return gelu(x, bias), (x, bias)

    def backward(
        residuals: tuple[jax.Array, jax.Array | None], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        x, bias = _again(residuals)
        _, transpose = jax.vjp(lambda x: jax.nn.gelu(x, approximate=approximate), _wide_sum(x, bias))
        x_gradient = transpose(cotangent.astype(jnp.float32))[0].astype(x.dtype)
        return x_gradient, None if bias is None else sum_of_rows(x_gradient).astype(bias.dtype)

    gelu.defvjp(forward, backward)
    return gelu


gelu = _gelu_of(approximate=True)
"""GELU (Hendrycks and Gimpel, arXiv 1606.08415) in its tanh form of `x` [..., features] + `bias`, like `x`."""
gelu_erf = _gelu_of(approximate=False)
"""`gelu` in its exact form, with the error function."""


def _again(residuals: Any) -> Any:
    """What a backward pass reads. XLA would otherwise keep what the forward pass computed of it, in float32, wherever
    both are in one computation, as without a loop over layers."""
    return lax.optimization_barrier(residuals)


def _wide_sum(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x.astype(jnp.float32) if bias is None else x.astype(jnp.float32) + bias


def _centred(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True)


def _unit(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """`x` over the square root of its mean square, and the inverse of that root."""
    inverse = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return x * inverse, inverse


def _gradients(
    unit: jax.Array, inverse: jax.Array, scale: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of `unit * scale`: for what `unit` was made of, float32, and for `scale`."""
    wide = cotangent.astype(jnp.float32)
    scaled = wide * scale
    x_gradient = inverse * (scaled - unit * jnp.mean(scaled * unit, axis=-1, keepdims=True))
    addends = wide * unit
    if cotangent.dtype == jnp.bfloat16:  # As the cotangent is rounded already. Float16 has too small a range.
        addends = addends.astype(jnp.bfloat16)
    return x_gradient, sum_of_rows(addends).astype(scale.dtype)
