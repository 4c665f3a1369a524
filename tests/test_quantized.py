import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdl.parallel.collectives.quantized import quantized_all_reduce, quantized_sent_bytes

BITS = [8, 4, 2, 1]
F32 = np.float32


def make_mesh(**sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


@functools.cache
def summed(num_devices=8, axis="replica", names=("replica",), sizes=None, check_vma=True, **options):
    """A jitted function of `[device, n]` and a key to (total `[n]`, error `[device, n]`), total typed as the same."""
    mesh = make_mesh(**dict(zip(names, sizes or (num_devices,), strict=True)))

    def one(x, key):
        total, error = quantized_all_reduce(x[0], axis, key, return_error=True, **options)
        return total, error[None]

    spec = P(axis)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(spec, P()), out_specs=(P(), spec), check_vma=check_vma))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


# The same algorithm in NumPy, element by element where jaxdl works on whole arrays.


def mix(x, second=None):
    x = np.asarray(x).astype(np.uint64)
    wrap = np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(17))) * np.uint64(0xED5AD4BB) & wrap
    x ^= x >> np.uint64(11)
    if second is not None:
        x = (x + np.uint64(second)) & wrap
    x = x * np.uint64(0xAC4C1B51) & wrap
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x31848BAB) & wrap
    return x ^ (x >> np.uint64(14))


def uniform(size, words, stream):
    wrap = 0xFFFFFFFF
    stream, one, other = int(mix(stream)), int(words[0]), int(words[1])
    first = int(mix((one + int(mix((other + stream) & wrap))) & wrap))
    second = int(mix(other ^ int(mix(one ^ (stream ^ wrap)))))
    return ((mix(np.arange(size) ^ first, second) >> np.uint64(8)).astype(F32) * F32(2.0**-24)).astype(F32)


def oracle_round(x, num_real, bits, u):
    """One block [block] -> what is read back, whose first `num_real` elements count."""
    with np.errstate(invalid="ignore"):
        if bits == 1:
            scale = F32(np.abs(x).sum(dtype=F32) / F32(max(num_real, 1)))
        else:
            scale = F32(np.abs(x).max() / F32(2 ** (bits - 1) - 1))
    if not np.isfinite(scale):
        return np.full_like(x, np.nan)
    if scale < 2.0**-126:
        return np.zeros_like(x)
    if bits == 1:
        return np.where(x >= 0, scale, -scale)
    top = F32(2 ** (bits - 1) - 1)
    levels = np.clip(x * (F32(1) / scale), -top, top)
    return (np.floor(levels) + (u < levels - np.floor(levels))).astype(F32) * scale


