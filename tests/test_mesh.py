"""The mesh: sizes, the order of devices, which devices JAX is started on."""

import dataclasses
import glob
import importlib.util

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.machine import open_devices
from jaxdl.parallel.mesh import Axis, MeshConfig, batch_sharding, batch_ways, gpus_chosen, gpus_visible, make_mesh


@pytest.mark.parametrize(
    ("config", "num_devices", "sizes"),
    [
        (MeshConfig(), 1, (1, 1, 1)),
        (MeshConfig(), 8, (1, 8, 1)),
        (MeshConfig(replica=2), 8, (2, 4, 1)),
        (MeshConfig(replica=2, tensor=2), 8, (2, 2, 2)),
        (MeshConfig(replica=-1, fsdp=2, tensor=2), 24, (6, 2, 2)),
        (MeshConfig(replica=1, fsdp=2, tensor=-1), 2, (1, 2, 1)),
        (MeshConfig(replica=3, fsdp=5, tensor=7), 105, (3, 5, 7)),
    ],
)
def test_sizes(config, num_devices, sizes):
    assert config.sizes(num_devices) == {"stage": 1, "context": 1} | dict(
        zip(("replica", "fsdp", "tensor"), sizes, strict=True)
    )


@pytest.mark.parametrize(
    ("config", "num_devices", "message"),
    [
        (
            MeshConfig(replica=3),
            8,
            "mesh replica 3 x fsdp -1 x tensor 1: 8 devices cannot be divided by 3.",
        ),
        (MeshConfig(replica=16), 8, "8 devices cannot be divided by 16"),
        (MeshConfig(replica=4, fsdp=4), 8, "replica 4 x fsdp 4 x tensor 1 = 16 devices, of 8: more than there are"),
        (MeshConfig(replica=2, fsdp=2), 8, "= 4 devices, of 8: the others would be idle"),
    ],
)
def test_sizes_that_do_not_fit(config, num_devices, message):
    with pytest.raises(ConfigError) as error:
        config.sizes(num_devices)
    assert message in str(error.value)
    assert "mesh.cpu_devices=N" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replica": 0}, "replica = 0: an axis has 1 or more devices"),
        ({"tensor": -2}, "tensor = -2"),
        ({"replica": -1}, "only one axis may be -1"),
        ({"cpu_devices": 0}, "cpu_devices: .*greater than or equal to 1"),
        ({"cpu_devices": 4, "without_gpus": MeshConfig()}, "cpu_devices = 4 and without_gpus: .*Set one of them"),
        ({"without_gpus": MeshConfig(without_gpus=MeshConfig())}, "without_gpus: it is the last choice"),
    ],
)
def test_sizes_that_are_none(fields, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(**fields)


def test_a_mesh_names_another_for_machines_without_gpus():
    without = MeshConfig(replica=2, cpu_devices=8)
    config = MeshConfig(fsdp=4, without_gpus=without)
    assert MeshConfig.from_json(config.to_json()) == config
    assert config.resolved(gpus=False) == without
    assert config.resolved(gpus=True) == MeshConfig(fsdp=4)
    assert without.resolved(gpus=True) is without


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "fake"


def test_replica_crosses_processes():
    """However JAX lists and numbers the devices, those of one process are one replica."""
    devices = [FakeDevice(id=number, process_index=number % 4) for number in range(16)]
    np.random.default_rng(0).shuffle(devices)
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2, tensor=2), devices)
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    assert processes.reshape(4, 4).tolist() == [[process] * 4 for process in range(4)]
    ids = np.vectorize(lambda device: device.id)(mesh.devices[1, 0, :, 0])
    assert ids.tolist() == [[1, 5], [9, 13]], "within a process in the order of their ids"


def test_mesh_of_real_devices():
    mesh = make_mesh(MeshConfig(replica=2, fsdp=-1, tensor=2))
    assert mesh.axis_names == tuple(axis.value for axis in Axis) == ("replica", "stage", "fsdp", "context", "tensor")
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert make_mesh(MeshConfig(), jax.devices()[:1]).size == 1
    with pytest.raises(ConfigError, match="5 devices cannot be divided by 2"):
        make_mesh(MeshConfig(replica=2), jax.devices()[:5])


def test_a_batch_is_split_over_replica_and_fsdp():
    mesh = make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
    assert batch_ways(mesh) == 4
    sharding = batch_sharding(mesh)
    assert sharding.spec == PartitionSpec(("replica", "fsdp"))
    batch = jax.device_put(np.arange(8), sharding)
    rows = {shard.device.id: shard.data.tolist() for shard in batch.addressable_shards}
    # Neighbours on `tensor` hold the same rows; each replica holds one half.
    assert rows == {number: [number // 2 * 2, number // 2 * 2 + 1] for number in range(8)}


@pytest.mark.parametrize(
    ("environment", "has_gpus", "has_plugin", "visible"),
    [
        ({}, True, True, True),
        ({}, False, True, False),
        ({}, True, False, False),
        ({"JAX_PLATFORMS": "cpu"}, True, True, False),
        ({"JAX_PLATFORMS": "cuda"}, True, True, True),
        ({"JAX_PLATFORMS": "cuda,cpu"}, True, True, True),
        ({"JAX_PLATFORMS": "gpu"}, True, True, True),
        ({"JAX_PLATFORMS": "tpu"}, True, True, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, True, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, True, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, True, True, True),
    ],
)
def test_gpus_visible(environment, has_gpus, has_plugin, visible, monkeypatch):
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"] if has_gpus else [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_plugin else None)
    assert gpus_visible() is visible


@pytest.mark.parametrize(
    ("platforms", "chosen"),
    [
        (None, False),
        ("", False),
        ("cpu", False),
        ("cpu,cuda", False),
        ("cuda", True),
        ("cuda,cpu", True),
        ("tpu", True),
    ],
)
def test_devices_that_are_asked_for_are_not_replaced_by_cpus(platforms, chosen, monkeypatch):
    """A mesh for machines without GPUs would set JAX to CPUs; without it JAX refuses what is not there."""
    monkeypatch.setattr("jaxdl.parallel.mesh.glob.glob", lambda _: [])
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        assert gpus_chosen() is chosen
    finally:
        jax.config.update("jax_platforms", before)


def test_cpus_in_the_place_of_what_comes_first_are_refused():
    before = jax.config.jax_platforms
    jax.devices()  # JAX has left out what it has no plugin for.
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.raises(ConfigError, match="JAX_PLATFORMS=cuda,cpu: there is no device of cuda here"):
            open_devices()
    finally:
        jax.config.update("jax_platforms", before)
