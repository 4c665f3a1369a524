"""The driver's side of a job: prints the lines of all processes as they come, and tells all to end when one failed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any, Self

from jaxdl.parallel.cluster.acceptor import Stranger
from jaxdl.parallel.cluster.door import Door
from jaxdl.parallel.cluster.token import Handshake
from jaxdl.parallel.cluster.wire import encoded
from jaxdl.platform.launch.output import Printer
from jaxdl.platform.launch.processes import NOT_RESTARTED
from jaxdl.platform.spark.hello import Go, Joining
from jaxdl.platform.spark.supervise import STOP

_PATIENCE_SEC = 120.0
_LINE_BYTES = 1 << 23
"""Longest message of a process: the last lines of one that has ended take the most."""
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
        self._door: Door[Joining] | None = None

    def __enter__(self) -> Self:
        self._door = Door(self._server, len(self._numbers), self._secret, Joining, self._serve_in_thread)
        self._door.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._door is not None:
            self._door.close()
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

    def _serve_in_thread(self, stranger: Stranger, hello: Joining, handshake: Handshake) -> None:
        """Called for who knows the secret: so there are as many threads as processes, and strangers get none."""
        connection = stranger.line.detach()
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # Its machine may be gone without a word.
        threading.Thread(target=self._serve, args=(connection, hello, handshake), daemon=True).start()

    def _serve(self, connection: socket.socket, hello: Joining, handshake: Handshake) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            if hello.process in self._numbers:
                self._admit(connection, hello.start, handshake)
                with connection.makefile("rb") as lines:
                    while (line := lines.readline(_LINE_BYTES)).endswith(b"\n"):
                        self._take(hello.process, json.loads(line), hello.start)
        with self._gone:
            self._connections.pop(connection, None)
            self._gone.notify_all()
        connection.close()

    def _admit(self, connection: socket.socket, start: str, handshake: Handshake) -> None:
        """Lets a process begin when those of an earlier start have ended: they may be saving in the same workdir."""
        with self._gone:
            self._connections[connection] = start
            self._gone.wait_for(lambda: set(self._connections.values()) <= {start}, _PATIENCE_SEC)
        fields = Go(go=True).to_json()
        connection.sendall(encoded(fields | {"proof": handshake.proof("host", fields)}))

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
