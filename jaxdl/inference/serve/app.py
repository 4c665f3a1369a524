"""The HTTP interface: OpenAI's paths, as an application of Starlette. Imported where the extra `serve` is installed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jaxdl.core.web.gate import Gate, Receive, Scope, Send
from jaxdl.core.web.refusal import Refusal
from jaxdl.inference.serve.answering import Answering, Gone
from jaxdl.inference.serve.engine import Engine
from jaxdl.inference.serve.errors import body_of
from jaxdl.inference.serve.requests import Ask, Served, read_chat, read_completion

_BODY_SEC = 30.0
"""How long a client may take to send a body."""
_DRAINED = 8
"""Of a body that is too large so many times as much is read as is allowed, so that the client sees the answer."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server.

    Attributes:
      max_requests: how many are answered at once.
      max_body_bytes: of one request.
      timeout_sec: how long one may take.
    """

    max_requests: int
    max_body_bytes: int
    timeout_sec: float


class _Events(Response):
    """An answer that is sent while it is written."""

    def __init__(self, events: AsyncIterator[bytes], answering: Answering, request: Request) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._answering, self._request = events, answering, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            async with self._answering.watched(lambda: _disconnected(receive)):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except Gone:
            return


class _Api:
    """What the paths do."""

    def __init__(self, served: Served, engine: Engine, limits: Limits) -> None:
        self._served, self._engine, self._limits = served, engine, limits
        self._created = int(time.time())
        # One thread, so that a long text keeps no other request from its answer. Tokens become text outside it at the
        # same time, which the tokenizers allow.
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
        self.gate: Gate | None = None

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, read_chat)

    async def models(self, request: Request) -> Response:
        """`/v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`/v1/models/NAME`."""
        name = request.path_params["name"]
        if name != self._served.name:
            message = f"The model {name[:100]!r} does not exist. This server has {self._served.name!r}."
            raise Refusal(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """`/health`: 200 while texts are written, 503 after a failure."""
        if self._engine.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """`/metrics`, in the text form of Prometheus."""
        assert self.gate is not None
        engine = self._engine
        values = {
            "requests_in_flight": ("gauge", self.gate.num_requests),
            "texts_live": ("gauge", engine.num_live),
            "texts_waiting": ("gauge", engine.num_waiting),
            "prompt_tokens_total": ("counter", engine.num_read),
            "written_tokens_total": ("counter", engine.num_written),
        }
        lines = [
            line
            for name, (kind, value) in values.items()
            for line in (f"# TYPE jaxdl_{name} {kind}", f"jaxdl_{name} {value}")
        ]
        lines.append("# TYPE jaxdl_answers_total counter")
        for (path, status), count in sorted(self.gate.answers.items()):
            lines.append(f'jaxdl_answers_total{{path="{path}",status="{status}"}} {count}')
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "jaxdl",
            "max_model_len": served.context,
        }

    async def _answer(self, request: Request, read: Callable[[bytes, Served], Ask]) -> Response:
        raw = await self._body(request)
        loop = asyncio.get_running_loop()
        ask = await loop.run_in_executor(self._reader, read, raw, self._served)
        answering = Answering(ask, self._served, self._engine, self._limits.timeout_sec)
        if ask.streams:
            return _Events(answering.events(), answering, request)
        async with answering.watched(lambda: _disconnected(request.receive)):
            return JSONResponse(await answering.whole())

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # A page of another site can make a browser send other kinds unasked.
            raise Refusal(415, "The body must be JSON. Send the header Content-Type: application/json.")
        most, size, pieces = self._limits.max_body_bytes, 0, list[bytes]()
        try:
            async with asyncio.timeout(_BODY_SEC):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= most:
                        pieces.append(piece)
                    elif size > _DRAINED * most:
                        break
        except TimeoutError:
            raise Refusal(408, f"The body did not come within {_BODY_SEC:.0f} s.") from None
        if size > most:
            raise Refusal(413, f"The body is larger than the {most:,} bytes that this server takes.")
        return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _of_http(request: Request, error: Exception) -> Response:
    """An error of Starlette, such as a path that there is not, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    messages = {404: f"There is no {request.scope['path'][:100]} here.", 405: f"{request.method}: not for this path."}
    refusal = Refusal(error.status_code, messages.get(error.status_code, error.detail))
    return JSONResponse(body_of(refusal), error.status_code, headers=dict(error.headers or {}))


async def _of_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(body_of(error), error.status, headers=error.headers)


async def _of_mistake(request: Request, error: Exception) -> Response:
    """An error of ours, which Starlette raises again, so that it is printed."""
    refusal = Refusal(500, "The server made a mistake; its output has more.")
    return JSONResponse(body_of(refusal), 500)


async def _of_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # Nobody reads it; it is counted.


def make_app(
    served: Served, engine: Engine, limits: Limits, *, tokens: tuple[str, ...] = (), hosts: set[str] | None = None
) -> Gate:
    """The application. One of `tokens` is needed, if there are some; `hosts` are those of `Gate`."""
    api = _Api(served, engine, limits)
    paths = {
        "/v1/completions": ("POST", api.completions),
        "/v1/chat/completions": ("POST", api.chat),
        "/v1/models": ("GET", api.models),
        "/v1/models/{name:path}": ("GET", api.model),
        "/health": ("GET", api.health),
        "/metrics": ("GET", api.metrics),
    }
    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for path, (method, handler) in paths.items()],
        exception_handlers={
            HTTPException: _of_http,
            Refusal: _of_refusal,
            Exception: _of_mistake,
            Gone: _of_gone,
            ClientDisconnect: _of_gone,
        },
    )
    # What is longer than the texts of a request may take is a client that does not send or read.
    slack = 2 * _BODY_SEC
    api.gate = gate = Gate(
        app, body=body_of, tokens=tokens, hosts=hosts, max_requests=limits.max_requests,
        timeout_sec=limits.timeout_sec + slack,
    )  # fmt: skip
    gate.known(paths)
    return gate
