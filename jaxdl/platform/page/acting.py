"""What may be done on the page with the token: what `echo > WORKDIR/halt` and `python -m jaxdl.fleet` do."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import HALT_FILE, replace_file
from jaxdl.platform.fleet.store import Store
from jaxdl.platform.page.access import COOKIE_SEC, Access, cookie_name
from jaxdl.platform.page.fleets import ORDERS
from jaxdl.platform.page.render import as_html, render
from jaxdl.platform.page.runs import Runs

_FORM_BYTES, _FORM_SEC, _MOST_FORMS = 4096, 5.0, 16
HALT_REASON = "halted on the status page"


class Acting:
    """The forms of the pages."""

    def __init__(self, runs: Runs, access: Access) -> None:
        self._runs, self._access = runs, access
        self._num_forms = 0

    def _check(self, request: Request) -> None:
        """Raises HTTPException 403 for who may not act."""
        if not self._access.has_tokens:
            raise HTTPException(403, "This page is read-only. Start it with --token to act on it.")
        if not self._access.may_act(request):
            raise HTTPException(403, "Only who has the token may do this. Sign in first.")
        if not self._access.is_from_here(request):
            raise HTTPException(403, "This form was not sent by a page of this server.")

    def halt(self, request: Request) -> Response:
        """Asks a run to save and end, by the halt file in its workdir."""
        self._check(request)
        snapshot, run_id = self._runs.snapshot(), request.path_params["id"]
        if run_id not in snapshot.runs:
            raise HTTPException(404, "There is no such run.")
        run = snapshot.runs[run_id]
        if run.group not in ("running", "stuck"):
            raise HTTPException(409, f"The run is {run.row.state}: there is nothing to halt.")
        try:
            replace_file(run.path / HALT_FILE, f"{HALT_REASON}\n".encode())
        except OSError as error:
            raise HTTPException(409, f"The halt file cannot be written: {error.strerror}.") from None
        self._runs.forget()
        return RedirectResponse(f"/run/{run_id}", 303)

    def order(self, request: Request) -> Response:
        """Asks the server of a fleet to hold, resume or cancel a run."""
        from jaxdl.platform.fleet.asking import ask_all

        self._check(request)
        fleet_id, name, order = (request.path_params[part] for part in ("id", "run", "order"))
        folder = self._runs.snapshot().found.fleets.get(fleet_id)
        if folder is None or order not in ORDERS:
            raise HTTPException(404, "There is no such fleet, or no such order.")
        if not (name.isascii() and name.isdecimal()):
            raise HTTPException(404, "There is no such run.")
        try:
            ask_all(Store(folder), [name], ORDERS[order])
        except ConfigError as error:
            raise HTTPException(409, str(error)) from None
        except OSError as error:
            raise HTTPException(409, f"It cannot be asked: {error.strerror}.") from None
        return RedirectResponse(f"/fleet/{fleet_id}", 303)

    def sign_in_page(self, request: Request) -> Response:
        """The form for the token."""
        return as_html(render("sign_in.html", has_tokens=self._access.has_tokens))

    async def sign_in(self, request: Request) -> Response:
        """Takes the token, and gives the browser a cookie."""
        content = await self._form(request)
        if not self._access.is_from_here(request):
            raise HTTPException(403, "This form was not sent by a page of this server.")
        try:
            values = parse_qs(content.decode("latin-1"), max_num_fields=8)
        except ValueError:
            raise HTTPException(400, "The form has more fields than that of this page.") from None
        return await self.with_cookie(request, self._access, values.get("token", [""])[0].strip(), "/")

    async def _form(self, request: Request) -> bytes:
        """The body of a form. Nobody needs a token to send one: few are read at a time, each for a short time."""
        if self._num_forms >= _MOST_FORMS:
            raise HTTPException(429, "Too many forms are being sent. Try again later.", {"Retry-After": "5"})
        self._num_forms += 1
        content = b""
        try:
            async with asyncio.timeout(_FORM_SEC):
                async for piece in request.stream():
                    content += piece
                    if len(content) > _FORM_BYTES:
                        raise HTTPException(413, "The form is too large.")
        except TimeoutError:
            raise HTTPException(408, f"The form did not come within {_FORM_SEC:.0f} s.") from None
        finally:
            self._num_forms -= 1
        return content

    def sign_out(self, request: Request) -> Response:
        """Takes the cookie back."""
        if not self._access.is_from_here(request):
            raise HTTPException(403, "This form was not sent by a page of this server.")
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(cookie_name(request))
        return answer

    @staticmethod
    async def with_cookie(request: Request, access: Access, token: str, where: str) -> Response:
        """Leads elsewhere, with the cookie of a token. Raises HTTPException 403 for a wrong one, and as `is_token`."""
        if not await access.is_token(request, token):
            raise HTTPException(403, "This is not the token of this server.")
        answer = RedirectResponse(where, 303)
        answer.set_cookie(
            cookie_name(request),
            access.cookie_of(token),
            max_age=COOKIE_SEC,
            httponly=True,
            samesite="strict",
            secure=request.scope["scheme"] == "https",
        )
        return answer
