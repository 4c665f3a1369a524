import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdl.parallel.compiler.wire_bytes import Collective, collectives, lower, sent_bytes

MESHES = [{"replica": 8}, {"replica": 4, "fsdp": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}]
N = 48  # Elements of one device: divisible by 2, 4 and 8.


def make_mesh(sizes, abstract=False):
    types = (AxisType.Auto,) * len(sizes)
    if abstract:
        return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def program_of(mesh, one_device, dtype=jnp.float32, n=N, **options):
    """The lowered function of `[n]` on each device."""
    spec = P(tuple(mesh.shape))
    whole = jax.ShapeDtypeStruct((n * mesh.size,), dtype, sharding=NamedSharding(mesh, spec))

    def function(x):
        return jax.tree.map(lambda y: y[None], one_device(x))

    return lower(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **options), whole)


def ring(axis):
    return [(i, (i + 1) % lax.axis_size(axis)) for i in range(lax.axis_size(axis))]


# Name -> (function of [N] and an axis, kind, share of the operand that is sent among m devices).
TALK = {
    "psum": (lax.psum, "all_reduce", lambda m: 2 * (m - 1) / m),
    "pmax": (lax.pmax, "all_reduce", lambda m: 2 * (m - 1) / m),
    "psum_scatter": (
        functools.partial(lax.psum_scatter, tiled=True), "reduce_scatter", lambda m: (m - 1) / m),
    "psum_scatter_rows": (
        lambda x, a: lax.psum_scatter(x.reshape(lax.axis_size(a), -1), a), "reduce_scatter", lambda m: (m - 1) / m),
    "all_gather": (lax.all_gather, "all_gather", lambda m: m - 1),
    "all_gather_tiled": (functools.partial(lax.all_gather, tiled=True), "all_gather", lambda m: m - 1),
    "all_to_all": (
        lambda x, a: lax.all_to_all(x.reshape(lax.axis_size(a), -1), a, 0, 0), "all_to_all", lambda m: (m - 1) / m),
    "all_to_all_tiled": (
        lambda x, a: lax.all_to_all(x, a, 0, 0, tiled=True), "all_to_all", lambda m: (m - 1) / m),
    "ppermute": (lambda x, a: lax.ppermute(x, a, ring(a)), "collective_permute", lambda m: 1),
}  # fmt: skip


@pytest.mark.parametrize("name", TALK)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_each_collective_sends_what_its_ring_algorithm_says(sizes, name):
    function, kind, share = TALK[name]
    mesh = make_mesh(sizes)
    for axis, size in sizes.items():
        program = program_of(mesh, lambda x, axis=axis: function(x, axis))
        (found,) = collectives(program)
        assert (found.kind, found.dtype, found.operand_bytes) == (kind, "float32", 4 * N)
        assert found.sent_bytes == pytest.approx(share(size) * 4 * N)
        assert sent_bytes(program, mesh) == pytest.approx(dict.fromkeys(sizes, 0.0) | {axis: share(size) * 4 * N})
        if kind != "collective_permute":
            ids = np.moveaxis(np.arange(8).reshape(tuple(sizes.values())), list(sizes).index(axis), -1)
            assert found.groups == tuple(map(tuple, ids.reshape(-1, size).tolist()))
            assert found.group_size == size


@pytest.mark.parametrize("order", [("fsdp", "replica"), ("replica", "fsdp")])
def test_several_axes_are_joined_in_the_order_of_the_mesh(order):
    mesh = make_mesh({"replica": 2, "fsdp": 2, "tensor": 2})

    def talk(x):
        return lax.psum(x, order), lax.all_gather(x.astype(jnp.bfloat16), "tensor"), lax.pmin(x[:4], ("tensor", *order))

    assert sent_bytes(program_of(mesh, talk), mesh) == pytest.approx(
        {
            "replica": 0,
            "fsdp": 0,
            "tensor": 2 * N,
            "replica+fsdp": 2 * 3 / 4 * 4 * N,
            "replica+fsdp+tensor": 2 * 7 / 8 * 16,
        }
    )


def test_axes_of_one_device_send_nothing():
    mesh = make_mesh({"replica": 8, "fsdp": 1})

    def talk(x):
        return lax.psum(x, "fsdp"), lax.all_gather(x, "fsdp"), lax.psum(x, ("replica", "fsdp"))

    assert sent_bytes(program_of(mesh, talk), mesh) == pytest.approx({"replica": 2 * 7 / 8 * 4 * N, "fsdp": 0})


def test_groups_inside_an_axis_count_with_their_own_size():
    mesh = make_mesh({"replica": 8})
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def talk(x):
        return lax.all_gather(x, "replica", axis_index_groups=groups)

    assert sent_bytes(program_of(mesh, talk, check_vma=False), mesh) == {"replica": 3 * 4 * N}


def test_a_permutation_that_keeps_everything_at_home_sends_nothing():
    mesh = make_mesh({"replica": 8})
    program = program_of(mesh, lambda x: lax.ppermute(x, "replica", [(i, i) for i in range(8)]))
    assert [found.sent_bytes for found in collectives(program)] == [0]
    assert sent_bytes(program, mesh) == {"replica": 0}


