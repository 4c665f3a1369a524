"""`bench balance`: the test before the times finds wrong exchanges, in every dtype, and passes right ones."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxdl.bench.balance_check import check_all, rounding
from jaxdl.bench.balance_run import Clock
from jaxdl.bench.balance_work import block
from jaxdl.exchange import Dense, Quantized, TopK
from jaxdl.mesh import MeshConfig, make_mesh


class SumOfAll(Dense, kind=None):
    """Wrong: the sum over the replicas in place of the mean."""

    def undelayed(self, layout):
        return Scaled(super().undelayed(layout), 2.0)


class ScaledTopK(TopK, kind=None):
    """Wrong: what is sent is doubled, and the residual does not know."""

    def undelayed(self, layout):
        return Scaled(super().undelayed(layout), 2.0)


class DeafTopK(TopK, kind=None):
    """Wrong on devices alone: replicas use what they would send themselves."""

    def undelayed(self, layout):
        return Deaf(super().undelayed(layout))


class LossyQuantized(Quantized, kind=None):
    """Wrong: without residuals, three quarters of the mean are lost."""

    def undelayed(self, layout):
        return Scaled(super().undelayed(layout), 0.25)


@dataclasses.dataclass(frozen=True)
class Scaled:
    inside: object
    factor: float

    def init(self, grads):
        return self.inside.init(grads)

    def update(self, grads, state, *, axis, key):
        mean, state, metrics = self.inside.update(grads, state, axis=axis, key=key)
        return jax.tree.map(lambda x: self.factor * x, mean), state, metrics


@dataclasses.dataclass(frozen=True)
class Deaf:
    inside: object

    def init(self, grads):
        return self.inside.init(grads)

    def update(self, grads, state, *, axis, key):
        mean, state, metrics = self.inside.update(grads, state, axis=axis, key=key)
        if axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying:  # On devices, not under vmap.
            mean = jax.tree.map(lambda x: 1.01 * x, mean)
        return mean, state, metrics


@dataclasses.dataclass(frozen=True)
class Weighted:
    """The gradients of replica 3 count `factor` times."""

    inside: object
    factor: float

    def init(self, grads):
        return self.inside.init(grads)

    def update(self, grads, state, *, axis, key):
        factor = jax.numpy.where(jax.lax.axis_index(axis) == 3, self.factor, 1.0)
        return self.inside.update(jax.tree.map(lambda x: factor * x, grads), state, axis=axis, key=key)


class Missing(Dense, kind=None):
    """Wrong: the part of one replica is missing."""

    def undelayed(self, layout):
        return Weighted(super().undelayed(layout), 0.0)


class Twice(Dense, kind=None):
    """Wrong: the part of one replica counts twice."""

    def undelayed(self, layout):
        return Weighted(super().undelayed(layout), 2.0)


class OneLess(Dense, kind=None):
    """Wrong: the sum over 8 replicas is divided by 7."""

    def undelayed(self, layout):
        return Scaled(super().undelayed(layout), 8 / 7)


class MissingTopK(TopK, kind=None):
    """Wrong on devices alone: what one replica sends is lost."""

    def undelayed(self, layout):
        return Lost(super().undelayed(layout))


@dataclasses.dataclass(frozen=True)
class Lost:
    inside: object

    def init(self, grads):
        return self.inside.init(grads)

    def update(self, grads, state, *, axis, key):
        if axis in jax.typeof(jax.lax.axis_index(axis)).mat.varying:  # On devices, not under vmap.
            return Weighted(self.inside, 0.0).update(grads, state, axis=axis, key=key)
        return self.inside.update(grads, state, axis=axis, key=key)


def checked(exchanges, replicas=2, inner=1, precision="float32"):
    clock = Clock(make_mesh(MeshConfig(replica=replicas, fsdp=inner), jax.devices()[: replicas * inner]))
    sizes = {"replicas": replicas, "inner": inner, "precision": precision}
    return check_all(block("tiny"), exchanges, **sizes, clock=clock)


def test_the_check_finds_wrong_exchanges_and_passes_right_ones():
    right = {"dense": Dense(), "topk": TopK(min_elements=64), "quantized": Quantized(error_feedback=False)}
    wrong = {
        "sum": SumOfAll(),
        "scaled": ScaledTopK(min_elements=64),
        "deaf": DeafTopK(min_elements=64),
        "lossy": LossyQuantized(error_feedback=False),
    }
    found = checked(right | wrong)
    assert {one.name for one in found if one.name in right and not one.fine} == set()
    failed = {(one.name, one.reference) for one in found if not one.fine}
    assert failed == {
        ("sum", "one device"),
        ("sum", "first change of one device"),
        ("scaled", "means and residuals"),
        ("deaf", "emulated on one device"),
        ("deaf", "first change, emulated"),
        ("lossy", "means"),
    }


@pytest.mark.parametrize(
    ("precision", "right", "wrong"),
    [
        ("float32", {"bf16": Dense(wire_dtype="bfloat16"), "f16": Dense(wire_dtype="float16")},
         {"missing": Missing(wire_dtype="bfloat16"), "twice": Twice(wire_dtype="float16"), "missing32": Missing()}),
        ("bfloat16", {"f32": Dense(), "bf16": Dense(wire_dtype="bfloat16"), "topk": TopK(min_elements=64)},
         {"missing": Missing(), "twice": Twice(wire_dtype="bfloat16"), "less": OneLess(),
          "lost": MissingTopK(min_elements=64)}),
    ],
    ids=["computed in float32", "in bfloat16"],
)  # fmt: skip
def test_one_replica_of_eight_that_is_missing_or_counts_twice_is_found_in_every_dtype(precision, right, wrong):
    found = checked(right | wrong, replicas=8, precision=precision)
    assert {one.name for one in found if not one.fine} == set(wrong)
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
