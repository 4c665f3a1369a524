"""One attempt to run the command on all hosts, from the start of the processes to the end of the last."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections.abc import Callable, Sequence

from jaxdl.platform.launch.host import HostProcess, describe_code, exit_code, first_failure

Events = queue.SimpleQueue[HostProcess | int]
"""What an attempt waits for: a process that has ended, or the number of a signal to forward, or `UNREAD`."""
SAME_SEC = 2.0
"""The first signal so soon after `UNREAD` is the one that ended the reader too, as Ctrl-C does under `| tee`."""
UNREAD = 0
"""The launcher's output is not read any more: as SIGTERM, but Ctrl-C under `| tee` is this and SIGINT at once, and
such a second one kills no process."""


class Reader:
    """Who reads what a launcher prints: its end is one signal, and so is the Ctrl-C that has ended it."""

    def __init__(self) -> None:
        self._gone_sec = -math.inf

    def signal_for(self, signum: int, has_stopped: bool, say: Callable[[str], None]) -> int | None:
        """The signal to forward for this number, which may be `UNREAD`; None for none."""
        now_sec = time.monotonic()
        if signum == UNREAD:
            if has_stopped:
                return None
            self._gone_sec = now_sec
            say("nobody reads the output any more")
            return signal.SIGTERM
        is_same, self._gone_sec = now_sec - self._gone_sec < SAME_SEC, -math.inf
        return None if is_same else signum


class Attempt:
    """Waits for started processes. When one fails, the others are killed after `grace_sec`."""

    def __init__(
        self, processes: Sequence[HostProcess], events: Events, *, grace_sec: float, say: Callable[[str], None]
    ) -> None:
        self.stopped: int | None = None
        """The signal that was forwarded."""
        self._processes = list(processes)
        self._events = events
        self._grace_sec = grace_sec
        self._say = say
        self._began_sec = time.monotonic()
        self._reader = Reader()
        self._ended: list[HostProcess] = []
        self._deadline_sec: float | None = None

    def run(self) -> None:
        """Returns when all processes, and those that they started, have ended."""
        while len(self._ended) < len(self._processes):
            try:
                event = self._events.get(timeout=self._remaining_sec())
            except queue.Empty:
                self._kill_rest(f"did not exit within {format_sec(self._grace_sec)}: killed")
                continue
            if isinstance(event, int):
                self._forward(event)
            else:
                self._note_end(event)
        deadline_sec = time.monotonic() + self._grace_sec
        killed = [process.host.name for process in self._processes if process.clean_up(deadline_sec)]
        if killed:
            self._say(f"{_names(killed)} left processes behind, which were killed")

    def kill(self) -> None:
        """Kills all processes at once."""
        for process in self._processes:
            process.kill()

    @property
    def code(self) -> int:
        """The exit code of the first failure; 0 when none failed."""
        culprit = first_failure(self._ended)
        if culprit is not None:
            assert culprit.code is not None
            return exit_code(culprit.code)
        return 128 + self.stopped if self.stopped and any(process.killed for process in self._ended) else 0

    @property
    def reason(self) -> str:
        """Which host failed first, how, and after what time; empty when none failed."""
        culprit = first_failure(self._ended)
        return "" if culprit is None else self._describe(culprit)

    def _describe(self, process: HostProcess) -> str:
        assert process.code is not None
        after = format_sec(process.ended_sec - self._began_sec)
        return f"{process.host.name} ended with {describe_code(process.code)} after {after}"

    def _remaining_sec(self) -> float | None:
        return None if self._deadline_sec is None else max(0.0, self._deadline_sec - time.monotonic())

    def _note_end(self, process: HostProcess) -> None:
        self._ended.append(process)
        assert process.code is not None
        asked = self.stopped is not None and exit_code(process.code) == 128 + self.stopped
        if process.failed and not asked and self._deadline_sec is None:
            self._deadline_sec = process.ended_sec + self._grace_sec
            if self._running():
                self._say(f"{self._describe(process)}; the others have {format_sec(self._grace_sec)} to exit")

    def _forward(self, signum: int) -> None:
        meant = self._reader.signal_for(signum, self.stopped is not None, self._say)
        if meant is None:
            return
        signum = meant
        name = signal.Signals(signum).name
        if self.stopped is None:
            self.stopped = signum
            self._say(f"{name} is forwarded to all hosts; a second one kills them")
            for process in self._running():
                process.signal(signum)
        else:
            self._kill_rest(f"killed by the second {name}")

    def _kill_rest(self, why: str) -> None:
        self._deadline_sec = None
        rest = self._running()
        for process in rest:
            process.kill()
        if rest:
            self._say(f"{_names([process.host.name for process in rest])} {why}")

    def _running(self) -> list[HostProcess]:
        return [process for process in self._processes if process.code is None]


def _names(names: Sequence[str]) -> str:
    """`host0, host1 and host2`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def format_sec(seconds: float) -> str:
    """`0.4 s`, `34 s`."""
    return f"{seconds:.1f} s" if seconds < 10 and seconds != round(seconds) else f"{seconds:.0f} s"
