"""The process of one host: started in its own session, read line by line, waited for, and killed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxdl.parallel.cluster import BROKEN
from jaxdl.platform.launch.output import LineReader, Printer
from jaxdl.platform.launch.reaper import Reaper, kill_session, session_members

_DIE_WITH_PARENT = Path(__file__).parent / "die_with_parent.py"
_POLL_SEC = 0.05
_UNKILLABLE_SEC = 10.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Host:
    """A real or emulated host, on which one process of the run is started."""

    name: str
    """The name printed before each of its lines."""
    address: str
    """The address at which the other hosts reach it."""
    prefix: tuple[str, ...] = ()
    """Words before the command, which enter the host (its network namespace) and exec the command."""


class HostProcess:
    """The process of one host. Puts itself into `ended` when it has ended for any reason.

    Make it in a thread that outlives the process: on Linux the process is killed when that thread ends.
    """

    def __init__(
        self,
        host: Host,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        printer: Printer,
        reaper: Reaper,
        ended: queue.SimpleQueue[HostProcess | int],
    ) -> None:
        self.host = host
        self.code: int | None = None
        """Return code as in `subprocess`: -N after signal N; None while the process runs."""
        self.killed = False
        """Whether the launcher killed it."""
        self.ended_sec = float("inf")
        """Time of its end, by `time.monotonic`."""
        self._gone = False
        self._reaper = reaper
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_DIE_WITH_PARENT), str(os.getpid()), *host.prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        self.pid = self._process.pid
        reaper.watch(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = ((self._process.stdout, False), (self._process.stderr, True))
        self._readers = [
            threading.Thread(target=_read, args=(host.name, stream, printer, error), daemon=True)
            for stream, error in streams
        ]
        self._waiter = threading.Thread(target=self._wait, args=(ended,), daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def _wait(self, ended: queue.SimpleQueue[HostProcess | int]) -> None:
        code = self._process.wait()
        self.ended_sec = time.monotonic()
        self.code = code
        ended.put(self)

    @property
    def failed(self) -> bool:
        """Whether it failed by itself, rather than being killed by the launcher."""
        return self.code not in (None, 0) and not self.killed

    def signal(self, signum: int) -> None:
        """Sends a signal to the process group, as a terminal does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def kill(self) -> None:
        """Kills the process, if it still runs, and all of its session at once."""
        self.killed = self.killed or self.code is None
        if not self._gone:  # Afterwards the pid may belong to another process.
            kill_session(self.pid)

    def clean_up(self, deadline_sec: float) -> bool:
        """Waits until the session is empty; kills what is left of it at `deadline_sec` (of `time.monotonic`).

        Call it after the process has ended. Returns whether anything had to be killed.
        """
        killed = False
        while session_members(self.pid):
            now_sec = time.monotonic()
            if now_sec >= deadline_sec + _UNKILLABLE_SEC:
                break  # A member waits for a disk or network file system that does not answer.
            if now_sec >= deadline_sec:
                kill_session(self.pid)
                killed = True
            time.sleep(_POLL_SEC)
        self._gone = True
        self._reaper.forget(self.pid)
        for reader in self._readers:
            reader.join(timeout=1.0)  # A process that left the session may hold the pipe open indefinitely.
        return killed


def _read(name: str, stream: IO[bytes], printer: Printer, error: bool) -> None:
    """Prints the lines of a stream until its end."""
    lines = LineReader()
    while data := os.read(stream.fileno(), _READ_BYTES):
        for line in lines.feed(data):
            printer.print(name, line, error=error)
    for line in lines.end():
        printer.print(name, line, error=error)
    stream.close()


def first_failure(ended: Sequence[HostProcess]) -> HostProcess | None:
    """The process that caused the failure, of `ended` in the order of their ends; None when none failed by itself.

    A process that exits because of another one (code 75) may end before that other, so it counts only if all did.
    """
    failed = [process for process in ended if process.failed]
    return next((process for process in failed if process.code != BROKEN), failed[0] if failed else None)


def exit_code(code: int) -> int:
    """The exit code as in shells: 128 + N after signal N."""
    return 128 - code if code < 0 else code


def describe_code(code: int) -> str:
    """`exit code 3`, or `SIGKILL`; 143 is written `exit code 143 (SIGTERM)`."""
    signum = -code if code < 0 else code - 128
    try:
        name = signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}" if code < 0 else f"exit code {code}"
    return name if code < 0 else f"exit code {code} ({name})"
