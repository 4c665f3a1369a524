"""A fleet in simulated time: runs arrive, are given nodes, are resized, and end; beside static partitions.

A resized run does nothing for as long as it takes to save, stop and start again; so does one that starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdl.fleet.policy import Rules, Run, decide, fair_shares, fairness_loss

OVER_COMPUTATION = (0.265, 0.442, 1.134, 2.237)
"""Seconds of dense exchange over seconds of computation on 4 hosts, as measured by `python -m jaxdl.bench cluster` at
several rates of the links (RESULTS.md, Clusters)."""
_SOON = 1e-6


@dataclass(frozen=True)
class Job:
    """A run of the simulation."""

    name: str
    arrival_sec: float
    examples: float
    """All of its work."""
    speeds: Mapping[int, float]
    """Nodes that it may have -> examples a second."""
    static_nodes: int
    """What it has under static partitions."""
    weight: float = 1.0


@dataclass(frozen=True)
class Costs:
    """What changes of a run take, and how often it may be resized."""

    start_sec: float = 60.0
    resize_sec: float = 120.0
    """Of saving, stopping and starting on other nodes."""
    between_sec: float = 1200.0
    """The least time between two changes of a run."""


@dataclass(frozen=True)
class Result:
    """What became of the jobs."""

    policy: str
    started_sec: Mapping[str, float]
    ended_sec: Mapping[str, float]
    utilization: float
    """The part of the nodes that had a run, until the last arrival."""
    fairness_loss: float
    """The mean over that time, see `jaxdl.fleet.policy.fairness_loss`; of the runs that are there, waiting or not."""
    lost: float
    """The part of the nodes' time with a run in which it was resized."""
    num_resized: int
    most_resized: int
    """Runs resized by one decision."""
    history: Sequence[tuple[float, Mapping[str, int]]]
    """When, and the nodes of each run from then on."""

    def completion_sec(self, jobs: Sequence[Job]) -> np.ndarray:
        """From the arrival to the end of each job, `[job]`."""
        return np.array([self.ended_sec[job.name] - job.arrival_sec for job in jobs])


@dataclass
class _State:
    left: float
    nodes: int = 0
    idle_until: float = 0.0
    fixed_until: float = 0.0
    resizing: bool = False


Choose = Callable[[float, Sequence[Job], Mapping[str, _State]], Mapping[str, int]]


def elastic(jobs: Sequence[Job], num_nodes: int, rules: Rules, costs: Costs) -> Result:
    """The jobs under `jaxdl.fleet.policy.decide`, at each arrival, each end, and when a run may be resized again."""

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Mapping[str, int]:
        runs = [
            Run(
                job.name,
                job.speeds,
                number,
                job.weight,
                nodes=states[job.name].nodes,
                fixed=states[job.name].fixed_until > now + _SOON,
            )
            for number, job in enumerate(there)
        ]
        return decide(runs, num_nodes, rules).nodes

    return _played("elastic", jobs, num_nodes, costs, choose)


def static(jobs: Sequence[Job], num_nodes: int, costs: Costs) -> Result:
    """The jobs in the order of arrival, each on its `static_nodes` until it ends."""

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Mapping[str, int]:
        del now
        found = {job.name: states[job.name].nodes for job in there}
        for job in there:
            if not found[job.name]:
                if sum(found.values()) + job.static_nodes > num_nodes:
                    break
                found[job.name] = job.static_nodes
        return found

    return _played("static", jobs, num_nodes, costs, choose)


