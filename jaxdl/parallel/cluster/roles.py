"""The two sides of a membership: process 0, which decides for all, and every other process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxdl.parallel.cluster.consistency import process_names
from jaxdl.parallel.cluster.exits import BROKEN, FAREWELL_SEC
from jaxdl.parallel.cluster.heartbeat import Heartbeat
from jaxdl.parallel.cluster.meeting import Meeting
from jaxdl.parallel.cluster.membership import Membership, set_current
from jaxdl.parallel.cluster.messages import (
    MAX_REASON,
    Arrived,
    Beat,
    Bye,
    End,
    Failed,
    FromFirst,
    Hang,
    Held,
    Hold,
    Passed,
    Signalled,
    StopAt,
    ToFirst,
    read_from_first,
    read_to_first,
)
from jaxdl.parallel.cluster.wire import Lost, ready


class Coordinator(Membership):
    """The membership of process 0: receives from all, decides, and sends to all."""

    def __init__(self, meeting: Meeting, *, silence_sec: float, heartbeat: Heartbeat) -> None:
        super().__init__(0, meeting, silence_sec=silence_sec, heartbeat=heartbeat)
        self._where: dict[int, tuple[int | None, str]] = {}
        self._stopping, self._counts = 0, dict[int, int]()
        self._arrived = dict.fromkeys(range(len(self.hosts)), 0)
        self._ended = False

    def _deliver(self, message: ToFirst) -> None:
        self._hear(0, message)
        if isinstance(message, Beat | Bye):
            for process in list(self._lines):
                self._send(process, message)

    def _understood(self, fields: Mapping[str, Any]) -> ToFirst:
        return read_to_first(fields)

    def _hear(self, process: int, message: ToFirst) -> None:
        match message:
            case Beat():
                self._where[process] = (message.step, message.phase)
            case Bye():
                self._leaving.add(process)
            case Failed():
                self._leaving.add(process)
                self._end_all(f"{self._name(process)}: {message.reason}", message.code)
            case Hang():
                self._end_all(self._who_hangs(message.idle_sec), BROKEN, dump=True)
            case Signalled():
                if not self._stopping:
                    self._stopping = message.signum
                    self._broadcast(Hold())
            case Arrived():
                before = min(self._arrived.values())
                self._arrived[process] = message.times
                if min(self._arrived.values()) > before:
                    self._broadcast(Passed(times=min(self._arrived.values())))
            case Held():
                self._counts[process] = message.polls
                self._settle()

    def _gone(self, process: int, how: str) -> None:
        super()._gone(process, how)
        self._settle()

    def _settle(self) -> None:
        """Announces the stop once all remaining processes have reported where they hold."""
        if self._counts and {0, *self._lines} <= set(self._counts):
            self._broadcast(StopAt(poll=max(self._counts.values()) + 1, signum=self._stopping))
            self._counts = {}

    def _lost(self, process: int, how: str) -> None:
        step, phase = self._where.get(process, (None, "start"))
        self._end_all(f"{self._name(process)} {how}; last report: {_position(step, phase)}", BROKEN)

    def _end_all(self, reason: str, code: int, *, dump: bool = False) -> None:
        if not self._ended:  # Later reports are consequences of the first.
            self._ended = True
            self._broadcast(End(reason=reason[:MAX_REASON], code=code, dump=dump))

    def _broadcast(self, message: FromFirst) -> None:
        for process in list(self._lines):
            self._send(process, message)
        self._act_on(message)

    def _is_heard(self) -> bool:
        return not self._lines

    def _before_exit(self) -> None:
        """Waits until the others have exited: JAX aborts them, with its own message, when process 0 exits."""
        end = time.monotonic() + FAREWELL_SEC
        while self._lines and time.monotonic() < end:
            for process, line in list(self._lines.items()):
                try:
                    line.flush()
                    for _ in line.messages():
                        pass
                except Lost:
                    del self._lines[process]
            ready(self._lines.values(), 0.05)

    def _who_hangs(self, idle_sec: float) -> str:
        groups: dict[tuple[int | None, str], list[int]] = {}
        for process in range(len(self.hosts)):
            groups.setdefault(self._where.get(process, (None, "start")), []).append(process)
        # The smallest group first: the others wait for it.
        by_size = sorted(groups.items(), key=lambda item: len(item[1]))
        parts = [
            f"{process_names(processes, self.hosts)}: {_position(step, phase)}" for (step, phase), processes in by_size
        ]
        return f"no progress for {idle_sec:.0f} s; the stacks of all threads are above; {'; '.join(parts)}"


class Follower(Membership):
    """The membership of every other process: reports to process 0 and acts on its messages."""

    def __init__(self, process: int, meeting: Meeting, *, silence_sec: float, heartbeat: Heartbeat) -> None:
        super().__init__(process, meeting, silence_sec=silence_sec, heartbeat=heartbeat)
        self._first: tuple[int | None, str] = (None, "start")

    def _deliver(self, message: ToFirst) -> None:
        self._send(0, message)

    def _understood(self, fields: Mapping[str, Any]) -> FromFirst:
        return read_from_first(fields)

    def _hear(self, process: int, message: FromFirst) -> None:
        match message:
            case Beat():
                self._first = (message.step, message.phase)
            case Bye():
                self._leaving.add(process)
            case _:
                self._act_on(message)

    def _is_heard(self) -> bool:
        return self._notified.is_set() or not self._lines

    def _before_exit(self) -> None:
        return  # No other process depends on this one.

    def _lost(self, process: int, how: str) -> None:
        cut = f" (or {self.hosts[self.process]} is disconnected)" if "silent" in how else ""
        self._end(f"{self._name(process)} {how}{cut}; last report: {_position(*self._first)}", BROKEN)


def _position(step: int | None, phase: str) -> str:
    return f"{f'step {step}' if step is not None else 'before the first step'} (phase {phase})"


def begin(process: int, meeting: Meeting, *, silence_sec: float, heartbeat: Heartbeat) -> Membership:
    """Makes this process's membership and starts its thread."""
    kind = Coordinator(meeting, silence_sec=silence_sec, heartbeat=heartbeat) if process == 0 else None
    member = kind or Follower(process, meeting, silence_sec=silence_sec, heartbeat=heartbeat)
    set_current(member)
    return member
