"""What every request passes: the token, the name of the host, the number of requests, and what is counted of them."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

from jaxdl.core.web.refusal import Refusal
from jaxdl.core.web.tokens import Tokens, TooMany, Trials, bearer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health",)
"""Paths that need no token, and are not counted among the requests at once."""
_ONCE = (b"host", b"authorization", b"origin")
"""Headers that a request has once: of two, the next reader could take the other one."""


class Gate:
    """An ASGI application around another: refuses what may not pass, and turns errors into answers."""

    def __init__(
        self, app: App, *, body: Callable[[Refusal], Any], tokens: Sequence[str], hosts: Collection[str] | None,
        max_requests: int, timeout_sec: float,
    ) -> None:  # fmt: skip
        """`body` returns the JSON of the answer to what is refused.

        One of `tokens` is needed, if there are some; `hosts` are the names by which it may be asked, None: any.
        """
        self._body = body
        self._app, self._hosts, self._max, self._timeout_sec = app, hosts, max_requests, timeout_sec
        self._tokens = Tokens(tokens)
        self._trials = Trials(self._tokens)
        self._paths: set[str] = set()
        self.num_requests = 0
        self.answers: Counter[tuple[str, int]] = Counter()

    def known(self, paths: Collection[str]) -> None:
        """The paths that are counted by name."""
        self._paths.update(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status = scope["path"], 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.answers[path if path in self._paths else "other", status] += 1
            await send(message)

        try:
            await self._check(scope)
            if path in OPEN:
                await self._app(scope, receive, counted)
                return
            self.num_requests += 1
            try:
                async with asyncio.timeout(self._timeout_sec):
                    await self._app(scope, receive, counted)
            finally:
                self.num_requests -= 1
        except Refusal as refusal:
            await self._refuse(refusal, counted)
        except TimeoutError:  # A client that does not read its answer, or does not send its request.
            if not status:
                await self._refuse(Refusal(408, "The request took longer than this server allows."), counted)
        except Exception:
            traceback.print_exc()
            if not status:
                await self._refuse(Refusal(500, "The server made a mistake; its output has more."), counted)

    async def _check(self, scope: Scope) -> None:
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        counts = Counter(name for name, _ in scope["headers"])
        if twice := [name.decode() for name in _ONCE if counts[name] > 1]:
            raise Refusal(400, f"The request has more than one header {twice[0]}.")
        if self._hosts is not None and _host(headers.get(b"host", b"")) not in self._hosts:
            # A page in a browser could otherwise reach it by a name of its own that leads here (DNS rebinding).
            raise Refusal(403, "This server is asked by the name of this machine alone, such as localhost.")
        if scope["path"] in OPEN:
            return
        if self._tokens and not await self._has_token(scope, headers.get(b"authorization", b"")):
            message = "No valid token. Send the header Authorization: Bearer TOKEN."
            raise Refusal(401, message, headers={"WWW-Authenticate": "Bearer"})
        if self.num_requests >= self._max:
            message = f"This server answers {self._max} requests at once. Try again later."
            raise Refusal(429, message, headers={"Retry-After": "1"})

    async def _has_token(self, scope: Scope, header: bytes) -> bool:
        """Whether a request has a token; a wrong one is answered slowly."""
        given, client = bearer(header), scope.get("client")
        if given is None:
            return False
        try:
            return await self._trials.match("" if client is None else client[0], given)
        except TooMany:
            raise Refusal(429, "Too many wrong tokens. Try again later.", headers={"Retry-After": "5"}) from None

    async def _refuse(self, refusal: Refusal, send: Send) -> None:
        """Sends an error."""
        body = json.dumps(self._body(refusal)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        await send(
            {
                "type": "http.response.start",
                "status": refusal.status,
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": body})


def _host(header: bytes) -> str:
    """The name in a header `Host`, without a port."""
    name = header.decode("latin-1").lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