def oracle(x, key, bits, block_size=None):
    """`[device, n]` -> (total `[n]`, error `[device, n]`)."""
    m, n = x.shape
    block_size = block_size or (1024 if bits == 1 else 256)
    per_range = -(-n // m)
    num_blocks = -(-per_range // block_size)
    block = 8 * math.ceil(per_range / num_blocks / 8)
    size = num_blocks * block
    words = np.asarray(jax.random.key_data(key))

    def rounded(values, start, stream):
        u = uniform(len(values), words, stream).reshape(-1, block)
        rows = values.reshape(-1, block)
        return np.concatenate(
            [oracle_round(row, min(max(n - start - i * block, 0), block), bits, u[i]) for i, row in enumerate(rows)]
        )

    padded = np.concatenate([x.astype(F32), np.zeros((m, m * size - n), F32)], axis=1)
    sent = np.stack([rounded(padded[d], 0, 2 * d) for d in range(m)])
    error, total = padded - sent, np.zeros(m * size, F32)
    for owner in range(m):
        here = slice(owner * size, (owner + 1) * size)
        owned = np.zeros(size, F32)
        for d in range(m):
            owned = owned + sent[d, here]
        owned = np.where(np.arange(here.start, here.stop) < n, owned, F32(0))
        total[here] = rounded(owned, here.start, 2 * owner + 1)
        error[owner, here] += owned - total[here]
    return total[:n], error[:, :n]


@pytest.mark.parametrize(("bits", "n"), [*((bits, 2048) for bits in BITS), (8, 1), (4, 5003), (1, 5003)])
def test_oracle_and_contract(bits, n):
    x, key = normal(n, 8, n), jax.random.key(bits)
    total, error = map(np.asarray, summed(bits=bits)(x, key))
    assert (total.dtype, error.dtype, total.shape, error.shape) == (F32, F32, (n,), (8, n))
    np.testing.assert_allclose(total + error.sum(0), x.sum(0), atol=1e-5)
    expected_total, expected_error = oracle(x, key, bits)
    # The last bit of a scale may differ, and with it, where a sum lies just between two levels, a level.
    assert np.isclose(total, expected_total, rtol=1e-5, atol=1e-6).mean() >= (0.999 if bits > 1 else 1)
    assert np.isclose(error, expected_error, rtol=1e-5, atol=3e-5).mean() >= (0.999 if bits > 1 else 1)


@pytest.mark.parametrize(("bits", "check_vma"), [(8, True), (1, False)])
def test_total_has_the_same_bits_on_all_devices(bits, check_vma):
    mesh, x = make_mesh(replica=8), normal(1, 8, 3001)

    def one(x):
        return quantized_all_reduce(x[0], "replica", jax.random.key(1), bits=bits)

    function = jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=check_vma)
    total = jax.jit(function)(x)
    shards = [np.asarray(shard.data) for shard in total.addressable_shards]
    assert len({shard.tobytes() for shard in shards}) == 1
    if (bits, check_vma) == (8, True):
        np.testing.assert_array_equal(np.asarray(function(x)), shards[0])
    stacked = jax.jit(jax.shard_map(lambda x: one(x)[None], mesh=mesh, in_specs=P("replica"), out_specs=P("replica")))
    np.testing.assert_array_equal(np.asarray(stacked(x)), np.stack(shards))


def test_error_differs_between_devices_and_is_typed_so():
    mesh = make_mesh(replica=8)

    def one(x):
        return quantized_all_reduce(x[0], "replica", jax.random.key(1), return_error=True)[1]

    error = np.asarray(summed()(normal(1, 8, 64), jax.random.key(1))[1])
    assert len({row.tobytes() for row in error}) == 8
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P()))(normal(1, 8, 64))


@pytest.mark.parametrize("axis", [("fsdp", "replica"), "replica"])
def test_tuple_axes_and_other_axes(axis):
    mesh = make_mesh(replica=4, fsdp=2)
    axes = (axis,) if isinstance(axis, str) else axis
    x = normal(2, 4, 2, 600)

    def one(x):
        both = quantized_all_reduce(x[0, 0], axis, jax.random.key(3), bits=8, return_error=True)
        return jax.tree.map(lambda y: y[None, None], both)

    spec = P("replica", "fsdp")
    kept = P(*(None if name in axes else name for name in ("replica", "fsdp")))
    function = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=(kept, spec)))
    total, error = map(np.asarray, function(x))
    dims = tuple(("replica", "fsdp").index(name) for name in axes)
    np.testing.assert_allclose(total + error.sum(dims, keepdims=True), x.sum(dims, keepdims=True), atol=1e-5)
    if len(axes) == 2:
        rows = (x if axes[0] == "replica" else x.swapaxes(0, 1)).reshape(8, 600)
        assert np.isclose(total[0, 0], oracle(rows, jax.random.key(3), 8)[0], rtol=1e-5, atol=1e-6).mean() > 0.999


@pytest.mark.slow
def test_vmap():
    bits = 1
    mesh, x = make_mesh(replica=4), normal(4, 4, 3, 500)
    keys = jax.random.split(jax.random.key(5), 3)
    call = functools.partial(quantized_all_reduce, bits=bits, return_error=True)

    def rows(x, keys):
        total, error = jax.vmap(lambda x, key: call(x, "replica", key))(x[0], keys)
        return total, error[None]

    def one_key(x, keys):
        total, error = jax.vmap(lambda x: call(x, "replica", keys[0]), in_axes=1, out_axes=1)(x[0].T)
        return total.T, error.T[None]

    for function, per_row in ((rows, keys), (one_key, keys[jnp.zeros(3, int)])):
        both = jax.shard_map(function, mesh=mesh, in_specs=(P("replica"), P()), out_specs=(P(), P("replica")))
        total, error = map(np.asarray, jax.jit(both)(x, keys))
        for row in range(3):
            one_total, one_error = summed(4, bits=bits)(x[:, row], per_row[row])
            np.testing.assert_allclose(total[row], np.asarray(one_total), rtol=1e-6)
            np.testing.assert_allclose(error[:, row], np.asarray(one_error), atol=1e-5)

    named = jax.vmap(lambda x: call(x, "i", keys[0]), axis_name="i", out_axes=(None, 0))
    total, error = map(np.asarray, jax.jit(named)(x[:, 0]))
    one_total, one_error = summed(4, bits=bits)(x[:, 0], keys[0])
    np.testing.assert_allclose(total, np.asarray(one_total), rtol=1e-6)
    np.testing.assert_allclose(error, np.asarray(one_error), atol=1e-5)


