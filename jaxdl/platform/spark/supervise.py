"""Runs one process of a job beside a Spark task: `python -m jaxdl.platform.spark.supervise OPTIONS -- COMMAND...`.

Spark kills the Python process of a task without warning. This one outlives it, by itself in a session: when its parent
is gone it sends SIGTERM to the command, so that a run saves, and kills it only after a while. It also sends what the
command prints to the driver, and leaves its exit code and its last words in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from jaxdl.parallel.cluster.address import host_name
from jaxdl.parallel.cluster.exits import stop_signals
from jaxdl.parallel.cluster.messages import MAX_PROCESSES, PROTOCOL, Greeting, Malformed, read
from jaxdl.parallel.cluster.token import Handshake, make_nonce, proves
from jaxdl.parallel.cluster.wire import Line, Lost, ready
from jaxdl.platform.launch import die_with_parent
from jaxdl.platform.launch.output import KEPT_CHARACTERS, KEPT_LINES, LineReader
from jaxdl.platform.spark.hello import Go, Joining

SECRET = "JAXDL_SPARK_SECRET"
"""The environment variable with what the driver knows its processes by; the command does not get it."""
STOP = b"stop\n"
"""What the driver sends when the process is to save and end; before, that it may start (`hello.Go`)."""
_POLL_SEC = 0.1
_READ_BYTES = 1 << 16
_CONNECT_SEC = 10.0
_END_SEC = 120.0
"""How long the end of a process waits for a driver that has not said yet that it may go."""


class ToDriver:
    """Where the lines of a process go: to the driver, or on this process's own output if that is out of reach."""

    def __init__(self, address: str, secret: str, process: int, start: str) -> None:
        """`start` is equal in all processes that are started together."""
        self.is_asked_to_stop = False
        self._may_go, self._lock, self._is_proved = threading.Event(), threading.Lock(), False
        self._socket: socket.socket | None = None
        self._handshake: Handshake | None = None
        host, _, port = address.rpartition(":")
        try:
            if address:
                self._join(host, int(port), secret, process, start)
        except (OSError, Lost, Malformed) as error:
            self._socket = None
            print(f"the driver at {address} is out of reach ({error}); lines stay here", file=sys.stderr, flush=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def _join(self, host: str, port: int, secret: str, process: int, start: str) -> None:
        """Connects, and proves to know the secret. Raises OSError, Lost, Malformed."""
        line = Line(socket.create_connection((host, port), timeout=_CONNECT_SEC))
        try:
            greeting = read(Greeting, _greeting(line))
        except BaseException:
            line.close()
            raise
        self._handshake = Handshake(secret, greeting.nonce, make_nonce(), process)
        hello = Joining(
            jaxdl=PROTOCOL,
            process=process,
            num_processes=MAX_PROCESSES,
            host=host_name(),
            nonce=self._handshake.guest_nonce,
            start=start,
        ).to_json()
        self._socket = line.detach()
        self._socket.settimeout(None)
        self._send(hello | {"proof": self._handshake.proof("guest", hello)})

    def send(self, fields: dict[str, Any]) -> bool:
        """Sends a message, one line of JSON, to what has proved to be the driver; whether that worked."""
        return self._is_proved and self._send(fields)

    def _send(self, fields: dict[str, Any]) -> bool:
        with self._lock:
            if self._socket is None:
                return False
            try:
                self._socket.sendall(json.dumps(fields).encode() + b"\n")
            except OSError:
                self._socket = None
                return False
            return True

    def line(self, text: str, *, error: bool) -> None:
        """Hands on a line of the process's stdout, or stderr if `error`."""
        if not self.send({"error": error, "text": text}):
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr if error else sys.stdout, flush=True)

    def wait_to_go(self, timeout_sec: float) -> None:
        """Returns when the processes of an earlier start have saved and ended, or the driver does not answer."""
        self._may_go.wait(timeout_sec)

    def _listen(self) -> None:
        connection = self._socket
        if connection is not None:
            with (
                contextlib.suppress(OSError, ValueError, TypeError, RecursionError),
                connection.makefile("rb") as lines,
            ):
                if self._is_go(json.loads(lines.readline(_READ_BYTES))):
                    self._is_proved = True
                    self._may_go.set()
                    while line := lines.readline(_READ_BYTES):
                        self.is_asked_to_stop = self.is_asked_to_stop or line == STOP
            if not self._is_proved:
                with self._lock:
                    self._socket = None
                connection.close()
                print("no driver that has proved to be one; lines stay here", file=sys.stderr, flush=True)
        self._may_go.set()

    def _is_go(self, fields: Any) -> bool:
        """Whether the driver, and no one else, says that the process may start. Raises ValueError."""
        assert self._handshake is not None
        answer = read(Go, fields)
        return answer.go and proves(answer.proof, self._handshake.proof("host", fields))


