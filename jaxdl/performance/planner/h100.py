"""Compiling for H100 on a machine without a GPU: XLA's GPU compiler needs only a description of the device.

This gives the optimized HLO and the memory of a program, which cannot run. Kernels are not autotuned, so their choice
can differ from that on a real device.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import importlib.util
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from jaxdl.core.config import ConfigError
from jaxdl.parallel.mesh import SLOW_AXES, ways
from jaxdl.training.run.compile import compile_train_step, programs_of
from jaxdl.training.run.plan.build import Plan

NUM_DEVICES = 8
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_CUDNN, _CAPABILITY = 91000, 9.0
"""As in `target_config`."""
_NO_TILE = "Couldn't find output tile sizes"

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

    To XLA each replica, and each of its stages, is a host of its own, so that it takes the network into account.

    Raises ConfigError when the sizes do not multiply to 8, and what `h100_devices` raises.
    """
    if math.prod(shape.values()) != NUM_DEVICES:
        raise ConfigError(
            f"mesh {dict(shape)}: the description has {NUM_DEVICES} devices. Let the sizes multiply to 8."
        )
    hosts = ways(shape, SLOW_AXES)
    devices = np.asarray(h100_devices(hosts, NUM_DEVICES // hosts)).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def h100_devices(hosts: int, of_each: int) -> list[Any]:
    """H100 that are only described, so many of each host.

    Raises ConfigError when JAX's CUDA compiler is not installed.
    """
    version = jax.__version__
    advice = (
        f"Put JAX's compiler for CUDA where Python finds it, without changing the environment: pip install --no-deps "
        f"--target DIR jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version}, then set PYTHONPATH=DIR "
        "JAX_PLATFORMS=cpu."
    )
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ConfigError(f"compiling for H100: the package jax_cuda12_plugin is not installed. {advice}")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(), topology=f"1x{hosts}x{of_each}"
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"compiling for H100: JAX does not start its CUDA compiler: {error}. {advice}") from None
    _describe_cudnn()
    _describe_cores()
    return list(topology.devices)


def _describe_cudnn() -> None:
    """Lets JAX take the cuDNN and the GPU of the description for those of this machine, from now on in this process."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    assert hasattr(cudnn, "check_cudnn_version"), "this JAX has another way to find cuDNN"
    cudnn.check_cudnn_version = lambda: _CUDNN
    cudnn.check_compute_capability = lambda least: float(least) <= _CAPABILITY
    cudnn.is_cuda_compute_capability_equal = lambda wanted: float(wanted) == _CAPABILITY


def _describe_cores() -> None:
    """Lets a kernel of JAX's that counts the cores of the first device count those of the description, from now on."""
    kernel = importlib.import_module("jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu")
    device = types.SimpleNamespace(core_count=DEVICE["core_count"])
    kernel.jax = types.SimpleNamespace(**{**vars(jax), "devices": lambda: [device]})  # pyright: ignore


def compile_step(plan: Plan) -> jax.stages.Compiled:
    """The train step of a plan, compiled; for H100 that are only described without Triton's products if need be."""
    return _with_tiles(plan, lambda plan: compile_train_step(plan))


def compile_programs(plan: Plan, only: Sequence[str] = ()) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """The programs of a plan by their names (`programs_of`), compiled as by `compile_step`.

    With `only` those whose names match one of these patterns; raises ConfigError if there is none.
    """
    names = list(programs_of(plan))
    chosen = [name for name in names if not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)]
    if not chosen:
        raise ConfigError(f"--only {' '.join(only)}: there is no such program. There are: {', '.join(names)}.")
    for name in chosen:
        yield name, _with_tiles(plan, lambda plan, name=name: programs_of(plan)[name]())


def _with_tiles(plan: Plan, compile: Callable[[Plan], jax.stages.Compiled]) -> jax.stages.Compiled:
    """A program of a plan, without Triton's products if need be.

    Without a GPU XLA gives each product of Triton a default tile, also where none of its size fits the operands, and
    then fails. With a GPU it tries the tiles, and cuBLAS, and takes the fastest that compiles.
    """
    try:
        return compile(plan)
    except jax.errors.JaxRuntimeError as error:
        options = plan.experiment.compiler.options
        if _NO_TILE not in str(error) or any(option.startswith(_TRITON_PRODUCTS) for option in options):
            raise
    print(f"XLA finds no tile for a product of Triton: compiled with {_TRITON_PRODUCTS}=false, all products by cuBLAS.")
    changes = {"compiler.options": (*options, f"{_TRITON_PRODUCTS}=false")}
    return compile(dataclasses.replace(plan, experiment=plan.experiment.replaced(changes)))
