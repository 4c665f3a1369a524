"""A fleet in simulated time: runs arrive, are given nodes, are resized, and end; beside static partitions.

A resized run does nothing for as long as it takes to save, stop and start again; so does one that starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxdl.platform.fleet.policy import Decision, Rules, Run, at_share, decide, fair_shares, fairness_loss
from jaxdl.platform.fleet.resources import Amounts, Room, most_hosts, totals
from jaxdl.platform.fleet.shared_nodes_policy import decide_mixed, dominant, fair_hosts

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
    needs: Amounts = field(default_factory=dict)
    """What each of its hosts takes of a node, see `Run.needs`."""

    @property
    def static_size(self) -> int:
        """`static_nodes` where it may have so many, else the next fewer that it may have, or its fewest."""
        return at_share(Run(self.name, self.speeds, 0), self.static_nodes)


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
    """The part of the nodes that had a run, until the last arrival; of shared nodes, the mean over the resources."""
    fairness_loss: float
    """The mean over that time, see `jaxdl.platform.fleet.policy.fairness_loss`; of the runs that are there, waiting or
    not."""
    lost: float
    """The part of the nodes' time with a run in which it was resized."""
    num_resized: int
    most_resized: int
    """Runs resized by one decision."""
    history: Sequence[tuple[float, Mapping[str, int]]]
    """When, and the nodes of each run from then on."""
    decide_sec: Sequence[float] = ()
    """What each decision on shared nodes took."""
    num_struck: int = 0
    """Decisions in which `Rules.solve_sec` struck."""

    def completion_sec(self, jobs: Sequence[Job]) -> np.ndarray:
        """From the arrival to the end of each job, `[job]`."""
        return np.array([self.ended_sec[job.name] - job.arrival_sec for job in jobs])


@dataclass
class _State:
    left: float
    nodes: int = 0
    places: Mapping[str, int] = field(default_factory=dict)
    idle_until: float = 0.0
    fixed_until: float = 0.0
    resizing: bool = False


Choose = Callable[[float, Sequence[Job], Mapping[str, _State]], Decision]
Measure = Callable[[Sequence[Job], Mapping[str, int]], tuple[float, float]]
"""(jobs that are there, their nodes) -> (the part of the nodes in use, the fairness loss)."""


