"""A run of learners and a syncer on a virtual clock: the syncer's own code, with no sockets, threads or waiting."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxdl.parallel.asynchrony.centre import Centre, Record, centre_of
from jaxdl.parallel.asynchrony.events import SECOND_US, Arrive, Event, Join, Leave, Release, Tick
from jaxdl.parallel.asynchrony.outer import Vector, digest
from jaxdl.parallel.asynchrony.policy import is_finished

_DECIDED, _HASHES = ("arrive", "merge", "release", "tick"), ("anchor", "delta")


class Worker(Protocol):
    """What a learner computes; the same object serves the simulator, a learner over sockets, and a replay."""

    def initial(self) -> Vector:
        """The initial parameters."""
        ...

    def run(self, anchor: Vector, num_steps: int) -> tuple[Vector, float]:
        """(the delta after `num_steps` steps from the anchor, its weight)."""
        ...


@dataclass(frozen=True)
class Round:
    """One round of a simulated learner."""

    took_us: int
    """Time from its anchor (or from the connection, if it came back with its work) to the arrival of its delta."""
    steps: int | None = None
    """Steps that it made; None: as many as it was asked for."""
    weight: float | None = None
    """None: what the worker says."""
    finite: bool = True
    known: bool = True
    """Whether its anchor is still known to the syncer."""
    number: int | None = None
    """Its number in the learner's life; None: one more than the last."""


@dataclass(frozen=True)
class Stay:
    """A time for which a simulated learner is connected."""

    join_us: int
    leave_us: int | None
    """None: until the run is over."""
    life: str
    rounds: Callable[[int, int], Round | None]
    """(number of the round in this stay from 0, the steps asked for) -> the round; None: it does nothing more."""
    finished: bool = False
    """Whether it leaves because it has finished."""
    round: int = 0
    working: bool = False
    """Whether it comes back with an anchor, after a lost connection."""
    resumes: str = ""
    why: str = ""


class Simulation:
    """Runs learners, each with its stays in their order. `workers` make the deltas; without it they are empty."""

    def __init__(
        self,
        centre: Centre,
        stays: Mapping[int, Sequence[Stay]],
        workers: Callable[[int, str], Worker] | None = None,
    ) -> None:
        self.centre = centre
        self._make = workers or (lambda learner, resumes: _Nothing())
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = itertools.count()
        self._stays = {learner: list(all_) for learner, all_ in stays.items()}
        self._current: dict[int, _Current] = {}
        self._workers: dict[tuple[int, str], Worker] = {}

    def run(self, end_us: int = 10**15) -> None:
        """Returns when the run is over, nothing more happens, or at `end_us`."""
        for learner, stays in self._stays.items():
            for stay in stays:
                self._at(stay.join_us, lambda at_us, who=learner, stay=stay: self._join(who, stay, at_us))
        while self._events and self._events[0][0] <= end_us:
            at_us, _, act = heapq.heappop(self._events)
            wake_us = self.centre.wake_us
            if wake_us is not None and wake_us <= at_us:
                heapq.heappush(self._events, (at_us, -next(self._order), act))
                self._tell(Tick(wake_us))
                continue
            act(at_us)
            while not self._events and (wake_us := self.centre.wake_us) is not None:
                self._tell(Tick(wake_us))

    def _at(self, at_us: int, act: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (at_us, next(self._order), act))

    def _join(self, learner: int, stay: Stay, at_us: int) -> None:
        worker = self._workers.setdefault((learner, stay.life), self._make(learner, stay.resumes))
        if self.centre.anchor is None:
            self.centre.begin(worker.initial())
        before = self._current.get(learner)
        same = before is not None and before.stay.life == stay.life
        current = _Current(stay, before.round if same and before else stay.round)
        self._current[learner] = current
        if same and before:
            current.anchor, current.version, current.steps = before.anchor, before.version, before.steps
        if stay.leave_us is not None:
            self._at(stay.leave_us, lambda at_us: self._leave(learner, stay, at_us))
        self._tell(Join(at_us, learner, stay.life, stay.round, stay.working, stay.resumes))
        if stay.working and not current.asked:
            self._work(learner, current, at_us)

    def _leave(self, learner: int, stay: Stay, at_us: int) -> None:
        current = self._current[learner]
        if current.stay is stay and not current.gone:
            current.gone = True
            self._tell(Leave(at_us, learner, stay.finished, stay.why))

    def _work(self, learner: int, current: _Current, at_us: int) -> None:
        """Plans the arrival of the next delta."""
        current.asked = True
        plan = current.stay.rounds(current.count, current.steps)
        current.count += 1
        if plan is not None:
            self._at(at_us + plan.took_us, lambda at_us: self._arrive(learner, current, plan, at_us))

    def _arrive(self, learner: int, current: _Current, plan: Round, at_us: int) -> None:
        if current.gone:
            return
        current.round = current.round + 1 if plan.number is None else plan.number
        steps = current.steps if plan.steps is None else plan.steps
        worker = self._workers[learner, current.stay.life]
        delta, weight = worker.run(current.anchor, steps)
        weight = weight if plan.weight is None else plan.weight
        anchor = digest(current.anchor) if plan.known else ""
        self._tell(
            Arrive(at_us, learner, current.round, current.version, anchor, weight, steps, digest(delta), plan.finite),
            delta,
        )

    def _tell(self, event: Event, delta: Vector | None = None) -> None:
        for decision in self.centre.handle(event, delta):
            if not isinstance(decision, Release):
                continue
            current = self._current[decision.learner]
            if decision.over:
                if current.stay.leave_us is None:
                    self._at(event.at_us + 1, lambda at_us, who=decision.learner: self._go_home(who, at_us))
                continue
            assert self.centre.anchor is not None
            current.anchor, current.version, current.steps = self.centre.anchor, decision.version, decision.steps
            self._work(decision.learner, current, event.at_us)

    def _go_home(self, learner: int, at_us: int) -> None:
        current = self._current[learner]
        if not current.gone:
            current.gone = True
            self._tell(Leave(at_us, learner, finished=True))

    @property
    def is_finished(self) -> bool:
        """Whether every learner has finished."""
        return is_finished(self.centre.policy, self.centre.standing, self.centre.standing.at_us)


