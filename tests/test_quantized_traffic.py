"""The bytes that a quantized all-reduce sends, counted in its program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdl.parallel.collectives.quantized import quantized_all_reduce, quantized_sent_bytes
from jaxdl.parallel.compiler.wire_bytes import collectives, lower, sent_bytes


def program_of(n, bits, mesh, block_size=None):
    spec = P(tuple(mesh.shape))
    x = jax.ShapeDtypeStruct((n * mesh.size,), jnp.float32, sharding=NamedSharding(mesh, spec))

    def one(x):
        options = {"bits": bits, "block_size": block_size, "return_error": True}
        return jax.tree.map(lambda y: y[None], quantized_all_reduce(x, "replica", jax.random.key(0), **options))

    return lower(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec), x)


@pytest.mark.parametrize(
    ("sizes", "n", "bits"),
    [
        *[((8, 1), 100_003, bits) for bits in (8, 4, 2, 1)],
        ((4, 2), 4096, 8),
        ((2, 4), 100_003, 1),
        *[((3, 1), 5, bits) for bits in (4, 2)],
        ((1, 8), 4096, 1),
    ],
    ids=str,
)
def test_sent_bytes_are_those_of_the_collectives(sizes, n, bits):
    mesh = AbstractMesh(sizes, ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    for block_size in (None, 64):
        program = program_of(n, bits, mesh, block_size)
        found = collectives(program)
        sent = quantized_sent_bytes(n, sizes[0], bits=bits, block_size=block_size)
        assert sent_bytes(program, mesh) == pytest.approx({"replica": sent, "fsdp": 0})
        assert [one.kind for one in found] == (["all_to_all", "all_gather"] if sizes[0] > 1 else [])
        assert {one.dtype for one in found} <= {"uint8"}


@pytest.mark.parametrize(("bits", "ratio"), [(8, 0.2539), (4, 0.1289), (2, 0.0664), (1, 0.0322)])
def test_share_of_a_dense_float32_all_reduce(bits, ratio):
    n, mesh = 25_600_000 // 2, AbstractMesh((8, 2), ("replica", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    dense = 2 * 7 / 8 * 4 * n
    assert sent_bytes(program_of(n, bits, mesh), mesh)["replica"] / dense == pytest.approx(ratio, abs=0.0001)
