"""Who is still there: every process keeps a connection to process 0 for the run, and all end when one is lost.

JAX waits for a process that is gone for as long as its own long defaults say, and for one that is stuck for ever. Here
each process tells process 0 every second where it is; process 0 tells all of them when one has died (its connection
closed), has been silent for too long (stopped, or cut off), has failed, or hangs. Then each says why and ends with
code 75, without JAX's orderly shutdown, which would wait for the lost one. The loss of process 0 is seen by all.

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
from typing import Any

from jaxdl.cluster.exits import BROKEN, DELIBERATE, FAREWELL_SEC, end_process
from jaxdl.cluster.identity import named
from jaxdl.cluster.pulse import Pulse
from jaxdl.cluster.rendezvous import Meeting
from jaxdl.cluster.wire import Line, Lost, ready

_BEAT_SEC = 1.0
_SAME_END_SEC = 20.0
"""How long the others may take to come to a deliberate end on their own."""


class Membership(abc.ABC):
    """This process among the others: a thread that holds the connections. See `Coordinator` and `Worker`.

    Args:
      process: this one's number.
      meeting: the hosts' names and the open connections.
      silence_sec: how long nothing may come from a process.
      pulse: where this process is.
    """

    def __init__(self, process: int, meeting: Meeting, *, silence_sec: float, pulse: Pulse) -> None:
        self.process, self.hosts = process, meeting.hosts
        self._lines: dict[int, Line] = dict(meeting.lines)
        self._silence_sec, self._pulse = silence_sec, pulse
        self._beat_sec = min(_BEAT_SEC, silence_sec / 5)
        self._heard = dict.fromkeys(self._lines, time.monotonic())
        self._leaving: set[int] = set()
        self._posted: deque[dict[str, Any]] = deque()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._condition = threading.Condition()
        self._polls, self._stop_at, self._signum = 0, None, 0
        self._asked, self._held = False, False
        self._arrivals, self._passed = 0, 0
        self._own_end, self._told = threading.Event(), threading.Event()
        self.write_stacks: Callable[[], None] = lambda: None
        """Writes the stacks of all threads: set by the watchdog."""
        self._thread = threading.Thread(target=self._run, name="jaxdl-membership", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    # What the main thread calls.

    def poll(self, signum: int) -> int:
        """The signal that all processes stop for at this poll; 0 to go on. `signum`: the one that came here, or 0.

        Every process must poll equally often. A stop is agreed on in two rounds, so that it is exact however far the
        processes are apart: all hold still before their next poll and say how many they have passed; the stop is at
        the poll after the largest of these numbers, which none has passed and all will come to.
        """
        with self._condition:
            if signum and not self._asked:
                self._asked = True
                self._post({"signal": signum})
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
            self._post({"arrived": self._arrivals})
            while self._passed < self._arrivals:
                self._condition.wait()

    @property
    def agreed(self) -> bool:
        """Whether all processes stop together because of a signal."""
        return self._stop_at is not None

    def leave(self) -> None:
        """Says that this process is about to end in good order, so that its end is no loss."""
        self._post({"bye": True})
        end = time.monotonic() + 1
        while self._posted and time.monotonic() < end:
            time.sleep(0.01)

    def failed(self, reason: str, code: int) -> None:
        """Tells the others that this process ends, why, and with which code; returns when they have heard of it."""
        self._own_end.set()
        self._post({"failed": reason, "code": code})
        end = time.monotonic() + FAREWELL_SEC
        while not self._is_heard() and time.monotonic() < end:
            time.sleep(0.02)

    def hang(self, idle_sec: float) -> None:
        """Tells process 0 of a hang here; it names who hangs to all. Ends the process if that takes too long."""
        self._post({"hang": idle_sec})
        time.sleep(FAREWELL_SEC)
        end_process(f"no step has been finished here for {idle_sec:.0f} s; the stacks of all threads are above", BROKEN)

    def await_reason(self) -> None:
        """Returns only if no process turns out to be lost, so that a broken connection has another cause."""
        time.sleep(self._silence_sec + 2 * self._beat_sec + 1)

    # The thread.

    def _post(self, message: dict[str, Any]) -> None:
        self._posted.append(message)
        with contextlib.suppress(OSError):  # Full: it wakes up anyhow.
            self._wake.send(b"x")

    def _run(self) -> None:
        last = next_beat = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > 2 * self._beat_sec + 1:  # This process stood still itself: the others have not been silent.
                self._heard = {process: heard + now - last for process, heard in self._heard.items()}
            last = now
            if now >= next_beat:
                next_beat = now + self._beat_sec
                step, phase = self._pulse.where()
                self._deliver({"beat": step, "phase": phase})
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
            messages = line.receive()
        except Lost as lost:
            self._gone(process, str(lost))
            return
        self._heard[process] = time.monotonic()
        for message in messages:
            self._hear(process, message)

    def _gone(self, process: int, why: str) -> None:
        line = self._lines.pop(process, None)
        if line is not None:
            line.close()
        if process not in self._leaving:
            self._lost(process, f"has gone without a word ({why})")

    def _check_silence(self) -> None:
        now = time.monotonic()
        for process in list(self._lines):
            if now - self._heard[process] > self._silence_sec:
                self._lost(process, f"has been silent for {self._silence_sec:g} s")

    def _send(self, process: int, message: Mapping[str, Any]) -> None:
        line = self._lines.get(process)
        if line is not None:
            try:
                line.send(message)
            except Lost as lost:
                self._gone(process, str(lost))

    def _name(self, process: int) -> str:
        return named([process], self.hosts)

    @abc.abstractmethod
    def _deliver(self, message: dict[str, Any]) -> None:
        """Takes a message of this process to process 0."""

    @abc.abstractmethod
    def _hear(self, process: int, message: Mapping[str, Any]) -> None:
        """Takes a message of another process."""

    @abc.abstractmethod
    def _lost(self, process: int, how: str) -> None:
        """Another process is lost."""

    def _obey(self, message: Mapping[str, Any]) -> None:
        """Does what process 0 says to all."""
        if "hold" in message:
            with self._condition:
                self._held = True
                count = self._polls
            self._post({"held": count})
        elif "stop" in message:
            with self._condition:
                self._stop_at, self._signum, self._held = message["stop"], message["signal"], False
                self._condition.notify_all()
        elif "passed" in message:
            with self._condition:
                self._passed = message["passed"]
                self._condition.notify_all()
        elif "end" in message:
            self._end(message["end"], message["code"], dump=message.get("dump", False))

    def _end(self, reason: str, code: int, *, dump: bool = False) -> None:
        """Ends this process, unless it is ending already of its own accord."""
        self._told.set()
        if self._own_end.is_set() or (code in DELIBERATE and self._own_end.wait(_SAME_END_SEC)):
            return
        if dump:
            self.write_stacks()
        end_process(reason, code if code in DELIBERATE else BROKEN, last=self._see_off)

    @abc.abstractmethod
    def _is_heard(self) -> bool:
        """Whether the others know of this process's end."""

    @abc.abstractmethod
    def _see_off(self) -> None:
        """What is left to be done before this process ends as it was told to."""


