"""The device mesh: the names of its axes, and their properties.

Other code asks for the properties of an axis, or uses the axes that have one; only `jaxdl.parallel.sharding`, which has
the rules, names axes too. So a new axis is a member of `Axis`, its size in `MeshConfig`, a rule in
`jaxdl.parallel.sharding` that says which dimensions it splits, and the code that uses it.
"""

from __future__ import annotations

import enum
import glob
import importlib.util
import math
import os
from collections.abc import Iterable, Mapping, Sequence
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
    """The mesh axes, in the order of the mesh's dimensions, each with its properties."""

    _value_: str
    is_slow: bool
    """Crosses the slow network, usually with one index per node; gradients are exchanged over it."""
    splits_batch: bool
    """Splits the examples of a batch."""
    splits_layers: bool
    """Splits the layers of a network into stages of a pipeline, with their parameters."""
    splits_length: bool
    """Splits the length of each text, or other sequence, of a batch."""
    splits_params: bool
    """Splits dimensions of parameters, their gradients and the optimizer's state."""

    def __new__(cls, name: str, *properties: str) -> Axis:
        """The axis; `properties` are the names of those it has."""
        axis = str.__new__(cls, name)
        axis._value_ = name
        known = ("is_slow", "splits_batch", "splits_layers", "splits_length", "splits_params")
        assert set(properties) <= set(known), (name, properties)
        for has in known:
            setattr(axis, has, has in properties)
        return axis

    REPLICA = "replica", "is_slow", "splits_batch"
    STAGE = "stage", "splits_layers"
    FSDP = "fsdp", "splits_batch", "splits_params"
    CONTEXT = "context", "splits_length", "splits_params"
    TENSOR = "tensor", "splits_params"


AXES = tuple(axis.value for axis in Axis)
"""All axes."""
INNER_AXES = tuple(axis.value for axis in Axis if not axis.is_slow)
"""Those inside a replica: stage, fsdp, context, tensor."""
BATCH_AXES = tuple(axis.value for axis in Axis if axis.splits_batch)
"""Those over which the leading dimension of a batch is sharded: replica, fsdp."""
INNER_BATCH_AXES = tuple(axis for axis in BATCH_AXES if axis in INNER_AXES)
"""Those over which the batch of one replica is sharded: fsdp."""
STAGE_AXES = tuple(axis.value for axis in Axis if axis.splits_layers)
"""Those over which layers are spread: stage."""
LENGTH_AXES = tuple(axis.value for axis in Axis if axis.splits_length)
"""Those over which the length of texts is split: context."""
PARAM_AXES = tuple(axis.value for axis in Axis if axis.splits_params)
"""Those over which dimensions of parameters are sharded: fsdp, context, tensor."""
GATHER_AXES = tuple(axis for axis in PARAM_AXES if axis in BATCH_AXES + LENGTH_AXES)
"""Those over which parameters are gathered for use: fsdp, context. Each device has other tokens or examples, which need
all parameters."""
MODEL_AXES = tuple(axis for axis in PARAM_AXES if axis not in GATHER_AXES)
"""Those over which the work on each token or example is split, as its parameters are: tensor."""
FAST_AXES = tuple(axis for axis in INNER_AXES if axis not in STAGE_AXES)
"""Those inside a replica, or a stage of it, on a fast network: fsdp, context, tensor."""
SLOW_AXES = tuple(axis.value for axis in Axis if axis.is_slow or axis.splits_layers)
"""Those that lie on the slow network, or may: replica, stage."""
RARE_AXES = STAGE_AXES + LENGTH_AXES
"""Those that only some models can use: stage, context. With one device they are not spoken of."""


class HostAxis(enum.StrEnum):
    """The axes of a host mesh, which has one CPU of each process, for rows of tables: see `make_host_mesh`."""

    NODE = "node"
    PART = "part"


_HOST_AXES = tuple(axis.value for axis in HostAxis)


