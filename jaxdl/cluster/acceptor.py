"""Where process 0 meets everybody who connects, before it is known who they are; strangers cannot use it up.

Bounded are: the strangers at once, what each may send and all together, the time until a whole hello is here, and the
work per connection. Where room is needed, the address with the most connections gives it up first, its oldest first, so
that a flood from one place does not push out a process that comes from another. A process that was pushed out comes
again by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxdl.cluster.messages import Greeting, printable
from jaxdl.cluster.token import make_nonce
from jaxdl.cluster.wire import Line, Lost

MIN_STRANGERS = 256
"""Connections that may wait for their hello at once; twice the number of processes, if that is more."""
MAX_HELLO_BYTES = 2**20
"""A hello holds the hashes of the source files and the whole config: some 10 KB."""
MAX_KEPT_BYTES = 16 * 2**20
"""What all strangers together may have sent of lines that have not ended."""
STRANGER_SEC = 10.0
"""Who connects has this long to say who it is: health checks and port scans never do."""
_BATCH = 64
"""Connections accepted before those that are here are listened to again."""
_BACK_OFF_SEC = 0.2
"""No connection is accepted for this long when there are no descriptors and no stranger holds one."""
LEAST_SEC = 0.05
"""For want of descriptors a stranger is pushed out only after it has had this long to say its hello."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MOST_NAMED = 4
_MAX_COUNTED = 1000
"""Addresses that are counted singly; a flood from more is one number."""

SILENT = "said nothing"
NO_HELLO = "sent no hello of jaxdl"
NO_TOKEN = "did not know the run's token"
LEFT = "left before the answer"
NO_ROOM = "made room for others"
_PERHAPS_OURS = (LEFT, NO_ROOM)
"""Kinds of connections that may have been processes of the run, which connect again."""


@dataclass(eq=False)
class Stranger:
    """Somebody who has connected, and has not said a valid hello yet."""

    line: Line
    address: str
    since: float
    nonce: str
    num_kept_bytes: int = 0
    """What it had sent of a line that has not ended, when it was last heard."""

    def fileno(self) -> int:
        """For `wire.ready`."""
        return self.line.fileno()


