"""Attention with capped scores, sinks and windows in some layers, and capped logits, against NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.models import attention
from jaxdl.models.attention import Weighing, attend
from jaxdl.parallel.collectives.cross_entropy import TokenLoss

RNG = np.random.default_rng(0)
QUERY: Any
KEY: Any
VALUE: Any
QUERY, KEY, VALUE = (RNG.normal(size=(2, 11, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
SINKS: Any = RNG.normal(size=4).astype(np.float32)
SEGMENTS = np.array([[1] * 4 + [2] * 7, [1] * 6 + [2] * 3 + [0] * 2], np.int32)


def oracle(*, cap=None, sinks=None, window=None, segments=None):
    """In float64, head by head."""
    mixed = np.zeros(QUERY.shape)
    for row, head, at in np.ndindex(2, 4, 11):
        seen = [other for other in range(at + 1)
                if (window is None or other > at - window)
                and (segments is None or segments[row, other] == segments[row, at])]  # fmt: skip
        scores = np.array([QUERY[row, at, head].astype(float) @ KEY[row, other, head // 2] / 2 for other in seen])
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores)
        weights /= weights.sum() + (0 if sinks is None else np.exp(float(sinks[head])))
        mixed[row, at, head] = weights @ VALUE[row, seen, head // 2]
    return mixed


@pytest.mark.parametrize("block", [512, 4])
@pytest.mark.parametrize(
    "how",
    [{"cap": 0.7}, {"sinks": SINKS}, {"cap": 0.7, "sinks": SINKS, "window": 3}, {"cap": 0.7, "segments": SEGMENTS}],
)
def test_weights_are_those_of_numpy(how, block, monkeypatch):
    """Also where the scores of 4 queries are made at a time; gradients too, which are those of whole scores."""
    monkeypatch.setattr(attention, "_BLOCK", block)
    weighing = Weighing(how.get("cap"), how.get("sinks"))
    places = {name: how[name] for name in ("window", "segments") if name in how}

    def mixed(query, key, value, weighing):
        return attend(query, key, value, causal=True, weighing=weighing, **places)

    def loss(*operands):
        return jnp.sum(mixed(*operands)[:, :9] ** 2)

    operands = QUERY, KEY, VALUE, weighing
    np.testing.assert_allclose(
        jax.jit(functools.partial(mixed, weighing=weighing))(*operands[:3]), oracle(**how), atol=1e-5
    )
    given = tuple(x for x in (QUERY, KEY, VALUE, how.get("sinks")) if x is not None)

    def of(*arrays):
        sinks = arrays[3] if len(arrays) > 3 else None
        return loss(*arrays[:3], Weighing(how.get("cap"), sinks))

    grads = jax.jit(jax.grad(of, argnums=range(len(given))))(*given)
    for number, (x, grad) in enumerate(zip(given, grads, strict=True)):
        direction = RNG.normal(size=x.shape).astype(np.float32)
        ends = [of(*(y + step * direction if place == number else y for place, y in enumerate(given)))
                for step in (1e-2, -1e-2)]  # fmt: skip
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-2, np.vdot(grad, direction), rtol=2e-2, atol=2e-2)


def test_a_window_of_some_layers():
    attention_of = jax.jit(lambda limited: attend(QUERY, KEY, VALUE, causal=True, window=3, limited=limited))
    np.testing.assert_allclose(attention_of(jnp.array(True)), oracle(window=3), atol=1e-5)
    np.testing.assert_allclose(attention_of(jnp.array(False)), oracle(), atol=1e-5)


def test_capped_logits_in_the_loss():
    x, kernel = RNG.normal(size=(2, 5, 6)).astype(np.float32), RNG.normal(size=(6, 9)).astype(np.float32)
    target, mask = jnp.asarray(RNG.integers(0, 9, (2, 5))), jnp.asarray(RNG.random((2, 5)) < 0.8)

    def plain(x, kernel):
        logits = 1.5 * jnp.tanh(x @ kernel / 1.5)
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(mask, losses, 0))

    def capped(x, kernel):
        return TokenLoss(4, cap=1.5).sums(x, kernel, target, mask)[0]

    wanted, found = (jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernel) for loss in (plain, capped))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5), found, wanted)
