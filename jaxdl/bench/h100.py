"""Compiling for 8 x H100 on a machine without a GPU: XLA's GPU compiler needs only a description of the device.

This gives the optimized HLO and the memory of a program, which cannot run. Kernels are not autotuned, so their choice
can differ from that on a real device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxdl.config import ConfigError
from jaxdl.mesh import Axis

NUM_DEVICES = 8

DEVICE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "memory_bandwidth": 3_352_320_000_000,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84_942_979_072,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}
"""XLA's description of an H100 SXM, from openxla/xla, xla/backends/gpu/target_config/specs/h100_sxm.txtpb."""


def target_config() -> str:
    """The device as text of XLA's message GpuTargetConfigProto."""
    numbers = "".join(f"  {name}: {value}\n" for name, value in DEVICE.items())
    name = '"NVIDIA H100 80GB HBM3"'
    return (
        f"gpu_device_info {{\n{numbers}  cuda_compute_capability {{ major: 9 }}\n  name: {name}\n"
        '  driver_version: "13.0.0"\n  runtime_version: "12.8.0"\n  compile_time_toolkit_version: "12.8.0"\n'
        '  dnn_version: "9.10.0"\n}\nplatform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 patch: 0 }\n'
        f"runtime_version {{ major: 12 minor: 8 patch: 0 }}\ndevice_description_str: {name}\n"
    )


def h100_mesh(shape: Mapping[str, int]) -> Mesh:
    """A mesh with these sizes over 8 x H100 that are only described; programs can be compiled for it, not run.

    To XLA each replica is a separate host, so that it takes the network between them into account.

    Raises ConfigError when the sizes do not multiply to 8, or when JAX's CUDA compiler is not installed.
    """
    if math.prod(shape.values()) != NUM_DEVICES:
        raise ConfigError(
            f"mesh {dict(shape)}: the description has {NUM_DEVICES} devices. Let the sizes multiply to 8."
        )
    hosts, version = shape.get(Axis.REPLICA.value, 1), jax.__version__
    advice = (
        f"Put JAX's compiler for CUDA where Python finds it, without changing the environment: pip install --no-deps "
        f"--target DIR jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version}, then set PYTHONPATH=DIR "
        "JAX_PLATFORMS=cpu."
    )
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ConfigError(f"compiling for H100: the package jax_cuda12_plugin is not installed. {advice}")
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(), topology=f"1x{hosts}x{NUM_DEVICES // hosts}"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"compiling for H100: JAX does not start its CUDA compiler: {error}. {advice}") from None
    devices = np.asarray(found.devices).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
