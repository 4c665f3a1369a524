"""Collectives read off compiled HLO: by mesh axis, with their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import TinyPerceptron, tiny_experiment, write_config

from benchmarks import collectives
from benchmarks.collectives import table_of
from jaxdl.exchange import TopK
from jaxdl.parallel.compiler.collectives import Operation, operations


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def found(mesh, function, out_specs):
    spec = P(("replica", "fsdp", "tensor"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out_specs)
    x = jax.ShapeDtypeStruct((8 * 96,), jnp.float32, sharding=NamedSharding(mesh, spec))
    return operations(jax.jit(mapped).lower(x).compile().as_text(), mesh.shape)


@pytest.mark.parametrize("axis", ["replica", "fsdp", "tensor", ("replica", "fsdp"), ("replica", "tensor")])
def test_an_all_reduce_over_each_axis(mesh, axis):
    axes = (axis,) if isinstance(axis, str) else axis
    others = tuple(name for name in mesh.axis_names if name not in axes)
    [one] = found(mesh, lambda x: lax.psum(x, axis), P(others))
    assert one == Operation("all-reduce", axes, (("f32", (96,)),))
    assert one.num_bytes == 384


def test_kinds(mesh):
    gathered = found(mesh, lambda x: lax.all_gather(x, "fsdp", tiled=True)[None], P(("replica", "fsdp", "tensor")))
    assert [(one.kind, one.axes, one.num_elements) for one in gathered] == [("all-gather", ("fsdp",), 192)]
    moved = found(mesh, lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), P(("replica", "fsdp", "tensor")))
    assert [(one.kind, one.axes) for one in moved] == [("collective-permute", ("tensor",))]
    parts = found(mesh, lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True), P(("replica", "fsdp", "tensor")))
    assert [(one.kind, one.axes) for one in parts] == [("all-to-all", ("replica",))]


def test_lists_of_groups_and_iotas():
    """The two ways in which HLO writes device groups, of GPUs too; starts of asynchronous ones, but not their ends."""
    text = """
  %a = (f32[4], f32[16]) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %b = f32[16] all-gather-done(%a)
  %c = f32[10]{0} all-reduce-start(%y), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %d = bf16[3,2]{1,0} reduce-scatter(%z), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %e = (f32[64]{0}, s32[64]{0}) sort(%k, %v), dimensions={0}
  %f = f32[8] all-reduce(%w), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
    """
    assert operations(text, {"replica": 2, "fsdp": 4}) == [
        Operation("all-gather", ("fsdp",), (("f32", (16,)),)),
        Operation("all-reduce", ("replica",), (("f32", (10,)),)),
        Operation("reduce-scatter", ("fsdp",), (("bf16", (3, 2)),)),
        Operation("sort", (), (("f32", (64,)), ("s32", (64,)))),
    ]
    assert table_of(operations(text, {"replica": 2, "fsdp": 4}), "title").row_count == 4


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    config = write_config(tmp_path, tiny_experiment(model=TinyPerceptron(), exchange=TopK(min_elements=64)))
    collectives.main(["--config", str(config), "--mesh.replica", "2", "--mesh.fsdp", "4", "--mesh.cpu-devices", "8"])
    printed = capsys.readouterr().out
    assert "exchange topk" in printed
    assert "u32[2," in printed, "the packed entries of both replicas"
    assert "MiB of temporary memory" in printed
