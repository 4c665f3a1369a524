"""The figures of a step on the devices at hand: it is compiled for them, and one that is small enough is run."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.cluster import wait_for_all
from jaxdl.cluster.agree import from_each_process
from jaxdl.mesh import Device, platform
from jaxdl.planner.h100 import compile_step
from jaxdl.planner.steptime import Efficiency
from jaxdl.planner.trial import Measured, figures, planned_bytes
from jaxdl.run.build import Plan

_REPEATS = 5
_MOST_OF_MEMORY = 0.5
"""A step that needs more than this share of a device's memory is not run."""


def agreed(value: float, of_all: Callable[..., float]) -> float:
    """The largest or the smallest of the values of all processes, so that they decide alike."""
    wait_for_all()  # One may have compiled for longer than Gloo waits.
    return of_all(float(one) for one in from_each_process(repr(float(value)).encode()))


class Timed:
    """Takes the figures of steps: kernels in proportion to their least times, as long as the steps of one device ran.

    What was never run takes the time of `Efficiency`. Virtual devices of a CPU share its cores: there the time is as
    many times longer as devices come on a core. All processes call it alike, and get the time of the slowest.
    """

    def __init__(self, device_bytes: float) -> None:
        self._device_bytes = device_bytes
        self._factor = 1 / Efficiency().compute

    def __call__(self, plan: Plan) -> Measured:
        """The figures of a plan's step."""
        compiled, mesh = compile_step(plan), plan.parts.layout.mesh
        found = figures(plan, compiled)
        needed = planned_bytes(compiled)
        if mesh.size == 1 and needed is not None and needed <= _MOST_OF_MEMORY * self._device_bytes:
            seconds = _seconds(plan, compiled) * (_devices_per_core() if platform(mesh) == "cpu" else 1.0)
            self._factor = agreed(seconds / (found.passes + found.other), max)
        return found._replace(passes=found.passes * self._factor, other=found.other * self._factor)


def _devices_per_core() -> float:
    return max(1.0, jax.local_device_count() / len(os.sched_getaffinity(0)))


def _seconds(plan: Plan, compiled: jax.stages.Compiled) -> float:
    """The median time of the step, on a state and a batch of zeros."""
    batch = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
    state_at, batch_at = compiled.input_shardings[0]
    state: Any = jax.tree.map(_zeros, plan.parts.state_spec.abstract(), state_at)
    batch, times = jax.tree.map(_zeros, batch, batch_at), []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _zeros(x: Any, sharding: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(0), math.prod(x.shape)).reshape(x.shape)
        return jax.device_put(keys, sharding)
    return jax.device_put(np.zeros(x.shape, x.dtype), sharding)


def memory_of(device: Device) -> float | None:
    """The bytes that programs may use on a device; None where it does not say."""
    found = device.memory_stats()
    return float(found["bytes_limit"]) if found and "bytes_limit" in found else None
