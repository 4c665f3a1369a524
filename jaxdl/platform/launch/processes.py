"""One process per host: started together, ended together, restarted after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import DIVERGED, HALTED, MISTAKE
from jaxdl.parallel.cluster.token import VARIABLE, make_token
from jaxdl.platform.launch.attempt import UNREAD, Attempt, Events, format_sec
from jaxdl.platform.launch.failures import keep_ends
from jaxdl.platform.launch.host import Host, HostProcess
from jaxdl.platform.launch.output import LAUNCHER, Printer
from jaxdl.platform.launch.reaper import Reaper

NOT_RESTARTED = {MISTAKE: "user error", DIVERGED: "training diverged", HALTED: "halted by the file"}
"""Exit codes after which a restart would fail in the same way, or is not wanted."""
FAST_SEC = 30.0
"""An attempt that fails sooner than this is followed by a pause."""
FIRST_PAUSE_SEC, MAX_PAUSE_SEC = 1.0, 30.0
_PORTS = range(15_000, 32_000)  # Below the ports of outgoing connections on Linux and macOS.


def local_hosts(num_hosts: int) -> list[Host]:
    """`num_hosts` hosts, all on this machine."""
    if num_hosts < 1:
        raise ConfigError(f"{num_hosts} hosts: at least 1 is needed.")
    return [Host(f"host{index}", "127.0.0.1") for index in range(num_hosts)]


class Launch:
    """Runs a command once on every host.

    `run` blocks; `start` and `wait` do the same in a thread. Each process gets `devices_per_host` virtual CPU devices
    and environment variables with its identity (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`,
    `JAXDL_HOST`), the number and the reason of the restart (`JAXDL_RESTART`, `JAXDL_RESTART_REASON`), and the run token
    of this start (`JAXDL_RUN_TOKEN`), which is in no command line and never printed.

    When a process fails, the others are killed after `grace_sec`. Then the command is restarted on all hosts, at most
    `restarts` times; not after exit codes 2, 3 and 4, nor after `stop`. `pids_file` gets the process ids as JSON at
    every start: {"launcher": 1, "restart": 0, "hosts": {"host0": 2, ...}}.
    """

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[Host],
        *,
        devices_per_host: int,
        restarts: int = 0,
        grace_sec: float = 10.0,
        pids_file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.command = resolve_command(command)
        self.hosts = list(hosts)
        if not self.hosts:
            raise ConfigError("0 hosts: at least 1 is needed.")
        for name, value, least in (
            ("devices_per_host", devices_per_host, 1),
            ("restarts", restarts, 0),
            ("grace_sec", grace_sec, 0),
        ):
            if not value >= least:
                raise ConfigError(f"{name} = {value}: it must be {least} or more.")
        self.devices_per_host, self.restarts, self.grace_sec = devices_per_host, restarts, grace_sec
        if pids_file is not None and not pids_file.parent.is_dir():
            raise ConfigError(f"pids {pids_file}: the folder {pids_file.parent} does not exist; make it first.")
        self.pids_file = pids_file
        self.environment = dict(os.environ if environment is None else environment)
        self.num_restarts = 0
        """Restarts so far."""
        self.pids: dict[str, int] = {}
        """Host name -> pid of its current process."""
        self._events: Events = queue.SimpleQueue()
        self._reason = ""
        self._result = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        names = [host.name for host in self.hosts]
        self._printer = Printer(names, stdout or sys.stdout, stderr or sys.stderr, lambda: self.stop(UNREAD))

    def start(self) -> Launch:
        """Starts `run` in a thread; `wait` returns its result. Returns itself."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run_and_note, name="jaxdl-launch")
        self._thread.start()
        return self

    def _run_and_note(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._error = error

    def wait(self, timeout_sec: float | None = None) -> int | None:
        """The exit code of a started run; None if it has not ended after `timeout_sec`.

        Raises the exception with which the launcher itself failed.
        """
        assert self._thread is not None, "wait without start"
        self._thread.join(timeout_sec)
        if self._error is not None:
            raise self._error
        return None if self._thread.is_alive() else self._result

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Forwards a signal to all processes and prevents restarts. A second call kills them.

        May be called from any thread and from a signal handler.
        """
        self._events.put(int(signum))

    def run(self) -> int:
        """Runs to the end, restarts included.

        Returns 0, or the exit code of the process that failed first (128 + N after signal N).
        """
        reaper, pause_sec = Reaper(), 0.0
        self._result = 0
        try:
            while not self._wait_for_stop(0.0):
                began_sec = time.monotonic()
                attempt = self._run_once(reaper)
                self._result, took_sec = attempt.code, time.monotonic() - began_sec
                again = self._should_restart(attempt, took_sec)
                then = f"restart {self.num_restarts + 1} of {self.restarts} by the launcher" if again else None
                keep_ends(self.command, attempt, self.pids, self._printer.take_ends(), then)
                if not again:
                    break
                pause_sec = pause_after(took_sec, pause_sec)
                soon = f" (in {format_sec(pause_sec)})" if pause_sec else ""
                self._say(f"restart {self.num_restarts + 1} of {self.restarts}: {self._reason}{soon}")
                if self._wait_for_stop(pause_sec):
                    break
                self.num_restarts += 1
        finally:
            reaper.close()
        return self._result

    def _run_once(self, reaper: Reaper) -> Attempt:
        """Runs one attempt: starts all processes and waits for the end of the last."""
        processes: list[HostProcess] = []
        coordinator, token = f"{self.hosts[0].address}:{free_port()}", make_token()
        try:
            for index, host in enumerate(self.hosts):
                environment = self.environment | self._variables(index, coordinator, token)
                processes.append(
                    HostProcess(
                        host, self.command, environment, printer=self._printer, reaper=reaper, ended=self._events
                    )
                )
            self.pids = {process.host.name: process.pid for process in processes}
            self._write_pids()
            attempt = Attempt(processes, self._events, grace_sec=self.grace_sec, say=self._say)
            attempt.run()
        finally:
            for process in processes:
                process.kill()
        return attempt

    def _should_restart(self, attempt: Attempt, took_sec: float) -> bool:
        """Whether to restart. If not, prints the closing line."""
        self._reason = attempt.reason
        if attempt.code == 0:
            who = "the host" if len(self.hosts) == 1 else f"all {len(self.hosts)} hosts"
            self._say(f"{who} finished after {format_sec(took_sec)}")
        elif attempt.stopped is not None:
            as_asked = attempt.code == 128 + attempt.stopped
            name = signal.Signals(attempt.stopped).name
            self._say(f"ended by {name} after {format_sec(took_sec)}" if as_asked else attempt.reason)
        elif self.restarts and attempt.code in NOT_RESTARTED:
            self._say(f"{attempt.reason}; not restarted: {NOT_RESTARTED[attempt.code]}")
        elif self.restarts and self.num_restarts == self.restarts:
            used = "the only restart" if self.restarts == 1 else f"all {self.restarts} restarts"
            self._say(f"{attempt.reason}; {used} used")
        elif not self.restarts:
            self._say(attempt.reason)
        else:
            return True
        return False

    def _wait_for_stop(self, pause_sec: float) -> bool:
        """Waits for `pause_sec` between attempts; returns true at once when `stop` is called."""
        with contextlib.suppress(queue.Empty):
            signum = self._events.get(timeout=pause_sec)
            assert isinstance(signum, int), "a process of an earlier run has ended twice"
            signum = signal.SIGTERM if signum == UNREAD else signum
            self._say(f"ended by {signal.Signals(signum).name} while no process was running")
            self._result = 128 + signum
            return True
        return False

    def _variables(self, index: int, coordinator: str, token: str) -> dict[str, str]:
        """The environment variables of process `index` that the launcher sets."""
        return {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(len(self.hosts)),
            "JAX_PROCESS_ID": str(index),
            VARIABLE: token,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_host),
            "PYTHONUNBUFFERED": "1",
            "JAXDL_HOST": self.hosts[index].name,
            "JAXDL_PROCESSES_OF_HOST": str(len(self.hosts)),  # Emulated hosts share the real one.
            "JAXDL_RESTART": str(self.num_restarts),
            "JAXDL_RESTART_REASON": self._reason,
        }

    def _write_pids(self) -> None:
        if self.pids_file is not None:
            fields = {"launcher": os.getpid(), "restart": self.num_restarts, "hosts": self.pids}
            try:
                write_pids(self.pids_file, fields)
            except OSError as error:
                if self.num_restarts == 0:
                    raise
                self._say(f"--pids {self.pids_file}: {error.strerror}; the file still has the pids of an earlier start")

    def _say(self, text: str) -> None:
        self._printer.print(LAUNCHER, text, error=True)


def pause_after(took_sec: float, before_sec: float = 0.0) -> float:
    """The seconds between an attempt that failed after `took_sec` and the next; `before_sec` is the last such pause."""
    return min(max(2 * before_sec, FIRST_PAUSE_SEC), MAX_PAUSE_SEC) if took_sec < FAST_SEC else 0.0


def write_pids(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes process ids as JSON. Replaced atomically, so that no reader sees half of it. Raises OSError."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    unfinished.replace(path)


def start_hosts(command: Sequence[str], hosts: Sequence[Host], *, devices_per_host: int, **options: Any) -> Launch:
    """Starts the command on all hosts and returns at once. The options are those of `Launch`."""
    return Launch(command, hosts, devices_per_host=devices_per_host, **options).start()


def run_hosts(command: Sequence[str], hosts: Sequence[Host], *, devices_per_host: int, **options: Any) -> int:
    """Runs the command on all hosts. Returns 0, or the exit code of the first failure (128 + N after signal N).

    Called from the main thread, it forwards SIGTERM, SIGINT and SIGHUP. The options are those of `Launch`.
    """
    launch = Launch(command, hosts, devices_per_host=devices_per_host, **options)
    with signals_to(launch.stop):
        return launch.run()


class Stoppable(Protocol):
    """What runs processes, and hands a signal on to them."""

    def stop(self, signum: int) -> None:
        """Forwards a signal."""
        ...


@contextlib.contextmanager
def forward_signals() -> Iterator[Callable[[Stoppable], None]]:
    """Context in which signals, as in `signals_to`, go to what its function is given; what came before, then."""
    early: list[int] = []
    receivers: list[Stoppable] = []

    def stop(signum: int) -> None:
        receivers[0].stop(signum) if receivers else early.append(signum)

    def forward_to(receiver: Stoppable) -> None:
        receivers.append(receiver)
        for signum in early:
            receiver.stop(signum)

    with signals_to(stop):
        yield forward_to


@contextlib.contextmanager
def signals_to(stop: Callable[[int], None]) -> Iterator[None]:
    """Context in which SIGTERM, SIGINT and SIGHUP (as SIGTERM) call `stop`; ignored signals stay ignored (nohup).

    SIGHUP does so only as the first of them: a terminal that is closed may send several.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    forwarded = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}
    before = {signum: signal.getsignal(signum) for signum in forwarded}
    came: list[int] = []

    def act(signum: int, _: object) -> None:
        came.append(signum)
        if signum != signal.SIGHUP or len(came) == 1:
            stop(forwarded[signal.Signals(signum)])

    for signum in forwarded:
        if before[signum] is not signal.SIG_IGN:
            signal.signal(signum, act)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def free_port() -> int:
    """A free TCP port of this machine, outside the range of outgoing connections."""
    for _ in range(100):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise ConfigError(f"found no free TCP port between {_PORTS.start} and {_PORTS.stop}.")


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command with `python` replaced by the Python of the launcher. Raises ConfigError for an unknown program."""
    if not command:
        raise ConfigError("no command to run. Write it after --, as in: -- python -m jaxdl.train ...")
    if command[0] in ("python", "python3"):
        # Under sudo the first `python` on PATH is usually not that of the active environment.
        return [sys.executable, *command[1:]]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: no such program. Write the command and its options after --.")
    return list(command)
