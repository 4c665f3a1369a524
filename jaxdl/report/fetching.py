"""Metrics of steps on the host, and under the names that reports have.

Of replicas that have parameters of their own (`jaxdl.training.rounds`) the metrics of a step are `[replica]`. A process
sees those of its own replicas alone: what other processes have parts of is named `own/NAME`. What all have trained on
is known when they merge; then every process has the totals, `joined/...`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxdl.report.skips import NONFINITE, REASON, Skip

OWN, JOINED, SUMS = "own/", "joined/", "sums/"
Fetched = Mapping[str, np.ndarray]
"""The metrics of a step."""


class TaskMetrics(Protocol):
    """What is read of a `jaxdl.training.tasks.Task`."""

    def metrics(self, sums: Mapping[str, Any], spec: Any) -> dict[str, float]:
        """From sums over examples to metrics."""
        ...


def fetch(steps: Sequence[Mapping[str, jax.Array]]) -> list[Fetched]:
    """The metrics of steps on the host; those that other processes have parts of as `own/NAME`, this process's rows.

    Waits for them. Which gradients were not finite is fetched of steps that were skipped for that alone.
    """
    rows = [dict(_rows(name, x) for name, x in step.items() if name != NONFINITE) for step in steps]
    return [fetched | _nonfinite(step, fetched) for step, fetched in zip(steps, jax.device_get(rows), strict=True)]


def _nonfinite(step: Mapping[str, jax.Array], fetched: Fetched) -> Fetched:
    if NONFINITE not in step or not np.any(reasons(fetched) & Skip.GRADIENT):
        return {}
    return jax.device_get(dict([_rows(NONFINITE, step[NONFINITE])]))


def reasons(metrics: Fetched) -> np.ndarray:
    """Why a step was skipped, the bits of `jaxdl.report.skips.Skip`: int32, `[replica]` of the replicas that are seen
    here."""
    bits = metrics.get(REASON, metrics.get(OWN + REASON, 0))
    return np.atleast_1d(np.asarray(bits)).astype(np.int32)


def _rows(name: str, x: jax.Array) -> tuple[str, Any]:
    if x.is_fully_addressable or x.is_fully_replicated:
        return name, x
    parts = {shard.index[0].start: shard.data for shard in x.addressable_shards}
    rows = np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
    return (name if len(rows) == len(x) else OWN + name), rows


def step_metrics(steps: Sequence[Fetched], task: TaskMetrics, spec: Any) -> dict[str, float]:
    """The metrics of some steps as reports name them: those of the task over all of them, others of the last one.

    A bad step has no part in the means, unless there is nothing else. If other processes have replicas too, those of
    the task are of all replicas up to the last merge, where one was among the steps; `own/...` those of this process's
    replicas.
    """
    own_steps = [_with_prefix(step, OWN) for step in steps]
    if not any(own_steps):
        return _mean_metrics(steps, task, spec) | _agreement_metrics(joint_totals(steps))
    shared = [{name: x for name, x in step.items() if not name.startswith((OWN, JOINED))} for step in steps]
    own_metrics = {OWN + name: value for name, value in _mean_metrics(own_steps, task, spec).items()}
    return own_metrics | _last_metrics(shared) | total_metrics(joint_totals(steps), task, spec)


def total_metrics(totals: Mapping[str, float], task: TaskMetrics, spec: Any) -> dict[str, float]:
    """The metrics of what replicas have joined (`joined`) as reports name them; empty if that is nothing."""
    if not totals.get(f"{SUMS}weight"):
        return {}
    return task.metrics(_with_prefix(totals, SUMS), spec) | _agreement_metrics(totals)


def metrics_of(task: TaskMetrics, sums: Mapping[str, Any], spec: Any) -> dict[str, float]:
    """The task's metrics of sums; each is NaN if nothing was counted, in which case the task raises ConfigError."""
    if sums["weight"]:
        return task.metrics(sums, spec)
    names = ["loss"]
    with contextlib.suppress(ArithmeticError, ValueError):  # Such sums may be impossible together.
        names += task.metrics({**sums, "weight": 1.0}, spec)
    return dict.fromkeys(names, math.nan)


def joint_totals(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The totals over all replicas that merges among the steps have given: `sums/...`, `seen`; empty without one."""
    totals: dict[str, float] = {}
    for step in steps:
        for name, value in _with_prefix(step, JOINED).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def metric_here(metrics: Fetched, name: str) -> Any:
    """A metric of a step, of the replicas that this process can see."""
    return metrics[name] if name in metrics else metrics[OWN + name]


def _agreement_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    weight = totals.get(f"{SUMS}weight")
    return {"agreement/loss": totals[f"{SUMS}loss"] / weight} if weight else {}


def _mean_metrics(steps: Sequence[Fetched], task: TaskMetrics, spec: Any) -> dict[str, float]:
    good = [step for step in map(without_bad, steps) if not np.any(step.get("bad_in_row", 0))] or steps
    sums = {name: _total(good, name) for name in _with_prefix(steps[0], SUMS)}
    counted = [without_empty(step) for step in steps if not np.all(reasons(step) & Skip.EMPTY)]
    metrics = metrics_of(task, sums, spec) | _last_metrics(counted or steps)
    if any(REASON in step for step in steps):
        metrics[REASON] = float(np.bitwise_or.reduce(np.concatenate([reasons(step) for step in steps])))
    return metrics


def _total(steps: Sequence[Fetched], name: str) -> Any:
    """The total of one of the task's sums over steps, and over the replicas that are seen here: a float, or float64."""
    replicas = tuple(range(np.ndim(steps[0][SUMS + "weight"])))
    total = sum(np.sum(step[SUMS + name], axis=replicas, dtype=np.float64) for step in steps)
    return total if np.ndim(total) else float(total)


def _last_metrics(steps: Sequence[Fetched]) -> dict[str, float]:
    return {
        name: float(np.mean(value))
        for step in steps
        for name, value in step.items()
        if not name.startswith((SUMS, JOINED)) and name not in ("bad_in_row", REASON, NONFINITE)
    }


def _with_prefix(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin so, by the rest of them."""
    return {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}


def without_bad(metrics: Fetched) -> Fetched:
    """The metrics of a step, `[replica]`, of the replicas in which it was good; as they are if there is none."""
    bad = np.asarray(metrics.get("bad_in_row", 0))
    if not bad.ndim or bad.all() or not bad.any():
        return metrics
    return {name: x[bad == 0] if np.ndim(x) else x for name, x in metrics.items()}


def without_empty(metrics: Fetched) -> Fetched:
    """The metrics of a step, `[replica]`, of the replicas in which some example counted; as they are without any."""
    empty = reasons(metrics) & Skip.EMPTY != 0
    if empty.size == 1 or empty.all() or not empty.any():
        return metrics
    return {name: x[~empty] if np.shape(x)[:1] == empty.shape else x for name, x in metrics.items()}
