"""Steps that are run on the devices at hand: those without messages, for predictions, and whole layouts, to choose.

The kernels of a step are timed on all devices of a process at once, each of them a replica that exchanges nothing: what
devices share, such as the cores under virtual ones, is shared. What messages take comes from `jaxdl.exchange.probe`.
Steps of embedding tables have messages in any case: what is predicted of these tables is taken off.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.parallel.mesh import Device, MeshConfig, platform
from jaxdl.performance.planner.h100 import compile_step
from jaxdl.performance.planner.idle_exchange import NoExchange
from jaxdl.performance.planner.memory import MOST_OF_DEVICE
from jaxdl.performance.planner.trial import Measured, figures, planned_bytes
from jaxdl.performance.planner.trials import Trials, first_batch
from jaxdl.training.run.plan.build import Plan
from jaxdl.training.state import TrainState
from jaxdl.training.step import Batch

ROUNDS = 15
_MOST_OF_MEMORY = 0.5
"""A step without messages that needs more than this share of a device's memory is not run: fewer examples will do."""
_MOST_SEC = 6.0
"""No further round begins when all steps together were timed for so long."""
_LEAST_ROUNDS = 3
_COMPILERS = 2

Name = TypeVar("Name", bound=Hashable)


class StepParts(NamedTuple):
    """The seconds of a step without messages: of m micro-batches of e examples it takes m (a + b e) + c."""

    microbatch: float
    """a"""
    example: float
    """b"""
    rest: float
    """c"""


def agree(value: float, of_all: Callable[..., float]) -> float:
    """The largest or the smallest of the values of all processes, so that they decide alike."""
    wait_for_all()  # One may have compiled for longer than Gloo waits.
    return of_all(float(answer) for answer in from_each_process(repr(float(value)).encode()))


