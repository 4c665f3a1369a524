"""Who is still there: every process keeps a connection to process 0 for the run, and all end when one is lost.

JAX waits for a process that has exited for as long as its own long defaults say, and indefinitely for one that is
stuck. Here each process reports to process 0 every second where it is; process 0 reports to all of them when one has
died (its connection closed), has been silent for too long (stopped, or cut off), sends what is no message, has failed,
or hangs. Then each says why and ends with code 75, without JAX's orderly shutdown, which would wait for the lost one.
The loss of process 0 is seen by all. `roles` has the two sides: process 0, and every other.

The same connections make a signal to one process stop all of them at the same poll of their loops.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxdl.cluster.consistency import process_names
from jaxdl.cluster.exits import BROKEN, DELIBERATE, FAREWELL_SEC, end_process
from jaxdl.cluster.heartbeat import Heartbeat
from jaxdl.cluster.meeting import Meeting
from jaxdl.cluster.messages import (
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
    Malformed,
    Passed,
    Signalled,
    StopAt,
    ToFirst,
)
from jaxdl.cluster.wire import Line, Lost, NoMessage, ready

Said: TypeAlias = ToFirst | FromFirst

_BEAT_SEC = 1.0
_SAME_END_SEC = 20.0
"""How long the others may take to come to a deliberate end on their own."""


class Membership(abc.ABC):
    """This process among the others: a thread that holds the connections. See `Coordinator` and `Follower`.

    Args:
      process: this one's number.
      meeting: the hosts' names and the open connections.
      silence_sec: how long nothing may come from a process.
      heartbeat: where this process is.
    """

    def __init__(self, process: int, meeting: Meeting, *, silence_sec: float, heartbeat: Heartbeat) -> None:
        self.process, self.hosts = process, meeting.hosts
        self._lines: dict[int, Line] = dict(meeting.lines)
        self._silence_sec, self._heartbeat = silence_sec, heartbeat
        self._beat_sec = min(_BEAT_SEC, silence_sec / 5)
        self._heard = dict.fromkeys(self._lines, time.monotonic())
        self._leaving: set[int] = set()
        self._posted: deque[ToFirst] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._condition = threading.Condition()
        self._polls, self._stop_at, self._signum = 0, None, 0
        self._asked, self._held = False, False
        self._arrivals, self._passed = 0, 0
        self._own_end, self._notified = threading.Event(), threading.Event()
        self.write_stacks: Callable[[], None] = lambda: None
        """Writes the stacks of all threads: set by the watchdog."""
        self._thread = threading.Thread(target=self._run, name="jaxdl-membership", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # What the main thread calls.

    def poll(self, signum: int) -> int:
        """The signal that all processes stop for at this poll; 0 for none. `signum`: the one that came here, or 0.

        Every process must poll equally often. A stop is agreed on in two rounds, so that it is exact however far the
        processes are apart: all hold still before their next poll and say how many they have passed; the stop is at
        the poll after the largest of these numbers, which none has passed and all will come to.
        """
        with self._condition:
            if signum and not self._asked:
                self._asked = True
                self._post(Signalled(signum=int(signum)))
            while self._held:
                self._condition.wait()
            self._polls += 1
            if self._stop_at is None or self._polls < self._stop_at:
                return 0
            return self._signum

    def wait_for_all(self) -> None:
        """Returns when every process has called this as often as this one.

        Gloo gives up when a process comes to its first collective 30 s after another: a slower compilation is enough.
        """
        with self._condition:
            self._arrivals += 1
            self._post(Arrived(times=self._arrivals))
            while self._passed < self._arrivals:
                self._condition.wait()

    @property
    def agreed(self) -> bool:
        """Whether all processes stop together because of a signal."""
        return self._stop_at is not None

    def leave(self) -> None:
        """Says that this process is about to end in good order, so that its end is no loss."""
        self._post(Bye())
        end = time.monotonic() + 1
        while self._posted and time.monotonic() < end:
            time.sleep(0.01)

    def report_failure(self, reason: str, code: int) -> None:
        """Reports to the others that this process ends, why, and with which code; returns when they know it."""
        self._own_end.set()
        self._post(Failed(reason=reason[:MAX_REASON], code=code % 256))
        end = time.monotonic() + FAREWELL_SEC
        while not self._is_heard() and time.monotonic() < end:
            time.sleep(0.02)

    def report_hang(self, idle_sec: float) -> None:
        """Reports a hang here to process 0, which names who hangs to all. Ends the process if that takes too long."""
        self._post(Hang(idle_sec=idle_sec))
        time.sleep(FAREWELL_SEC)
        end_process(f"no step has been finished here for {idle_sec:.0f} s; the stacks of all threads are above", BROKEN)

    def await_reason(self) -> None:
        """Returns only if no process turns out to be lost, so that a broken connection has another cause."""
        time.sleep(self._silence_sec + 2 * self._beat_sec + 1)

    # The thread.

    def _post(self, message: ToFirst) -> None:
        self._posted.append(message)
        with contextlib.suppress(OSError):  # Full: it wakes up anyhow.
            self._wake.send(b"x")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # A defect here: without this thread a lost process would go unnoticed.
            what = f"{type(error).__name__}: {error}"
            end_process(f"the thread that watches over the other processes failed ({what})", BROKEN)

    def _watch(self) -> None:
        last = next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > 2 * self._beat_sec + 1:  # This process stood still itself: the others have not been silent.
                self._heard = {process: heard + now - last for process, heard in self._heard.items()}
            last = now
            if now >= next_beat:
                next_beat = now + self._beat_sec
                step, phase = self._heartbeat.where()
                self._deliver(Beat(step=step, phase=phase))
            while self._posted:
                self._deliver(self._posted[0])
                self._posted.popleft()
            for one in ready([self._woken, *self._lines.values()], next_beat - now):
                if isinstance(one, Line):
                    self._read(one)
                else:
                    one.recv(2**10)
            self._check_silence()

    def _read(self, line: Line) -> None:
        process = next((number for number, one in self._lines.items() if one is line), None)
        if process is None:
            return
        try:
            line.flush()
            for fields in line.messages():
                # What came before something that is no message counts: it may say why.
                self._hear(process, self._understood(fields))
                self._heard[process] = time.monotonic()
        except (NoMessage, Malformed) as error:
            self._gone(process, f"sent something that is no message of jaxdl ({error})")
        except Lost as lost:
            self._gone(process, f"exited unexpectedly ({lost})")

    def _gone(self, process: int, how: str) -> None:
        """The connection to a process is over; unless it was about to end in good order, the process is lost."""
        line = self._lines.pop(process, None)
        if line is not None:
            line.close()
        if process not in self._leaving:
            self._lost(process, how)

    def _check_silence(self) -> None:
        now = time.monotonic()
        for process in list(self._lines):
            if now - self._heard[process] > self._silence_sec:
                self._lost(process, f"has been silent for {self._silence_sec:g} s")

    def _send(self, process: int, message: Said) -> None:
        line = self._lines.get(process)
        if line is not None:
            try:
                line.send(message.to_json())
            except Lost as lost:
                self._gone(process, f"exited unexpectedly ({lost})")

    def _name(self, process: int) -> str:
        return process_names([process], self.hosts)

    @abc.abstractmethod
    def _deliver(self, message: ToFirst) -> None:
        """Takes a message of this process to process 0."""

    @abc.abstractmethod
    def _understood(self, fields: Mapping[str, Any]) -> Said:
        """What came as a message that this side may be sent. Raises Malformed."""

    @abc.abstractmethod
    def _hear(self, process: int, message: Any) -> None:
        """Takes a message of another process, as `_understood` returns it."""

    @abc.abstractmethod
    def _lost(self, process: int, how: str) -> None:
        """Another process is lost."""

    def _act_on(self, message: FromFirst) -> None:
        """Does what process 0 says to all."""
        match message:
            case Hold():
                with self._condition:
                    self._held = True
                    count = self._polls
                self._post(Held(polls=count))
            case StopAt():
                with self._condition:
                    self._stop_at, self._signum, self._held = message.poll, message.signum, False
                    self._condition.notify_all()
            case Passed():
                with self._condition:
                    self._passed = message.times
                    self._condition.notify_all()
            case End():
                self._end(message.reason, message.code, dump=message.dump)
            case Beat() | Bye():
                pass  # They are about the sender, not about all.

    def _end(self, reason: str, code: int, *, dump: bool = False) -> None:
        """Ends this process, unless it is already ending for a reason of its own."""
        self._notified.set()
        if self._own_end.is_set() or (code in DELIBERATE and self._own_end.wait(_SAME_END_SEC)):
            return
        if dump:
            self.write_stacks()
        end_process(reason, code if code in DELIBERATE else BROKEN, last=self._before_exit)

    @abc.abstractmethod
    def _is_heard(self) -> bool:
        """Whether the others know of this process's end."""

    @abc.abstractmethod
    def _before_exit(self) -> None:
        """What is left to be done before this process ends because of another."""


_current: Membership | None = None


def current() -> Membership | None:
    """This process's membership; None when it is alone."""
    return _current


def wait_for_all() -> None:
    """`Membership.wait_for_all` of this process; returns at once in a process that is alone."""
    if _current is not None:
        _current.wait_for_all()


def set_current(member: Membership) -> None:
    """Makes `member` this process's membership, once, and starts it for as long as the process lives."""
    global _current
    assert _current is None
    _current = member
    member.start()
    # JAX's own handler, registered earlier, comes after it, and waits there for the others.
    atexit.register(member.leave)
