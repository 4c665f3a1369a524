"""JSON messages over non-blocking TCP, one per line; a lost connection says why."""

from __future__ import annotations

import errno
import json
import select
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

MAX_LINE_BYTES = 4 * 2**20
"""Longest message; a longer line ends the connection."""
_MAX_UNSENT_BYTES = 16 * 2**20
"""Only a peer that has stopped reading lets more pile up; its silence is noticed long before."""


class Lost(Exception):
    """The connection is over; the message says why."""


class NoMessage(Lost):
    """The peer sent something that is not a message, so nothing after it can be read."""


class Line:
    """A TCP connection that carries JSON objects. Takes over the socket.

    `limit_bytes` bounds the buffer of an unfinished line.
    """

    def __init__(self, connection: socket.socket, *, limit_bytes: int = MAX_LINE_BYTES) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit_bytes = limit_bytes
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self.has_spoken = False
        """Whether any byte has been received."""

    def fileno(self) -> int:
        """For `ready`."""
        return self._socket.fileno()

    @property
    def waits_to_send(self) -> bool:
        """Whether bytes wait in the send buffer."""
        return bool(self._unsent)

    @property
    def num_kept_bytes(self) -> int:
        """Received bytes of an unfinished line."""
        return len(self._received)

    def same_machine(self) -> bool:
        """Whether both ends have the same address: the peer is on this machine, in this network namespace."""
        try:
            return self._socket.getpeername()[0] == self._socket.getsockname()[0]
        except OSError:
            return False

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends the message; bytes that the socket does not take now wait for the next `flush`. Raises Lost."""
        self.send_encoded(encoded(message))

    def send_encoded(self, words: bytes) -> None:
        """`send` of a message that is already `encoded`, because it goes to many. Raises Lost."""
        if len(self._unsent) + len(words) > _MAX_UNSENT_BYTES:
            raise Lost("the peer reads nothing")
        self._unsent += words
        self.flush()

    def flush(self) -> None:
        """Sends buffered bytes. Raises Lost."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise Lost(_why(error)) from None

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields the messages received since the last call; the caller must take them all, or close the connection.

        Then raises Lost when the connection is over, and NoMessage for bytes that are not a message.
        """
        whole, problem = self._read()
        for line in whole:
            yield _parsed(line)
        if problem is not None:
            raise problem

    def receive_one(self) -> dict[str, Any] | None:
        """The only message that a peer may send before it is answered; None until it is complete.

        Raises Lost when the connection is over, even after a message, since nobody could read the answer; NoMessage for
        bytes that are not a message, and for more than one message.
        """
        whole, problem = self._read()
        if isinstance(problem, NoMessage):
            raise problem
        if len(whole) > 1 or (whole and self._received):
            raise NoMessage("more than one message")
        message = _parsed(whole[0]) if whole else None
        if problem is not None:
            raise problem
        return message

    def _read(self) -> tuple[list[bytes], Lost | None]:
        """(complete lines, the problem after them). Reads little more than `limit_bytes` at once."""
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
                problem = Lost("connection closed")
                break
            self._received += data
            self.has_spoken = True
            ended = ended or b"\n" in data
        whole: list[bytes] = []
        if ended:  # Earlier bytes have no line end: do not search them again for every few bytes received.
            *parts, rest = bytes(self._received).split(b"\n")
            self._received = bytearray(rest)
            whole = [line for line in parts if line.strip()]
        too_long = next((index for index, line in enumerate(whole) if len(line) > self.limit_bytes), None)
        if too_long is not None or len(self._received) > self.limit_bytes:
            return whole[:too_long], NoMessage(f"a line of more than {self.limit_bytes} bytes")
        return whole, problem

    def detach(self) -> socket.socket:
        """The socket, for what comes after the lines. Only where the peer sends nothing before it is answered."""
        assert not self._received
        assert not self._unsent
        return self._socket

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def encoded(message: Mapping[str, Any]) -> bytes:
    """The line that carries a message."""
    return json.dumps(message).encode() + b"\n"


class HasFileno(Protocol):
    """Anything with a file descriptor to wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


WaitedT = TypeVar("WaitedT", bound=HasFileno)


def ready(waited: Iterable[WaitedT], timeout_sec: float) -> list[WaitedT]:
    """The items that can be read (or have ended), or can take buffered bytes; empty after `timeout_sec`."""
    by_number = {item.fileno(): item for item in waited}
    poll = select.poll()  # Unlike select() it knows file descriptors above 1023.
    for number, item in by_number.items():
        line = getattr(item, "line", item)  # The item is a Line or holds one.
        writes = isinstance(line, Line) and line.waits_to_send
        poll.register(number, select.POLLIN | (select.POLLOUT if writes else 0))
    return [by_number[number] for number, _ in poll.poll(max(0.0, timeout_sec) * 1000)]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError, as is a number of too many digits.
        message = None
    if not isinstance(message, dict):
        raise NoMessage("not a JSON object")
    return message


def _why(error: OSError) -> str:
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "connection closed"
    return f"connection broke: {error.strerror or error}"
