"""One process per host: started together, ended together, started again after a failure."""

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
from typing import Any, TextIO

from jaxdl.cluster import DIVERGED, MISTAKE
from jaxdl.cluster.token import VARIABLE, make_token
from jaxdl.config import ConfigError
from jaxdl.launch.attempt import Attempt, Events, format_sec
from jaxdl.launch.host import Host, HostProcess
from jaxdl.launch.output import LAUNCHER, Printer
from jaxdl.launch.reaper import Reaper

NOT_RESTARTED = {MISTAKE: "a mistake of the user's", DIVERGED: "training diverged for good"}
"""Exit codes after which the same would happen again."""
FAST_SEC = 30.0
"""A run that fails within this time of its start is started again after a pause."""
FIRST_PAUSE_SEC, MAX_PAUSE_SEC = 1.0, 30.0
_PORTS = range(15_000, 32_000)  # Below those that Linux and macOS give to outgoing connections.


def local_hosts(num_hosts: int) -> list[Host]:
    """`num_hosts` hosts that are all this machine."""
    if num_hosts < 1:
        raise ConfigError(f"{num_hosts} hosts: there must be 1 or more.")
    return [Host(f"host{index}", "127.0.0.1") for index in range(num_hosts)]


class Launch:
    """A command that runs once on every host.

    `run` blocks; `start` and `wait` do the same from a thread. Each process finds in its environment who it is
    (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, `JAXDL_HOST`), has `devices_per_host` virtual CPU
    devices, and finds the number of the restart and its reason (`JAXDL_RESTART`, `JAXDL_RESTART_REASON`). Every start
    has a run token of its own (`JAXDL_RUN_TOKEN`), which is in no command line and is not printed.

    When a process fails, the others have `grace_sec` to end by themselves, then they are killed. After that the command
    is started again on all hosts, `restarts` times at most; not after exit codes 2 and 3, nor after `stop`.
    `pids_file` gets the pids as JSON at every start: {"launcher": 1, "restart": 0, "hosts": {"host0": 2, ...}}.
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
        self.command = resolved(command)
        self.hosts = list(hosts)
        if not self.hosts:
            raise ConfigError("0 hosts: there must be 1 or more.")
        for name, value, least in (
            ("devices_per_host", devices_per_host, 1),
            ("restarts", restarts, 0),
            ("grace_sec", grace_sec, 0),
        ):
            if not value >= least:
                raise ConfigError(f"{name} = {value}: it must be {least} or more.")
        self.devices_per_host, self.restarts, self.grace_sec = devices_per_host, restarts, grace_sec
        if pids_file is not None and not pids_file.parent.is_dir():
            raise ConfigError(f"pids {pids_file}: there is no folder {pids_file.parent}; make it first.")
        self.pids_file = pids_file
        self.environment = dict(os.environ if environment is None else environment)
        self.num_restarts = 0
        """Restarts up to now."""
        self.pids: dict[str, int] = {}
        """Host name -> pid of its newest process."""
        self._events: Events = queue.SimpleQueue()
        self._reason = ""
        self._result = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        names = [host.name for host in self.hosts]
        self._printer = Printer(names, stdout or sys.stdout, stderr or sys.stderr, lambda: self.stop(signal.SIGTERM))

    def start(self) -> Launch:
        """Runs in a thread from here on; `wait` for the result. Returns itself."""
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
        """The exit code of a run that was started; None when it has not ended after `timeout_sec`.

        Raises what the launcher itself failed with.
        """
        assert self._thread is not None, "wait without start"
        self._thread.join(timeout_sec)
        if self._error is not None:
            raise self._error
        return None if self._thread.is_alive() else self._result

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Hands a signal on to all processes, and starts them no more. The second time it kills them.

        May be called from any thread, and by a signal's handler.
        """
        self._events.put(int(signum))

    def run(self) -> int:
        """Runs to the end, restarts included.

        Returns 0, or the exit code of the process that failed first (128 + N after signal N).
        """
        reaper, pause_sec = Reaper(), 0.0
        self._result = 0
        try:
            while not self._stopped_within(0.0):
                began_sec = time.monotonic()
                attempt = self._run_once(reaper)
                self._result, took_sec = attempt.code, time.monotonic() - began_sec
                if not self._goes_on(attempt, took_sec):
                    break
                pause_sec = min(max(2 * pause_sec, FIRST_PAUSE_SEC), MAX_PAUSE_SEC) if took_sec < FAST_SEC else 0.0
                soon = f" (in {format_sec(pause_sec)})" if pause_sec else ""
                self._say(f"restart {self.num_restarts + 1} of {self.restarts}: {self._reason}{soon}")
                if self._stopped_within(pause_sec):
                    break
                self.num_restarts += 1
        finally:
            reaper.close()
        return self._result

    def _run_once(self, reaper: Reaper) -> Attempt:
        """One start of all processes, to the end of the last."""
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

    def _goes_on(self, attempt: Attempt, took_sec: float) -> bool:
        """Whether the run is to be started again. Prints the closing line if it is not."""
        self._reason = attempt.reason
        if attempt.code == 0:
            who = "the host" if len(self.hosts) == 1 else f"all {len(self.hosts)} hosts"
            self._say(f"{who} ended after {format_sec(took_sec)}")
        elif attempt.stopped is not None:
            as_asked = attempt.code == 128 + attempt.stopped
            name = signal.Signals(attempt.stopped).name
            self._say(f"ended by {name} after {format_sec(took_sec)}" if as_asked else attempt.reason)
        elif self.restarts and attempt.code in NOT_RESTARTED:
            self._say(f"{attempt.reason}; not started again: {NOT_RESTARTED[attempt.code]}")
        elif self.restarts and self.num_restarts == self.restarts:
            used = "the only restart is" if self.restarts == 1 else f"all {self.restarts} restarts are"
            self._say(f"{attempt.reason}; {used} used up")
        elif not self.restarts:
            self._say(attempt.reason)
        else:
            return True
        return False

    def _stopped_within(self, pause_sec: float) -> bool:
        """Waits while no process runs; returns at once, and true, when `stop` is called."""
        with contextlib.suppress(queue.Empty):
            signum = self._events.get(timeout=pause_sec)
            assert isinstance(signum, int), "a process of an earlier run has ended twice"
            self._say(f"ended by {signal.Signals(signum).name}; no process runs")
            self._result = 128 + signum
            return True
        return False

    def _variables(self, index: int, coordinator: str, token: str) -> dict[str, str]:
        """The environment of process `index` in which it differs from the launcher's."""
        return {
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(len(self.hosts)),
            "JAX_PROCESS_ID": str(index),
            VARIABLE: token,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_host),
            "PYTHONUNBUFFERED": "1",
            "JAXDL_HOST": self.hosts[index].name,
            "JAXDL_PROCESSES_OF_HOST": str(len(self.hosts)),  # Emulated hosts share the one that there is.
            "JAXDL_RESTART": str(self.num_restarts),
            "JAXDL_RESTART_REASON": self._reason,
        }

    def _write_pids(self) -> None:
        if self.pids_file is not None:
            text = json.dumps({"launcher": os.getpid(), "restart": self.num_restarts, "hosts": self.pids})
            # Replaced as a whole: who polls the file never reads half of it.
            unfinished = self.pids_file.with_name(self.pids_file.name + ".tmp")
            try:
                unfinished.write_text(text + "\n")
                unfinished.replace(self.pids_file)
            except OSError as error:
                if self.num_restarts == 0:
                    raise
                self._say(f"--pids {self.pids_file}: {error.strerror}; the file is of an earlier start")

    def _say(self, text: str) -> None:
        self._printer.print(LAUNCHER, text, error=True)


