"""The wire format of sparse entries, against NumPy and bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.parallel.collectives.packing import BLOCK_SIZE, num_words, pack, rounded, unpack

SIZES = [(1, 1), (5, 3), (300, 300), (65_535, 40), (65_536, 40), (65_537, 40), (200_000, 1), (1_000_000, 5_000)]


def entries(n, k, seed=0):
    """Float32 values of many magnitudes at k distinct ascending indices."""
    random = np.random.default_rng(seed)
    indices = np.sort(random.choice(n, k, replace=False)).astype(np.int32)
    return (random.standard_normal(k) * 10.0 ** random.integers(-30, 30, k)).astype(np.float32), indices


def nearest_even(values):
    """Float32 rounded to bfloat16's 8 bits by integer arithmetic, as float32."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def there_and_back(values, indices, n, wire="packed"):
    words = jax.jit(lambda v, i: pack(v, i, n, wire=wire))(values, indices)
    assert words.dtype == jnp.uint32
    assert words.shape == (num_words(len(values), n, wire),)
    back = jax.jit(lambda w: unpack(w, len(values), n, wire=wire))(words)
    assert [x.dtype for x in back] == [jnp.float32, jnp.int32]
    return np.asarray(words), *map(np.asarray, back)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_entries_come_back(n, k, wire):
    values, indices = entries(n, k)
    _, got_values, got_indices = there_and_back(values, indices, n, wire)
    np.testing.assert_array_equal(got_indices, indices)
    expected = nearest_even(values) if wire == "packed" else values
    assert got_values.tobytes() == expected.tobytes()
    assert np.asarray(rounded(values, wire)).tobytes() == expected.tobytes()


def test_a_word_is_a_value_and_an_index():
    n = 3 * BLOCK_SIZE - 7
    indices = np.array([3, 65_535, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 9], np.int32)
    words, _, _ = there_and_back(np.array([1.0, -2.0, 0.5, 3.0], np.float32), indices, n)
    assert words[:3].tolist() == [2, 2, 4]
    assert [hex(word) for word in words[3:].tolist()] == ["0x3f800003", "0xc000ffff", "0x3f000000", "0x40400009"]


@pytest.mark.parametrize("wire", ["packed", "plain"])
@pytest.mark.parametrize("n", [10, 65_536, 65_537, 140_000])
def test_padding_carries_nothing(n, wire):
    indices = np.array([0, n - 1, n, n, n + 5, 2**31 - 1], np.int32)
    _, values, back = there_and_back(np.arange(1, 7, dtype=np.float32), indices, n, wire)
    assert values.tolist() == [1, 2, 0, 0, 0, 0]
    assert back.tolist() == [0, n - 1, n, n, n, n]


def test_an_empty_block_in_the_middle_and_a_full_one():
    n = 4 * BLOCK_SIZE
    indices = np.concatenate([[7], np.arange(2 * BLOCK_SIZE, 3 * BLOCK_SIZE)]).astype(np.int32)
    words, _, back = there_and_back(np.ones(len(indices), np.float32), indices, n)
    assert words[:4].tolist() == [1, 1, 1 + BLOCK_SIZE, 1 + BLOCK_SIZE]
    np.testing.assert_array_equal(back, indices)


def test_the_largest_positions_that_int32_can_name():
    n = 2**31 - 1
    indices = np.array([0, 2**31 - BLOCK_SIZE - 1, 2**31 - BLOCK_SIZE, n - 1, n], np.int32)
    _, values, back = there_and_back(np.ones(5, np.float32), indices, n)
    np.testing.assert_array_equal(back, indices)
    assert values.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_special_values_stay_what_they_are(wire):
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.3e38, -1e-37], np.float32)
    _, back, _ = there_and_back(values, np.arange(7, dtype=np.int32), 7, wire)
    assert np.isnan(back[0])
    assert back[1:5].tobytes() == values[1:5].tobytes()
    np.testing.assert_allclose(back[5:], values[5:], rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("wire", ["packed", "plain"])
def test_narrow_values(dtype, wire):
    values = jnp.asarray(np.random.default_rng(1).standard_normal(50), dtype)
    _, back, _ = there_and_back(values, np.arange(50, dtype=np.int32), 50, wire)
    exact = np.asarray(values.astype(jnp.float32))
    kept = wire == "plain" or dtype == jnp.bfloat16
    np.testing.assert_array_equal(back, exact if kept else nearest_even(exact))


def test_the_rounding_error_survives_the_compiler():
    """XLA may drop a conversion to bfloat16 and back, and the error with it."""
    values, _ = entries(1000, 1000)
    error = jax.jit(lambda v: v - rounded(v))(values)
    np.testing.assert_array_equal(error, values - nearest_even(values))
    assert np.count_nonzero(error) > 900


@pytest.mark.slow
def test_vmap_packs_each_row():
    rows = [entries(100_000, 20, seed) for seed in range(3)]
    values, indices = (np.stack(x) for x in zip(*rows, strict=True))
    words = jax.vmap(lambda v, i: pack(v, i, 100_000))(values, indices)
    for row, (v, i) in zip(words, rows, strict=True):
        np.testing.assert_array_equal(row, pack(v, i, 100_000))
    np.testing.assert_array_equal(jax.vmap(lambda w: unpack(w, 20, 100_000)[1])(words), indices)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"wire='zip': no such wire format\. Take one of 'packed', 'plain'"):
        num_words(1, 1, "zip")
