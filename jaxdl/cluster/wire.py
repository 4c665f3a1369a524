"""JSON messages over TCP, one a line, without ever blocking; and what the connection was lost by."""

from __future__ import annotations

import errno
import json
import select
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

MAX_LINE_BYTES = 4 * 2**20
"""No message is longer; a stream without line ends is cut here."""
_MAX_UNSENT_BYTES = 16 * 2**20
"""More than this waits only for a peer that does not read; its silence is noticed long before."""


class Lost(Exception):
    """The connection is over; the message says by what."""


class NoMessage(Lost):
    """What comes is no message: nothing that follows can be understood."""


class Line:
    """A TCP connection that carries JSON objects. Takes over the socket.

    `limit_bytes` bounds what is kept of a line that has not ended yet.
    """

    def __init__(self, connection: socket.socket, *, limit_bytes: int = MAX_LINE_BYTES) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_bytes = limit_bytes
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self.has_spoken = False
        """Whether anything has come."""

    def fileno(self) -> int:
        """For `ready`."""
        return self._socket.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether something is left that the connection did not take yet."""
        return bool(self._unsent)

    @property
    def num_kept_bytes(self) -> int:
        """How much has come of a line that has not ended yet."""
        return len(self._received)

    def same_machine(self) -> bool:
        """Whether the other end is on this machine (in this network namespace): both ends have one address."""
        try:
            return self._socket.getpeername()[0] == self._socket.getsockname()[0]
        except OSError:
            return False

    def send(self, message: Mapping[str, Any]) -> None:
        """Hands the message over; what the connection does not take at once goes with the next `flush`. Raises Lost."""
        self.send_encoded(encoded(message))

    def send_encoded(self, words: bytes) -> None:
        """`send` of a message that is `encoded` already, as one that goes to many is. Raises Lost."""
        if len(self._unsent) + len(words) > _MAX_UNSENT_BYTES:
            raise Lost("it reads nothing")
        self._unsent += words
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

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields the messages that have come since; whoever calls this takes them all, or closes the connection.

        Then raises Lost when the connection is over, and NoMessage when what follows is no message.
        """
        whole, problem = self._read()
        for line in whole:
            yield _parsed(line)
        if problem is not None:
            raise problem

    def receive_one(self) -> dict[str, Any] | None:
        """The message of a peer that may send one and no more before it is answered; None until all of it is here.

        Raises Lost when the connection is over, also after a message, as nobody is there to be answered; NoMessage when
        what comes is no message, or more than one.
        """
        whole, problem = self._read()
        if isinstance(problem, NoMessage):
            raise problem
        if len(whole) > 1 or (whole and self._received):
            raise NoMessage("it sends more than one message")
        message = _parsed(whole[0]) if whole else None
        if problem is not None:
            raise problem
        return message

    def _read(self) -> tuple[list[bytes], Lost | None]:
        """(whole lines, what is wrong after them). At most `limit_bytes` and a little are taken at once."""
        problem: Lost | None = None
        ended = False
        while len(self._received) <= self.limit_bytes:
            try:
                data = self._socket.recv(2**16)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                problem = Lost(_why(error))
                break
            if not data:
                problem = Lost("its connection closed")
                break
            self._received += data
            self.has_spoken = True
            ended = ended or b"\n" in data
        whole: list[bytes] = []
        if ended:  # What came earlier has no line end: a drip of bytes must not have it searched again each time.
            *parts, rest = bytes(self._received).split(b"\n")
            self._received = bytearray(rest)
            whole = [line for line in parts if line.strip()]
        too_long = next((index for index, line in enumerate(whole) if len(line) > self.limit_bytes), None)
        if too_long is not None or len(self._received) > self.limit_bytes:
            return whole[:too_long], NoMessage(f"it sends a line of more than {self.limit_bytes} bytes")
        return whole, problem

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def encoded(message: Mapping[str, Any]) -> bytes:
    """The line that carries a message."""
    return json.dumps(message).encode() + b"\n"


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
        line = getattr(one, "line", one)  # Of one that holds a connection, that.
        writes = isinstance(line, Line) and line.waits_to_send
        poll.register(number, select.POLLIN | (select.POLLOUT if writes else 0))
    return [by_number[number] for number, _ in poll.poll(max(0.0, timeout_sec) * 1000)]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError, as is a number of too many digits.
        message = None
    if not isinstance(message, dict):
        raise NoMessage("it sends something else")
    return message


def _why(error: OSError) -> str:
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "its connection closed"
    return f"its connection broke: {error.strerror or error}"
