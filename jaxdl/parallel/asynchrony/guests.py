"""The syncer's connections: strangers are kept at the door until they prove that they know the run token."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxdl.parallel.asynchrony.codec import Codec
from jaxdl.parallel.asynchrony.frames import Channel, frame_key
from jaxdl.parallel.asynchrony.messages import Beat, Begin, Bye, Delta, Hello, Replaced, Welcome, read_to_syncer
from jaxdl.parallel.asynchrony.outer import Vector
from jaxdl.parallel.cluster.acceptor import NO_TOKEN, Stranger
from jaxdl.parallel.cluster.door import POLL_SEC, Door
from jaxdl.parallel.cluster.messages import Message
from jaxdl.parallel.cluster.token import VARIABLE, Handshake
from jaxdl.parallel.cluster.wire import Lost

_BEATS = 4
"""Beats within the time after which silence means that the connection is lost."""


@dataclass(frozen=True)
class News:
    """What a connection has brought."""

    what: Literal["hello", "begin", "delta", "gone"]
    guest: Guest
    hello: Hello | None = None
    vector: Vector | None = None
    """The initial parameters, or a delta."""
    delta: Delta | None = None
    digest: str = ""
    """SHA-256 of the delta as it was sent."""
    finite: bool = True
    finished: bool = False
    why: str = ""


class Doorkeeper:
    """Accepts connections in a thread of its own; puts those that have proved themselves into the news."""

    def __init__(
        self,
        listener: socket.socket,
        num_learners: int,
        token: str,
        news: queue.Queue[News],
        *,
        silence_sec: float,
        say: Callable[[str], object],
    ) -> None:
        self._news, self._silence_sec = news, silence_sec
        self._door = Door(
            listener,
            num_learners,
            token,
            Hello,
            self._admit,
            tell=lambda address, hello: say(
                f"a connection from {address}, as learner {hello.process}, {NO_TOKEN}: {VARIABLE} differs"
            ),
        )
        self._door.start()

    def _admit(self, stranger: Stranger, hello: Hello, handshake: Handshake) -> None:
        guest = Guest(stranger, hello, handshake, self._news, silence_sec=self._silence_sec)
        put(self._news, News("hello", guest, hello=hello), self._door.closed)

    def close(self) -> None:
        """Stops listening, and ends the connections that were not answered."""
        self._door.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait().guest.close()


def put(news: queue.Queue[News], item: News, closed: threading.Event) -> None:
    """Adds to the news when there is room; ends the connection when they are not read any more."""
    while not closed.is_set():
        with contextlib.suppress(queue.Full):
            return news.put(item, timeout=POLL_SEC)
    item.guest.close()


class Guest:
    """A connection whose peer knows the token: a learner, once it is welcome."""

    def __init__(
        self,
        stranger: Stranger,
        hello: Hello,
        handshake: Handshake,
        news: queue.Queue[News],
        *,
        silence_sec: float,
    ) -> None:
        self.hello = hello
        self._line, self._handshake = stranger.line, handshake
        self._news, self._silence_sec = news, silence_sec
        self._channel: Channel | None = None
        self._codec: Codec | None = None
        self._initial_bytes = 0
        self._unsent: queue.SimpleQueue[tuple[Message, Any] | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    @property
    def learner(self) -> int:
        """The number of the learner."""
        return self.hello.process

    def welcome(self, refused: str | None, *, initial_bytes: int, codec: Codec) -> None:
        """Answers the hello, and begins to receive and to send unless the guest is `refused`."""
        answer = Welcome(
            refused=refused, bits=codec.bits, wants_initial=initial_bytes > 0, silence_sec=self._silence_sec
        )
        fields = answer.to_json()
        try:
            self._line.send(fields | {"proof": self._handshake.proof("host", fields)})
        except Lost:
            refused = "lost"
        if refused is not None or self._line.waits_to_send:
            self.close()
            return
        self._initial_bytes, self._codec = initial_bytes, codec
        key = frame_key(self._handshake)
        self._channel = Channel(self._line.detach(), key, own="host", silence_sec=self._silence_sec)
        for act in (self._receive, self._send):
            threading.Thread(target=act, name=f"jaxdl-{act.__name__.strip('_')}", daemon=True).start()

    def send(self, header: Message, payload: Any = b"") -> None:
        """Sends a frame, as soon as those before it are sent. The payload must not change afterwards."""
        self._unsent.put((header, payload))

    def replaced(self, by: str) -> None:
        """Tells a process that another one has its number."""
        self._unsent.put((Replaced(by=by), b""))

    def close(self) -> None:
        """Ends the connection once what was handed to `send` is sent, at most after the time of silence."""
        self._closed.set()
        self._unsent.put(None)
        if self._channel is None:
            self._line.close()

    def _send(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(Lost):
            while True:
                try:
                    item = self._unsent.get(timeout=self._silence_sec / _BEATS)
                except queue.Empty:
                    self._channel.send(Beat())
                    continue
                if item is None:
                    break
                self._channel.send(*item)
        self._channel.close()

    def _receive(self) -> None:
        assert self._channel is not None
        begun, why, finished = False, "", False
        try:
            while not finished:
                header, payload, digest = self._channel.receive(read_to_syncer, self._expected_bytes)
                match header:
                    case Begin() if not begun:
                        begun = True
                        vector = np.frombuffer(payload, "<f4").astype(np.float32, copy=False) if payload else None
                        put(self._news, News("begin", self, vector=vector), self._closed)
                    case Delta() if begun:
                        assert self._codec is not None
                        vector = self._codec.decode(payload)
                        finite = bool(np.isfinite(vector).all())
                        news = News("delta", self, vector=vector, delta=header, digest=digest, finite=finite)
                        put(self._news, news, self._closed)
                    case Bye():
                        finished, why = header.finished, "it said goodbye"
                        break
                    case Beat() if begun:
                        pass
                    case _:
                        raise Lost("it sent a message that is not due")
        except Lost as lost:
            why = str(lost)
        put(self._news, News("gone", self, finished=finished, why=why), self._closed)

    def _expected_bytes(self, header: Any) -> int:
        assert self._codec is not None
        match header:
            case Begin():
                return self._initial_bytes
            case Delta():
                return self._codec.num_bytes
            case _:
                return 0


class Guests:
    """The learners that are connected, one for each number."""

    def __init__(self) -> None:
        self._of: dict[int, Guest] = {}

    def of(self, learner: int) -> Guest | None:
        """The connection of a learner, if it has one."""
        return self._of.get(learner)

    def all(self) -> list[Guest]:
        """All connections."""
        return list(self._of.values())

    def has(self, guest: Guest) -> bool:
        """Whether this connection is that of its learner."""
        return self._of.get(guest.learner) is guest

    def add(self, guest: Guest) -> None:
        """Adds a connection."""
        self._of[guest.learner] = guest

    def forget(self, guest: Guest) -> None:
        """Removes a connection."""
        del self._of[guest.learner]

    def close(self) -> None:
        """Ends all connections."""
        for guest in self._of.values():
            guest.close()
        self._of.clear()