@dataclass
class Refused:
    """How many connections did not become a process of the run, by what they did and the address they came from."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    num_exhausted: int = 0
    """How often the process had no file descriptor left for a new connection."""

    def add(self, kind: str, address: str) -> None:
        """Counts one."""
        counter = self.counts.setdefault(kind, Counter())
        known = address in counter or len(counter) < _MAX_COUNTED
        counter[address if known else "other addresses"] += 1

    def note(self) -> str:
        """A sentence or more about them; empty when there were none."""
        parts = [self._part(kind) for kind in sorted(self.counts) if kind not in _PERHAPS_OURS]
        total = sum(counter.total() for kind, counter in self.counts.items() if kind not in _PERHAPS_OURS)
        text = ""
        if parts:
            who = "1 connection was no process of this run and was" if total == 1 else (
                f"{total} connections were no processes of this run and were"
            )  # fmt: skip
            text = f"{who} closed: {', '.join(parts)}."
        if unknown := [self._part(kind) for kind in _PERHAPS_OURS if kind in self.counts]:
            text += f" Connections that ended before it was known what they are: {', '.join(unknown)}."
        if self.num_exhausted:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            text += f" The process ran out of file descriptors {self.num_exhausted} times (ulimit -n is {limit})."
        return text.strip()

    def _part(self, kind: str) -> str:
        """`3 said nothing (10.0.0.1; 10.0.0.2)`."""
        counter = self.counts[kind]
        named = "; ".join(address for address, _ in counter.most_common(_MOST_NAMED))
        more = f"; and {len(counter) - _MOST_NAMED} more addresses" if len(counter) > _MOST_NAMED else ""
        return f"{counter.total()} {kind} ({named}{more})"


class Acceptor:
    """Accepts connections and keeps them as strangers until they are `admitted` or `refused`. Takes over the listener.

    Its methods take the time, `now`, by `time.monotonic`.
    """

    def __init__(self, listener: socket.socket, num_processes: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._max_strangers = max(MIN_STRANGERS, 2 * num_processes)
        self._num_kept_bytes = 0
        self._strangers: dict[Stranger, None] = {}  # The oldest first.
        self._by_address: Counter[str] = Counter()
        self._deaf_until = self._reserve_from = 0.0
        self._reserve: int | None = None
        self._take_reserve()
        self.seen = Refused()

    def fileno(self) -> int:
        """For `wire.ready`: something to read is a connection to accept."""
        return self._listener.fileno()

    @property
    def strangers(self) -> list[Stranger]:
        """Those that wait to be listened to, the oldest first."""
        return list(self._strangers)

    def __contains__(self, stranger: Stranger) -> bool:
        """Whether it still waits: others' bytes or connections may have pushed it out."""
        return stranger in self._strangers

    def is_open(self, now: float) -> bool:
        """Whether to accept now: not while there are no descriptors, as the listener would be ready all the time."""
        return now >= self._deaf_until

    def tidy(self, now: float) -> None:
        """Closes the strangers whose time is up."""
        for stranger in self.strangers:
            if now < stranger.since + STRANGER_SEC:
                break
            self.dropped(stranger)
        if self._reserve is None and now >= self._reserve_from:
            self._take_reserve()

    def hear(self, stranger: Stranger) -> dict[str, Any] | None:
        """What a stranger has said, as `Line.receive_one` returns and raises it.

        Closes those that keep the most, this one perhaps, until all together keep no more than `MAX_KEPT_BYTES`.
        """
        stranger.line.flush()
        message = stranger.line.receive_one()
        self._num_kept_bytes += stranger.line.num_kept_bytes - stranger.num_kept_bytes
        stranger.num_kept_bytes = stranger.line.num_kept_bytes
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self.dropped(max(self._strangers, key=lambda one: one.num_kept_bytes))
        return message

    def accept(self, now: float) -> None:
        """Accepts those who have connected since, and greets them."""
        for _ in range(_BATCH):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_descriptors(now)
                    return
                continue  # The connection broke before it was accepted.
            self._greet(connection, str(address[0]).removeprefix("::ffff:"), now)
            if len(self._strangers) > self._max_strangers:
                self.refused(self._first_out(), NO_ROOM)

    def admitted(self, stranger: Stranger) -> None:
        """It has said a valid hello and is kept by somebody else now."""
        self._forget(stranger)

    def refused(self, stranger: Stranger, kind: str, named: str = "") -> None:
        """Closes a stranger for what it has said; `named` is what it says to be."""
        self._forget(stranger)
        stranger.line.close()
        self.seen.add(kind, stranger.address + (f", as {printable(named)}" if named else ""))

    def dropped(self, stranger: Stranger) -> None:
        """Closes a stranger whose time is up, or that keeps too much."""
        self.refused(stranger, NO_HELLO if stranger.line.has_spoken else SILENT)

    def gone(self, stranger: Stranger) -> None:
        """Closes a stranger whose connection is over."""
        whole = stranger.line.has_spoken and not stranger.line.num_kept_bytes
        if whole:
            self.refused(stranger, LEFT)
        else:
            self.dropped(stranger)

    def close(self) -> None:
        """Stops listening, and closes the strangers that are left."""
        self._listener.close()
        for stranger in self.strangers:
            self.dropped(stranger)
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _greet(self, connection: socket.socket, address: str, now: float) -> None:
        try:
            line = Line(connection, limit_bytes=MAX_HELLO_BYTES)
        except OSError:
            connection.close()
            self.seen.add(SILENT, address)
            return
        stranger = Stranger(line, address, now, make_nonce())
        self._strangers[stranger] = None
        self._by_address[address] += 1
        try:
            line.send(Greeting(nonce=stranger.nonce).to_json())
        except Lost:
            self.gone(stranger)

    def _make_descriptors(self, now: float) -> None:
        """Closes strangers for their descriptors; failing that gives up the reserve; failing that waits."""
        self.seen.num_exhausted += 1
        for _ in range(max(1, len(self._strangers) // 2)):
            oldest = self._first_out() if self._strangers else None
            if oldest is None or now - oldest.since < LEAST_SEC:
                break
            self.refused(oldest, NO_ROOM)
        else:
            return
        if self._strangers:
            self._deaf_until = now + LEAST_SEC
        elif self._reserve is not None:
            os.close(self._reserve)
            self._reserve, self._reserve_from = None, now + _BACK_OFF_SEC  # The next connection is to have it.
        else:
            self._deaf_until = now + _BACK_OFF_SEC

    def _take_reserve(self) -> None:
        """Keeps one descriptor for a process that comes when there are no others."""
        with contextlib.suppress(OSError):
            self._reserve = os.dup(self._listener.fileno())

    def _first_out(self) -> Stranger:
        """The oldest stranger of the address with the most."""
        most = max(self._by_address.values())
        return next(one for one in self._strangers if self._by_address[one.address] == most)

    def _forget(self, stranger: Stranger) -> None:
        del self._strangers[stranger]
        self._num_kept_bytes -= stranger.num_kept_bytes
        self._by_address[stranger.address] -= 1
        if not self._by_address[stranger.address]:
            del self._by_address[stranger.address]
