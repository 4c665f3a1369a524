"""What the server of a fleet knows of its runs: from their files and its journal, and again after it was killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.journal import JOURNAL_FILE, Journal
from jaxdl.platform.fleet.member import ENDED, RUNNING, STOPPING, WAITING, Member
from jaxdl.platform.fleet.roll import Roll, in_order
from jaxdl.platform.fleet.speed import MeasuredSpeeds
from jaxdl.platform.fleet.store import DamagedFile, Order, Store

STARTED, STOPPED, KILLED, LEFT, ENDING, RESUMED = "started", "stopping", "killed", "left", "ended", "resumed"
PLACED = "placed"
"""Kinds of events."""
_TOLD = 5


class Members:
    """The runs. Each kind of event changes one in one place, now and when the journal is read again.

    A run of which a file is damaged is set aside; the others are as they would be without it.
    """

    def __init__(self, store: Store, now: Callable[[], float], *, read_only: bool) -> None:
        self._store, self._now, self._read_only = store, now, read_only
        self.all: dict[str, Member] = {}
        self.active: dict[str, Member] = {}
        """Those that have not ended, in their order: a turn looks at no others."""
        self.changed: set[str] = set()
        """Runs whose state may have changed; for who tells of it, and empties it."""
        self.ended: set[str] = set()
        """Runs that have ended, or were removed, lately; for who shows them, and empties it."""
        self.asked: set[str] = set()
        """Runs of which something may have been asked after they ended; for who obeys, and takes them out."""
        self.measured = MeasuredSpeeds()
        self._roll = Roll(store, read_only=read_only)
        self._order_problems: dict[str, str] = {}
        """Run -> what is wrong with the file that says what was asked."""
        self._bad_lines: list[int] = []
        self._journal = Journal(store.folder, read_only=read_only)
        self.read()
        self._replay()
        self.asked = set(self.all)

    @property
    def problems(self) -> list[str]:
        """What is damaged, and what was done about it."""
        problems = [problem for problem in (self._store.lost_problem(), *self._roll.problems.values()) if problem]
        problems += [why for name, why in self._order_problems.items() if name not in self._roll.problems]
        if self._bad_lines:
            lines = ", ".join(map(str, self._bad_lines[:_TOLD])) + (", ..." if len(self._bad_lines) > _TOLD else "")
            problems.append(
                f"{self._store.folder / JOURNAL_FILE}: line {lines} cannot be read, and was passed over. Runs that it "
                "was about are as their other files say."
            )
        return problems

    def has_submission(self, member: Member) -> bool:
        """Whether it is known what was submitted."""
        return member.submission.name not in self._roll.problems

    def read(self) -> None:
        """Reads what was submitted, and which runs something was asked of."""
        news = self._roll.read()
        for name in news.gone:
            self.drop(name)
        for submission in news.submitted:
            if submission.name in self.all:  # Its file was damaged.
                self.all[submission.name].submission = submission
                self.ended.add(submission.name)
            else:
                self._put(Member(submission, not_before=submission.not_before))
        self.asked |= news.asked

    def drop(self, name: str) -> None:
        """Knows a run no more."""
        self.active.pop(name, None)
        self._order_problems.pop(name, None)
        if self.all.pop(name, None) is not None:
            self.ended.add(name)
            self.changed.add(name)

    def write(self, what: str, member: Member, **values: Any) -> None:
        """Does what an event says once it is in the journal."""
        event = {"at": self._now(), "run": member.submission.name, **values}
        self._journal.write(what, **event)
        self._apply({"what": what, **event})

    def _replay(self) -> None:
        """Applies the journal. What is damaged in it is passed over, and what it said found where it left traces."""
        for number, event in self._journal.lines():
            before = None if event is None else self.all.get(str(event.get("run")))
            kept = before and replace(before)
            try:
                self._apply(event or {})
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError):
                self._bad_lines.append(number)
                if kept:
                    self._put(kept)
        for name, member in () if self._read_only else list(self.active.items()):
            last = self._store.last_attempt(name)
            if last > member.attempt:  # Nobody knows which nodes it has, so that nothing starts until it has ended.
                known = {"attempt": last, "nodes": [], "resized": False, "reason": "it was started"}
                self.write(STARTED, member, **known)
                self.write(STOPPED, member, reason="the journal does not say on which nodes it runs")

    def _put(self, member: Member) -> None:
        """Takes in what is known of a run."""
        name = member.submission.name
        self.all[name] = member
        if member.state in ENDED:
            if self.active.pop(name, None) is not None:
                self.asked.add(name)
            self.ended.add(name)
        else:
            behind, new = next(reversed(self.active), ""), name not in self.active
            self.active[name] = member
            if new and in_order(name) < in_order(behind):
                self.active = dict(sorted(self.active.items(), key=lambda item: in_order(item[0])))
        self.changed.add(name)

    def _apply(self, event: dict[str, Any]) -> None:
        member = self.all.get(event["run"])
        if member is None:  # The run was removed.
            return
        what, at = event["what"], event["at"]
        _check(what, event)
        if what == STARTED:
            member.resized += int(event["resized"])
            member.state, member.attempt = RUNNING, event["attempt"]
            member.nodes, member.changed = tuple(event["nodes"]), at
            member.size, member.from_step = len(member.nodes), event.get("from_step", 0)
            member.begun, member.resizing, member.placed = 0.0, False, event.get("placed", True)
        elif what == PLACED:  # It has these nodes, or waits for so many.
            member.nodes, member.size, member.placed = tuple(event["nodes"]), len(event["nodes"]), event["placed"]
            member.changed, member.resized = at, member.resized + int(event["resized"])
        elif what == STOPPED:
            member.state, member.stopping, member.resizing = STOPPING, at, event.get("resizing", False)
        elif what == KILLED:  # It did not save and end in time.
            member.killed += 1
        elif what == LEFT:  # An attempt is over, and another may follow.
            member.state, member.nodes, member.code = WAITING, (), event["code"]
            member.failures, member.not_before = event["failures"], event["not_before"]
        elif what == ENDING:
            member.state, member.nodes, member.code = event["state"], (), event.get("code", member.code)
            member.order_number, member.ended = event.get("num_asked", 0), at
        elif what == RESUMED:
            member.state, member.failures, member.not_before = WAITING, 0, 0.0
        else:
            raise ConfigError(f"{self._store.folder}: the journal has an event {what!r} of another version of jaxdl.")
        member.reason = str(event["reason"])
        self._put(member)
        if event.get("speed") is not None and member.size:
            self.measured.add(event["run"], member.size, event["speed"])

    def order(self, member: Member) -> Order | None:
        """What was asked of a run last; None if that is not known, or its submission is not."""
        name, order = member.submission.name, None
        try:
            order = self._store.order_of(name)
            self._order_problems.pop(name, None)
        except DamagedFile as error:
            self._order_problems[name] = str(error)
        member.problem = self._roll.problems.get(name) or self._order_problems.get(name, "")
        return order


def _check(what: str, event: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for an event without what it must have."""
    numbers = [event["at"]]
    if what in (STARTED, PLACED):
        numbers += [event["attempt"]]
        if not all(isinstance(node, str) for node in event["nodes"]):
            raise ValueError
    elif what == LEFT:
        numbers += [event["failures"], event["not_before"]]
    elif what == ENDING and event["state"] not in ENDED:
        raise ValueError
    if not all(isinstance(number, int | float) for number in numbers):
        raise ValueError