class _Current:
    """A simulated learner in one of its stays."""

    def __init__(self, stay: Stay, round: int) -> None:
        self.stay, self.round = stay, round
        self.anchor: Vector = np.zeros(0, np.float32)
        self.version = self.steps = self.count = 0
        self.asked = self.gone = False


class _Nothing:
    """A worker whose deltas are empty: then only the decisions mean something."""

    def initial(self) -> Vector:
        return np.zeros(0, np.float32)

    def run(self, anchor: Vector, num_steps: int) -> tuple[Vector, float]:
        return anchor, float(num_steps)


def steady(
    speeds: Sequence[float], *, seed: int = 0, jitter: float = 0.1, kills: Iterable[tuple[int, float, float]] = ()
) -> dict[int, list[Stay]]:
    """Learners of given speeds in steps per second, whose rounds vary by `jitter` of their duration.

    `kills` are (learner, second of its death, seconds until it is back). All is drawn from the seed.
    """
    stays: dict[int, list[Stay]] = {}
    for learner, speed in enumerate(speeds):
        join_us, deaths = learner + 1, sorted((at, back) for who, at, back in kills if who == learner)
        stays[learner] = []
        for number, (at, back) in enumerate([*deaths, (None, 0.0)]):
            draw = random.Random(f"{seed} {learner} {number}")

            def rounds(_: int, steps: int, draw: random.Random = draw, speed: float = speed) -> Round:
                return Round(max(1, int(steps / speed * (1 + jitter * (2 * draw.random() - 1)) * SECOND_US)))

            leave_us = None if at is None else max(int(at * SECOND_US), join_us + 1)
            stays[learner].append(Stay(join_us, leave_us, f"{learner}.{number}", rounds))
            join_us = 0 if leave_us is None else leave_us + int(back * SECOND_US)
    return stays


def decided(records: Sequence[Record]) -> list[Record]:
    """What was decided: each delta's fate, merge, release and tick, in their order, without the values of vectors."""
    return [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in record.items()
            if name not in _HASHES
        }
        for record in records
        if record["kind"] in _DECIDED
    ]


def simulated(records: Sequence[Record]) -> list[Record]:
    """`decided` by a simulation whose learners come, take their time and go as those of a tape. Raises ValueError."""
    new_records: list[Record] = []
    centre = centre_of(records[0], new_records.append)
    Simulation(centre, from_tape(records)).run()
    return decided(new_records)


def from_tape(records: Sequence[Record]) -> dict[int, list[Stay]]:
    """The learners of a tape, as they came, took their time and went. Raises ValueError if its syncer was restarted.

    Only durations are taken from it: what the syncer decided is left for the simulation to find.
    """
    if any(record["kind"] == "restart" for record in records):
        raise ValueError("the syncer of this tape was restarted; a simulation cannot go back")
    stays: dict[int, list[Stay]] = {}
    open_: dict[int, tuple[Record, list[Round]]] = {}
    since: dict[int, int] = {}
    for record in records:
        learner, kind = record.get("learner", -1), record["kind"]
        if kind == "join":
            open_[learner], since[learner] = (record, []), record["at_us"]
        elif kind == "release" and not record["over"]:  # After the last anchor nothing is begun.
            since[learner] = record["at_us"]
        elif kind == "arrive":
            open_[learner][1].append(_round_of(record, since[learner]))
        elif kind == "leave":
            stays.setdefault(learner, []).append(_stay(*open_.pop(learner), record))
    for learner, (join, rounds) in open_.items():
        stays.setdefault(learner, []).append(_stay(join, rounds, None))
    return stays


def _round_of(record: Record, since_us: int) -> Round:
    return Round(
        record["at_us"] - since_us,
        steps=record["steps"],
        weight=record["weight"],
        finite=record["finite"],
        known=record["verdict"] != "unknown",
        number=record["round"],
    )


def _stay(join: Record, rounds: list[Round], leave: Record | None) -> Stay:
    return Stay(
        join["at_us"],
        leave["at_us"] if leave else None,
        join["life"],
        lambda number, steps: rounds[number] if number < len(rounds) else None,
        finished=bool(leave and leave["finished"]),
        round=join["round"],
        working=join["working"],
        resumes=join["resumes"],
        why=leave["why"] if leave else "",
    )
