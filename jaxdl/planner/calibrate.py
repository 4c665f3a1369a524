"""What a machine that is at hand does, for predictions of step times: steps without messages, and links, are timed.

The kernels of a step are timed on all devices at once, each of them a replica that exchanges nothing: what devices
share, such as the cores under virtual ones, is shared. Messages are not timed here in a step: their bytes come from
compiled steps, and their times from `jaxdl.exchange.probe`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdl.exchange import Dense
from jaxdl.exchange.cost import Machine
from jaxdl.exchange.idle import NoExchange
from jaxdl.exchange.probe import probe
from jaxdl.experiment import Experiment
from jaxdl.mesh import MeshConfig, make_mesh
from jaxdl.planner.memory import Fit
from jaxdl.planner.steptime import Profile
from jaxdl.planner.trial import profile, stand_in
from jaxdl.run.build import Plan, make_initial_state, make_plan
from jaxdl.run.compile import compile_train_step

_COLLECTIVES = ("all_reduce/float32", "all_gather", "all_to_all")
_ROUNDS = 5
Steps = Mapping[tuple[int, int], float]
"""(micro-batches, examples of a device in one) -> seconds of a step."""


def measured_machine(
    devices: Sequence[Any], replica: int, *, bits: Sequence[int] = (8,), num_repeats: int = 5
) -> Machine:
    """Links and speeds of these devices, as `replica` replicas over the others as `fsdp`: takes some seconds."""
    mesh = make_mesh(MeshConfig(replica=replica, fsdp=len(devices) // replica, tensor=1), devices)
    return probe(mesh, methods=("threshold",), bits=bits, collectives=_COLLECTIVES, num_repeats=num_repeats)


def measured_profiles(
    experiment: Experiment, devices: Sequence[Any], *, num_rounds: int = _ROUNDS
) -> Callable[[int, str, str], Profile]:
    """Profiles by tensor (1 alone), remat and sharding, whose times are those of these devices; see `Workload`.

    They are divided by the efficiency as others are: plan with `Efficiency(compute=1.0)`. Three or four steps are
    compiled and timed for each way to keep activations.
    """
    resident = stand_in(experiment)
    local = max(1, experiment.batch_size // len(devices))

    @functools.cache
    def timed(remat: str) -> tuple[float, float, float]:
        return fitted_steps(timed_steps(resident, devices, remat or None, local, num_rounds=num_rounds))

    @functools.cache
    def found(tensor: int, remat: str, param_sharding: str) -> Profile:
        few = max(1, min(8, local // 2))
        counted = profile(
            resident,
            devices,
            tensor=tensor,
            most_fsdp=len(devices) // tensor,
            remat=remat or None,
            param_sharding=param_sharding,
            examples=(few, 2 * few),
        )
        fixed, of_example, update = timed(remat)
        divided = param_sharding == "sharded"
        return dataclasses.replace(
            counted,
            passes_sec=Fit(fixed, 0.0, of_example),
            other_sec=Fit(0.0, update, 0.0) if divided else Fit(update, 0.0, 0.0),
        )

    return found


def timed_steps(
    experiment: Experiment, devices: Sequence[Any], remat: str | None, local: int, *, num_rounds: int = _ROUNDS
) -> dict[tuple[int, int], float]:
    """Median seconds of steps without messages, by micro-batches and their examples, up to `local` of a device."""
    wanted = [(m, local // m) for m in (1, 2, 4) if local % m == 0]
    wanted += [(1, local // 2)] if local > 1 else []
    plans = {one: local_plan(experiment, devices, remat, one[1], one[0]) for one in wanted}
    return {one: statistics.median(found) for one, found in timed_plans(plans, num_rounds).items()}


def fitted_steps(steps: Steps) -> tuple[float, float, float]:
    """Seconds of a micro-batch, of each example, and of the rest of a step; none negative.

    A step of m micro-batches of e examples takes m (a + b e) + c; the sum of squares of relative errors is the least.
    """
    import scipy.optimize

    rows = np.array([[m, m * e, 1.0] for m, e in steps])
    seconds = np.array(list(steps.values()))
    weighted = rows / seconds[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    found, _ = scipy.optimize.nnls(weighted / scale, np.ones(len(seconds)))
    a, b, c = (found / scale).tolist()
    return a, b, c


def local_plan(
    experiment: Experiment, devices: Sequence[Any], remat: str | None, examples: int, microbatches: int
) -> Plan:
    """A step in which every device is a replica that exchanges nothing."""
    batch = examples * microbatches * len(devices)
    changes: dict[str, Any] = {
        "mesh": MeshConfig(replica=len(devices), fsdp=1, tensor=1),
        "batch_size": batch,
        "step.microbatches": microbatches,
        "exchange": Dense(),
    }
    if remat is not None:
        changes["model.remat"] = remat
    if isinstance(number := getattr(experiment.data, "num_train", None), int):
        changes["data.num_train"] = max(batch, number)
    plan = make_plan(experiment.replaced(changes), devices)
    return dataclasses.replace(plan, parts=dataclasses.replace(plan.parts, exchange=NoExchange()))


def timed_plans(plans: Mapping[Any, Plan], num_rounds: int) -> dict[Any, list[float]]:
    """Seconds of the train step of each plan on one resident batch, one a round, in turns; two rounds warm up."""
    programs, states, batches = {}, {}, {}
    for name, plan in plans.items():
        programs[name], states[name] = compile_train_step(plan), make_initial_state(plan)
        with plan.batches(plan.timeline.segments[0], 0, 1) as loader:
            batches[name] = dict(next(iter(loader)))
    times: dict[Any, list[float]] = {name: [] for name in plans}
    for number in range(num_rounds + 2):
        for name in list(plans)[:: -1 if number % 2 else 1]:
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(programs[name](states[name], batches[name]))
            if number > 1:
                times[name].append(time.perf_counter() - start)
    return times