class MeshConfig(Config):
    """Sizes of the mesh axes; one of them may be -1 and takes the remaining devices."""

    replica: int = 1
    """Data parallel across the slow network; gradients are exchanged over it. Usually the number of nodes."""
    stage: int = pydantic.Field(default=1, exclude_if=lambda size: size == 1)
    """Pipeline: each stage has a part of the layers, and the micro-batches of `step.microbatches` pass through them one
    after the other. For decoders."""
    fsdp: int = -1
    """Data parallel inside a node; parameters and optimizer state are sharded over it."""
    context: int = pydantic.Field(default=1, exclude_if=lambda size: size == 1)
    """Splits each text over its devices, for long ones; parameters are sharded over it too. For decoders."""
    tensor: int = 1
    """Model parallel inside a node."""
    cpu_devices: int | None = pydantic.Field(default=None, ge=1)
    """Train on this many virtual CPU devices per process instead of the machine's accelerators."""
    without_gpus: Annotated[MeshConfig | None, tyro.conf.Suppress] = None
    """The mesh to use instead where no GPU is visible, such as `MeshConfig(cpu_devices=2)`. Set in a config file; one
    of the two is chosen when the config is loaded, before the command line changes it."""

    @pydantic.model_validator(mode="after")
    def _sizes(self) -> MeshConfig:
        sizes = self._requested
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

    @property
    def _requested(self) -> dict[str, int]:
        """Axis -> size, as it was given."""
        return {axis: getattr(self, axis) for axis in AXES}

    def resolved(self, *, gpus: bool) -> MeshConfig:
        """The mesh for a machine with or without GPUs: this one, or `without_gpus`. Asked when a config is loaded."""
        if self.without_gpus is None:
            return self
        return self.replaced({"without_gpus": None}) if gpus else self.without_gpus

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Axis -> size on `num_devices` devices. Raises ConfigError when the mesh does not use exactly these."""
        sizes = self._requested
        fixed = math.prod(size for size in sizes.values() if size != -1)
        shape = mesh_text(sizes)
        options = [f"--mesh.{axis}" for axis in AXES if axis not in RARE_AXES or sizes[axis] != 1]
        advice = f"Change {', '.join(options[:-1])} or {options[-1]}, or use --devices N for N virtual CPU devices."
        if -1 in sizes.values():
            if num_devices % fixed or num_devices < fixed:
                raise ConfigError(f"mesh {shape}: {num_devices} devices cannot be divided by {fixed}. {advice}")
            return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != num_devices:
            problem = "more than there are" if fixed > num_devices else "the others would be idle"
            raise ConfigError(f"mesh {shape} = {fixed} devices, of {num_devices}: {problem}. {advice}")
        return sizes


FILLING_AXIS = next(axis for axis in AXES if MeshConfig.model_fields[axis].default == -1)
"""The axis that takes all remaining devices by default: fsdp."""


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """The mesh over `devices` (default: all of the run), with automatic axes in the order of `Axis`.

    Devices are laid out by process, so `replica`, the outermost axis, is the one that crosses hosts.
    Raises ConfigError when the sizes do not fit the devices.
    """
    by_process = sorted(
        jax.devices() if devices is None else devices, key=lambda device: (device.process_index, device.id)
    )
    sizes = config.sizes(len(by_process))
    return Mesh(
        np.asarray(by_process).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def make_host_mesh(mesh: Mesh) -> Mesh:
    """The host mesh of a device mesh: one CPU of each of its processes, for arrays in host memory.

    These are the rows of embedding tables that the devices only cache. The processes along `HostAxis.NODE` have other
    replicas, those along `HostAxis.PART` other devices of the same ones.
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
    hosts = np.array([cpus[process] for process in dict.fromkeys(processes.ravel().tolist())])
    return Mesh(hosts.reshape(sizes), _HOST_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def host_sizes(processes: np.ndarray) -> tuple[int, int]:
    """The sizes of `make_host_mesh`, for the process of each device, `[replica, device of it]`.

    Raises ConfigError when the devices of a process are neither whole replicas nor an equal part of one.
    """
    num_replicas, inside = processes.shape
    order, counts = np.unique(processes, return_counts=True)
    each = int(counts[0])
    if (counts != each).any() or (inside % each and each % inside):
        raise ConfigError(
            f"a process has {int(counts.max())} devices and a replica {inside} "
            f"({' x '.join(f'--mesh.{axis}' for axis in INNER_AXES)}). What is kept in the memory of hosts needs "
            "processes with whole replicas, or with equal parts of one. Change the mesh."
        )
    return (num_replicas, inside // each) if inside % each == 0 else (len(order), 1)


def host_axes(axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of a `make_host_mesh` for these axes of the device mesh: a host has what its devices have.

    `axes` has all axes inside a replica or none of them, with or without the slow axis.
    """
    nodes = (HostAxis.NODE.value,) if any(axis not in INNER_AXES for axis in axes) else ()
    return nodes + ((HostAxis.PART.value,) if any(axis in INNER_AXES for axis in axes) else ())


def host_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec on a `make_host_mesh` of an array with this spec on the device mesh: see `host_axes`."""
    return PartitionSpec(*(host_axes((axes,) if isinstance(axes, str) else axes or ()) for axes in spec))


def on_hosts(x: Any) -> bool:
    """Whether an array, or that of a shape struct, is in the memory of hosts, on a host mesh."""
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == _HOST_AXES


def ways(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """The product of the sizes of `axes`; 1 for an axis that the mesh lacks."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """`replica 2 x fsdp 4 x tensor 1`, and `RARE_AXES` of more than one device."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1 or axis not in RARE_AXES)


def inner_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes inside a replica that have more than one device."""
    return {axis: size for axis, size in sizes.items() if axis in INNER_AXES and size > 1}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a global batch: its leading dimension over `BATCH_AXES`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def batch_ways(mesh: Mesh) -> int:
    """The number of equal parts into which the batch is split."""
    return ways(mesh.shape, BATCH_AXES)


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
    """Whether a program shall run on GPUs, or on other devices than CPUs: there are some, or the user asks for them.

    If the user asks for a platform that is missing (`JAX_PLATFORMS=cuda`), JAX reports it at start.
    """
    return gpus_visible() or asked_platforms() is not None


def asked_platforms() -> str | None:
    """The user's JAX_PLATFORMS, or JAX's setting of that name, if its first choice is not "cpu"; None otherwise."""
    platforms = getattr(jax.config, "jax_platforms", None) or ""
    first = platforms.split(",")[0].strip()
    return platforms if first not in ("", "cpu") else None
