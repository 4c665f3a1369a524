"""The server of a fleet: one loop that reads what is asked, sees what runs, decides, and starts and stops runs.

All that it has to know after a crash is in the journal, in the files of the attempts, and in the locks of the runs: a
server that is killed at any moment is followed by one that knows the same. An event is on disk before what it says is
done. So an attempt may be in the journal that was never started: it is taken for lost, and another follows.
"""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxdl.parallel.cluster import exits
from jaxdl.platform.fleet.engine import LOST, Engine
from jaxdl.platform.fleet.member import (
    CANCELLED,
    COMPLETED,
    ENDED,
    FAILED,
    HALTED,
    HELD,
    RESUMABLE,
    RUNNING,
    STOPPING,
    WAITING,
    Member,
)
from jaxdl.platform.fleet.members import ENDING, KILLED, LEFT, RESUMED, STARTED, STOPPED, Members
from jaxdl.platform.fleet.placing import follow, resize, room_of
from jaxdl.platform.fleet.policy import Decision, Rules, Run, decide
from jaxdl.platform.fleet.queued import queue, unqueue
from jaxdl.platform.fleet.resources import Amounts, Room, hosts_of
from jaxdl.platform.fleet.shared_nodes_policy import decide_mixed
from jaxdl.platform.fleet.speed import Estimate, estimates, last_speed, last_step
from jaxdl.platform.fleet.store import DamagedFile, Store
from jaxdl.platform.fleet.view import Views
from jaxdl.report.status import State

_AS_STATUS = {COMPLETED: State.COMPLETED, FAILED: State.FAILED, CANCELLED: State.HALTED, HALTED: State.HALTED}
_SAVED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a run that was asked to save and end, and did."""
_FIRST_PAUSE_SEC, _LONGEST_PAUSE_SEC = 5.0, 300.0
_LEAST_GRACE_SEC = 10.0
"""What a run has at least to save and end after a server has asked it, also where the server before meant to."""
_AGAIN_SEC, _LONGER = 60.0, 10.0
"""A decision that `Rules.solve_sec` cut short is made once more after so long, with so many times as long."""
_START_SEC = 600.0
"""How long a run that reports nothing yet counts as starting; to resize it then would lose its whole start."""


@dataclass(frozen=True)
class Settings:
    """How a fleet is run."""

    rules: Rules = field(default_factory=Rules)
    between_sec: float = 600.0
    """The least time between the first step of a run on its nodes and its next change; ten times what saving and
    starting it takes is a good choice."""
    failures: int = 3
    """Number of failures in a row after which a run has failed, if it never ran for `between_sec` between them."""
    grace_sec: float = 120.0
    """How long a run may take to save and end when it is stopped; then it is killed."""
    network: str | None = None
    """The rate of a node's network, for which submissions compute their exchange."""