@pytest.mark.parametrize(("bits", "dtype"), [(8, jnp.bfloat16), (1, jnp.float16)])
def test_short_floats_are_taken_as_they_are(bits, dtype):
    x = normal(6, 8, 700).astype(dtype)
    results = summed(bits=bits)(x, jax.random.key(0))
    for one, other in zip(results, summed(bits=bits)(x.astype(F32), jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert results[0].dtype == F32


def test_one_device_sums_exactly():
    x = np.concatenate([normal(7, 1, 50), [[np.nan, np.inf, 1e-40]]], axis=1).astype(F32)
    total, error = summed(1)(x, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(total), x[0])
    np.testing.assert_array_equal(np.asarray(error), np.zeros_like(x))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1e-38, -0.0])
def test_blocks_of_zeros_and_nearly_zeros_are_zeros(bits, value):
    x = np.full((8, 2048), value, F32)
    total, error = map(np.asarray, summed(bits=bits)(x, jax.random.key(0)))
    np.testing.assert_array_equal(total, 0)
    np.testing.assert_allclose(error, x, atol=1e-37)


@pytest.mark.parametrize("bits", [8, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_makes_its_block_one(bits, bad):
    x = normal(8, 8, 8 * 64)
    x[3, 70] = bad  # The second range is that of elements 64 to 127; its first block ends before 96.
    total, error = map(np.asarray, summed(bits=bits, block_size=32)(x, jax.random.key(0)))
    hit = (np.arange(512) >= 64) & (np.arange(512) < 96)
    np.testing.assert_array_equal(np.isnan(total), hit)
    np.testing.assert_array_equal(np.isnan(error).any(0), hit)
    assert set(np.flatnonzero(np.isnan(error).any(1))) == {1, 3}  # The owner and the device that had it.


@pytest.mark.parametrize("bits", BITS)
def test_what_lies_on_a_level_is_kept(bits):
    top = max(1, 2 ** (bits - 1) - 1)
    values = np.arange(-top, top + 1) if bits > 1 else np.array([-1, 1])
    one = np.resize(values, 8 * 256).astype(F32) * F32(0.25)
    x = np.outer(np.arange(8) == 2, one).astype(F32)
    total, error = map(np.asarray, summed(bits=bits)(x, jax.random.key(0)))
    np.testing.assert_allclose(total, one, rtol=1e-6)
    np.testing.assert_allclose(error, 0, atol=1e-6)


@pytest.mark.parametrize(("bits", "num_keys"), [(4, 3000), pytest.param(2, 6000, marks=pytest.mark.slow)])
def test_unbiased_with_the_expected_variance(bits, num_keys):
    """By element over many keys: mean within 5 sigma; neighbours, devices and keys are not correlated."""
    m, n = 4, 64
    x = normal(9, m, n)
    call = functools.partial(quantized_all_reduce, bits=bits, return_error=True)
    one_key = jax.vmap(lambda x, key: call(x, "i", key), in_axes=(0, None), out_axes=(None, 0), axis_name="i")
    keys = jax.random.split(jax.random.key(bits), num_keys)
    totals, errors = jax.jit(lambda keys: lax.map(lambda key: one_key(x, key), keys))(keys)
    totals, errors = np.asarray(totals, float), np.asarray(errors, float)
    deviation = totals - x.sum(0, dtype=float)
    standard_error = deviation.std(0) / math.sqrt(num_keys)
    assert (np.abs(deviation.mean(0)) <= 5 * standard_error + 1e-6).all()

    # The first rounding of one device, outside the range that it owns: a coin of known odds for each element.
    block = n // m
    scale = np.abs(x.reshape(m, m, block)).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    fraction = (x.reshape(m, m, block) / scale) % 1
    expected = np.broadcast_to(scale**2 * fraction * (1 - fraction), (m, m, block)).astype(float)
    others = ~np.eye(m, dtype=bool)
    errors = errors.reshape(num_keys, m, m, block)
    variance = errors.var(0)
    assert variance[others].sum() == pytest.approx(expected[others].sum(), rel=0.03)
    random = others[..., None] & (expected > 0.01 * scale**2)
    np.testing.assert_allclose(variance[random], expected[random], rtol=0.35)

    normed = np.where(random, (errors - errors.mean(0)) / np.sqrt(np.where(random, variance, 1)), 0)
    bound = 5 / math.sqrt(num_keys)
    # Same key: neighbouring elements, and any two devices. Neighbouring keys: the same element.
    assert np.abs((normed[..., 1:] * normed[..., :-1]).mean(0)).max() < bound
    for one in range(m):
        for other in range(one):
            assert np.abs((normed[:, one] * normed[:, other]).mean(0)).max() < bound
    assert np.abs((normed[1:] * normed[:-1]).mean(0)).max() < bound


def test_keys_that_differ_by_one_draw_other_numbers():
    """Raw keys as a step counter gives them: consecutive second words; 5 sigma over 16384 elements."""
    x = np.full((8, 1 << 14), 0.5, F32)
    x[:, ::8] = 127  # The scale is 1: everything else is halfway between two levels.

    def error(*words):
        words = np.array(words, np.uint32)
        both = np.asarray(summed(bits=8)(x, words)[1]).reshape(8, 8, -1)
        return np.sign(both[0, 1:].reshape(-1, 8)[:, 1:])  # Device 0, what others own: +-1/2.

    seen = [error(0, step) for step in range(4)] + [error(step, 0) for step in range(1, 4)]
    bound = 5 / math.sqrt(seen[0].size)
    for i, one in enumerate(seen):
        assert set(np.unique(one)) == {-1, 1}
        assert abs(one.mean()) < bound
        for distance in (1, 2, 3):
            assert abs((one[:, distance:] * one[:, :-distance]).mean()) < 2 * bound
        for other in seen[:i]:
            assert abs((one * other).mean()) < bound


def test_one_bit_with_error_feedback_telescopes():
    """1 bit is biased; with the error handed in again the sum of the totals follows the sum of what was handed in."""
    steps, x = 60, normal(10, 8, 300)
    residual, plain, fed = np.zeros_like(x), 0, 0
    for step in range(steps):
        plain = plain + np.asarray(summed(bits=1)(x, jax.random.key(step))[0])
        total, error = summed(bits=1)(x + residual, jax.random.key(step))
        residual, fed = np.asarray(error), fed + np.asarray(total)
    wanted = steps * x.sum(0)
    np.testing.assert_allclose(fed + residual.sum(0), wanted, atol=2e-3)
    assert np.linalg.norm(fed - wanted) < 0.15 * np.linalg.norm(plain - wanted)


def test_mistakes_are_explained():
    mesh = make_mesh(replica=8)

    def call(x, key, **options):
        def one(x):
            return quantized_all_reduce(x[0], "replica", key, **options)

        return jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P())(x)

    x, key = normal(0, 8, 16), jax.random.key(0)
    for match, bad_x, bad_key, options in (
        ("bits=3: .*Choose", x, key, {"bits": 3}),
        ("block_size=12: .*multiple of 8", x, key, {"block_size": 12}),
        ("block_size=0", x, key, {"block_size": 0}),
        ("key=None: .*new one each step", x, None, {"bits": 2}),
        ("int32: only float32", x.astype(np.int32), key, {}),
        (r"shape \(2, 8\)", x.reshape(8, 2, 8), key, {}),
    ):
        with pytest.raises(ValueError, match=match):
            call(bad_x, bad_key, **options)
    assert call(x, None, bits=1).shape == (16,)
    with pytest.raises(NameError, match="shard_map"):
        quantized_all_reduce(x[0], "replica", key)
    with pytest.raises(ValueError, match="bits=5"):
        quantized_sent_bytes(10, 2, bits=5)


@pytest.mark.slow
def test_no_derivative():
    mesh = make_mesh(replica=8)

    def loss(x, stop):
        def one(x):
            x = lax.stop_gradient(x) if stop else x
            return quantized_all_reduce(x[0], "replica", jax.random.key(0)).sum()

        return jax.shard_map(one, mesh=mesh, in_specs=P("replica"), out_specs=P())(x) + x.sum()

    x = normal(0, 8, 16)
    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(x, True)), np.ones_like(x))
    with pytest.raises(ValueError, match=r"quantized_all_reduce .*jax\.lax\.stop_gradient"):
        jax.grad(loss)(x, False)
    with pytest.raises(ValueError, match=r"stop_gradient"):
        jax.jvp(lambda x: loss(x, False), (x,), (x,))
