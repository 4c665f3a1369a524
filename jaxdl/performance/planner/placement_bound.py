"""The makespan that no placement of shards is below: what those of `jaxdl.performance.planner.placement` are compared
with."""

from __future__ import annotations

import math

import numpy as np

from jaxdl.core.solver import milp

_SOLVER_SEC = 2.0


def lower_bound(
    costs: np.ndarray, num_devices: int, sizes: np.ndarray | None = None, memory: float = math.inf
) -> float:
    """A makespan that no placement is below: of each phase the mean load, or the largest shard's.

    With sizes and the memory of a device, the mean is that of the devices without a shard that leaves no room for any
    other; and a device must have what the others have no room for, so a shard has at least the cheapest such company.
    """
    costs = costs.reshape(len(costs), -1)
    if sizes is None:
        return float(np.maximum(_mean_load(costs, num_devices), costs.max(axis=0)).sum())
    alone = sizes + sizes.min() > memory
    rest = num_devices - int(alone.sum())
    mean = _mean_load(costs[~alone], rest) if rest > 0 else np.zeros(costs.shape[1])
    least = sizes.sum() - (num_devices - 1) * memory
    company = [_with_company(column, sizes, least) for column in costs.T]
    return float(np.maximum(mean, company).sum())


def _mean_load(costs: np.ndarray, num_devices: int) -> np.ndarray:
    """Of each phase the mean load of a device; of costs that are whole numbers the next of these: a load is one."""
    mean = costs.sum(axis=0) / num_devices
    return np.where((costs % 1 == 0).all(axis=0), np.ceil(mean - 1e-9), mean)


def _with_company(costs: np.ndarray, sizes: np.ndarray, least: float) -> float:
    """What a device costs at least that has the most expensive shard, and shards of `least` bytes or more in all.

    That is a covering knapsack, which HiGHS solves in milliseconds; the bound that it proves is one if it ends early.
    """
    import scipy.optimize

    shard = int(costs.argmax())
    others = np.delete(np.arange(len(costs)), shard)
    wanted = (least - sizes[shard]) / max(float(sizes.max()), 1e-300)
    if wanted <= 0 or not len(others) or not costs.any():
        return float(costs[shard])
    solution = milp(
        costs[others] / costs[shard],
        constraints=scipy.optimize.LinearConstraint(sizes[others][None] / sizes.max(), wanted, np.inf),
        integrality=np.ones(len(others)),
        bounds=scipy.optimize.Bounds(0, 1),
        options={"time_limit": _SOLVER_SEC},
    )
    return float(costs[shard] * (1 + max(0.0, solution.mip_dual_bound or 0.0)))
