"""Derivatives of the sum of sparse vectors are those of the dense sum."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from test_sparse import LAYOUTS, entries, mapped, wide_axes

from jaxdl.parallel.collectives.sparse import sparse_all_reduce

CHECKED = pytest.mark.parametrize("check_vma", [True, False])


def dense_sum(values, indices, n, axis):
    """What `sparse_all_reduce` is a cheaper form of."""
    at = jnp.where((indices >= 0) & (indices < n), indices, n)
    return lax.psum(jnp.zeros(n).at[at].add(values.astype(jnp.float32), mode="drop"), axis)


def sparse_sum(values, indices, n, axis):
    return sparse_all_reduce(values, indices, n, axis, return_error=True, wire="plain")[0]


@CHECKED
@pytest.mark.parametrize("layout", ["replica 4 of 4 x 2", "both of 4 x 2", "both of 4 x 2, turned", "one device"])
def test_derivatives_are_those_of_the_dense_sum(layout, check_vma):
    n, k = 300, 20
    values, indices = entries(n + 5, k)
    indices[2, 0] = -1
    weights = np.random.default_rng(1).standard_normal((8, n)).astype(np.float32)

    def loss(reduce, values):
        def one(values, indices, weights):
            total = reduce(values, indices, n, LAYOUTS[layout][1])
            return lax.psum(jnp.sum(weights * total**2), wide_axes(layout))

        return mapped(one, layout, 3, PartitionSpec(), check_vma)(values, indices, weights)

    results = []
    for reduce in (dense_sum, sparse_sum):
        one = functools.partial(loss, reduce)
        results.append(jax.jit(lambda v, one=one: (jax.grad(one)(v), jax.jvp(one, (v,), (v * 2,))[1]))(values))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(results[0][0]).max() > 1


@pytest.mark.slow
def test_derivatives_see_through_the_rounding_and_keep_the_dtype():
    values, indices = entries(300, 20)
    weights = np.random.default_rng(1).standard_normal(300).astype(np.float32)

    def loss(values):
        def one(values, indices):
            total, error = sparse_all_reduce(values, indices, 300, "replica", return_error=True)
            return jnp.sum(weights * total) + lax.psum(jnp.sum(error), "replica")

        return mapped(one, "replica 8", 2, PartitionSpec())(values, indices)

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(values), weights[indices])
    narrow = gradient(jnp.asarray(values, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), weights[indices], rtol=2**-8)


def test_derivatives_of_a_mapped_axis():
    n = 300
    values, indices = entries(n + 5, 20)
    indices[2, :2] = [-1, 2**31 - 1]
    weights = np.random.default_rng(1).standard_normal((8, n)).astype(np.float32)
    results = []
    for reduce in (dense_sum, sparse_sum):

        def loss(values, indices, weights, reduce=reduce):
            return jnp.sum(weights * reduce(values, indices, n, "device") ** 2)

        def summed(values, loss=loss):
            return jax.vmap(loss, axis_name="device")(values, indices, weights).sum()

        inside = jax.jit(jax.vmap(jax.grad(loss), axis_name="device"))(values, indices, weights)
        results.append((jax.jit(jax.grad(summed))(values), inside))
    for expected, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_second_selection_has_no_derivative():
    values, indices = entries(300, 20)

    def loss(values, stop=False):
        def one(values, indices):
            values = lax.stop_gradient(values) if stop else values
            return sparse_all_reduce(values, indices, 300, "replica", algorithm="all_to_all").sum()

        return mapped(one, "replica 8", 2, PartitionSpec())(values, indices)

    with pytest.raises(ValueError, match=r"'all_to_all' has no derivative.*stop_gradient"):
        jax.grad(loss)(values)
    jax.eval_shape(jax.grad(functools.partial(loss, stop=True)), values)

    def over_axis(values):
        reduce = functools.partial(sparse_all_reduce, n=300, axis="device", algorithm="all_to_all")
        return jax.vmap(reduce, axis_name="device", out_axes=None)(values, indices).sum()

    with pytest.raises(ValueError, match="'all_to_all' has no derivative"):
        jax.eval_shape(jax.grad(over_axis), values)