def test_called_functions_count_as_often_as_they_are_called_and_loops_and_branches_once():
    mesh = make_mesh({"replica": 8})

    @jax.jit
    def inner(x):
        return lax.all_gather(x, "replica").sum(0)

    def loop(x):
        return lax.scan(lambda c, _: (inner(c), None), x, None, length=5)[0]

    one = 7 * 4 * N
    assert sent_bytes(program_of(mesh, lambda x: inner(inner(inner(x)))), mesh) == {"replica": 3 * one}
    assert sent_bytes(program_of(mesh, loop), mesh) == {"replica": one}

    def branches(x):
        return lax.cond(x[0] > 0, lambda x: lax.ppermute(x, "replica", ring("replica")), inner, x)

    assert sent_bytes(program_of(mesh, branches), mesh) == {"replica": one + 4 * N}


MODULE = """module @jit_f {{
  sdy.mesh @mesh = <["replica"=4, "fsdp"=2]>
  func.func public @main(%0: tensor<6xf32>, %1: tensor<3x5xi8>) {{
    %2:2 = "stablehlo.all_gather"(%0, %1) <{{all_gather_dim = 0 : i64, replica_groups = {}}}> :
      (tensor<6xf32>, tensor<3x5xi8>) -> (tensor<?xf32>, tensor<?x5xi8>)
    return
  }}
}}"""
AXES = "#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [{}]>"


def parsed(text):
    with jax.jit(jnp.negative).lower(0.0).compiler_ir("stablehlo").context:
        return ir.Module.parse(text)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>", ((0, 1), (2, 3))),
        ("dense<0> : tensor<1x1xi64>", ((0,),)),
        (AXES.format('#stablehlo.axis_ref<name = "replica">'), ((0, 2, 4, 6), (1, 3, 5, 7))),
        (AXES.format('#stablehlo.axis_ref<name = "fsdp">'), ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups_of_every_form_and_all_operands_of_a_collective_count(groups, expected):
    size = len(expected[0])
    module = parsed(MODULE.format(groups))
    assert collectives(module) == [Collective("all_gather", "float32+int8", 6 * 4 + 15, size, expected)]


def test_groups_of_an_unknown_form_are_an_error():
    part = '#stablehlo.axis_ref<name = "replica", sub_axis_info = (1)2>'
    with pytest.raises(ValueError, match=r"device groups of an unknown form: .*sub_axis"):
        collectives(parsed(MODULE.format(AXES.format(part))))


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("bfloat16", 2), ("float16", 2), ("int8", 1), ("uint8", 1), ("bool", 1), ("float8_e4m3fn", 1), ("uint32", 4),
     ("complex64", 8), ("int4", 0.5)],
)  # fmt: skip
def test_bytes_of_dtypes(dtype, num_bytes):
    mesh = make_mesh({"replica": 8})
    (found,) = collectives(program_of(mesh, lambda x: lax.all_gather(x, "replica"), jnp.dtype(dtype)))
    assert (found.dtype, found.operand_bytes) == (dtype, N * num_bytes)


def test_other_meshes_and_unknown_collectives_are_errors():
    mesh = make_mesh({"replica": 8})
    program = program_of(mesh, lambda x: lax.psum(x, "replica"))
    with pytest.raises(ValueError, match="Pass the mesh"):
        sent_bytes(program, make_mesh({"replica": 4}, abstract=True))
    with pytest.raises(ValueError, match="Pass the mesh"):
        sent_bytes(program, make_mesh({"replica": 16}, abstract=True))
    one = jax.shard_map(
        lambda x: lax.pbroadcast(x, ("replica",), 0), mesh=mesh, in_specs=P("replica"), out_specs=P("replica")
    )
    broadcast = lower(one, jax.ShapeDtypeStruct((8 * N,), jnp.float32), platform="cuda")
    with pytest.raises(ValueError, match="collective_broadcast: its size is unknown"):
        collectives(broadcast)


@pytest.mark.parametrize("sizes", [{"replica": 8, "fsdp": 2}, {"replica": 128, "fsdp": 8}], ids=str)
def test_more_devices_than_there_are(sizes):
    mesh = make_mesh(sizes, abstract=True)

    def talk(x):
        shard = lax.psum_scatter(x, "fsdp", tiled=True)
        return lax.all_gather(lax.psum(shard, "replica"), "fsdp")

    replica, fsdp = sizes.values()
    program = program_of(mesh, talk)
    assert sent_bytes(program, mesh) == pytest.approx(
        {"replica": 2 * (replica - 1) / replica * 4 * N / fsdp, "fsdp": 2 * (fsdp - 1) / fsdp * 4 * N}
    )
    assert [found.kind for found in collectives(program)] == ["reduce_scatter", "all_reduce", "all_gather"]


def test_an_integer_psum_saves_nothing():
    """Why the quantized all-reduce is no psum: int8 wraps around, and what cannot wrap costs as much as float32."""
    mesh = make_mesh({"replica": 8})
    values = np.full((8, N), 100, np.int8)

    def run(one_device):
        function = jax.shard_map(one_device, mesh=mesh, in_specs=P("replica"), out_specs=P())
        return np.asarray(jax.jit(function)(values.reshape(-1)))

    def narrow(x):
        return lax.psum(x, "replica")

    def wide(x):
        return lax.psum(x.astype(jnp.int32), "replica")

    exact = values.astype(int).sum(0)
    assert run(narrow).dtype == np.int8
    np.testing.assert_array_equal(run(narrow), exact.astype(np.int8))
    assert (run(narrow) != exact).all()
    np.testing.assert_array_equal(run(wide), exact)
    dense = sent_bytes(program_of(mesh, lambda x: lax.psum(x, "replica")), mesh)["replica"]
    assert sent_bytes(program_of(mesh, wide, jnp.int8), mesh)["replica"] == dense
    assert sent_bytes(program_of(mesh, narrow, jnp.int8), mesh)["replica"] == dense / 4