def _played(policy: str, jobs: Sequence[Job], num_nodes: int, costs: Costs, choose: Choose) -> Result:
    waiting, there = sorted(jobs, key=lambda job: job.arrival_sec), list[Job]()
    horizon = waiting[-1].arrival_sec
    states = {job.name: _State(job.examples) for job in jobs}
    started: dict[str, float] = {}
    ended: dict[str, float] = {}
    history: list[tuple[float, Mapping[str, int]]] = []
    busy = unfair = lost = whole = now = 0.0
    changes: list[int] = []
    while waiting or there:
        upcoming = [job.arrival_sec for job in waiting[:1]]
        for job in there:
            state = states[job.name]
            if state.nodes:
                upcoming.append(max(now, state.idle_until) + state.left / job.speeds[state.nodes])
                upcoming += [state.fixed_until] if state.fixed_until > now + _SOON else []
        later = min(upcoming)
        counted = max(0.0, min(later, horizon) - now)
        nodes = {job.name: states[job.name].nodes for job in there}
        busy += counted * sum(nodes.values())
        unfair += counted * fairness_loss(nodes, shares_of(there, num_nodes), num_nodes)
        for job in there:
            state = states[job.name]
            idle = min(later, max(now, state.idle_until)) - now
            lost += idle * state.nodes * state.resizing
            whole += (later - now) * state.nodes
            if state.nodes:
                state.left -= (later - now - idle) * job.speeds[state.nodes]
        now = later
        for job in [job for job in there if states[job.name].nodes and states[job.name].left <= _SOON * job.examples]:
            there.remove(job)
            ended[job.name] = now
        while waiting and waiting[0].arrival_sec <= now + _SOON:
            there.append(waiting.pop(0))
        resized = 0
        for name, size in choose(now, there, states).items():
            state = states[name]
            if size == state.nodes:
                continue
            resized += int(state.nodes > 0)
            state.resizing = name in started
            state.idle_until = now + (costs.resize_sec if state.resizing else costs.start_sec)
            state.nodes, state.fixed_until = size, now + costs.between_sec
            started.setdefault(name, now)
        changes.append(resized)
        history.append((now, {job.name: states[job.name].nodes for job in there}))
    return Result(
        policy,
        started,
        ended,
        busy / (num_nodes * horizon),
        unfair / horizon,
        lost / whole,
        sum(changes),
        max(changes),
        history,
    )


def shares_of(there: Sequence[Job], num_nodes: int) -> Mapping[str, float]:
    """Fair shares of all jobs that are there, down to a part of a node where they are more than the nodes."""
    runs = [Run(job.name, {1: 1.0, max(job.speeds): 1.0}, number, job.weight) for number, job in enumerate(there)]
    if len(runs) <= num_nodes:
        return fair_shares(runs, num_nodes)
    weight = sum(run.weight for run in runs)
    return {run.name: num_nodes * run.weight / weight for run in runs}


def speed_curve(sizes: Sequence[int], over_computation: float, examples_per_sec: float = 1.0) -> dict[int, float]:
    """Nodes -> examples a second, of a run with a batch of each node and dense exchange, by its cost on 4 nodes.

    On n nodes a ring sends (n - 1) / n of the gradients twice: the exchange takes (n - 1) / n over 3 / 4 of that on 4.
    """
    return {
        size: examples_per_sec * size / (1 + over_computation * (size - 1) / size / 0.75)
        if size > 1
        else examples_per_sec
        for size in sizes
    }


def made_up_jobs(count: int, num_nodes: int, seed: int, *, between_sec: float = 1200.0) -> list[Job]:
    """Jobs with Poisson arrivals, log-normal work and measured cost of their exchange (`OVER_COMPUTATION`).

    A day of Dorm's evaluation was like that: 50 applications, 20 minutes apart on average (arXiv 1704.06738).
    """
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(between_sec, count))
    jobs = []
    for number in range(count):
        most = int(draw.choice([2, 4, 8, 16]))
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= min(most, num_nodes)]
        speeds = speed_curve(sizes, float(draw.choice(OVER_COMPUTATION)))
        hours = float(np.exp(draw.normal(math.log(3.0), 1.0)))  # On one node.
        asked = int(draw.choice(sizes))
        weight = float(draw.choice([1.0, 2.0, 4.0]))
        jobs.append(Job(f"run{number:02d}", float(arrivals[number]), 3600 * hours, speeds, asked, weight))
    return jobs