def start_hosts(command: Sequence[str], hosts: Sequence[Host], *, devices_per_host: int, **options: Any) -> Launch:
    """Starts the command on all hosts and returns the run at once. Options as those of `Launch`."""
    return Launch(command, hosts, devices_per_host=devices_per_host, **options).start()


def run_hosts(command: Sequence[str], hosts: Sequence[Host], *, devices_per_host: int, **options: Any) -> int:
    """Runs the command on all hosts. Returns 0, or the exit code of the first failure (128 + N after signal N).

    SIGTERM, SIGINT and SIGHUP are handed on while it runs, when it is called from the main thread. Options as those of
    `Launch`.
    """
    launch = Launch(command, hosts, devices_per_host=devices_per_host, **options)
    with signals_to(launch.stop):
        return launch.run()


@contextlib.contextmanager
def signals_to(stop: Callable[[int], None]) -> Iterator[None]:
    """Context: SIGTERM, SIGINT and SIGHUP (as SIGTERM) call `stop`. Those that are ignored stay so (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handed_on = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}
    before = {signum: signal.getsignal(signum) for signum in handed_on}
    for signum in handed_on:
        if before[signum] is not signal.SIG_IGN:
            signal.signal(signum, lambda number, _: stop(handed_on[signal.Signals(number)]))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, outside those given to outgoing connections."""
    for _ in range(100):
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
    raise ConfigError(f"no free TCP port was found between {_PORTS.start} and {_PORTS.stop}.")


def resolved(command: Sequence[str]) -> list[str]:
    """The command to run: `python` is the Python of the launcher. Raises ConfigError when there is no such program."""
    if not command:
        raise ConfigError("there is no command to run. Write it after --, as in: -- python -m jaxdl.train ...")
    if command[0] in ("python", "python3"):
        # Under sudo the first `python` on the path is mostly not that of the environment in use.
        return [sys.executable, *command[1:]]
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]}: there is no such program to run. Write the command and its options after --.")
    return list(command)
