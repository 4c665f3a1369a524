"""`select_top_k`: exactly k for every input, the right ones, and as a primitive in every place JAX may put it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdl.parallel.collectives import blocks, compact, mstopk
from jaxdl.parallel.collectives.select import METHODS, on_cpu, on_gpu, select_top_k

NO_KEY = jnp.zeros(2, jnp.uint32)
# The passes are what takes time to compile.
FEW_PASSES = {"mstopk": 4}


def nasty_inputs(n, dtype):
    """[input, n]: all that has ever made a selection return too many, too few, or the same twice."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n)
    outlier = np.where(np.arange(n) == n // 2, 60000.0, normal)
    tiny = normal * np.finfo(np.float16).tiny
    inputs = [
        normal, np.zeros(n), -np.zeros(n), np.ones(n), -np.full(n, 0.1), rng.integers(-2, 3, n), outlier, tiny,
        np.where(rng.random(n) < 0.002, -np.inf, normal), np.where(rng.random(n) < 0.5, np.inf, normal),
        np.where(rng.random(n) < 0.002, np.nan, normal), np.where(rng.random(n) < 0.5, -np.nan, 0.0),
        np.full(n, np.nan), np.full(n, np.inf), np.arange(n)[::-1], np.where(np.arange(n) < n - 1, 0.0, 1.0),
    ]  # fmt: skip
    return jnp.asarray(np.stack(inputs), dtype)


def bits_of(x):
    return np.asarray(x, np.float32).view(np.int32) & 0x7FFFFFFF


def best(keys, k):
    """The indices of the k largest keys, ties lowest index first, ascending."""
    return np.sort(np.argsort(-keys.astype(np.int64), kind="stable")[:k])


def best_of_blocks(keys, k, num_per_block):
    parts, first = [], 0
    for block in np.array_split(keys, k // num_per_block):
        parts.append(first + best(block, num_per_block))
        first += len(block)
    return np.concatenate(parts)


def assert_is_selection(indices, n, k):
    indices = np.asarray(indices)
    assert indices.dtype == np.int32
    assert indices.shape[-1] == k
    assert (np.diff(indices) > 0).all(), "not ascending and distinct"
    assert (indices >= 0).all()
    assert (indices < n).all()


def check_indices(x, indices, k, method, num_per_block=1):
    for row, mine in zip(np.asarray(x, np.float32), np.asarray(indices), strict=True):
        keys = bits_of(row)
        if method == "exact":
            np.testing.assert_array_equal(mine, best(keys, k))
        if method == "threshold":
            np.testing.assert_array_equal(mine, best(keys >> 7, k))
        if method == "block":
            np.testing.assert_array_equal(mine, best_of_blocks(keys, k, num_per_block))
        if method == "mstopk":
            unbounded = np.flatnonzero(keys >= compact.INFINITY)
            assert np.isin(unbounded, mine).all() if len(unbounded) <= k else np.isin(mine, unbounded).all()


# A single entry, all entries, one block of the two stages for each chosen entry, primes, a last block that is not full.
SIZES = [(1, 1), (37, 37), (4096, 600), (6007, 6)]
# Each method at the last size, and at one or two of the others.
METHODS_OF_SIZES = [(*SIZES[3], method) for method in METHODS] + [
    (*SIZES[number], method) for number in range(3) for method in METHODS[number % 2 :: 2]
]


@pytest.mark.parametrize(("n", "k", "method"), METHODS_OF_SIZES)
def test_exactly_k_and_the_right_ones(n, k, method):
    x = nasty_inputs(n, jnp.float32)
    select = functools.partial(select_top_k, k=k, method=method, num_passes=FEW_PASSES.get(method, 30))
    values, indices = jax.jit(jax.vmap(select))(x)
    assert_is_selection(indices, n, k)
    np.testing.assert_array_equal(values, np.take_along_axis(np.asarray(x), np.asarray(indices), 1))
    check_indices(x, indices, k, method)


@pytest.mark.parametrize(("method", "dtype"), [*zip(METHODS, [jnp.bfloat16, jnp.float16] * 2, strict=True)])
def test_short_dtypes(method, dtype):
    x = nasty_inputs(3001, dtype)
    select = functools.partial(select_top_k, k=17, method=method, num_passes=FEW_PASSES.get(method, 30))
    values, indices = jax.jit(jax.vmap(select))(x)
    assert values.dtype == dtype
    assert_is_selection(indices, 3001, 17)
    check_indices(x, indices, 17, method)


@pytest.mark.parametrize(("method", "n", "k"), [*zip(METHODS, (6007, 1030) * 2, (6, 500) * 2, strict=True)])
def test_the_ways_of_counting_agree(n, k, method):
    x = nasty_inputs(n, jnp.float32)[:, :n]
    settings = {
        "k": k,
        "method": method,
        "num_passes": 5,
        "num_per_block": 2 if method == "block" else 1,
    }
    rows = [x[i] for i in (0, 3, 5, 6, 8, 9)]
    ways = [jax.jit(functools.partial(way, bits=NO_KEY, **settings)) for way in (on_cpu, on_gpu)]
    for row in rows:
        (mine,), (other,) = (way(row) for way in ways)
        assert_is_selection(mine, n, k)
        if method != "mstopk":
            np.testing.assert_array_equal(mine, other)
            check_indices(row[None], mine[None], k, method, settings["num_per_block"])
        else:  # The means are summed in another order, so that the last thresholds may differ a little.
            assert_is_selection(other, n, k)
            assert len(np.intersect1d(mine, other)) >= 0.9 * k or len(np.unique(row)) < 10


@pytest.mark.parametrize("n_k", [(25_600_000, 25_600), (100, 1), (100, 100), (1 << 20, 1 << 14)])
def test_blocks_leave_less_to_do(n_k):
    n, k = n_k
    width = blocks.block_width(n, k)
    if width is not None:
        assert 2 * k * width <= n
        assert n // width + k * width < n
    else:
        assert k * min(blocks.BLOCK_WIDTHS) > n / 8 or n < 1000


# ---- MSTopK ----


def oracle_mstopk(x, k, num_passes, mean, key):
    """The paper's algorithm in NumPy, with the arithmetic of float32 and the corrections of its holes."""
    a = np.abs(x)
    top, left, right = a.max(), np.float32(0), np.float32(1)
    k1, k2, sure, band = 0, a.size, np.float32(np.inf), np.float32(0)
    for _ in range(num_passes):
        ratio = left + (right - left) / np.float32(2)
        threshold = mean + ratio * (top - mean)
        assert threshold.dtype == np.float32
        count = int((a >= threshold).sum())
        if count <= k:
            right = ratio
            if count > k1:
                k1, sure = count, threshold
        else:
            left = ratio
            if count < k2:
                k2, band = count, threshold
    first, second = np.flatnonzero(a >= sure), np.flatnonzero((a < sure) & (a >= band))
    spare = len(second) - (k - len(first))
    start = int(jax.random.randint(key, (), 0, spare + 1))
    return np.sort(np.concatenate([first, second[start : start + k - len(first)]]))


@pytest.mark.parametrize(("way", "num_passes"), [(on_cpu, 12), (on_gpu, 4)])
def test_mstopk_is_the_papers(way, num_passes):
    n, k = 20_000, 200
    rng = np.random.default_rng(2)
    run = jax.jit(lambda x, bits: way(x, bits, k=k, method="mstopk", num_passes=num_passes, num_per_block=1)[0])
    measure = jax.jit(functools.partial(mstopk.mean_and_max, num_finite=jnp.int32(n), compare=way is on_gpu))
    whole = np.round(100 * rng.laplace(size=n)).astype(np.float32)  # Whole numbers have one sum, in any order.
    normal, heavy = rng.standard_normal(n).astype(np.float32), rng.standard_t(3, n).astype(np.float32)
    outlier = np.where(np.arange(n) == 77, 1e4 * np.abs(heavy).max(), heavy).astype(np.float32)
    for seed, x in enumerate((whole, normal, heavy, outlier, np.zeros(n, np.float32), np.full(n, 0.1, np.float32))):
        key = jax.random.key(seed)
        mean, top = (np.float32(value) for value in measure(x))
        np.testing.assert_allclose(mean, np.abs(x).astype(np.float64).mean(), rtol=1e-5)
        assert top == np.abs(x).max()
        if seed == 0:
            assert mean == np.float32(np.abs(x).astype(np.float64).sum()) / np.float32(n)
        mine = run(x, jax.random.key_data(key))
        np.testing.assert_array_equal(mine, oracle_mstopk(x, k, num_passes, mean, key), err_msg=str(seed))


@pytest.mark.slow
def test_the_window_of_mstopk_follows_the_key():
    x = jnp.ones(1000)  # Nothing is sure, so that all of them are in the window's reach.
    select = jax.jit(jax.vmap(lambda key: select_top_k(x, 10, "mstopk", key=key, num_passes=2)[1]))
    keys = jax.random.split(jax.random.key(0), 200)
    found = np.asarray(select(keys))
    np.testing.assert_array_equal(found, select(keys))
    assert (np.diff(found) == 1).all(), "the window is contiguous"
    starts = found[:, 0]
    assert len(set(starts[:10].tolist())) > 5
    assert starts.min() < 30
    assert 960 < starts.max() <= 990
    np.testing.assert_allclose(starts.mean(), 495, atol=70)


def test_recall():
    """Of the definitions: those of the other tests, which the selections equal."""
    n, k = 200_000, 200
    rng = np.random.default_rng(0)
    heavy = rng.standard_t(3, n)
    outlier = np.where(np.arange(n) == 77, 1e4 * np.abs(heavy).max(), heavy)
    for x in (rng.standard_normal(n), rng.laplace(size=n), heavy, outlier):
        x = x.astype(np.float32)
        keys, mean = bits_of(x), np.abs(x).mean()
        assert len(np.intersect1d(best(keys >> 7, k), best(keys, k))) >= 0.999 * k
        assert len(np.intersect1d(oracle_mstopk(x, k, 30, mean, jax.random.key(0)), best(keys, k))) >= 0.99 * k


# ---- pieces ----


def test_bit_words_and_their_ranks():
    rng = np.random.default_rng(0)
    flags = rng.random((50, 32)) < np.linspace(0, 1, 50)[:, None]
    for compare in (False, True):
        words = compact.bit_words(jnp.asarray(flags.reshape(-1)), compare=compare)
        np.testing.assert_array_equal(words, np.packbits(flags, axis=1, bitorder="little").view(np.uint32)[:, 0])
    ranks = np.cumsum(flags, 1) - 1
    places = np.asarray(jax.jit(compact.nth_set)(jnp.repeat(words[:, None], 32, 1), jnp.maximum(ranks, 0)))
    np.testing.assert_array_equal(places[flags], np.nonzero(flags)[1])
    keep = jax.jit(compact.first_set)
    for count in (0, 1, 5, 32):
        kept = np.asarray(keep(words, jnp.full(50, count)))
        wanted = flags & (np.cumsum(flags, 1) <= count)
        np.testing.assert_array_equal(kept, np.packbits(wanted, axis=1, bitorder="little").view(np.uint32)[:, 0])


@pytest.mark.parametrize(("n", "num"), [(5, 1), (128, 3), (70_001, 7)])
def test_counts_that_share_an_integer(n, num):
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 100, n).astype(np.int32)
    thresholds = np.array([0, 99, 50, 3, 100, 0, 1], np.int32)[:num]
    wanted = (keys[:, None] >= thresholds).sum(0)
    for count in (compact.count_packed, compact.count_above):
        np.testing.assert_array_equal(jax.jit(count)(keys, thresholds), wanted)


@pytest.mark.parametrize(("n", "k", "num_per_block"), [(1003, 40, 4), (1003, 6, 3), (64, 64, 64), (10_007, 14, 2)])
def test_several_of_each_block(n, k, num_per_block):
    x = nasty_inputs(n, jnp.float32)
    select = functools.partial(select_top_k, k=k, method="block", num_per_block=num_per_block)
    _, indices = jax.jit(jax.vmap(select))(x)
    assert_is_selection(indices, n, k)
    check_indices(x, indices, k, "block", num_per_block)


# ---- as a primitive ----


def test_eager_jit_and_vmap_agree():
    x = jax.random.normal(jax.random.key(0), (3, 2, 500))
    mapped = jax.vmap(jax.vmap(lambda x: select_top_k(x, 7)))(x)
    for i in range(3):
        for j in range(2):
            np.testing.assert_array_equal(mapped[1][i, j], select_top_k(x[i, j], 7)[1])
    along = jax.vmap(jax.vmap(lambda x: select_top_k(x, 7)[1]), in_axes=2, axis_name="other")(jnp.moveaxis(x, 1, 2))
    np.testing.assert_array_equal(jnp.swapaxes(along, 0, 1), mapped[1])


@pytest.mark.parametrize(("method", "check_vma"), [*zip(METHODS, [True] * 4, strict=True), (METHODS[0], False)])
def test_in_shard_map(method, check_vma):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(0), (8 * 300,))
    settings = {"mstopk": {"num_passes": 3}, "block": {"num_per_block": 2}}.get(method, {})
    select = functools.partial(select_top_k, k=6, method=method, **settings)

    def local(x):
        return select(x, key=jax.random.fold_in(jax.random.key(0), lax.axis_index("a")))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=check_vma))
    values, indices = run(x)
    keys = jax.vmap(lambda device: jax.random.fold_in(jax.random.key(0), device // 2))(jnp.arange(8))
    wanted = jax.jit(jax.vmap(lambda x, key: select(x, key=key)))(x.reshape(8, 300), keys)
    np.testing.assert_array_equal(indices.reshape(8, 6), wanted[1])
    np.testing.assert_array_equal(values.reshape(8, 6), wanted[0])


def test_results_vary_where_the_operands_do():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (800,))
    shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P())
    same = jax.jit(shard_map(lambda x: select_top_k(x, 9), in_specs=P()))(x)
    for result in same:
        shards = [np.asarray(shard.data) for shard in result.addressable_shards]
        assert all(np.array_equal(shard, shards[0]) for shard in shards)
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(shard_map(lambda x: select_top_k(x, 9)[1], in_specs=P("a")))(x)
    # The key alone makes the window another one.
    keyed = shard_map(lambda x, keys: select_top_k(x, 9, "mstopk", key=keys[0])[1], in_specs=(P(), P("a")))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(keyed)(x, jax.random.split(jax.random.key(0), 8))


