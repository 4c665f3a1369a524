"""Norms against float64, over the range of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxdl.optim import scale_by_lars_trust_ratio
from jaxdl.optim.layerwise import scale_by_lamb_trust_ratio
from jaxdl.optim.norms import global_norm, layer_norms


def normal(shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", ["cpu", "default"])
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e18, 1e25])
def test_norms_over_the_range_of_float32(size, backend, monkeypatch):
    """Against float64, layers by layers; the way of GPUs is run here as well."""
    if backend == "default":
        monkeypatch.setattr(lax, "platform_dependent", lambda *leaves, cpu, default: default(*leaves))
    leaves = [
        jnp.asarray(x) for x in (normal((3, 40, 50)) * np.float32(size), normal((7,)), np.zeros((2, 2), np.float32))
    ]
    found = jax.jit(lambda leaves: (layer_norms(leaves, [(0,), (), ()]), global_norm(leaves)))(leaves)
    whole = [np.asarray(x, np.float64) for x in leaves]
    np.testing.assert_allclose(found[0][0][:, 0, 0], np.linalg.norm(whole[0].reshape(3, -1), axis=1), rtol=1e-5)
    assert found[0][0].shape == (3, 1, 1)
    np.testing.assert_allclose(found[0][1], [np.linalg.norm(whole[1])], rtol=1e-5)
    assert not np.any(found[0][2])
    together = np.sqrt(sum(np.sum(x**2) for x in whole))
    np.testing.assert_allclose(found[1], together, rtol=1e-5)
    assert float(global_norm({})) == 0


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_norms_of_what_is_not_finite(bad):
    [norm] = jax.jit(lambda x: layer_norms([x], [(0,)]))(jnp.array([[1.0, 2.0], [bad, 1.0]]))
    np.testing.assert_allclose(norm[:, 0], [np.sqrt(5), bad], rtol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e18, 1e25])
@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_trust_ratios_over_the_range_of_float32(kind, size):
    """LARS steps as far whatever the size of the gradient, LAMB whatever that of the direction."""
    kernel, gradient = normal((16, 8)), normal((16, 8))[::-1]
    mask, stacked = {"kernel": True}, {"kernel": ()}
    transformation = (
        scale_by_lars_trust_ratio(0.001, 0.0, 0.0, mask, stacked)
        if kind == "lars"
        else scale_by_lamb_trust_ratio(mask, stacked)
    )
    scaled = {"kernel": jnp.asarray(gradient * np.float32(size))}
    update, _ = jax.jit(transformation.update)(scaled, optax.EmptyState(), {"kernel": jnp.asarray(kernel)})
    ratio = np.linalg.norm(kernel.astype(np.float64)) / np.linalg.norm(gradient.astype(np.float64))
    expected = gradient * ratio * (0.001 if kind == "lars" else 1.0)
    np.testing.assert_allclose(update["kernel"], expected, rtol=1e-4)
