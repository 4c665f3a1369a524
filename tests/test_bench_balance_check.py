"""`bench balance`: the test before the times finds wrong exchanges, in every dtype, and passes right ones."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxdl.exchange import Dense, Quantized, TopK
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.performance.bench.balance.balance_check import check_all, rounding
from jaxdl.performance.bench.balance.balance_run import Clock
from jaxdl.performance.bench.balance.balance_work import block


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """An exchange inside another one."""

    inside: object

    def init(self, grads):
        return self.inside.init(grads)


@dataclasses.dataclass(frozen=True)
class Scaled(Wrapped):
    factor: float

    def update(self, grads, state, *, axis, key):
        mean, state, metrics = self.inside.update(grads, state, axis=axis, key=key)
        return jax.tree.map(lambda x: self.factor * x, mean), state, metrics


@dataclasses.dataclass(frozen=True)
class Weighted(Wrapped):
    """The gradients of replica 3 count `factor` times."""

    factor: float

    def update(self, grads, state, *, axis, key):
        factor = jax.numpy.where(jax.lax.axis_index(axis) == 3, self.factor, 1.0)
        return self.inside.update(jax.tree.map(lambda x: factor * x, grads), state, axis=axis, key=key)


@dataclasses.dataclass(frozen=True)
class OnDevices(Wrapped):
    """Another exchange on devices, not under vmap."""

    there: object

    def update(self, grads, state, *, axis, key):
        on_devices = axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying
        return (self.there if on_devices else self.inside).update(grads, state, axis=axis, key=key)


def wrong(right, wrap):
    """An exchange as `right`, but for what `wrap` puts around it."""

    class Wrong(right, kind=None):
        def undelayed(self, layout):
            return wrap(super().undelayed(layout))

    return Wrong


ScaledTopK = wrong(TopK, lambda one: Scaled(one, 2.0))
"""What is sent is doubled, and the residual does not know."""
DeafTopK = wrong(TopK, lambda one: OnDevices(one, Scaled(one, 1.01)))
"""On devices alone: replicas use what they would send themselves."""
LossyQuantized = wrong(Quantized, lambda one: Scaled(one, 0.25))
"""Without residuals, three quarters of the mean are lost."""
Missing = wrong(Dense, lambda one: Weighted(one, 0.0))
"""The part of one replica is missing."""
MissingTopK = wrong(TopK, lambda one: OnDevices(one, Weighted(one, 0.0)))
"""On devices alone: what one replica sends is lost."""


def checked(exchanges, precision="float32"):
    clock = Clock(make_mesh(MeshConfig(replica=8, fsdp=1), jax.devices()))
    sizes = {"replicas": 8, "inner": 1, "precision": precision}
    return check_all(block("tiny"), exchanges, **sizes, clock=clock)


@pytest.mark.slow
def test_the_check_finds_wrong_exchanges():
    """Each is found by comparisons that pass the others."""
    bad = {
        "scaled": ScaledTopK(min_elements=64),
        "deaf": DeafTopK(min_elements=64),
        "lossy": LossyQuantized(error_feedback=False),
    }
    found = checked(bad)
    failed = {(one.name, one.reference) for one in found if not one.fine}
    assert failed == {
        ("scaled", "means and residuals"),
        ("deaf", "emulated on one device"),
        ("deaf", "first change, emulated"),
        ("lossy", "means"),
    }


@pytest.mark.slow
def test_one_replica_of_eight_that_is_missing_is_found_in_bfloat16():
    right = {"bf16": Dense(wire_dtype="bfloat16"), "topk": TopK(min_elements=64)}
    bad = {"missing": Missing(), "lost": MissingTopK(min_elements=64)}
    found = checked(right | bad, precision="bfloat16")
    assert {one.name for one in found if not one.fine} == set(bad)
    losses = [one for one in found if one.name == "missing" and one.reference == "one device"]
    assert losses[0].fine, "the losses of a few steps would not tell"


def test_what_rounding_may_do():
    """Sums of random parts in 16 bits, one after the other, are within the bound; with one part less they are not."""
    random = np.random.default_rng(0)
    for count, mean in ((4, 1.0), (8, 0.0), (16, 1.0), (32, 0.0)):
        parts = jax.numpy.asarray(random.normal(mean, 1, (count, 50_000)), "float32")
        exact = np.asarray(parts, np.float64).mean(0)
        size = np.linalg.norm(np.abs(np.asarray(parts, np.float64)).mean(0))
        for dtype in ("bfloat16", "float16"):
            total = functools.reduce(lambda a, b: a + b, list(parts.astype(dtype)))
            bound = rounding(Dense(wire_dtype=dtype), "float32", count)
            assert np.linalg.norm(np.asarray(total, np.float64) / count - exact) < bound * size
            assert np.linalg.norm(np.asarray(parts[:-1], np.float64).sum(0) / count - exact) > bound * size
