"""Process 0 accepts connections here and keeps them as strangers until their hello is valid. Resists floods.

Bounded are: the number of strangers, the bytes that each and all may send, the time until a complete hello, and the
work per connection. To make room, the address with the most connections loses its oldest one, so that a flood from one
host does not evict a process on another. An evicted process connects again by itself.
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

from jaxdl.parallel.cluster.messages import Greeting, printable
from jaxdl.parallel.cluster.token import make_nonce
from jaxdl.parallel.cluster.wire import Line, Lost

MIN_STRANGERS = 256
"""Most strangers at a time; twice the number of processes, if that is more."""
MAX_HELLO_BYTES = 2**20
"""Longest hello. One holds the hashes of the source files and the whole config: some 10 KB."""
MAX_KEPT_BYTES = 16 * 2**20
"""Most bytes of unfinished lines, of all strangers together."""
STRANGER_SEC = 10.0
"""Seconds until a stranger must have sent its hello: health checks and port scans never do."""
_BATCH = 64
"""Connections accepted before the existing ones are read again."""
_BACK_OFF_SEC = 0.2
"""Pause in accepting when the process has no file descriptors left and no stranger holds one."""
LEAST_SEC = 0.05
"""Seconds to send its hello that a stranger has, even when file descriptors run out."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MOST_NAMED = 4
_MAX_COUNTED = 1000
"""Addresses that are counted one by one; further ones share a counter."""

SILENT = "sent nothing"
NO_HELLO = "sent no valid hello"
NO_TOKEN = "did not know the run's token"
LEFT = "left before the answer"
NO_ROOM = "evicted to make room"
_PERHAPS_OURS = (LEFT, NO_ROOM)
"""These may have been processes of the run, which connect again."""


@dataclass(eq=False)
class Stranger:
    """A peer that has connected but not yet sent a valid hello."""

    line: Line
    address: str
    since: float
    nonce: str
    num_kept_bytes: int = 0
    """Bytes of its unfinished line when it was last read."""

    def fileno(self) -> int:
        """For `wire.ready`."""
        return self.line.fileno()


@dataclass
class Refused:
    """Counts the connections that did not become a process of the run, by what they did and by their address."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    num_exhausted: int = 0
    """How often there was no file descriptor left for a new connection."""

    def add(self, kind: str, address: str) -> None:
        """Counts one connection."""
        counter = self.counts.setdefault(kind, Counter())
        known = address in counter or len(counter) < _MAX_COUNTED
        counter[address if known else "other addresses"] += 1

    def note(self) -> str:
        """Describes them in a sentence or more; empty when there were none."""
        parts = [self._part(kind) for kind in sorted(self.counts) if kind not in _PERHAPS_OURS]
        total = sum(counter.total() for kind, counter in self.counts.items() if kind not in _PERHAPS_OURS)
        text = ""
        if parts:
            who = f"{total} connection{'s' * (total > 1)} from outside this run {'were' if total > 1 else 'was'}"
            text = f"{who} closed: {', '.join(parts)}."
        if unknown := [self._part(kind) for kind in _PERHAPS_OURS if kind in self.counts]:
            text += f" Connections closed before they identified themselves: {', '.join(unknown)}."
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

    `now` is always a `time.monotonic()`.
    """

    def __init__(self, listener: socket.socket, num_processes: int, *, hello_bytes: int = MAX_HELLO_BYTES) -> None:
        """`hello_bytes` is the longest hello."""
        listener.setblocking(False)
        self._listener, self._hello_bytes = listener, hello_bytes
        self._max_strangers = max(MIN_STRANGERS, 2 * num_processes)
        self._num_kept_bytes = 0
        self._strangers: dict[Stranger, None] = {}  # The oldest first.
        self._by_address: Counter[str] = Counter()
        self._deaf_until = self._reserve_from = 0.0
        self._reserve: int | None = None
        self._take_reserve()
        self.seen = Refused()

    def fileno(self) -> int:
        """For `wire.ready`: readable when there is a connection to accept."""
        return self._listener.fileno()

    @property
    def strangers(self) -> list[Stranger]:
        """All strangers, the oldest first."""
        return list(self._strangers)

    def __contains__(self, stranger: Stranger) -> bool:
        """Whether this stranger is still kept: it may have been evicted meanwhile."""
        return stranger in self._strangers

    def is_open(self, now: float) -> bool:
        """Whether to accept now; not while descriptors are exhausted, when the listener would be ready all the time."""
        return now >= self._deaf_until

    def tidy(self, now: float) -> None:
        """Closes the strangers that have timed out."""
        for stranger in self.strangers:
            if now < stranger.since + STRANGER_SEC:
                break
            self.dropped(stranger)
        if self._reserve is None and now >= self._reserve_from:
            self._take_reserve()

    def hear(self, stranger: Stranger) -> dict[str, Any] | None:
        """Reads a stranger; returns and raises as `Line.receive_one` does.

        Closes the strangers with the most unfinished bytes, perhaps this one, until all keep at most `MAX_KEPT_BYTES`.
        """
        stranger.line.flush()
        message = stranger.line.receive_one()
        self._num_kept_bytes += stranger.line.num_kept_bytes - stranger.num_kept_bytes
        stranger.num_kept_bytes = stranger.line.num_kept_bytes
        while self._num_kept_bytes > MAX_KEPT_BYTES:
            self.dropped(max(self._strangers, key=lambda candidate: candidate.num_kept_bytes))
        return message

    def accept(self, now: float) -> None:
        """Accepts and greets the waiting connections."""
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
        """Hands a stranger with a valid hello over to the caller."""
        self._forget(stranger)

    def refused(self, stranger: Stranger, kind: str, named: str = "") -> None:
        """Closes a stranger because of what it sent; `named` is who it claims to be."""
        self._forget(stranger)
        stranger.line.close()
        self.seen.add(kind, stranger.address + (f", as {printable(named)}" if named else ""))

    def dropped(self, stranger: Stranger) -> None:
        """Closes a stranger that has timed out or keeps too many bytes."""
        self.refused(stranger, NO_HELLO if stranger.line.has_spoken else SILENT)

    def gone(self, stranger: Stranger) -> None:
        """Closes a stranger whose connection has ended."""
        whole = stranger.line.has_spoken and not stranger.line.num_kept_bytes
        if whole:
            self.refused(stranger, LEFT)
        else:
            self.dropped(stranger)

    def close(self) -> None:
        """Stops listening and closes all strangers."""
        self._listener.close()
        for stranger in self.strangers:
            self.dropped(stranger)
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _greet(self, connection: socket.socket, address: str, now: float) -> None:
        try:
            line = Line(connection, limit_bytes=self._hello_bytes)
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
        """Frees descriptors: closes strangers, else releases the reserved one, else stops accepting for a while."""
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
            self._reserve, self._reserve_from = None, now + _BACK_OFF_SEC  # For the next connection.
        else:
            self._deaf_until = now + _BACK_OFF_SEC

    def _take_reserve(self) -> None:
        """Reserves one descriptor for a process that connects when there are no others."""
        with contextlib.suppress(OSError):
            self._reserve = os.dup(self._listener.fileno())

    def _first_out(self) -> Stranger:
        """The stranger to evict: the oldest of the address with the most."""
        most = max(self._by_address.values())
        return next(stranger for stranger in self._strangers if self._by_address[stranger.address] == most)

    def _forget(self, stranger: Stranger) -> None:
        del self._strangers[stranger]
        self._num_kept_bytes -= stranger.num_kept_bytes
        self._by_address[stranger.address] -= 1
        if not self._by_address[stranger.address]:
            del self._by_address[stranger.address]
