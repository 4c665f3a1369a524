"""One connection of an attack: what it sends in which way, and what became of it."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

_HELD = 300
"""So many connections are held open, silent, slow or deaf; the oldest is closed for the next."""
_ANSWER_SEC = 1.0
_OTHERS = 8
"""Addresses of this machine from which the attack comes."""
Payload = Callable[[random.Random, bytes], bytes]
"""What is sent, of the random numbers of its input and of what the listener said first."""


@dataclass
class Attack:
    """Sends inputs to a port; counts what it is answered.

    Args:
      port: of the listener, on this machine.
      payload: makes the bytes of an input.
      kind_of: a word for what came back.
      greets: whether the listener speaks first.
    """

    port: int
    payload: Payload
    kind_of: Callable[[bytes], str]
    greets: bool = False
    answers: Counter[str] = field(default_factory=Counter)
    num_inputs: int = 0
    num_bytes: int = 0
    refused: int = 0
    """Connections that could not be made."""
    _held: deque[tuple[socket.socket, bytes]] = field(default_factory=deque)

    def send(self, seed: str) -> None:
        """Sends the input of a seed: equal seeds give equal inputs."""
        draw = random.Random(seed)
        way = draw.choices(list(_WAYS), [entry[0] for entry in _WAYS.values()])[0]
        try:
            connection = self._connect(draw)
        except OSError:
            self.refused += 1
            time.sleep(0.02)
            return
        self.num_inputs += 1
        try:
            first = self._read(connection, _ANSWER_SEC, line=True) if self.greets and way != "silent" else b""
            _WAYS[way][1](self, draw, connection, first)
        except OSError:
            self.answers["closed while sending"] += 1
            connection.close()

    def drip(self) -> None:
        """Sends a byte more on some of the held connections."""
        for _ in range(min(4, len(self._held))):
            connection, rest = self._held.popleft()
            try:
                connection.send(rest[:1])
                self._held.append((connection, rest[1:] or b"x"))
            except OSError:
                connection.close()
                self.answers["held, closed by the listener"] += 1

    def close(self) -> None:
        """Closes what is held."""
        for connection, _ in self._held:
            connection.close()
        self._held.clear()

    def _connect(self, draw: random.Random) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(_ANSWER_SEC)
        try:
            connection.bind((f"127.0.0.{draw.randrange(1, _OTHERS)}", 0))
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return connection

    def _hold(self, connection: socket.socket, rest: bytes) -> None:
        self._held.append((connection, rest))
        if len(self._held) > _HELD:
            self._held.popleft()[0].close()

    def _read(self, connection: socket.socket, seconds: float, *, line: bool = False) -> bytes:
        """What comes until the end, or a pause, or a line end."""
        found, end = b"", time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while len(found) < 1 << 18 and (left := end - time.monotonic()) > 0:
                if not select.select([connection], [], [], min(left, 0.05 if found else left))[0]:
                    break
                data = connection.recv(1 << 16)
                found += data
                if not data or (line and b"\n" in found):
                    break
        return found

    # The ways in which an input is sent.

    def _whole(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        data = self.payload(draw, first)
        self.num_bytes += len(data)
        connection.sendall(data)
        if draw.random() < 0.5:
            connection.shutdown(socket.SHUT_WR)
        self.answers[self.kind_of(self._read(connection, _ANSWER_SEC))] += 1
        connection.close()

    def _in_pieces(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        data, at = self.payload(draw, first), 0
        self.num_bytes += len(data)
        for _ in range(6):
            size = draw.choice([1, 7, 100, 5000])
            connection.sendall(data[at : at + size])
            at += size
            time.sleep(0.002)
        connection.sendall(data[at:])
        self.answers[self.kind_of(self._read(connection, _ANSWER_SEC))] += 1
        connection.close()

    def _cut(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        data = self.payload(draw, first)
        data = data[: draw.randrange(len(data) + 1)]
        self.num_bytes += len(data)
        connection.sendall(data)
        if draw.random() < 0.5:  # Closed by a reset, with what was sent perhaps unread.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        self.answers["cut by us"] += 1

    def _silent(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        self._hold(connection, b"")
        self.answers["held silent"] += 1

    def _slow(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        data = self.payload(draw, first)
        start = draw.randrange(min(len(data), 200) + 1)
        connection.sendall(data[:start])
        self._hold(connection, data[start : start + 1000])
        self.answers["held slow"] += 1

    def _deaf(self, draw: random.Random, connection: socket.socket, first: bytes) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(self.payload(draw, first))
        self._hold(connection, b"")
        self.answers["held deaf"] += 1


_WAYS = {
    "whole": (60, Attack._whole),
    "pieces": (8, Attack._in_pieces),
    "cut": (14, Attack._cut),
    "silent": (7, Attack._silent),
    "slow": (7, Attack._slow),
    "deaf": (4, Attack._deaf),
}
"""Way -> (how often of a hundred times, what does it)."""