def _greeting(line: Line) -> dict[str, Any]:
    """What the driver says first. Raises Lost."""
    end = time.monotonic() + _CONNECT_SEC
    while time.monotonic() < end:
        ready([line], _POLL_SEC)
        for message in line.messages():
            return message
    raise Lost("it does not answer")


class Supervised:
    """A command that is run, read, and ended."""

    def __init__(self, command: Sequence[str], driver: ToDriver, grace_sec: float) -> None:
        self._driver, self._grace_sec, self._told_sec = driver, grace_sec, float("inf")
        self.ends: deque[str] = deque(maxlen=KEPT_LINES)
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        self._process = subprocess.Popen(
            [sys.executable, die_with_parent.__file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        streams = ((self._process.stdout, False), (self._process.stderr, True))
        self._readers = [
            threading.Thread(target=self._read, args=(stream, error), daemon=True) for stream, error in streams
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[bytes], error: bool) -> None:
        lines = LineReader()
        while data := os.read(stream.fileno(), _READ_BYTES):
            self._hand_on(lines.feed(data), error)
        self._hand_on(lines.end(), error)

    def _hand_on(self, lines: Sequence[str], error: bool) -> None:
        for text in lines:
            if error:
                self.ends.append(text[:KEPT_CHARACTERS])
            self._driver.line(text, error=error)

    def stop(self) -> None:
        """Sends SIGTERM, once."""
        if self._told_sec == float("inf"):
            self._told_sec = time.monotonic()
            self._signal(signal.SIGTERM)

    def wait(self, parent: int) -> tuple[int, bool]:
        """(exit code, whether it was told to end before). Ends it when the parent is gone or the driver asks for it."""
        told: list[int] = []
        for signum in stop_signals():
            if signum != signal.SIGINT:
                signal.signal(signum, lambda number, _: told.append(number))
        while self._process.poll() is None:
            if told or os.getppid() != parent or self._driver.is_asked_to_stop:
                self.stop()
            if time.monotonic() - self._told_sec > self._grace_sec:
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_SEC)
        for reader in self._readers:  # A process that the command started may hold the pipes open.
            reader.join(5)
        code = self._process.returncode
        return (128 - code if code < 0 else code), self._told_sec != float("inf")

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command, and writes {"code": ..., "told": ..., "end": [last lines of stderr]} to the file `--report`."""
    parser = argparse.ArgumentParser(prog="python -m jaxdl.platform.spark.supervise", description=__doc__)
    parser.add_argument("--process", type=int, required=True, help="number of the process")
    parser.add_argument("--parent", type=int, required=True, help="pid whose end ends the command")
    parser.add_argument("--start", default="", help="what is equal in all processes that are started together")
    parser.add_argument("--driver", default="", help="host:port where the driver takes lines")
    parser.add_argument("--grace-sec", type=float, default=120.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--report", type=Path, required=True, help="file for the outcome")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(args)
    driver = ToDriver(given.driver, os.environ.get(SECRET, ""), given.process, given.start)
    driver.wait_to_go(given.grace_sec)
    supervised = Supervised(given.command, driver, given.grace_sec)
    code, told = supervised.wait(given.parent)
    outcome = {"code": code, "told": told, "end": [*supervised.ends]}
    with contextlib.suppress(OSError):  # The task that would read it may be gone, with its folder.
        given.report.write_text(json.dumps(outcome), encoding="utf-8")
    driver.wait_to_go(_END_SEC)
    driver.send({"ended": code, "told": told, "end": outcome["end"]})


if __name__ == "__main__":
    main()