def test_gradients_hold_the_selection():
    x = jax.random.normal(jax.random.key(0), (300,))
    weights = jnp.arange(1.0, 8.0)
    _, indices = select_top_k(x, 7)

    def loss(x):
        values, indices = select_top_k(x, 7)
        return jnp.sum(weights * values**2) + 0.0 * indices.sum()

    wanted = np.zeros(300, np.float32)
    wanted[indices] = 2 * weights * x[indices]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(jnp.stack([x, -x]))[1], -wanted, rtol=1e-6)
    direction = jax.random.normal(jax.random.key(1), (300,))
    values, tangents = jax.jvp(lambda x: select_top_k(x, 7)[0], (x,), (direction,))
    np.testing.assert_array_equal(tangents, direction[indices])
    np.testing.assert_array_equal(values, x[indices])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_sorted(method, platform):
    x = jax.ShapeDtypeStruct((100_000,), jnp.float32)
    traced = jax.jit(functools.partial(select_top_k, k=100, method=method)).trace(x)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert not re.search(r"\.(sort|top_k)|@top_?k", program, re.IGNORECASE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0: there are 10 entries"),
        ({"k": 11}, "k=11: there are 10 entries"),
        ({"method": "sort"}, "method='sort'"),
        ({"x": np.ones(10, np.int32)}, "x is int32"),
        ({"x": np.ones((2, 5), np.float32)}, "one dimension"),
        ({"method": "mstopk", "num_passes": 0}, "num_passes=0"),
        ({"num_passes": 10}, "no passes"),
        ({"num_per_block": 2}, "no blocks"),
        ({"method": "block", "num_per_block": 2}, "no multiple"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_top_k(**{"x": np.ones(10, np.float32), "k": 3} | arguments)
