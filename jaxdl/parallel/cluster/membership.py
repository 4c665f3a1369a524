"""Detects lost processes: each process keeps a connection to process 0 during the run, and all exit when one is lost.

JAX waits for an exited process until its long timeouts expire, and indefinitely for a stuck one. Here each process
sends process 0 a heartbeat with its step every second. Process 0 tells all when a process has exited (its connection
closed), is silent for too long (stopped, or disconnected), sends invalid data, has failed, or hangs. Each then prints
the reason and exits with code 75, without JAX's normal shutdown, which would wait for the lost process. All processes
notice the loss of process 0 themselves. `roles` has the two sides, `Coordinator` (process 0) and `Follower`.

Over the same connections, a signal to one process stops all of them at the same poll of their loops.
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

from jaxdl.parallel.cluster.consistency import process_names
from jaxdl.parallel.cluster.exits import BROKEN, DELIBERATE, FAREWELL_SEC, end_process
from jaxdl.parallel.cluster.heartbeat import Heartbeat
from jaxdl.parallel.cluster.meeting import Meeting
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
    Malformed,
    Passed,
    Signalled,
    StopAt,
    ToFirst,
)
from jaxdl.parallel.cluster.wire import Line, Lost, NoMessage, ready

Said: TypeAlias = ToFirst | FromFirst

_BEAT_SEC = 1.0
_SAME_END_SEC = 20.0
"""How long a process may take to reach by itself the user error or divergence that another has reported."""


class Membership(abc.ABC):
    """This process's membership in the run: a thread that serves the connections. See `Coordinator` and `Follower`.

    Args:
      process: the number of this process.
      meeting: the host names and the open connections.
      silence_sec: a process that sends nothing for this long is lost.
      heartbeat: the step and phase of this process.
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
        """Writes the stacks of all threads; set by the watchdog."""
        self._thread = threading.Thread(target=self._run, name="jaxdl-membership", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # Called by the main thread.

    def poll(self, signum: int) -> int:
        """The signal for which all processes stop at this poll, or 0. `signum`: the one that this process got, or 0.

        Every process must poll equally often. Two rounds agree on the stop, so that it is exact however far apart the
        processes are: all hold before their next poll and report how many they have made; the stop is at the poll
        after the largest count, which none has made yet and all will reach.
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

        Gloo fails if a process reaches its first collective 30 s after another, which a slow compilation can cause.
        """
        with self._condition:
            self._arrivals += 1
            self._post(Arrived(times=self._arrivals))
            while self._passed < self._arrivals:
                self._condition.wait()

    @property
    def agreed(self) -> bool:
        """Whether the processes have agreed to stop for a signal."""
        return self._stop_at is not None

    def leave(self) -> None:
        """Announces that this process is about to exit normally, so that the others do not report a loss."""
        self._post(Bye())
        end = time.monotonic() + 1
        while self._posted and time.monotonic() < end:
            time.sleep(0.01)

    def report_failure(self, reason: str, code: int) -> None:
        """Tells the others that this process exits, why, and with which code; waits for that at most 2 s."""
        self._own_end.set()
        self._post(Failed(reason=reason[:MAX_REASON], code=code % 256))
        end = time.monotonic() + FAREWELL_SEC
        while not self._is_heard() and time.monotonic() < end:
            time.sleep(0.02)

    def report_hang(self, idle_sec: float) -> None:
        """Reports a hang to process 0, which tells all who hangs and ends them. Exits alone if that takes too long."""
        self._post(Hang(idle_sec=idle_sec))
        time.sleep(FAREWELL_SEC)
        end_process(f"no progress here for {idle_sec:.0f} s; the stacks of all threads are above", BROKEN)

    def await_reason(self) -> None:
        """Waits long enough to detect a lost process, which ends this one; returns if none is lost."""
        time.sleep(self._silence_sec + 2 * self._beat_sec + 1)

    # The thread.

    def _post(self, message: ToFirst) -> None:
        self._posted.append(message)
        with contextlib.suppress(OSError):  # The pipe is full: the thread wakes up anyway.
            self._wake.send(b"x")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # A bug: without this thread a lost process would go unnoticed.
            what = f"{type(error).__name__}: {error}"
            end_process(f"the thread that monitors the other processes failed ({what})", BROKEN)

    def _watch(self) -> None:
        last = next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if (
                now - last > 2 * self._beat_sec + 1
            ):  # This process was suspended: do not count that as silence of the others.
                self._heard = {process: heard + now - last for process, heard in self._heard.items()}
            last = now
            if now >= next_beat:
                next_beat = now + self._beat_sec
                step, phase = self._heartbeat.where()
                self._deliver(Beat(step=step, phase=phase))
            while self._posted:
                self._deliver(self._posted[0])
                self._posted.popleft()
            for item in ready([self._woken, *self._lines.values()], next_beat - now):
                if isinstance(item, Line):
                    self._read(item)
                else:
                    item.recv(2**10)
            self._check_silence()

    def _read(self, line: Line) -> None:
        process = next((number for number, other in self._lines.items() if other is line), None)
        if process is None:
            return
        try:
            line.flush()
            for fields in line.messages():
                # Messages before invalid data count: one may give the reason.
                self._hear(process, self._understood(fields))
                self._heard[process] = time.monotonic()
        except (NoMessage, Malformed) as error:
            self._gone(process, f"sent an invalid message ({error})")
        except Lost as lost:
            self._gone(process, f"exited unexpectedly ({lost})")

    def _gone(self, process: int, how: str) -> None:
        """Closes the connection to a process, which is lost unless it had announced its exit."""
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
        """Delivers a message of this process to process 0."""

    @abc.abstractmethod
    def _understood(self, fields: Mapping[str, Any]) -> Said:
        """Parses a received message. Raises Malformed for one that this side must not get."""

    @abc.abstractmethod
    def _hear(self, process: int, message: Any) -> None:
        """Handles a message of another process, as returned by `_understood`."""

    @abc.abstractmethod
    def _lost(self, process: int, how: str) -> None:
        """Handles the loss of a process."""

    def _act_on(self, message: FromFirst) -> None:
        """Acts on a message of process 0 to all."""
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
                pass  # About the sender only.

    def _end(self, reason: str, code: int, *, dump: bool = False) -> None:
        """Exits, unless this process is already exiting for its own reason."""
        self._notified.set()
        if self._own_end.is_set() or (code in DELIBERATE and self._own_end.wait(_SAME_END_SEC)):
            return
        if dump:
            self.write_stacks()
        end_process(reason, code if code in DELIBERATE else BROKEN, last=self._before_exit)

    @abc.abstractmethod
    def _is_heard(self) -> bool:
        """Whether the others know that this process exits."""

    @abc.abstractmethod
    def _before_exit(self) -> None:
        """Called before this process exits because of another."""


_current: Membership | None = None
"""Global, because the connections of a process last for its whole life; set once, by `set_current`."""


def current() -> Membership | None:
    """The membership of this process; None in a run of one process."""
    return _current


def wait_for_all() -> None:
    """`Membership.wait_for_all`; returns at once in a run of one process."""
    if _current is not None:
        _current.wait_for_all()


def set_current(member: Membership) -> None:
    """Makes `member` the membership of this process, once, and starts its thread."""
    global _current
    assert _current is None
    _current = member
    member.start()
    # Runs before JAX's own handler, registered earlier, which waits for the other processes.
    atexit.register(member.leave)
