"""JSON messages over TCP, one a line, without ever blocking; and what the connection was lost by."""

from __future__ import annotations

import errno
import json
import select
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

_MAX_LINE_BYTES = 4 * 2**20
"""The hello of a process holds its whole config, some 10 KB; a stranger's stream without line ends must stop soon."""
_MAX_UNSENT_BYTES = 16 * 2**20
"""More than this waits only for a peer that does not read; silence has told of it long before."""


class Lost(Exception):
    """The connection is over; the message says by what."""


class Line:
    """A TCP connection that carries JSON objects. Takes over the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """For `ready`."""
        return self._socket.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether something is left that the connection did not take yet."""
        return bool(self._unsent)

    def same_machine(self) -> bool:
        """Whether the other end is on this machine (in this network namespace): both ends have one address."""
        try:
            return self._socket.getpeername()[0] == self._socket.getsockname()[0]
        except OSError:
            return False

    def send(self, message: Mapping[str, Any]) -> None:
        """Hands the message over; what the connection does not take at once goes with the next `flush`. Raises Lost."""
        self._unsent += json.dumps(message).encode() + b"\n"
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise Lost("it reads nothing")
        self.flush()

    def flush(self) -> None:
        """Sends on what is left. Raises Lost."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Lost(_why(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come since. Raises Lost when the connection is over or what comes is no message."""
        over: str | None = None
        while True:
            try:
                data = self._socket.recv(2**16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                over = _why(error)
                break
            if not data:
                over = "its connection closed"
                break
            self._received += data
            if len(self._received) > _MAX_LINE_BYTES:
                raise Lost("it sends something else")
        *whole, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        messages = [_parsed(line) for line in whole if line]
        if over is not None and not messages:
            raise Lost(over)
        return messages  # If it is over, the next call says so.

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


class HasFileno(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


WaitedT = TypeVar("WaitedT", bound=HasFileno)


def ready(waited: Iterable[WaitedT], timeout_sec: float) -> list[WaitedT]:
    """Those that have something to read (or have ended), or take what waited to be sent; within the time, or none."""
    by_number = {one.fileno(): one for one in waited}
    poll = select.poll()  # Unlike select() it knows file descriptors above 1023.
    for number, one in by_number.items():
        writes = isinstance(one, Line) and one.waits_to_send
        poll.register(number, select.POLLIN | (select.POLLOUT if writes else 0))
    return [by_number[number] for number, _ in poll.poll(max(0.0, timeout_sec) * 1000)]


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise Lost("it sends something else")
    return message


def _why(error: OSError) -> str:
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "its connection closed"
    return f"its connection broke: {error.strerror or error}"
