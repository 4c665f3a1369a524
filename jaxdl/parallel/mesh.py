"""The device mesh: the only home of axis names.

`replica` crosses the slow network (usually one index per node); `fsdp` and `tensor` stay inside a node. The batch is
sharded over `(replica, fsdp)`; parameters and optimizer state over `fsdp` and `tensor`.
"""

from __future__ import annotations

import enum
import glob
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import numpy as np
import pydantic
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdl.core.config import Config, ConfigError

Device = Any
"""A `jax.Device`. jaxlib has no type stubs, so to a type checker that name is no type."""


class Axis(enum.StrEnum):
    """The mesh axes, in the order of the mesh's dimensions."""

    REPLICA = "replica"
    FSDP = "fsdp"
    TENSOR = "tensor"


BATCH_AXES = (Axis.REPLICA.value, Axis.FSDP.value)
"""The axes over which the leading dimension of a batch is sharded."""


class HostAxis(enum.StrEnum):
    """The axes of the mesh of the CPUs of a run's processes, one each: see `make_host_mesh`."""

    NODE = "node"
    PART = "part"


_HOST_AXES = tuple(axis.value for axis in HostAxis)


class MeshConfig(Config):
    """Sizes of the mesh axes; one of them may be -1 and takes the remaining devices."""

    replica: int = 1
    """Data parallel across the slow network; gradients are exchanged over it. Usually the number of nodes."""
    fsdp: int = -1
    """Data parallel inside a node; parameters and optimizer state are sharded over it."""
    tensor: int = 1
    """Model parallel inside a node."""
    cpu_devices: int | None = pydantic.Field(default=None, ge=1)
    """Train on this many virtual CPU devices per process instead of the machine's accelerators."""
    without_gpus: Annotated[MeshConfig | None, tyro.conf.Suppress] = None
    """The mesh to use instead where no GPU is visible, such as `MeshConfig(cpu_devices=2)`. Set in a config file; one
    of the two is chosen when the config is loaded, before the command line changes it."""

    @pydantic.model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        sizes = {axis.value: getattr(self, axis.value) for axis in Axis}
        for name, size in sizes.items():
            if size != -1 and size < 1:
                raise ValueError(f"{name} = {size}: an axis has 1 or more devices, or -1 for the rest.")
        if list(sizes.values()).count(-1) > 1:
            given = " ".join(f"--mesh.{name} -1" for name, size in sizes.items() if size == -1)
            raise ValueError(
                f"{given}: only one axis may be -1 (the rest of the devices). Give the sizes of the others."
            )
        if self.without_gpus is not None and self.cpu_devices is not None:
            raise ValueError(
                f"cpu_devices = {self.cpu_devices} and without_gpus: with cpu_devices no GPU is used, so without_gpus "
                "would be ignored. Set one of them; without_gpus has its own cpu_devices."
            )
        if self.without_gpus is not None and self.without_gpus.without_gpus is not None:
            raise ValueError("without_gpus: it is the last choice. Set no without_gpus inside it.")
        return self

    def resolved(self, *, gpus: bool) -> MeshConfig:
        """The mesh for a machine with or without GPUs: this one, or `without_gpus`."""
        if self.without_gpus is None:
            return self
        return self.replaced({"without_gpus": None}) if gpus else self.without_gpus

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Axis -> size on `num_devices` devices. Raises ConfigError when the mesh does not use exactly these."""
        sizes = {axis.value: getattr(self, axis.value) for axis in Axis}
        fixed = math.prod(size for size in sizes.values() if size != -1)
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items())
        advice = "Change --mesh.replica, --mesh.fsdp or --mesh.tensor, or use --devices N for N virtual CPU devices."
        if -1 in sizes.values():
            if num_devices % fixed or num_devices < fixed:
                raise ConfigError(f"mesh {shape}: {num_devices} devices cannot be divided by {fixed}. {advice}")
            return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != num_devices:
            problem = "more than there are" if fixed > num_devices else "the others would be idle"
            raise ConfigError(f"mesh {shape} = {fixed} devices, of {num_devices}: {problem}. {advice}")
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """The mesh over `devices` (default: all of the run), with automatic axes in the order of `Axis`.

    Devices are laid out by process, so `replica`, the outermost axis, is the one that crosses hosts.
    Raises ConfigError when the sizes do not fit the devices.
    """
    found = list(jax.devices() if devices is None else devices)
    found.sort(key=lambda device: (device.process_index, device.id))
    sizes = config.sizes(len(found))
    return Mesh(
        np.asarray(found).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def make_host_mesh(mesh: Mesh) -> Mesh:
    """The CPUs of the processes of a mesh, one each, for arrays in the memory of hosts.

    The processes along `HostAxis.NODE` have other replicas, those along `HostAxis.PART` other devices of the same ones.
    Raises ConfigError as `host_sizes` does, and where JAX has no CPUs.
    """
    processes = np.array([device.process_index for device in mesh.devices.flat]).reshape(len(mesh.devices), -1)
    sizes = host_sizes(processes)
    try:
        cpus = {device.process_index: device for device in reversed(jax.devices("cpu"))}
    except RuntimeError:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ConfigError(
            f"JAX_PLATFORMS={platforms}: it leaves out the CPUs, and rows are kept in their memory. Give "
            f"JAX_PLATFORMS={platforms},cpu."
        ) from None
    found = np.array([cpus[process] for process in dict.fromkeys(processes.ravel().tolist())])
    return Mesh(found.reshape(sizes), _HOST_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def host_sizes(processes: np.ndarray) -> tuple[int, int]:
    """The sizes of `make_host_mesh`, for the process of each device, `[replica, device of it]`.

    Raises ConfigError when the devices of a process are neither whole replicas nor an equal part of one.
    """
    num_replicas, inside = processes.shape
    order, counts = np.unique(processes, return_counts=True)
    each = int(counts[0])
    if (counts != each).any() or (inside % each and each % inside):
        raise ConfigError(
            f"a process has {int(counts.max())} devices and a replica {inside} (--mesh.fsdp x --mesh.tensor). What is "
            "kept in the memory of hosts needs processes with whole replicas, or with equal parts of one. Change the "
            "mesh."
        )
    return (num_replicas, inside // each) if inside % each == 0 else (len(order), 1)


def host_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """Over which axes of a `make_host_mesh` lies what is spread over these axes of its mesh: each host has what its own
    devices have. They are all axes inside a replica, or none of these, with `replica` or without.
    """
    nodes = (HostAxis.NODE.value,) if Axis.REPLICA in axes else ()
    return nodes + ((HostAxis.PART.value,) if Axis.FSDP in axes else ())


def host_spec(spec: PartitionSpec) -> PartitionSpec:
    """How an array with this spec on a mesh lies on its `make_host_mesh`: see `host_axes`."""
    return PartitionSpec(*(host_axes((axes,) if isinstance(axes, str) else axes or ()) for axes in spec))


def on_hosts(x: Any) -> bool:
    """Whether an array, or a shape struct's, is in the memory of hosts, on a `make_host_mesh`."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == _HOST_AXES


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a global batch: its leading dimension over (replica, fsdp)."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_ways(mesh: Mesh) -> int:
    """The number of equal parts into which the batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def platform(mesh: Mesh) -> str:
    """XLA's name for the platform of a mesh's devices: "gpu", "cpu", "tpu"..."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def gpus_visible() -> bool:
    """Whether this process would find NVIDIA GPUs, without starting JAX."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    wanted = not platforms or "cuda" in platforms or "gpu" in platforms
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # Without JAX's CUDA plugin this process cannot use the GPUs.
    usable = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return wanted and not hidden and usable and bool(glob.glob("/dev/nvidia[0-9]*"))


def gpus_chosen() -> bool:
    """Whether a program shall run on GPUs, or other devices than CPUs: there are some, or the user asks for them.

    Who asks in vain (`JAX_PLATFORMS=cuda` on a machine without) hears so when JAX starts.
    """
    return gpus_visible() or asked_platforms() is not None


def asked_platforms() -> str | None:
    """The user's JAX_PLATFORMS, or JAX's setting of that name, if its first choice is no CPU; None otherwise."""
    platforms = getattr(jax.config, "jax_platforms", None) or ""
    first = platforms.split(",")[0].strip()
    return platforms if first not in ("", "cpu") else None