class Coordinator(Membership):
    """Process 0's: hears all the others, decides, and tells all."""

    def __init__(self, meeting: Meeting, *, silence_sec: float, pulse: Pulse) -> None:
        super().__init__(0, meeting, silence_sec=silence_sec, pulse=pulse)
        self._where: dict[int, tuple[int | None, str]] = {}
        self._stopping, self._counts = 0, dict[int, int]()
        self._arrived = dict.fromkeys(range(len(self.hosts)), 0)
        self._ended = False

    def _deliver(self, message: dict[str, Any]) -> None:
        self._hear(0, message)
        if "beat" in message or "bye" in message:
            for process in list(self._lines):
                self._send(process, message)

    def _hear(self, process: int, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            self._where[process] = (message["beat"], str(message.get("phase")))
        elif "bye" in message:
            self._leaving.add(process)
        elif "failed" in message:
            self._leaving.add(process)
            self._tell_end(f"{self._name(process)}: {message['failed']}", message["code"])
        elif "hang" in message:
            self._tell_end(self._who_hangs(message["hang"]), BROKEN, dump=True)
        elif "signal" in message and not self._stopping:
            self._stopping = message["signal"]
            self._tell({"hold": True})
        elif "arrived" in message:
            before = min(self._arrived.values())
            self._arrived[process] = message["arrived"]
            if min(self._arrived.values()) > before:
                self._tell({"passed": min(self._arrived.values())})
        elif "held" in message:
            self._counts[process] = message["held"]
            self._settle()

    def _gone(self, process: int, why: str) -> None:
        super()._gone(process, why)
        self._settle()

    def _settle(self) -> None:
        """Says where to stop, once all that are left have said where they hold."""
        if self._counts and {0, *self._lines} <= set(self._counts):
            self._tell({"stop": max(self._counts.values()) + 1, "signal": self._stopping})
            self._counts = {}

    def _lost(self, process: int, how: str) -> None:
        step, phase = self._where.get(process, (None, "start"))
        self._tell_end(f"{self._name(process)} {how}; {_last(step, phase)}", BROKEN)

    def _tell_end(self, reason: str, code: int, *, dump: bool = False) -> None:
        if not self._ended:  # What others say when they are told to end is not the reason.
            self._ended = True
            self._tell({"end": reason, "code": code, "dump": dump})

    def _tell(self, message: Mapping[str, Any]) -> None:
        for process in list(self._lines):
            self._send(process, message)
        self._obey(message)

    def _is_heard(self) -> bool:
        return not self._lines

    def _see_off(self) -> None:
        """Waits until the others have gone: JAX aborts them, with a message of its own, when this process is gone."""
        end = time.monotonic() + FAREWELL_SEC
        while self._lines and time.monotonic() < end:
            for process, line in list(self._lines.items()):
                try:
                    line.flush()
                    line.receive()
                except Lost:
                    del self._lines[process]
            ready(self._lines.values(), 0.05)

    def _who_hangs(self, idle_sec: float) -> str:
        groups: dict[tuple[int | None, str], list[int]] = {}
        for process in range(len(self.hosts)):
            groups.setdefault(self._where.get(process, (None, "start")), []).append(process)
        # The many wait for the few.
        by_size = sorted(groups.items(), key=lambda item: len(item[1]))
        parts = [
            f"{named(processes, self.hosts)}: {_last(step, phase).removeprefix('last heard of ')}"
            for (step, phase), processes in by_size
        ]
        return f"no step has been finished for {idle_sec:.0f} s, and the stacks were written; {'; '.join(parts)}"


class Worker(Membership):
    """Every other process's: tells process 0, and does as it says."""

    def __init__(self, process: int, meeting: Meeting, *, silence_sec: float, pulse: Pulse) -> None:
        super().__init__(process, meeting, silence_sec=silence_sec, pulse=pulse)
        self._first: tuple[int | None, str] = (None, "start")

    def _deliver(self, message: dict[str, Any]) -> None:
        self._send(0, message)

    def _hear(self, process: int, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            self._first = (message["beat"], str(message.get("phase")))
        elif "bye" in message:
            self._leaving.add(process)
        else:
            self._obey(message)

    def _is_heard(self) -> bool:
        return self._told.is_set() or not self._lines

    def _see_off(self) -> None:
        return  # Nobody waits for word of a worker that was told to end.

    def _lost(self, process: int, how: str) -> None:
        cut = f" (or {self.hosts[self.process]} is cut off)" if "silent" in how else ""
        self._end(f"{self._name(process)} {how}{cut}; {_last(*self._first)}", BROKEN)


def _last(step: int | None, phase: str) -> str:
    return f"last heard of {f'after step {step}' if step is not None else 'before it began to train'} (phase {phase})"


_current: Membership | None = None


def current() -> Membership | None:
    """This process's membership; None when it is alone."""
    return _current


def wait_for_all() -> None:
    """`Membership.wait_for_all` of this process; a process that is alone goes on."""
    if _current is not None:
        _current.wait_for_all()


def begin(process: int, meeting: Meeting, *, silence_sec: float, pulse: Pulse) -> Membership:
    """Makes and starts this process's membership, for as long as it lives."""
    global _current
    assert _current is None
    kind = Coordinator(meeting, silence_sec=silence_sec, pulse=pulse) if process == 0 else None
    _current = kind or Worker(process, meeting, silence_sec=silence_sec, pulse=pulse)
    _current.start()
    # JAX's own handler, registered earlier, comes after it, and waits there for the others.
    atexit.register(_current.leave)
    return _current