def memory_of(device: Device) -> float | None:
    """The bytes that programs may use on a device; None where it does not say."""
    stats = device.memory_stats()
    return float(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


class LocalSteps:
    """Steps without messages on these devices, which are compiled and timed when they are first asked for.

    They have up to `local` examples of a device, or as many fewer as fit. `devices` are those of this process; all
    processes call this alike, at once, and get the times of the slowest.
    """

    def __init__(
        self,
        trials: Trials,
        devices: Sequence[Device],
        local: int,
        device_bytes: float = math.inf,
        tables_sec: Callable[[Plan], float] = lambda _: 0.0,
    ) -> None:
        """`tables_sec` predicts the seconds of a step's embedding tables, which are taken off."""
        self._trials, self._devices, self._local = trials, devices, local
        self._device_bytes, self._tables_sec = device_bytes, tables_sec
        self._steps = functools.cache(self._compile)
        self._parts = functools.cache(self._time)

    def __call__(self, remat: str) -> StepParts:
        """What steps take with this remat, empty for a model without the setting; of three that are run.

        Raises ConfigError if not even one example fits.
        """
        return self._parts(remat)

    def figures(self, remat: str) -> dict[int, Measured]:
        """Examples of a device -> what the compiled step needs, of those with one micro-batch."""
        return {
            examples: figures(plan, program)
            for (microbatches, examples), (plan, program) in self._steps(remat).items()
            if microbatches == 1
        }

    def _time(self, remat: str) -> StepParts:
        steps = self._steps(remat)
        times = time_steps(steps, ROUNDS)
        return fit_steps(
            {counts: without_tables(sec, self._tables_sec(steps[counts][0])) for counts, sec in times.items()}
        )

    def _compile(self, remat: str) -> dict[tuple[int, int], tuple[Plan, jax.stages.Compiled]]:
        examples, limit = self._local, self._device_bytes
        while True:
            wanted = [(1, examples), (1, max(1, examples // 2)), (2, max(1, examples // 2))]
            plans = {
                counts: local_plan(self._trials, self._devices, remat or None, *counts)
                for counts in dict.fromkeys(wanted)
            }
            programs = compile_all(plans)
            most = agree(max(planned_bytes(program) or 0 for program in programs.values()), max)
            if examples == 1 and most > limit:
                raise ConfigError(
                    f"--plan auto: a step of one example with all parameters on a device needs {most / 1e9:.3g} "
                    f"GB of {limit / 1e9:.3g}, so none can be timed. Choose the layout, or take larger devices."
                )
            if examples == 1 or most <= _MOST_OF_MEMORY * limit:
                return {counts: (plans[counts], programs[counts]) for counts in plans}
            examples = max(1, examples // 2)


def compile_all(plans: Mapping[Name, Plan]) -> dict[Name, jax.stages.Compiled]:
    """The compiled steps of plans; on CPUs two at a time, since XLA has work for one core in a part of that time."""
    if not plans or any(platform(plan.parts.layout.mesh) != "cpu" for plan in plans.values()):
        return {name: compile_step(plan) for name, plan in plans.items()}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        return dict(zip(plans, pool.map(compile_step, plans.values()), strict=True))


def without_tables(seconds: float, tables_sec: float) -> float:
    """The seconds of a step without its embedding tables; a tenth is left where more than all is predicted of them."""
    return max(seconds - tables_sec, 0.1 * seconds)


def fit_steps(steps: Mapping[tuple[int, int], float]) -> StepParts:
    """What steps take, of (micro-batches, examples of a device in one) -> seconds; no part is negative.

    The sum of squares of relative errors is the least.
    """
    import scipy.optimize

    rows = np.array([[m, m * e, 1.0] for m, e in steps])
    seconds = np.array(list(steps.values()))
    weighted = rows / seconds[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    coefficients, _ = scipy.optimize.nnls(weighted / scale, np.ones(len(seconds)))
    return StepParts(*(coefficients / scale).tolist())


def local_plan(trials: Trials, devices: Sequence[Device], remat: str | None, microbatches: int, examples: int) -> Plan:
    """A step in which every device is a replica that exchanges nothing."""
    changes: dict[str, Any] = {
        "mesh": MeshConfig(replica=len(devices), fsdp=1, tensor=1),
        "batch_size": examples * microbatches * len(devices),
        "step.microbatches": microbatches,
        "exchange": Dense(),
    }
    if remat is not None:
        changes["model.remat"] = remat
    plan = trials.plan(changes, devices)
    return dataclasses.replace(plan, parts=dataclasses.replace(plan.parts, exchange=NoExchange()))


def time_layouts(plans: Mapping[Name, Plan], device_bytes: float, num_rounds: int) -> dict[Name, list[float]]:
    """Seconds of the steps of whole layouts, one a round, of the slowest process.

    They are infinite for a layout that needs more memory by XLA's plan than a plan may, which is not run.
    """
    most = MOST_OF_DEVICE * device_bytes
    programs = compile_all(plans)
    needed = {name: agree(planned_bytes(program) or 0, max) for name, program in programs.items()}
    fitting = {name: (plans[name], programs[name]) for name in plans if needed[name] <= most}
    turns = [fitting] if sum(needed[name] for name in fitting) <= most else [{name: fitting[name]} for name in fitting]
    times = {name: [math.inf] for name in plans}
    for some in turns:
        times |= slowest(time_rounds(some, num_rounds)) if some else {}
    return times


def slowest(times: Mapping[Name, Sequence[float]]) -> dict[Name, list[float]]:
    """The seconds of each round, of the slowest process, so that all decide alike."""
    wait_for_all()  # One may have compiled for longer than Gloo waits.
    every = [json.loads(answer) for answer in from_each_process(json.dumps(list(times.values())).encode())]
    return dict(zip(times, (np.max(of_each, axis=0).tolist() for of_each in zip(*every, strict=True)), strict=True))


def is_as_fast(times: Sequence[float], fastest: Sequence[float]) -> bool:
    """Whether noise hides that steps are slower than the fastest: in a quarter of the rounds or more they are not.

    Layouts that are not timed in the same rounds, for want of memory, may have other numbers of them.
    """
    count = min(len(times), len(fastest))
    return bool(np.quantile(np.divide(times[:count], fastest[:count]), 0.25) <= 1)


def quickest(times: Mapping[Name, Sequence[float]]) -> Name:
    """The first that noise does not tell from the one with the least median; the order is that of the predictions."""
    fastest = min(times, key=lambda name: statistics.median(times[name]))
    if math.isinf(times[fastest][0]):
        return fastest
    fit = (name for name in times if not math.isinf(times[name][0]))
    return next(name for name in fit if is_as_fast(times[name], times[fastest]))


def time_steps(programs: Mapping[Name, tuple[Plan, jax.stages.Compiled]], num_rounds: int) -> dict[Name, float]:
    """Median seconds of each step, of the slowest process."""
    return {name: agree(statistics.median(times), max) for name, times in time_rounds(programs, num_rounds).items()}


def time_rounds(
    programs: Mapping[Name, tuple[Plan, jax.stages.Compiled]], num_rounds: int, most_sec: float = _MOST_SEC
) -> dict[Name, list[float]]:
    """Seconds of the steps on one batch, one a round, in turns, after two rounds that warm up.

    The batch is of zeros, but of a plan with tables it has ids of the data, which decide what its step does.

    Rounds end early, but not before the third, when all took longer than `most_sec`.
    """
    states = _states({name: plan for name, (plan, _) in programs.items()})
    batches = {name: _batch(plan, program) for name, (plan, program) in programs.items()}
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for number in range(num_rounds + 2):
        for name in _turns(programs, number):
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(programs[name][1](states[name], batches[name]))
            if number > 1:
                times[name].append(time.perf_counter() - start)
        timed = number - 1
        if _LEAST_ROUNDS <= timed < num_rounds and agree(sum(map(sum, times.values())), max) > most_sec:
            break
    return times


def _turns(names: Iterable[Name], number: int) -> list[Name]:
    return list(names)[:: -1 if number % 2 else 1]


def _states(plans: Mapping[Name, Plan]) -> dict[Name, TrainState]:
    """Fresh states, without the tables of the host, of which no step sees more than its slots.

    To compile the program that makes one takes about as long as to compile a step. So those of the same arrays are
    copies, in their own shardings, of the first.
    """
    made: dict[Hashable, TrainState] = {}
    states = {}
    for name, plan in plans.items():
        spec = plan.parts.state_spec
        leaves, structure = jax.tree.flatten(spec.shapes)
        kind = (structure, *leaves)
        if kind not in made:
            states[name] = made[kind] = spec.initializer()(plan.experiment.seed)
        else:
            copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=spec.shardings)
            states[name] = copy(made[kind])
    return states


def _batch(plan: Plan, program: jax.stages.Compiled) -> Batch:
    """A batch as the program takes it, on all processes."""
    shapes = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
    if plan.parts.tables is not None and (batch := first_batch(plan, shapes)) is not None:
        return batch
    _, sharding = program.input_shardings[0]
    make = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(shapes)), out_shardings=sharding)
    return make()
