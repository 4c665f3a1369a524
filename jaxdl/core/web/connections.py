"""The connections of a web server: how many there may be, and how long each may send nothing or take nothing.

uvicorn waits for ever for a request that does not come, and for a client that does not read its answer: a few hundred
such connections would keep everybody out. Imported where the extra `serve` is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxdl.core.web.gate import App

HEAD_SEC = 20.0
"""Within this time a client must have sent a request: its first, and those that it begins after an answer."""
STALL_SEC = 30.0
"""A client that takes nothing of its answer for this long is gone."""
HEAD_BYTES = 1 << 15
"""The longest line and headers of a request."""
MOST_UNSENT_BYTES = 256 << 20
"""Bytes of answers that clients have not taken, of all together."""
_SWEEP_SEC = 1.0
_PROXY_VARIABLE = "FORWARDED_ALLOW_IPS"
"""uvicorn's variable with the addresses of proxies, whose word it takes for the address of a client."""


class Keeper:
    """Closes connections that hold a place for nothing. Of one event loop."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: dict[_Connection, None] = {}  # The oldest first.
        self._by_address: Counter[str] = Counter()
        self._sweeping = False

    def add(self, connection: _Connection) -> None:
        """Takes a connection. Makes room for it, where there is none, as `_first_out` says."""
        self._connections[connection] = None
        self._by_address[connection.address] += 1
        if len(self._connections) > self.most:
            (self._first_out() or connection).abort()
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(_SWEEP_SEC, self._sweep, connection.loop)

    def forget(self, connection: _Connection) -> None:
        """Forgets a connection, if it is not forgotten."""
        if connection in self._connections:
            del self._connections[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def check_unsent(self) -> None:
        """Closes those whose clients have taken least, while all together keep too much."""
        unsent = {connection: connection.num_unsent for connection in self._connections}
        while sum(unsent.values()) > MOST_UNSENT_BYTES:
            worst = max(unsent, key=lambda connection: unsent[connection])
            del unsent[worst]
            worst.abort()

    def _first_out(self) -> _Connection | None:
        """The oldest connection without a request, of the address that has the most connections; None if all have one.

        So whoever opens many loses their own.
        """
        idle = [connection for connection in self._connections if not connection.is_busy]
        return max(idle, key=lambda connection: self._by_address[connection.address], default=None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.is_late(now):
                connection.abort()
        self._sweeping = bool(self._connections)
        if self._sweeping:
            loop.call_later(_SWEEP_SEC, self._sweep, loop)


class _Connection(H11Protocol):
    """A connection of uvicorn that a `keeper` may close."""

    keeper: Keeper

    def connection_made(self, transport: Any) -> None:
        """Begins to watch it."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._since = self._moved = time.monotonic()
        self._left = 0
        self.keeper.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the watch."""
        self.keeper.forget(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """From now on it waits for the next request."""
        self._since = time.monotonic()
        super().on_response_complete()
        if self.num_unsent:
            self.keeper.check_unsent()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, where it can be answered: not within an answer, or after the last one."""
        if self.is_busy:
            self.cycle.disconnected = True  # What the application still sends is dropped, as when a client has left.
            self.cycle.message_event.set()
        else:
            with contextlib.suppress(h11.LocalProtocolError):
                super().send_400_response(msg)
        self.transport.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def num_unsent(self) -> int:
        """Bytes of answers that the client has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def is_late(self, now: float) -> bool:
        """Whether the client sends no request, or does not take its answer. Called about every second."""
        left = self.num_unsent
        if self.is_busy or left < self._left:  # The gate bounds what a request takes, and may add to what is left.
            self._moved = now
        self._left = left
        if self.is_busy:
            return False
        if left:
            return now - self._moved > STALL_SEC
        return now - max(self._since, self._moved) > HEAD_SEC

    def abort(self) -> None:
        """Closes it without waiting for the client."""
        self.keeper.forget(self)
        with contextlib.suppress(OSError):
            self.transport.abort()


def make_server(app: App, *, most_connections: int, backlog: int, drain_sec: int) -> uvicorn.Server:
    """A `uvicorn.Server` that has not started, with at most so many connections: fewer where few files may be open.

    After a signal it takes `drain_sec` to end what it is answering.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = most_connections if files == resource.RLIM_INFINITY else max(8, min(most_connections, files // 2))
    protocol = type("Connection", (_Connection,), {"keeper": Keeper(most)})
    config: Any = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=backlog,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        # Else whoever is on this machine could name any address as their own, and try tokens as many clients.
        proxy_headers=_PROXY_VARIABLE in os.environ,
        timeout_graceful_shutdown=drain_sec,
    )
    return uvicorn.Server(config)
