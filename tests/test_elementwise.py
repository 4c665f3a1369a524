"""Norms, gates and activations with a backward pass of their own: against what JAX derives from their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.models.elementwise import gelu, layer_norm, rms_norm, swiglu

EPSILON = 0.1


def plain_rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def plain_layer_norm(x, scale, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.var(x, axis=-1, keepdims=True) + EPSILON) * scale + bias


def plain_gelu(x, bias=0.0):
    x = x + bias
    return x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


CASES = {
    "rms_norm": (lambda *x: rms_norm(*x, EPSILON, x[0].dtype), plain_rms_norm, [(2, 5, 8), (8,)]),
    "layer_norm": (lambda *x: layer_norm(*x, EPSILON, x[0].dtype), plain_layer_norm, [(2, 5, 8), (8,), (8,)]),
    "gelu": (gelu, plain_gelu, [(2, 5, 8), (8,)]),
    "gelu without a bias": (lambda x: gelu(x, None), plain_gelu, [(2, 5, 8)]),
    "swiglu": (swiglu, lambda gate, up: gate / (1 + jnp.exp(-gate)) * up, [(2, 5, 8), (2, 5, 8)]),
}


@pytest.mark.parametrize("size", [4096.0, 2e-7])
def test_the_scale_of_a_norm_has_a_gradient_in_the_whole_range_of_float16(size):
    """Loss scaling makes cotangents large, and those of unlikely words are small."""
    x = 40.0 * jnp.eye(8, dtype=jnp.float16)[None] + jnp.float16(0.01)
    cotangent = jnp.full(x.shape, size, jnp.float16)
    wanted = jax.vjp(lambda scale: plain_rms_norm(x.astype(jnp.float32), scale), jnp.ones(8))[1]
    found = jax.vjp(lambda scale: rms_norm(x, scale, EPSILON, jnp.float16), jnp.ones(8))[1](cotangent)
    np.testing.assert_allclose(found[0], wanted(cotangent.astype(jnp.float32))[0], rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "digits"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2.0**-7)])
def test_values_and_gradients_are_those_of_the_formula(name, dtype, digits):
    """In 16 bits each is rounded once, from float32; and what is kept for the backward pass are the operands alone."""
    function, plain, shapes = CASES[name]
    random = np.random.default_rng(0)
    operands = [
        jnp.asarray(3 * random.normal(size=shape), dtype if len(shape) == 3 else jnp.float32) for shape in shapes
    ]
    result, transpose = jax.vjp(function, *operands)
    wide = [x.astype(jnp.float32) for x in operands]
    expected, plain_transpose = jax.vjp(plain, *wide)
    cotangent = jnp.cos(expected).astype(dtype)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype(np.float32), expected, rtol=digits, atol=digits / 10)
    for found, wanted, operand in zip(
        transpose(cotangent), plain_transpose(cotangent.astype(jnp.float32)), operands, strict=True
    ):
        assert found.dtype == operand.dtype
        np.testing.assert_allclose(found.astype(np.float32), wanted, rtol=digits, atol=2 * digits)
    kept = {id(x) for x in jax.tree.leaves(transpose)}
    assert kept <= {id(x) for x in operands}
