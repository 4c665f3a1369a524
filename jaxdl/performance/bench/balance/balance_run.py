"""Runs what `python -m jaxdl.bench balance` measures: compiled steps, and their times on every host.

All processes follow the same loops, also those that have no device of a mesh: there a side does nothing, and the
process waits with the others.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.exchange.probe import start_together
from jaxdl.parallel.cluster import current, wait_for_all
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.compiler.collectives import usual_collectives
from jaxdl.parallel.mesh import Axis, batch_sharding
from jaxdl.training.evaluation import max_in_flight
from jaxdl.training.run.compile import programs
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.step import Batch

_MOST_ITERATIONS = 2**24
"""Up to here the sum of float32 numbers one by one is exact."""


@dataclass(frozen=True)
class Side:
    """One thing to be timed."""

    run: Callable[[int], object]
    """Runs so many iterations, and returns when they have ended. Does nothing on a process without devices of it."""
    hosts: tuple[int, ...]
    """The processes that have devices of it."""


@dataclass(frozen=True)
class Times:
    """How long a side takes."""

    iterations: int
    """Of one test."""
    seconds: np.ndarray
    """Of one iteration, `[rounds, hosts]`."""
    hosts: tuple[int, ...]

    @property
    def of_hosts(self) -> np.ndarray:
        """The median over the rounds of each host."""
        return np.median(self.seconds, axis=0)

    @property
    def median_sec(self) -> float:
        """Of the hosts, the median one."""
        return float(np.median(self.of_hosts))

    @property
    def slowest_sec(self) -> float:
        """Of the slowest host."""
        return float(self.of_hosts.max())

    @property
    def slowest_host(self) -> str:
        """Its name."""
        process, member = self.hosts[int(self.of_hosts.argmax())], current()
        return member.hosts[process] if member is not None else f"host{process}"


class Clock:
    """Where the processes meet, what time it is, and how each learns the times of all."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def meet(self) -> None:
        """Returns in all processes at about the same time."""
        wait_for_all()
        start_together(self._mesh)

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def every(self, seconds: float) -> list[float]:
        """The seconds of each process."""
        wait_for_all()
        return [struct.unpack("d", answer)[0] for answer in from_each_process(struct.pack("d", seconds))]


def time_side(side: Side, count: int, clock: Clock) -> list[float]:
    """Seconds of `count` iterations on each host of a side, which begin together."""
    clock.meet()
    start = clock.now()
    side.run(count)
    every = clock.every(clock.now() - start)
    return [every[host] for host in side.hosts]


def count_iterations(side: Side, min_sec: float, clock: Clock) -> int:
    """The number of iterations, a power of two, with which the slowest host takes `min_sec` or longer."""
    count = 1
    while max(time_side(side, count, clock)) < min_sec and count < _MOST_ITERATIONS:
        count *= 2
    return count


def measure(sides: Mapping[str, Side], *, min_sec: float, num_rounds: int, clock: Clock) -> dict[str, Times]:
    """The times of the sides, in turns: in each round all run, every second round in the opposite order.

    The iterations of a test are doubled until it takes `min_sec`; these tests also warm up, and do not count.
    """
    counts = {name: count_iterations(side, min_sec, clock) for name, side in sides.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    for number in range(num_rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds[name].append([sec / counts[name] for sec in time_side(sides[name], counts[name], clock)])
    return {name: Times(counts[name], np.array(seconds[name]), side.hosts) for name, side in sides.items()}


def hosts_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that have devices of a mesh."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_here(mesh: Mesh) -> bool:
    """Whether this process has devices of a mesh."""
    return jax.process_index() in hosts_of(mesh)


def batch_of(plan: Plan, number: int) -> Batch:
    """A batch of a plan on its mesh: the same on every mesh for the same global batch."""
    size = plan.experiment.batch_size
    rows, sharding = (
        plan.splits.train.batch(np.arange(number * size, (number + 1) * size)),
        batch_sharding(plan.parts.layout.mesh),
    )
    return {
        name: jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]) for name, x in rows.items()
    }


def step_side(plan: Plan) -> Side:
    """The compiled step of a plan, again and again on one batch; of an agreement, its local step."""
    mesh = plan.parts.layout.mesh
    if not is_here(mesh):
        return Side(lambda _: None, hosts_of(mesh))
    step: Any = programs().train_step(plan)
    state, batch = programs().initial_state(plan), batch_of(plan, 0)
    if plan.parts.agreement.keeps_replicas:
        check_silent(step.as_text() or "", mesh.shape)

    def run(count: int) -> None:
        nonlocal state
        for number in range(count):
            state, metrics = step(state, batch)
            if (number + 1) % max_in_flight() == 0:
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)

    return Side(run, hosts_of(mesh))


def check_silent(text: str, axes: Mapping[str, int]) -> None:
    """Raises AssertionError if a program, as compiled HLO, sends anything over `replica`."""
    sent = [kind for kind, over, _ in usual_collectives(text, axes) if Axis.REPLICA.value in over]
    assert not sent, f"a local step sends over {Axis.REPLICA.value}: {', '.join(sent)}"


def first_steps(plan: Plan, num_steps: int) -> tuple[list[float], list[np.ndarray]]:
    """(the loss of each of some steps, each on a batch of its own; how the first one changes each parameter)."""
    step: Any = programs().train_step(plan)
    mesh = plan.parts.layout.mesh
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def params() -> list[np.ndarray]:
        return [np.array(leave.addressable_data(0)) for leave in jax.tree.leaves(whole(state.params))]

    state, losses = programs().initial_state(plan), []
    before, change = params(), []
    wait_for_all()
    for number in range(num_steps):
        state, metrics = jax.block_until_ready(step(state, batch_of(plan, number)))
        losses.append(float(metrics["sums/loss"]) / float(metrics["sums/weight"]))
        if number == 0:
            change = [after - earlier for after, earlier in zip(params(), before, strict=True)]
    return losses, change


def first_devices(count: int) -> list[Any]:
    """The first devices of the run, by process."""
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))[:count]


def machine_kind() -> str:
    """What the devices are: the name of a GPU, and of CPUs, which JAX all calls so, the architecture and the cores."""
    kind = str(jax.devices()[0].device_kind)
    return kind if kind != "cpu" else f"cpu ({platform.machine()}, {os.cpu_count()} cores)"