class Server:
    """Serves the fleet of a store, whose lease the caller has."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        settings: Settings,
        *,
        now: Callable[[], float] = time.time,
        read_only: bool = False,
    ) -> None:
        """With `read_only`, another server may be writing; only `propose` is for such a one, which writes nothing."""
        self.store, self.engine, self.settings = store, engine, settings
        engine.grace_sec = settings.grace_sec
        self._now = now
        self._read_only = read_only
        self.known = Members(store, now, read_only=read_only)
        self.decision: Decision | None = None
        self._situation: Any = None
        self._again = math.inf
        """When a decision on the same situation is due once more."""
        self._may_start = False
        self._signalled: dict[tuple[str, int], float] = {}
        """(run, attempt) -> when this server first asked it to save and end: the one before may have had no time."""
        self._views = Views(store, self._view_of)

    def turn(self) -> None:
        """One turn of the loop: reads, polls, decides, acts, and writes what `status` shows."""
        if not self.engine.look():
            self._views.write(self.view(), self.members, self.known.ended)
            return
        self.known.read()
        self._poll()
        self._obey()
        self._decide()
        self._act()
        self._views.write(self.view(), self.members, self.known.ended)
        self.known.ended.clear()

    @property
    def members(self) -> Mapping[str, Member]:
        """All runs."""
        return self.known.all

    @property
    def active(self) -> Mapping[str, Member]:
        """The runs that have not ended, in their order."""
        return self.known.active

    @property
    def idle(self) -> bool:
        """Whether all runs have ended."""
        return not self.active

    @property
    def sharing_runs(self) -> list[str]:
        """The runs that may be running now on parts of nodes."""
        return [name for name, member in self.active.items() if member.alive and member.submission.needs]

    def propose(self) -> Decision:
        """The decision for what there is to run when what has to stop has saved; of a server that reads only."""
        self.known.read()
        for member in self.active.values():
            self._look(member)
            if member.alive:
                follow(member, self.engine, self.known)
                member.waits = self.engine.waits(member.submission, member.attempt)
        self._obey()
        for member in [one for one in self.active.values() if one.state == STOPPING]:
            self._leave(member, _SAVED[0], None, member.reason)
        self._obey()
        return self._decision(self._runs(), self.engine.resources(), self.settings.rules)

    # The loop, in the order of `turn`.

    def _poll(self) -> None:
        for member in list(self.active.values()):
            if not member.alive:
                continue
            follow(member, self.engine, self.known)
            speed = self._look(member)
            code = self.engine.poll(member.submission, member.attempt)
            if code is not None:
                self._handle_end(member, code, speed)
                continue
            waits = self.engine.waits(member.submission, member.attempt)
            if waits and member.placed:  # It has its nodes only afterwards.
                member.changed = self._now()
            if waits != member.waits:
                member.waits = waits
                self.known.changed.add(member.submission.name)
        self.engine.end_strays(self.members)

    def _look(self, member: Member) -> float | None:
        """Reads what an attempt reports: its speed, None where there is none yet, and whether it has made a step."""
        workdir = member.submission.workdir
        if not member.alive:
            return None
        if workdir is None:
            member.begun = member.changed
            return None
        speed = last_speed(workdir, member.from_step)
        if speed is not None and member.size:
            self.known.measured.add(member.submission.name, member.size, speed)
        if not member.begun and last_step(workdir) > member.from_step:
            member.begun = self._now()
        return speed

    def _handle_end(self, member: Member, code: int, speed: float | None) -> None:
        """An attempt has ended with a code; `speed` is what it reached."""
        lost = self.engine.out_of_service(member.here)
        said, taken, in_time = self.engine.explain_end(member.submission, member.attempt)
        pause = _FIRST_PAUSE_SEC if taken and not lost else 0.0  # The cluster may not know yet what it has left.
        if code == 0:
            self._end(member, COMPLETED, code, speed, "finished")
        elif code == exits.HALTED:
            self._end(member, HALTED, code, speed, "halted by the file in its workdir; `resume` lets it run again")
        elif code in exits.DELIBERATE:
            self._end(member, FAILED, code, speed, f"exit code {code}: it would fail again")
        elif member.state == STOPPING and (code in _SAVED or taken or self.known.order(member) in ("hold", "cancel")):
            self._leave(member, code, speed, member.reason, failures=0 if code in _SAVED else member.failures)
        elif (taken or in_time) and code in _SAVED and member.begun:
            self._leave(member, code, speed, f"{said}: starts again", pause_sec=pause)
        elif lost or taken:  # That is no failure of the run.
            why = f"{said}: starts again" if taken else f"{', '.join(sorted(lost))} is out of service"
            self._leave(member, code, speed, why, failures=member.failures, pause_sec=pause)
        else:
            # One that was asked to stop and has not saved has lasted, but may have come no further than the one before.
            lasted = member.state != STOPPING and self._now() - member.changed >= self.settings.between_sec
            failures = 1 if lasted else member.failures + 1
            what = said or ("killed, or lost with its node" if code == LOST else f"exit code {code}")
            if member.state == STOPPING:
                what = f"it did not save when it was stopped ({what})"
            if failures > self.settings.failures:
                self._end(member, FAILED, code, speed, f"{what}, {failures} times in a row; `resume` tries it again")
                return
            pause = 0.0 if failures == 1 else min(_FIRST_PAUSE_SEC * 2 ** (failures - 2), _LONGEST_PAUSE_SEC)
            self._leave(member, code, speed, f"{what}: starts again", failures=failures, pause_sec=pause)

    def _end(self, member: Member, state: str, code: int | None, speed: float | None, reason: str) -> None:
        try:
            num_asked = self.store.order_number(member.submission.name)
        except DamagedFile:  # What is asked from now on counts.
            num_asked = int(time.time() * 1000)
        self.known.write(ENDING, member, state=state, code=code, speed=speed, num_asked=num_asked, reason=reason)
        if not self._read_only:
            unqueue(member.submission.workdir, _AS_STATUS[state], reason, code)

    def _leave(
        self, member: Member, code: int, speed: float | None, reason: str, *, failures: int = 0, pause_sec: float = 0.0
    ) -> None:
        again = self._now() + pause_sec if pause_sec else 0.0
        self.known.write(LEFT, member, code=code, speed=speed, failures=failures, not_before=again, reason=reason)
        if member.resizing and not self._read_only:
            queue(member.submission.command, member.submission.workdir, doing="its fleet resizes it")

    def _obey(self) -> None:
        for name in sorted(self.known.asked):
            member = self.members.get(name)
            if member is None or member.state not in ENDED or self._obey_after_end(member):
                self.known.asked.discard(name)
        gone = self.engine.out_of_service({node for member in self.active.values() for node in member.here})
        for member in list(self.active.values()):
            order, unknown = self.known.order(member), not self.known.has_submission(member)
            stop = "its submission is damaged" if unknown else {"hold": "held", "cancel": "cancelled"}.get(order or "")
            if member.state == RUNNING and stop:
                self.known.write(STOPPED, member, reason=stop)
            elif member.state == RUNNING and not gone.isdisjoint(member.here):
                lost = ", ".join(sorted(gone.intersection(member.here)))
                self.known.write(STOPPED, member, reason=f"{lost} is out of service")
            elif not member.alive:
                waits = order in ("run", "remove") and not unknown
                if order == "cancel":
                    self._end(member, CANCELLED, member.code, None, "cancelled")
                elif waits == (member.state == HELD):
                    member.state = WAITING if waits else HELD
                    self.known.changed.add(member.submission.name)

    def _obey_after_end(self, member: Member) -> bool:
        """Does what was asked of a run that has ended; whether that is done."""
        name, order = member.submission.name, self.known.order(member)
        if order == "remove" and not self._read_only:
            if member.attempt and self.engine.poll(member.submission, member.attempt) is None:
                return False
            try:
                self.store.remove(name)
            except OSError as error:  # The folder of another user, say; it is tried again when it is asked again.
                member.problem = f"it cannot be removed ({error.strerror}: {error.filename})"
                self.known.ended.add(name)
                return True
            self.known.drop(name)
        elif order == "run" and member.state in RESUMABLE and self.store.order_number(name) > member.order_number:
            self.known.write(RESUMED, member, reason="resumed")
        return True

    def _runs(self) -> list[Run]:
        """The runs that may run now, as the policy sees them."""
        now, runs = self._now(), []
        for number, member in enumerate(self.active.values()):
            submission = member.submission
            may_start = member.state == WAITING and member.not_before <= now
            if member.state == STOPPING or not (may_start or member.state == RUNNING):
                continue
            least = self.settings.between_sec
            lately = now - member.begun < least if member.begun else now - member.changed < max(least, _START_SEC)
            fixed = member.state == RUNNING and lately and not member.queued
            known = {size: estimate.examples_per_sec for size, estimate in self.estimates(submission.name).items()}
            values = {"weight": submission.weight, "priority": submission.priority, "needs": submission.needs}
            values |= {"nodes": len(member.nodes), "fixed": fixed, "places": Counter(member.nodes)}
            runs.append(Run(submission.name, known, number, **values))
        return runs

    def _decision(self, runs: Sequence[Run], nodes: Mapping[str, Amounts], rules: Rules) -> Decision:
        """What the policy says: the one for whole nodes, unless a run shares them."""
        if any(run.needs for run in runs):
            return decide_mixed(runs, nodes, rules)
        return decide(runs, len(nodes), rules)

    def _decide(self) -> None:
        """A new decision, if something is otherwise than when the last one was made and no run is being stopped.

        What an attempt that is being stopped has is free only when it has ended. Until then nothing more is started,
        since the last decision does not know what has happened meanwhile.
        """
        self._may_start = not any(member.state == STOPPING for member in self.active.values())
        if not self._may_start:
            return
        runs, nodes = self._runs(), self.engine.resources()
        situation = ([(run.name, run.places, run.fixed, run.priority) for run in runs], nodes)
        rules, same = self.settings.rules, situation == self._situation
        if same and self._now() < self._again:
            return
        self._situation = situation
        self.decision = self._decision(
            runs, nodes, replace(rules, solve_sec=rules.solve_sec * _LONGER) if same else rules
        )
        self._again = math.inf if same or self.decision.proven else self._now() + _AGAIN_SEC
        for name, why in self.decision.reasons.items():
            self.members[name].decided = why

    def _act(self) -> None:
        """Brings the fleet nearer to the decision: stops what has to change, then starts what there is room for."""
        decided, places = ({}, {}) if self.decision is None else (self.decision.nodes, self.decision.places)
        wanted = {name: size for name, size in decided.items() if name in self.active}
        for name, size in wanted.items():
            member = self.members[name]
            same = size == len(member.nodes) and places.get(name, Counter(member.nodes)) == Counter(member.nodes)
            if member.state == RUNNING and not same and not resize(member, size, self.engine, self.known):
                self.known.write(STOPPED, member, reason=member.decided, resizing=size > 0)
            elif not size:
                member.resizing = False  # Others have its nodes now, and it waits.
        room = self._room()
        for name, size in wanted.items() if self._may_start else ():
            member = self.members[name]
            if member.state != WAITING or not size or member.not_before > self._now():
                continue
            needs = member.submission.needs
            # Where nodes are alike, the decision names none.
            mine = places.get(name) or room.find(needs, size)
            if mine is not None and room.holds(needs, mine):
                self._start(member, hosts_of(mine, list(room.left)))
                room.take(needs, Counter(member.nodes))
        for member in self.active.values():
            if member.state == STOPPING:
                self._stop(member)

    def _room(self) -> Room:
        return room_of(self.engine.resources(), self.active.values())

    def _stop(self, member: Member) -> None:
        """Asks an attempt to save and end; kills it when it has not done so in time."""
        now, attempt = self._now(), (member.submission.name, member.attempt)
        first = self._signalled.setdefault(attempt, now)
        least = min(self.settings.grace_sec, _LEAST_GRACE_SEC)
        if now - member.stopping < self.settings.grace_sec or now - first < least:
            self.engine.stop(member.submission, member.attempt)
            return
        told = f"killed: it did not save and end within {self.settings.grace_sec:g} s"
        if told not in member.reason:
            self.known.write(KILLED, member, attempt=member.attempt, reason=f"{member.reason}; {told}")
        self.engine.kill(member.submission, member.attempt)

    def _start(self, member: Member, nodes: list[str]) -> None:
        attempt, workdir, member.waits = member.attempt + 1, member.submission.workdir, ""
        values = {
            "attempt": attempt,
            "nodes": nodes,
            "placed": self.engine.nodes_of(member.submission, attempt) is None,
            "resized": bool(member.size) and member.size != len(nodes),
            "from_step": 0 if workdir is None else last_step(workdir),
        }
        self.known.write(STARTED, member, **values, reason=member.decided or "starts")
        if not self.engine.start(member.submission, attempt, nodes):
            self._leave(member, LOST, None, "still ends", failures=member.failures, pause_sec=1.0)

    # What is shown.

    def estimates(self, name: str) -> dict[int, Estimate]:
        """The speed of a run on each of its sizes."""
        submission = self.members[name].submission
        return estimates(submission.sizes, self.known.measured.of(name), submission.exchange)

    def _view_of(self, member: Member) -> dict[str, Any]:
        """A run as JSON."""
        name, shares = member.submission.name, {} if self.decision is None else self.decision.shares
        return member.view() | {
            "share": shares.get(name, 0.0),
            "speeds": {str(n): sec for n, sec in sorted(self.known.measured.of(name).items())},
            "estimates": {str(size): list(estimate) for size, estimate in self.estimates(name).items()},
        }

    def view(self) -> dict[str, Any]:
        """The fleet as JSON, without runs that have ended."""
        lost, room = sorted(self.store.lost_nodes()), self._room()
        taken = [node for member in self.active.values() if member.alive for node in member.nodes]
        has = {node: dict(amounts) for node, amounts in self.engine.resources().items()}
        nodes = {
            node: ", ".join(name for name, member in self.active.items() if member.alive and node in member.here)
            # Where they are only a number, runs may for a while have more than there are.
            for node in dict.fromkeys([*room.left, *(() if self.engine.names_nodes else taken)])
        }
        runs = [self._view_of(member) for member in self.active.values()]
        free = {node: left for node, left in room.left.items() if left}
        engine = self.engine
        about = {"at": self._now(), "gives_gpus": engine.gives_gpus, "shares": engine.shares_nodes, "has": has}
        about |= {"network": self.settings.network, "nodes": nodes, "free": free, "lost": lost, "runs": runs}
        return about | {"problems": self.known.problems, "engine": engine.problems()}
