"""A learner's side: it sends a delta and waits for the next anchor, while a thread keeps the connection."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.parallel.asynchrony.codec import Bits, Codec, Encoder
from jaxdl.parallel.asynchrony.frames import Channel, frame_key
from jaxdl.parallel.asynchrony.messages import (
    VERSION,
    Anchor,
    Beat,
    Begin,
    Bye,
    Delta,
    Hello,
    Replaced,
    Welcome,
    read_from_syncer,
)
from jaxdl.parallel.asynchrony.outer import Vector
from jaxdl.parallel.asynchrony.simulator import Worker
from jaxdl.parallel.cluster import ClusterError
from jaxdl.parallel.cluster.address import host_name
from jaxdl.parallel.cluster.messages import PROTOCOL, Greeting, Malformed, read
from jaxdl.parallel.cluster.token import VARIABLE, Handshake, make_nonce, proves
from jaxdl.parallel.cluster.wire import Line, Lost, ready

GIVE_UP_SEC = 300.0
"""A learner that cannot reach the syncer for so long ends."""
CONNECT_SEC = 10.0
"""Longest wait for a connection, and for each answer before its first frame."""
_FIRST_PAUSE_SEC, _MAX_PAUSE_SEC = 0.05, 5.0
_BEATS = 4
_FAREWELL_SEC = 5.0


class _Refused(Exception):
    """The syncer, which has proved itself, does not want this learner."""


@dataclass(frozen=True)
class Given:
    """An anchor, and how many steps to make from it."""

    anchor: Vector
    version: int
    steps: int
    over: bool
    """Whether the run is over: then the anchor is the last one."""
    hash: str
    """SHA-256 of the anchor."""


class Learner:
    """The connection of one learner. One thread calls `begin` and then `exchange` again and again.

    A lost connection is made again, with pauses that grow; a delta without an answer is sent again, and counts once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        learner: int,
        num_learners: int,
        token: str,
        *,
        size: int,
        layout: str,
        resumes: str = "",
        stream: str = "",
        waiting: Callable[[str], object] = lambda why: None,
        give_up_sec: float = GIVE_UP_SEC,
    ) -> None:
        """`layout` is a SHA-256 of the names and shapes of the parameters, which have `size` values.

        `resumes` and `stream` say from where it goes on and on which examples it trains; two learners on the same
        stream are refused. `waiting` is called about every second while it waits for the syncer, with the reason if
        there is no connection, else an empty text.
        """
        self._address, self._learner, self._num_learners, self._token = address, learner, num_learners, token
        self._size, self._layout, self._resumes = size, layout, resumes
        self._give_up_sec, self._stream, self._waiting = give_up_sec, stream, waiting
        self._encoder: Encoder | None = None
        """Made when the syncer has said with how many bits."""
        self._life = secrets.token_hex(8)
        self._initial: Callable[[], Vector] | None = None
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._channel: Channel | None = None
        self._given: Given | None = None
        """The anchor that the learner works from."""
        self._answer: Given | None = None
        self._round = 0
        """The round that waits for an answer, or the last that was answered."""
        self._unanswered: tuple[Delta, bytes] | None = None
        self._sent_on: Channel | None = None
        self._over: Given | None = None
        self._error: Exception | None = None
        self._problem = ""
        """Why the last attempt to connect failed."""
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run is over: the next `exchange` returns the last anchor at once."""
        return self._over is not None

    def begin(self, initial: Callable[[], Vector]) -> Given:
        """Connects; returns the first anchor. `initial` makes the initial parameters, if the syncer has none yet.

        Raises ConfigError if the syncer refuses this learner, ClusterError if it cannot be reached.
        """
        self._initial = initial
        self._thread = threading.Thread(target=self._run, name="jaxdl-learner", daemon=True)
        self._thread.start()
        return self._wait()

    def exchange(self, delta: Vector, *, weight: float, steps: int) -> Given:
        """Sends the delta of `steps` steps; returns the next anchor. Raises as `begin` does."""
        with self._changed:
            if self._over is not None:
                return self._over
            assert self._given is not None
            given = self._given
        assert self._encoder is not None
        data, finite = self._encoder.encode(delta)
        header = Delta(
            round=self._round + 1,
            version=given.version,
            anchor=given.hash,
            weight=float(weight),
            steps=steps,
            finite=finite,
        )
        with self._changed:
            self._round += 1
            self._answer, self._unanswered, self._sent_on = None, (header, data), None
            channel = self._claim()
        self._send_unanswered(channel)
        return self._wait()

    def close(self, *, finished: bool = True) -> None:
        """Says goodbye. `finished` says that the learner will not come back."""
        with self._changed:
            self._closed = True
            channel = self._channel
            self._changed.notify_all()
        if channel is not None:
            with contextlib.suppress(Lost):
                channel.send(Bye(finished=finished))
        if self._thread is not None:
            self._thread.join(_FAREWELL_SEC)
        if channel is not None:
            channel.close()

    def _wait(self) -> Given:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                given = self._over or self._answer
                if given is not None:
                    break
                self._changed.wait(1.0)
                self._waiting("" if self._channel is not None else self._problem)
            self._given, self._unanswered = given, None
        return given

    def _claim(self) -> Channel | None:
        """The channel on which the unanswered delta must be sent now; None if it has been, or there is none."""
        if self._unanswered is None or self._channel is None or self._sent_on is self._channel:
            return None
        self._sent_on = self._channel
        return self._channel

    def _send_unanswered(self, channel: Channel | None) -> None:
        unanswered = self._unanswered
        if channel is not None and unanswered is not None:
            with contextlib.suppress(Lost):  # The thread that receives notices it too.
                channel.send(*unanswered)

    def _run(self) -> None:
        """Keeps the connection until the learner is closed."""
        pause_sec, since, why = _FIRST_PAUSE_SEC, time.monotonic(), "no answer"
        while not self._closed:
            try:
                if self._serve(*self._connect()):
                    pause_sec, since = _FIRST_PAUSE_SEC, time.monotonic()
            except _Refused as refused:
                return self._fail(ConfigError(str(refused)))
            except (OSError, Lost) as error:
                why = getattr(error, "strerror", None) or str(error)
                self._problem = why
            except Exception as error:  # Never leave `exchange` waiting.
                return self._fail(error)
            if time.monotonic() - since > self._give_up_sec:
                host, port = self._address
                return self._fail(
                    ClusterError(
                        f"the syncer at {host}:{port} could not be reached for {self._give_up_sec:g} s: {why}."
                    )
                )
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_sec * random.uniform(0.5, 1.5))
            pause_sec = min(2 * pause_sec, _MAX_PAUSE_SEC)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _serve(self, channel: Channel, silence_sec: float) -> bool:
        """Receives until the connection is over; whether anything came."""
        has_heard = False
        with self._changed:
            self._channel = channel
            claimed = self._claim()
        done = threading.Event()
        beater = threading.Thread(target=self._beat, args=(channel, done, silence_sec / _BEATS), daemon=True)
        beater.start()
        try:
            self._send_unanswered(claimed)
            while True:
                header, payload, digest = channel.receive(read_from_syncer, self._expected_bytes)
                has_heard = True
                match header:
                    case Anchor():
                        self._take(header, payload, digest)
                    case Replaced():
                        raise _Refused(f"{header.by}; this one ends. Give each learner a number of its own.")
                    case Beat():
                        pass
        except Lost:
            pass
        finally:
            done.set()
            with self._changed:
                self._channel = None
            channel.close()
        return has_heard

    def _beat(self, channel: Channel, done: threading.Event, every_sec: float) -> None:
        with contextlib.suppress(Lost):
            while not done.wait(every_sec):
                channel.beat(Beat())

    def _take(self, header: Anchor, payload: bytearray, digest: str) -> None:
        anchor = np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
        given = Given(anchor, header.version, header.steps, header.over, digest)
        with self._changed:
            if header.over:
                self._over = given
            elif header.round == self._round and (self._unanswered is not None or self._given is None):
                self._answer = given
            self._changed.notify_all()

    def _expected_bytes(self, header: Any) -> int:
        return 4 * self._size if isinstance(header, Anchor) else 0

    def _connect(self) -> tuple[Channel, float]:
        """(a channel whose first frame has been sent, the time of silence). Raises OSError, Lost and _Refused."""
        connection = socket.create_connection(self._address, timeout=CONNECT_SEC)
        line = Line(connection)
        try:
            handshake = Handshake(self._token, self._one(line, Greeting).nonce, make_nonce(), self._learner)
            fields = self._hello(handshake.guest_nonce).to_json()
            line.send(fields | {"proof": handshake.proof("guest", fields)})
            try:
                message = self._fields(line)
            except Lost as lost:
                raise Lost(f"{lost} instead of an answer; is {VARIABLE} the syncer's?") from None
            try:
                welcome = read(Welcome, message)
            except Malformed as error:
                raise Lost(f"invalid message: {error}") from None
            if not proves(welcome.proof, handshake.proof("host", message)):
                raise Lost("what answers there does not know the run token")
            if welcome.refused is not None:
                raise _Refused(welcome.refused)
            self._encode_in(welcome.bits)
            key = frame_key(handshake)
            channel = Channel(line.detach(), key, own="guest", silence_sec=welcome.silence_sec)
        except BaseException:
            line.close()
            raise
        try:
            channel.send(Begin(), self._first_anchor() if welcome.wants_initial else b"")
        except BaseException:
            channel.close()
            raise
        return channel, welcome.silence_sec

    def _encode_in(self, bits: Bits) -> None:
        """Sends deltas in `bits` bits. Raises _Refused if it has sent others."""
        if self._encoder is None:
            self._encoder = Encoder(Codec(self._size, bits))
        elif self._encoder.codec.bits != bits:
            raise _Refused(
                f"the syncer was started again with {bits} bits a value instead of {self._encoder.codec.bits}. Start "
                "the learner again too."
            )

    def _hello(self, nonce: str) -> Hello:
        with self._changed:
            waits = self._unanswered is not None
            answered = self._round - 1 if waits else self._round
            working = self._given is not None
        return Hello(
            jaxdl=PROTOCOL,
            process=self._learner,
            num_processes=self._num_learners,
            host=host_name(),
            nonce=nonce,
            asynchrony=VERSION,
            life=self._life,
            size=self._size,
            layout=self._layout,
            round=answered,
            working=working,
            resumes=self._resumes,
            stream=self._stream,
        )

    def _first_anchor(self) -> Vector:
        """What a syncer without an anchor begins with: the one that this learner works from, if it has one."""
        with self._changed:
            given = self._given
        if given is not None:
            return given.anchor
        assert self._initial is not None
        return np.ascontiguousarray(self._initial(), "<f4")

    def _one(self, line: Line, kind: Any) -> Any:
        try:
            return read(kind, self._fields(line))
        except Malformed as error:
            raise Lost(f"invalid message: {error}") from None

    def _fields(self, line: Line) -> dict[str, Any]:
        """The next line. Raises Lost, also when it does not come in time."""
        end = time.monotonic() + CONNECT_SEC
        while (left := end - time.monotonic()) > 0:
            ready([line], left)
            for message in line.messages():
                return message
        raise Lost("no answer")


def learn(learner: Learner, worker: Worker) -> Given:
    """Works until the run is over; returns the last anchor. Raises as `Learner.begin` does."""
    given = learner.begin(worker.initial)
    while not given.over:
        delta, weight = worker.run(given.anchor, given.steps)
        given = learner.exchange(delta, weight=weight, steps=given.steps)
    learner.close()
    return given
