"""The sum of sparse vectors: against NumPy bit by bit, its error, its types, and what it sends."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxdl.parallel.collectives.sparse import sparse_all_reduce, sparse_sent_bytes
from jaxdl.parallel.compiler.wire_bytes import collectives

AXES = ("replica", "fsdp")
LAYOUTS = {
    "replica 8": ((8, 1), "replica"),
    "replica 4 of 4 x 2": ((4, 2), "replica"),
    "both of 4 x 2": ((4, 2), ("replica", "fsdp")),
    "both of 4 x 2, turned": ((4, 2), ("fsdp", "replica")),
    "one device": ((1, 8), "replica"),
}
BOTH = pytest.mark.parametrize("algorithm", ["all_gather", "all_to_all"])
N, K = 3000, 100
CAPACITY = 30  # ceil(1.25 K / 8 + 4 sqrt(K / 8)), of one owner among 8.


@dataclasses.dataclass(frozen=True)
class Result:
    total: np.ndarray  # [device, n], what each device has.
    error: np.ndarray  # [device, n]


def entries(n, k, seed=0, device_choice=None):
    """`values [8, k]` and distinct `indices [8, k]` in any order."""
    random = np.random.default_rng(seed)
    choose = device_choice or (lambda random, device: random.choice(n, k, replace=False))
    indices = np.stack([choose(random, device) for device in range(8)]).astype(np.int32)
    return random.standard_normal((8, k)).astype(np.float32), indices


def dense(values, indices, n):
    """float32 `[device, n]`."""
    out = np.zeros((len(values), n), np.float32)
    for row, one, at in zip(out, values, indices, strict=True):
        inside = (at >= 0) & (at < n)
        row[at[inside]] = one[inside]
    return out


def groups(layout):
    """The device numbers of each group that sums, in the order in which it sums."""
    shape, axis = LAYOUTS[layout]
    grid = np.arange(8).reshape(shape)
    if axis == "replica":
        return grid.T.tolist()
    return [(grid if axis == AXES else grid.T).reshape(-1).tolist()]


def mesh_of(layout):
    return jax.make_mesh(LAYOUTS[layout][0], AXES, axis_types=(AxisType.Auto,) * 2)


def wide_axes(layout):
    return tuple(name for name, size in mesh_of(layout).shape.items() if size > 1)


def mapped(function, layout, num_inputs, out_specs, check_vma=True):
    """A `shard_map` of a function of one device's arrays; inputs have a leading device dimension."""
    return jax.shard_map(
        lambda *inputs: function(*(x[0] for x in inputs)),
        mesh=mesh_of(layout),
        in_specs=(PartitionSpec(wide_axes(layout)),) * num_inputs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


@functools.cache
def reducer(n, layout, check_vma, jit, options):
    """The mapped function, compiled once for all tests that use it."""
    shape, axis = LAYOUTS[layout]

    def one(values, indices):
        total, error = sparse_all_reduce(values, indices, n, axis, return_error=True, **dict(options))
        return total[None], error[None]

    same = PartitionSpec("fsdp") if axis == "replica" and shape[1] > 1 else PartitionSpec()
    function = mapped(one, layout, 2, (same, PartitionSpec(AXES)), check_vma)
    return jax.jit(function) if jit else function


def run(values, indices, n, layout="replica 8", check_vma=True, jit=True, **options):
    total, error = reducer(n, layout, check_vma, jit, tuple(options.items()))(values, indices)
    assert (total.dtype, error.dtype) == (jnp.float32, jnp.float32)
    shards = {shard.device.id: np.asarray(shard.data)[0] for shard in total.addressable_shards}
    return Result(np.stack([shards[device.id] for device in mesh_of(layout).devices.flat]), np.asarray(error))


def bfloat16(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).astype(np.float32)


def oracle_all_gather(rows, sent):
    """Sources one after the other; the order decides the last bit."""
    return functools.reduce(np.add, sent), [row - one for row, one in zip(rows, sent, strict=True)]


def oracle_all_to_all(rows, indices, rounding, *, num_kept, capacity):
    """`(total, errors)` of one group, with one owner after the other."""
    m, n = len(rows), rows.shape[1]
    chunk = min(64, -(-n // m))
    owner = np.arange(n) // chunk % m
    errors, total = rows.copy(), np.zeros(n, np.float32)
    for one in range(m):
        mine = np.zeros(n, np.float32)
        for device in range(m):
            at = np.sort(indices[device][(indices[device] < n) & (indices[device] >= 0)])
            at = at[owner[at] == one][:capacity]
            sent = rounding(rows[device, at])
            mine[at] += sent
            errors[device, at] -= sent
        at = np.flatnonzero(owner == one)
        at = at[np.argsort(-np.abs(mine[at]), kind="stable")[: -(-num_kept // m)]]
        total[at] = rounding(mine[at])
        mine[at] -= total[at]
        errors[one] += mine
    return total, errors


@pytest.mark.parametrize(
    ("layout", "algorithm", "wire"),
    [
        *((layout, "all_gather", "packed") for layout in LAYOUTS),
        *((layout, "all_to_all", "packed") for layout in ("replica 8", "replica 4 of 4 x 2")),
        *(("replica 8", algorithm, "plain") for algorithm in ("all_gather", "all_to_all")),
    ],
)
def test_bit_equal_to_numpy_on_every_device(layout, algorithm, wire):
    n, k = N, K
    values, indices = entries(n, k)
    indices[0, :3] = [-1, n, 2**31 - 1]
    result = run(values, indices, n, layout, algorithm=algorithm, wire=wire)
    rows = dense(values, indices, n)
    for group in groups(layout):
        m = len(group)
        rounding = bfloat16 if wire == "packed" and m > 1 else (lambda x: x)
        if algorithm == "all_gather" or m == 1:
            total, errors = oracle_all_gather(rows[group], rounding(rows[group]))
        else:
            capacity = int(np.ceil(1.25 * k / m + 4 * np.sqrt(k / m)))
            total, errors = oracle_all_to_all(rows[group], indices[group], rounding, num_kept=k, capacity=capacity)
        for device, error in zip(group, errors, strict=True):
            assert result.total[device].tobytes() == (total + 0.0).tobytes()
            np.testing.assert_array_equal(result.error[device], error)


@pytest.mark.parametrize(
    ("n", "k", "algorithm"),
    [
        (1, 1, "all_gather"),
        (5, 4, "all_to_all"),
        (513, 100, "all_gather"),
    ],
)
def test_what_is_lost_is_the_error(n, k, algorithm):
    values, indices = entries(n, k, seed=n + k)
    result = run(values, indices, n, algorithm=algorithm)
    assert len({row.tobytes() for row in result.total}) == 1
    handed_in = dense(values, indices, n).astype(np.float64).sum(0)
    np.testing.assert_allclose(result.total[0] + result.error.astype(np.float64).sum(0), handed_in, atol=1e-6)


@BOTH
@pytest.mark.parametrize("kind", ["disjoint", "the same", "one owner"])
def test_overlaps(algorithm, kind):
    owner = np.arange(N) // 64 % 8
    choices = {
        "disjoint": lambda random, device: device + 8 * random.choice(N // 8, K, replace=False),
        "the same": lambda random, device: np.arange(K) * 7,
        "one owner": lambda random, device: random.choice(np.flatnonzero(owner == 0), K, replace=False),
    }
    values, indices = entries(N, K, device_choice=choices[kind])
    result = run(values, indices, N, algorithm=algorithm)
    rows = dense(values, indices, N)
    if algorithm == "all_gather":
        np.testing.assert_array_equal(result.error, rows - bfloat16(rows))
    elif kind == "one owner":
        for row, error in zip(rows[1:], result.error[1:], strict=True):  # The first has the owner's losses as well.
            sent, unsent = np.split(np.flatnonzero(row), [CAPACITY])
            assert len(unsent) == K - CAPACITY
            np.testing.assert_array_equal(error[unsent], row[unsent])
            np.testing.assert_array_equal(error[sent], (row - bfloat16(row))[sent])
    if algorithm == "all_to_all":
        candidates = [np.count_nonzero(rows.any(0) & (owner == one)) for one in range(8)]
        assert np.count_nonzero(result.total[0]) == sum(min(13, one) for one in candidates)
    sums = result.total[0] + result.error.astype(np.float64).sum(0)
    np.testing.assert_allclose(sums, rows.astype(np.float64).sum(0), atol=1e-6)


def test_error_feedback_telescopes():
    """What came out over some steps, and the errors of the last, are all that went in."""
    n, k, steps = N, K, 5
    random = np.random.default_rng(3)
    grads = random.standard_normal((steps, 8, n)).astype(np.float32)
    residual, came_out = np.zeros((8, n), np.float32), np.zeros(n, np.float64)
    for grad in grads:
        rows = grad + residual
        indices = np.argsort(-np.abs(rows), axis=1)[:, :k].astype(np.int32)
        values = np.take_along_axis(rows, indices, 1)
        result = run(values, indices, n, algorithm="all_to_all")
        residual = rows - dense(values, indices, n) + result.error
        came_out += result.total[0]
    np.testing.assert_allclose(came_out + residual.astype(np.float64).sum(0), grads.sum((0, 1)), atol=2e-5)


def test_the_second_selection_keeps_the_largest_sums():
    num_kept = 33
    n, k = N, K
    values, indices = entries(n, k)
    result = run(values, indices, n, algorithm="all_to_all", wire="plain", num_kept=num_kept, capacity_factor=8.0)
    sums = dense(values, indices, n).astype(np.float64).sum(0)
    expected = np.zeros(n)
    for one in range(8):
        at = np.flatnonzero(np.arange(n) // 64 % 8 == one)
        at = at[np.argsort(-np.abs(sums[at]))[: -(-num_kept // 8)]]
        expected[at] = sums[at]
    np.testing.assert_allclose(result.total[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("all_gather", {"check_vma": False}),
        ("all_gather", {"indices_sorted": True}),
        ("all_to_all", {}),
        ("all_to_all", {"check_vma": False, "jit": False}),
    ],
)
def test_every_way_to_call_it_gives_the_same_bits(algorithm, options):
    values, indices = entries(N, K)
    indices = np.sort(indices)
    first = run(values, indices, N, algorithm=algorithm)
    again = run(values, indices, N, algorithm=algorithm, **options)
    assert again.total.tobytes() == first.total.tobytes()
    assert again.error.tobytes() == first.error.tobytes()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_values(dtype):
    values, indices = entries(N, K)
    narrow = jnp.asarray(values, dtype)
    result = run(narrow, indices, N, algorithm="all_gather")
    wide = run(narrow.astype(jnp.float32), indices, N, algorithm="all_gather")
    assert result.total.tobytes() == wide.total.tobytes()
    assert result.error.tobytes() == wide.error.tobytes()


@BOTH
def test_vmap_over_a_batch_and_over_the_axis(algorithm):
    n, k = N, K
    batches = [entries(n, k, seed) for seed in range(3)]
    singles = [run(values, indices, n, algorithm=algorithm) for values, indices in batches]
    reduce = functools.partial(sparse_all_reduce, n=n, axis="replica", algorithm=algorithm, return_error=True)

    def batched(values, indices):
        total, error = jax.vmap(reduce)(values, indices)
        return total, error[None]

    values, indices = (np.stack(x, 1) for x in zip(*batches, strict=True))
    specs = (PartitionSpec(), PartitionSpec(AXES))
    total, error = jax.jit(mapped(batched, "replica 8", 2, specs))(values, indices)
    for number, single in enumerate(singles):
        np.testing.assert_array_equal(total[number], single.total[0])
        np.testing.assert_array_equal(error[:, number], single.error)

    total, error = jax.jit(jax.vmap(reduce, axis_name="replica", out_axes=(None, 0)))(*batches[0])
    np.testing.assert_array_equal(total, singles[0].total[0])
    np.testing.assert_array_equal(error, singles[0].error)


@BOTH
def test_the_error_is_typed_varying_and_the_total_is_not(algorithm):
    values, indices = entries(300, 20)
    reduce = functools.partial(sparse_all_reduce, n=300, algorithm=algorithm, return_error=True)

    def infer(layout, axis, which):
        one = mapped(lambda v, i: reduce(v, i, axis=axis)[which], layout, 2, PartitionSpec())
        return jax.eval_shape(one, values, indices)

    for layout, axis in (("replica 8", "replica"), ("both of 4 x 2", AXES)):
        infer(layout, axis, 0)
        with pytest.raises(ValueError, match="out_specs"):
            infer(layout, axis, 1)
    with pytest.raises(ValueError, match="out_specs"):  # The other axis goes on varying.
        infer("both of 4 x 2", "replica", 0)


def lowered(n, k, layout="replica 8", **options):
    function = mapped(
        lambda v, i: sparse_all_reduce(v, i, n, LAYOUTS[layout][1], **options), layout, 2, PartitionSpec(), False
    )
    shapes = [jax.ShapeDtypeStruct((8, k), dtype) for dtype in (jnp.float32, jnp.int32)]
    return collectives(jax.jit(function).lower(*shapes))


@pytest.mark.parametrize(
    ("n", "k", "wire", "layouts"),
    [
        (5_000, 70, "packed", {"replica 8": 8, "both of 4 x 2": 8}),
        (5_000, 70, "plain", {"replica 4 of 4 x 2": 4}),
        (12_800_000, 128_000, "packed", {"replica 8": 8}),
    ],
)
def test_one_message_each_of_the_size_that_was_said(n, k, wire, layouts):
    for (layout, m), algorithm in itertools.product(layouts.items(), ["all_gather", "all_to_all"]):
        found = lowered(n, k, layout, algorithm=algorithm, wire=wire)
        kinds = ["all_gather"] if algorithm == "all_gather" else ["all_to_all", "all_gather"]
        assert [one.kind for one in found] == kinds
        assert {one.dtype for one in found} == {"uint32"}
        assert {one.group_size for one in found} == {m}
        assert sum(one.sent_bytes for one in found) == sparse_sent_bytes(k, n, m, algorithm=algorithm, wire=wire)


@BOTH
def test_one_device_sends_nothing(algorithm):
    assert lowered(5_000, 70, "one device", algorithm=algorithm) == []
    assert sparse_sent_bytes(70, 5_000, 1, algorithm=algorithm) == 0


def test_packed_entries_are_far_below_a_dense_sum():
    n, k, m = 12_800_000, 128_000, 8
    dense_bytes = 2 * (m - 1) / m * n * 2
    assert sparse_sent_bytes(k, n, m) <= dense_bytes / 12
    assert sparse_sent_bytes(k, n, m, algorithm="all_to_all") <= dense_bytes / 24
    many = [sparse_sent_bytes(k, n, 8 * m, algorithm=one) for one in ("all_gather", "all_to_all")]
    assert many[0] > 8 * sparse_sent_bytes(k, n, m)
    assert many[1] < 1.5 * sparse_sent_bytes(k, n, m, algorithm="all_to_all")


def test_mistakes_are_told():
    values, indices = jnp.ones(4), jnp.arange(4, dtype=jnp.int32)

    def call(values=values, indices=indices, n=10, **options):
        one = functools.partial(sparse_all_reduce, n=n, axis="device", **options)
        jax.vmap(one, axis_name="device", out_axes=None)(values[None], indices[None])

    for message, options in {
        "must both be": {"indices": indices[:3]},
        "nothing to sum": {"values": values[:0], "indices": indices[:0]},
        "n is 1 to 2147483583": {"n": 2**31 - 1},
        "n=0": {"n": 0},
        "entries are float32, bfloat16 or float16": {"values": indices},
        "must be int32": {"indices": values},
        "algorithm='ring': no such algorithm": {"algorithm": "ring"},
        "wire='zip'": {"wire": "zip"},
        "all_gather keeps all": {"num_kept": 3},
        "keep at least 1": {"num_kept": 0, "algorithm": "all_to_all"},
        "must be above 0": {"capacity_factor": 0.0, "algorithm": "all_to_all"},
        "method": {"method": "guess", "algorithm": "all_to_all"},
    }.items():
        with pytest.raises(ValueError, match=message):
            call(**options)
    with pytest.raises(NameError, match="'replica' is not bound"):
        sparse_all_reduce(values, indices, 10, "replica")
    with pytest.raises(ValueError, match="must both be"):
        call(values=jnp.ones((2, 4)))
