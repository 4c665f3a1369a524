"""Fingerprints cover every bit and position, are equal on every mesh, and gather no array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.training.checkpoint import fingerprints
from jaxdl.training.checkpoint.disk import disk_reason
from jaxdl.training.checkpoint.fingerprint import (
    Stale,
    host_fingerprints,
    row_fingerprints,
    tag_fingerprints,
    tag_words,
    tagged_texts,
    text,
)

RANDOM = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)


def of(x):
    return text(np.asarray(jax.jit(fingerprints)(x)))


def changed(x, *places_and_values):
    x = x.copy()
    for place, value in places_and_values:
        x[place] = value
    return x


ONE = np.zeros(4096, np.float32)
HALVES = np.ones(512, np.float32)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (RANDOM, -RANDOM),
        (RANDOM, changed(RANDOM, ((3, 5), -RANDOM[3, 5]), ((10, 7), -RANDOM[10, 7]))),
        (changed(ONE, (0, 1.0)), changed(ONE, (256, 1.0))),
        (changed(ONE, (7, 0.5), (8, -0.5)), changed(ONE, (7, -0.5), (8, 0.5))),
        (changed(HALVES, (slice(256), 2.0)), changed(HALVES, (slice(256, 512), 2.0))),
        (ONE, np.full_like(ONE, -0.0)),
        (ONE, np.full_like(ONE, 2.0)),
        (RANDOM, np.roll(RANDOM, 1)),
        (RANDOM, RANDOM[::-1]),
        (np.arange(6, dtype=np.int8), np.arange(6, dtype=np.int8)[::-1]),
        (np.array([True, False]), np.array([False, True])),
        (np.float32(1), np.nextafter(np.float32(1), np.float32(2))),
    ],
)
def test_changes_that_a_sum_of_weighted_bits_may_miss(before, after):
    assert of(before) != of(np.ascontiguousarray(after))


def test_every_single_bit_counts():
    """Both words of the fingerprint change."""
    x = np.zeros(8, np.uint32)
    flipped = np.stack([x, *(changed(x, (place, np.uint32(1) << bit)) for place in range(8) for bit in range(32))])
    found = np.asarray(jax.jit(jax.vmap(fingerprints))(flipped))
    for word in range(2):
        assert len(set(found[:, word])) == 257


def oracle(x):
    """The definition, element by element in Python integers."""
    words = []
    for seed, (a, b), (first, second, third) in (
        (0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35), (16, 13, 16)),
        (0x7F4A7C15, (0x7FEB352D, 0x846CA68B), (16, 15, 16)),
    ):

        def mix(value, a=a, b=b, first=first, second=second, third=third):
            value = ((value ^ (value >> first)) * a) % 2**32
            value = ((value ^ (value >> second)) * b) % 2**32
            return value ^ (value >> third)

        words.append(sum(mix(int(bits) ^ mix(place ^ seed)) for place, bits in enumerate(x.ravel())) % 2**32)
    return "".join(f"{word:08x}" for word in words)


def test_the_formula():
    assert of(RANDOM) == oracle(RANDOM.view(np.uint32))
    assert of(RANDOM.astype(jnp.bfloat16)) == oracle(RANDOM.astype(jnp.bfloat16).view(np.uint16))
    doubles = RANDOM.astype(np.float64)
    with jax.enable_x64(True):
        assert of(doubles) == oracle(doubles.view(np.uint32))
    key = jax.random.key(3)
    assert of(key) == of(jax.random.key_data(key))
    assert of(np.zeros((0, 3), np.float32)) == "0" * 16


def test_the_same_on_every_mesh_without_gathering():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for spec in (jax.P("a", "b"), jax.P("b"), jax.P(None, ("a", "b")), jax.P()):
        sharded = jax.device_put(RANDOM, jax.NamedSharding(mesh, spec))
        assert of(sharded) == of(RANDOM)
        program = jax.jit(fingerprints).lower(sharded).compile().as_text()
        found = re.findall(r"= (.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program)
        assert all(kind == "all-reduce" for _, kind in found), found
        assert all(not re.search(r"\[[3-9]|\[\d\d|,", shape.split("{")[0]) for shape, _ in found if "(" not in shape)
        assert bool(found) == (spec != jax.P())


def test_fingerprints_of_another_checkpoint_do_not_pass_for_those_of_this_one():
    """On their devices they have the step; what is stored has not, as ever."""
    state = {"a": RANDOM, "b": ONE}
    step = 700
    found = jax.jit(tag_fingerprints)(state, np.uint32(step))
    assert tagged_texts(found, step) == {name: of(x) for name, x in state.items()}
    with pytest.raises(Stale) as error:
        tagged_texts(found, step + 1)
    assert "another checkpoint" in disk_reason(error.value)
    rows = np.asarray(jax.jit(row_fingerprints)([RANDOM], np.uint32(step)))
    assert (rows ^ tag_words(np.uint32(step)) == np.asarray(row_fingerprints([RANDOM]))).all()
    assert (rows ^ tag_words(np.uint32(step + 1)) != np.asarray(row_fingerprints([RANDOM]))).any(axis=1).all()


@pytest.mark.parametrize("dtype", ["bool", "int4", "int8", "bfloat16", "float32", "float64", "complex64", "key"])
@pytest.mark.parametrize("shape", [(), (8, 6, 2)])
def test_numpy_sums_what_a_program_does(shape, dtype):
    values = np.random.default_rng(1).integers(-4, 4, shape)
    with jax.enable_x64(dtype == "float64"):
        x = jax.random.key(3) if dtype == "key" else jnp.asarray(values).astype(dtype)
        if dtype == "key" and shape:
            x = jax.random.split(x, shape)
        words = np.asarray(fingerprints(x))
        spec = jax.sharding.PartitionSpec("x", None, "y") if shape else jax.sharding.PartitionSpec()
        placed = jax.device_put(x, jax.sharding.NamedSharding(jax.make_mesh((4, 2), ("x", "y")), spec))
        assert np.array_equal(host_fingerprints([placed])[0], words)
