"""The application behind `python -m jaxdl.status --serve`. Imported where the extra `serve` is installed."""

from __future__ import annotations

import mimetypes
import threading
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxdl.core.web.gate import App, Gate, Message, Receive, Scope, Send
from jaxdl.core.web.refusal import Refusal
from jaxdl.platform.page.access import Access
from jaxdl.platform.page.acting import Acting
from jaxdl.platform.page.pages import Pages
from jaxdl.platform.page.render import FOLDER, as_html, render

_MAX_REQUESTS, _TIMEOUT_SEC = 64, 60.0
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class _Secured:
    """An application around another: every answer has the headers of `_SECURITY`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                further = [(name.lower().encode(), value.encode()) for name, value in _SECURITY.items()]
                message["headers"] = [*message.get("headers", ()), *further]
            await send(message)

        await self._app(scope, receive, secured)


def make_app(
    given: Sequence[str],
    *,
    tokens: Sequence[str] = (),
    everyone_looks: bool = True,
    hosts: Collection[str] | None = None,
    metrics: Sequence[str] = (),
    look_ahead: bool = False,
) -> App:
    """The application that shows the runs in the given folders and patterns.

    Args:
      given: as on the command line.
      tokens: whoever has one of them may act.
      everyone_looks: whether one may look without a token.
      hosts: the names by which the server may be asked, None: any.
      metrics: those that get a column; by default the usual ones.
      look_ahead: whether the runs are read at once, in a thread, not when the first request comes.
    """
    access = Access(tokens, everyone_looks=everyone_looks)
    pages = Pages(given, access, metrics)
    acting = Acting(pages.runs, access)
    if look_ahead:
        threading.Thread(target=pages.runs.snapshot, name="jaxdl-page", daemon=True).start()
    looks: dict[str, Callable[[Request], Response]] = {
        "/": pages.index,
        "/run/{id}": pages.run,
        "/compare": pages.compare,
        "/fleet/{id}": pages.fleet,
        "/search/{id}": pages.search,
        "/run/{id}/picture/{name}": pages.picture_of_run,
        "/search/{id}/picture/{name}": pages.picture_of_search,
        "/api/runs": pages.runs_data,
        "/api/run/{id}": pages.run_data,
        "/api/run/{id}/log": pages.log_data,
        "/api/curves": pages.curves_data,
        "/api/fleet/{id}": pages.fleet_data,
        "/api/search/{id}": pages.search_data,
    }
    acts = {
        "/run/{id}/halt": acting.halt,
        "/fleet/{id}/{run}/{order}": acting.order,
        "/sign-out": acting.sign_out,
    }
    routes = [Route(path, _guarded(handler, access), methods=["GET"]) for path, handler in looks.items()]
    routes += [Route(path, _checked(handler, access), methods=["POST"]) for path, handler in acts.items()]
    routes += [
        Route("/sign-in", acting.sign_in_page, methods=["GET"]),
        Route("/sign-in", acting.sign_in, methods=["POST"]),
        Route("/static/{name}", _static, methods=["GET"]),
        Route("/health", _health, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(GZipMiddleware, minimum_size=2_000)],
        exception_handlers={HTTPException: _of_http, ClientDisconnect: _of_gone, Exception: _of_mistake},
    )
    gate = Gate(app, body=_refused, tokens=(), hosts=hosts, max_requests=_MAX_REQUESTS, timeout_sec=_TIMEOUT_SEC)
    return _Secured(gate)


def _checked(handler: Callable[[Request], Response], access: Access) -> Callable[[Request], Awaitable[Response]]:
    """The handler, run in a thread, with which wrong tokens cannot be tried quickly."""

    async def checked(request: Request) -> Response:
        await access.check_header(request)
        return await run_in_threadpool(handler, request)

    return checked


def _guarded(handler: Callable[[Request], Response], access: Access) -> Callable[[Request], Awaitable[Response]]:
    """The handler for those who may look. A token in the address becomes a cookie, and leaves the address."""

    async def guarded(request: Request) -> Response:
        if "token" in request.query_params and request.scope["path"] == "/":
            return await Acting.with_cookie(request, access, request.query_params["token"], "/")
        await access.check_header(request)
        if access.may_look(request):
            return await run_in_threadpool(handler, request)
        raise HTTPException(401, "This page needs the token that its server was started with.")

    return guarded


def _static(request: Request) -> Response:
    """A file of the page itself, by its name."""
    files = {path.name: path for path in (FOLDER / "static").iterdir()}
    path = files.get(request.path_params["name"])
    if path is None:
        raise HTTPException(404, "There is no such file.")
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Response(path.read_bytes(), 200, {"Cache-Control": "no-cache"}, kind)


def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _refused(refusal: Refusal) -> dict[str, str]:
    """The JSON of an error."""
    return {"error": refusal.message}


def _answer(request: Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    if request.scope["path"].startswith("/api/"):
        return JSONResponse(_refused(Refusal(status, message)), status, headers)
    answer = as_html(render("message.html", title=f"{status}", message=message, sign_in=status == 401), status)
    answer.headers.update(headers or {})
    return answer


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(request, error.status_code, error.detail, dict(error.headers or {}))


def _of_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # Nobody reads it.


def _of_mistake(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return _answer(request, 500, "The server made a mistake; its output has more.")
