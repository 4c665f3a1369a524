"""A syncer and its learners as processes of this machine. Unlike the hosts of a run, each is started again alone.

On a cluster each node has one learner, and the first one the syncer too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from jaxdl.parallel.asynchrony.service import LEARNER_VARIABLE, LEARNERS_VARIABLE, Service
from jaxdl.parallel.cluster.address import SYNCER_VARIABLE
from jaxdl.parallel.cluster.token import VARIABLE, make_token
from jaxdl.platform.launch.attempt import UNREAD, Events, Reader, format_sec
from jaxdl.platform.launch.host import Host, HostProcess, describe_code, exit_code
from jaxdl.platform.launch.output import LAUNCHER, Printer
from jaxdl.platform.launch.processes import NOT_RESTARTED, free_port, resolve_command, write_pids
from jaxdl.platform.launch.reaper import Reaper

SYNCER = "syncer"
PLACEHOLDER = "{learner}"
"""In the words of the command: replaced by the number of the learner."""
LEAVE_SEC = 30.0
"""Seconds for the learners to end by themselves once the syncer has."""
KILL_SEC = 10.0
"""Seconds for processes to end after a signal or the first user error, before they are killed."""
_PAUSE_SEC = 1.0
_ALONE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAXDL_DISTRIBUTED")
"""Variables that would make a learner one process of a larger run."""


class Place(NamedTuple):
    """Which learner of a cluster runs on this node. The first node has the syncer too."""

    number: int
    address: str
    """`host:port` of the syncer."""
    token: str
    """The secret of the syncer and all learners."""


class Learners:
    """Runs a syncer and `learners` times a command, or what is at one `place` of a cluster; `run` blocks.

    A process that fails is started again by itself, at most `restarts` times each; a learner not after exit code 2
    (user error), which ends all, or 3 (diverged), after which the others go on. The learners find the syncer by
    environment variables; the secret that they share is in no command line.
    """

    def __init__(
        self,
        command: Sequence[str],
        service: Service,
        *,
        devices_per_learner: int | None = None,
        place: Place | None = None,
        restarts: int = 0,
        pids_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self._command = resolve_command(command)
        host = service.host or (None if place else "127.0.0.1")
        self._service = service.replaced({"host": host, "port": service.port or free_port()})
        numbers = range(service.learners) if place is None else [place.number]
        self._numbers = {f"learner{number}": number for number in numbers}
        self._has_syncer, self._elsewhere = 0 in numbers, service.learners > len(numbers)
        self._address = place.address if place else f"127.0.0.1:{self._service.port}"
        self._devices, self._restarts, self._pids_file = devices_per_learner, restarts, pids_file
        self._environment = dict(os.environ if environment is None else environment)
        self._token = place.token if place else make_token()
        self._events: Events = queue.SimpleQueue()
        self._running: dict[str, HostProcess] = {}
        self._starts: dict[str, int] = {}
        self._due: dict[str, float] = {}
        """When a process that has failed is started again, of `time.monotonic`."""
        self._lost: list[str] = []
        """Learners that have failed and are not started again."""
        self._deadline: float | None = None
        """When whatever still runs is killed."""
        self._stopped: int | None = None
        self._reader = Reader()
        self._code: int | None = None
        """The exit code of the run, once it is known."""
        names = [SYNCER, *self._numbers]
        out, err = stdout or sys.stdout, stderr or sys.stderr
        self._printer = Printer(names, out, err, lambda: self.stop(UNREAD))

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Forwards a signal to all processes; a second call kills them. From any thread, or a signal handler."""
        self._events.put(int(signum))

    def run(self) -> int:
        """Runs to the end. Returns 0, or the code of the failure that ended the run (128 + N after signal N)."""
        reaper = Reaper()
        try:
            for name in (*([SYNCER] if self._has_syncer else []), *self._numbers):
                self._start(name, reaper)
            while self._running or self._due:
                self._start_due(reaper)
                try:
                    event = self._events.get(timeout=self._patience_sec())
                except queue.Empty:
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        self._kill_rest()
                    continue
                if isinstance(event, int):
                    self._forward(event)
                else:
                    self._handle_end(event)
        finally:
            for process in self._running.values():
                process.kill()
            reaper.close()
        return self._code or 0

    def _start(self, name: str, reaper: Reaper) -> None:
        number = self._numbers.get(name)
        command = self._service.command() if number is None else command_of_learner(self._command, number)
        restart = self._starts.get(name, 0)
        self._starts[name] = restart + 1
        environment = {key: value for key, value in self._environment.items() if key not in _ALONE}
        environment |= self._variables(name, number, restart)
        host = Host(name, "127.0.0.1")
        process = HostProcess(host, command, environment, printer=self._printer, reaper=reaper, ended=self._events)
        self._running[name] = process
        if self._pids_file is not None:
            pids = {name: process.pid for name, process in self._running.items()}
            with contextlib.suppress(OSError):
                write_pids(self._pids_file, {"launcher": os.getpid(), "processes": pids})

    def _variables(self, name: str, number: int | None, restart: int) -> dict[str, str]:
        variables = {
            VARIABLE: self._token,
            "PYTHONUNBUFFERED": "1",
            "JAXDL_HOST": name,
            "JAXDL_PROCESSES_OF_HOST": str(len(self._numbers)),
            "JAXDL_RESTART": str(restart),
        }
        if number is None:
            return variables
        variables |= {
            SYNCER_VARIABLE: self._address,
            LEARNER_VARIABLE: str(number),
            LEARNERS_VARIABLE: str(self._service.learners),
        }
        if self._devices is None:
            return variables
        return variables | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self._devices)}

    def _handle_end(self, process: HostProcess) -> None:
        name = process.host.name
        del self._running[name]
        process.clean_up(time.monotonic() + KILL_SEC)
        assert process.code is not None
        code = exit_code(process.code)
        if process.killed or self._stopped is not None:
            self._code = 128 + self._stopped if self._stopped is not None else self._code
            return
        what = f"{name} ended with {describe_code(process.code)}"
        if name == SYNCER and code == 0:
            self._leave(LEAVE_SEC)
        elif self._deadline is not None:
            pass
        elif code == 0:
            self._handle_finish(name)
        elif code in NOT_RESTARTED and not (name != SYNCER and code != 2 and self._others(name)):
            self._say(f"{what}: {NOT_RESTARTED[code]}")
            self._end_all(code)
        elif code in NOT_RESTARTED:
            self._give_up(name, f"{what}: {NOT_RESTARTED[code]}", code)
        elif self._starts[name] <= self._restarts:
            self._say(f"restart {self._starts[name]} of {self._restarts}: {what}")
            self._due[name] = time.monotonic() + _PAUSE_SEC
        elif name == SYNCER or not self._others(name):
            self._say(what)
            self._end_all(code)
        else:
            self._give_up(name, what, code)

    def _give_up(self, name: str, what: str, code: int) -> None:
        """Notes that a learner will not come back; its node of a cluster then ends with its code."""
        self._lost.append(name)
        self._say(f"{what}; the others go on")
        if self._elsewhere:
            self._code = self._code or code

    def _handle_finish(self, name: str) -> None:
        """A learner has finished: if it was the last one, the syncer need not wait for those that were lost."""
        if self._lost and not self._others(name):
            self._say(f"the others have finished, and {', '.join(self._lost)} will not come back: the syncer ends")
            self._end_all(0)

    def _others(self, name: str) -> bool:
        """Whether learners besides this one run, or will run again."""
        return self._elsewhere or bool({*self._running, *self._due} - {name, SYNCER})

    def _start_due(self, reaper: Reaper) -> None:
        for name in [name for name, at in self._due.items() if at <= time.monotonic()]:
            del self._due[name]
            self._start(name, reaper)

    def _patience_sec(self) -> float | None:
        times = [*self._due.values(), *([] if self._deadline is None else [self._deadline])]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _leave(self, after_sec: float) -> None:
        """From here on nothing is started again; what still runs after some seconds is killed."""
        self._due.clear()
        self._deadline = time.monotonic() + after_sec

    def _end_all(self, code: int) -> None:
        self._code = self._code or code
        self._leave(KILL_SEC)
        for process in self._running.values():
            process.signal(signal.SIGTERM)

    def _forward(self, signum: int) -> None:
        meant = self._reader.signal_for(signum, self._stopped is not None, self._say)
        if meant is None:
            return
        signum = meant
        name = signal.Signals(signum).name
        if self._stopped is not None:
            self._kill_rest()
            return
        self._stopped, self._code = signum, 128 + signum
        self._due.clear()
        self._say(f"{name} is forwarded to all; a second one kills them")
        # The learners save and say goodbye before the syncer is gone.
        for process in sorted(self._running.values(), key=lambda process: process.host.name == SYNCER):
            process.signal(signum)

    def _kill_rest(self) -> None:
        self._deadline = None
        rest = sorted(self._running)
        for process in self._running.values():
            process.kill()
        if rest:
            self._say(f"{', '.join(rest)} did not exit within {format_sec(KILL_SEC)}: killed")

    def _say(self, text: str) -> None:
        self._printer.print(LAUNCHER, text, error=True)


def command_of_learner(command: Sequence[str], number: int) -> list[str]:
    """The command of a learner."""
    return [word.replace(PLACEHOLDER, str(number)) for word in command]