def _as_runs(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> list[Run]:
    return [
        Run(
            job.name,
            job.speeds,
            number,
            job.weight,
            nodes=states[job.name].nodes,
            fixed=states[job.name].fixed_until > now + _SOON,
            needs=job.needs,
            places=states[job.name].places,
        )
        for number, job in enumerate(there)
    ]


def play_elastic(jobs: Sequence[Job], num_nodes: int, rules: Rules, costs: Costs) -> Result:
    """The jobs under `jaxdl.platform.fleet.policy.decide`, at each arrival, each end, and when a run may be resized
    again."""

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Decision:
        return decide(_as_runs(now, there, states), num_nodes, rules)

    return _play("elastic", jobs, costs, choose, _of_whole(num_nodes))


def play_static(jobs: Sequence[Job], num_nodes: int, costs: Costs) -> Result:
    """The jobs in the order of arrival, each on its `static_size` until it ends."""

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Decision:
        del now
        nodes = {job.name: states[job.name].nodes for job in there}
        for job in there:
            if not nodes[job.name]:
                if sum(nodes.values()) + job.static_size > num_nodes:
                    break
                nodes[job.name] = job.static_size
        return Decision(nodes, {}, {})

    return _play("static", jobs, costs, choose, _of_whole(num_nodes))


def _of_whole(num_nodes: int) -> Measure:
    def measure(there: Sequence[Job], nodes: Mapping[str, int]) -> tuple[float, float]:
        return sum(nodes.values()) / num_nodes, fairness_loss(nodes, shares_of(there, num_nodes), num_nodes)

    return measure


def play_elastic_shared(jobs: Sequence[Job], nodes: Mapping[str, Amounts], rules: Rules, costs: Costs) -> Result:
    """As `play_elastic`, on nodes that jobs share, under `jaxdl.platform.fleet.shared_nodes_policy.decide_mixed`."""
    seconds: list[float] = []
    struck = 0

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Decision:
        nonlocal struck
        began = time.perf_counter()
        decision = decide_mixed(_as_runs(now, there, states), nodes, rules)
        seconds.append(time.perf_counter() - began)
        struck += not decision.proven
        return decision

    played = _play("elastic", jobs, costs, choose, _of_shared(nodes))
    return replace(played, decide_sec=seconds, num_struck=struck)


def play_static_shared(jobs: Sequence[Job], nodes: Mapping[str, Amounts], costs: Costs) -> Result:
    """As `play_static`, on nodes that jobs share: each where it fits first, until it ends."""

    def choose(now: float, there: Sequence[Job], states: Mapping[str, _State]) -> Decision:
        del now
        room = Room(nodes)
        places = {job.name: states[job.name].places for job in there}
        for job in there:
            room.take(job.needs, places[job.name])
        for job in there:
            if not places[job.name]:
                if (place := room.place(job.needs, job.static_size)) is None:
                    break
                places[job.name] = place
        return Decision({name: sum(hosts.values()) for name, hosts in places.items()}, {}, {}, places)

    return _play("static", jobs, costs, choose, _of_shared(nodes))


def _of_shared(nodes: Mapping[str, Amounts]) -> Measure:
    total = totals(nodes)

    def measure(there: Sequence[Job], hosts: Mapping[str, int]) -> tuple[float, float]:
        used = [sum(hosts[job.name] * job.needs.get(name, 0.0) for job in there) / has for name, has in total.items()]
        runs = [Run(job.name, job.speeds, 0, job.weight, needs=job.needs) for job in there]
        shares = fair_hosts(runs, nodes, from_least=False)
        far = (abs(hosts[run.name] - shares[run.name]) * dominant(run, total, len(nodes))[0] for run in runs)
        return sum(used) / len(used), sum(far)

    return measure


def _play(policy: str, jobs: Sequence[Job], costs: Costs, choose: Choose, measure: Measure) -> Result:
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
        if counted:
            used, loss = measure(there, nodes)
            busy, unfair = busy + counted * used, unfair + counted * loss
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
        decision = choose(now, there, states)
        for name, size in decision.nodes.items():
            state, places = states[name], decision.places.get(name, {})
            if size == state.nodes and places == state.places:
                continue
            resized += int(state.nodes > 0)
            state.resizing = name in started
            state.idle_until = now + (costs.resize_sec if state.resizing else costs.start_sec)
            state.nodes, state.places, state.fixed_until = size, places, now + costs.between_sec
            started.setdefault(name, now)
        changes.append(resized)
        history.append((now, {job.name: states[job.name].nodes for job in there}))
    return Result(
        policy,
        started,
        ended,
        busy / horizon,
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


def random_jobs(count: int, num_nodes: int, seed: int, *, between_sec: float = 1200.0) -> list[Job]:
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


def random_shared_jobs(count: int, num_nodes: int, seed: int) -> tuple[list[Job], dict[str, Amounts]]:
    """(Jobs whose hosts take parts of nodes, nodes): as `random_jobs`; every fifth node has CPUs alone.

    Arrivals come so much faster as there are more nodes, and hosts to a node.
    """
    nodes: dict[str, Amounts] = {
        f"node{number}": {"cpus": 128.0, "memory-gb": 512.0} | ({} if number % 5 == 4 else {"gpus": 8.0})
        for number in range(num_nodes)
    }
    draw = np.random.default_rng(seed)
    jobs = []
    for job in random_jobs(count, num_nodes, seed, between_sec=1200.0 * 20 / num_nodes / 3):
        gpus, memory = float(draw.choice([0, 1, 2, 4, 8])), float(draw.choice([16, 64]))
        needs = {"gpus": gpus, "cpus": 8 * gpus, "memory-gb": 16 + 32 * gpus} if gpus else {"cpus": 16.0}
        needs = {"memory-gb": memory} | needs
        room = sum(most_hosts(needs, has) for has in nodes.values())
        speeds = {size: speed for size, speed in job.speeds.items() if size <= room}
        jobs.append(replace(job, needs=needs, speeds=speeds, static_nodes=min(job.static_nodes, max(speeds))))
    return jobs, nodes
