"""The driver's side of a job: prints the lines of all processes as they come, and tells all to end when one failed."""

from __future__ import annotations

import contextlib
import hmac
import json
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any, Self

from jaxdl.platform.launch.output import Printer
from jaxdl.platform.launch.processes import NOT_RESTARTED
from jaxdl.platform.spark.supervise import GO, STOP

_PATIENCE_SEC = 120.0
_TERMINATED = 128 + signal.SIGTERM
"""The exit code of a run that was told to save."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    process: int
    code: int
    told: bool
    """Whether it was told to end before: then its code says nothing about why the job ended."""
    end: tuple[str, ...]
    """The last lines that it printed on stderr."""
    start: str = ""
    """Which start of the job it belonged to."""


class Stream:
    """Listens for the processes of a job, which know its secret. A context; `address` is `host:port`."""

    def __init__(self, num_processes: int, host: str, secret: str) -> None:
        self.ended: list[Ended] = []
        """In the order in which they ended, those of restarted processes too."""
        self._secret, self._numbers = secret, range(num_processes)
        self._names = [f"process{number}" for number in self._numbers]
        self._printer = Printer(self._names, sys.stdout, sys.stderr)
        self._connections: dict[socket.socket, str] = {}
        """Of the processes that have not ended -> the start that each belongs to."""
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._server = socket.create_server((_listen_address(host), 0))
        self.address = f"{host}:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="jaxdl-spark", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.close()

    @property
    def failure(self) -> Ended | None:
        """The first process of the newest start that failed by itself; None if none did."""
        return next((ended for ended in self._newest if ended.code and ended not in self.stopped), None)

    @property
    def stopped(self) -> list[Ended]:
        """The processes that were told to save, and those that ended with them: a run stops as a whole."""
        told = [ended for ended in self._newest if ended.told]
        return [ended for ended in self._newest if ended.told or (told and ended.code == _TERMINATED)]

    @property
    def _newest(self) -> list[Ended]:
        return [ended for ended in self.ended if ended.start == self.ended[-1].start]

    def stop(self) -> None:
        """Tells all processes to save and end."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(STOP)

    def wait_until_ended(self, timeout_sec: float) -> None:
        """Returns when no process is left, or none ends any more: those of a killed task may still be saving."""
        with self._gone:
            self._gone.wait_for(lambda: not self._connections, timeout_sec)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # Closed.
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection.makefile("rb") as lines:
            hello = json.loads(lines.readline())
            process, start = int(hello["process"]), str(hello["start"])
            if hmac.compare_digest(str(hello["secret"]).encode(), self._secret.encode()) and process in self._numbers:
                self._admit(connection, start)
                for line in lines:
                    self._take(process, json.loads(line), start)
        with self._gone:
            self._connections.pop(connection, None)
            self._gone.notify_all()
        connection.close()

    def _admit(self, connection: socket.socket, start: str) -> None:
        """Lets a process begin when those of an earlier start have ended: they may be saving in the same workdir."""
        with self._gone:
            self._connections[connection] = start
            self._gone.wait_for(lambda: set(self._connections.values()) <= {start}, _PATIENCE_SEC)
        connection.sendall(GO)

    def _take(self, process: int, fields: dict[str, Any], start: str) -> None:
        if "ended" not in fields:
            self._printer.print(self._names[process], str(fields["text"]), error=bool(fields["error"]))
            return
        with self._lock:
            ended = Ended(process, int(fields["ended"]), bool(fields["told"]), tuple(fields["end"]), start)
            self.ended.append(ended)
        if fields["ended"] in NOT_RESTARTED and not fields["told"]:
            self.stop()


def _listen_address(host: str) -> str:
    """The address to listen on: that of the host name if it is one of this machine, else all."""
    try:
        with socket.create_server((host, 0)):
            return host
    except OSError:
        return ""
