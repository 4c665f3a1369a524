"""Who may look at the page, and who may act: by where it listens, and by its token."""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jaxdl.core.web.tokens import Tokens, TooMany, Trials, bearer

COOKIE_SEC = 7 * 86_400


class Access:
    """The rights of a request.

    Args:
      tokens: whoever sends one of them may act; none: nobody may.
      everyone_looks: whether one may look without a token.
    """

    def __init__(self, tokens: Sequence[str], *, everyone_looks: bool) -> None:
        self.has_tokens, self._everyone_looks = bool(tokens), everyone_looks
        # A cookie is that of this process: it is of no use to another server, nor to this one when it is started again.
        self._secret = secrets.token_bytes(32)
        self._tokens, self._cookies = Tokens(tokens), Tokens([self.cookie_of(token) for token in tokens])
        self._trials = Trials(self._tokens)

    def may_act(self, request: Request) -> bool:
        """Whether a request has a token: in its cookie, or in a header `Authorization: Bearer TOKEN`."""
        by_header = self._tokens.match_header(_header(request))
        return by_header or self._cookies.match(_as_bytes(request.cookies.get(cookie_name(request), "")))

    def may_look(self, request: Request) -> bool:
        """Whether a request may see the page."""
        return self._everyone_looks or self.may_act(request)

    async def is_token(self, request: Request, given: str) -> bool:
        """Whether a text is one of the tokens; a wrong one is answered slowly. Other requests do not wait for it.

        Raises HTTPException 429 where `Trials.match` raises TooMany.
        """
        return await self._is_token(request, _as_bytes(given))

    async def check_header(self, request: Request) -> None:
        """Lets a request with a wrong token in its header wait. Raises as `is_token`.

        Cookies need no such thing: nobody guesses 256 random bits.
        """
        given = bearer(_header(request))
        if self.has_tokens and given is not None:
            await self._is_token(request, given)

    async def _is_token(self, request: Request, given: bytes) -> bool:
        try:
            return await self._trials.match("" if request.client is None else request.client.host, given)
        except TooMany:
            raise HTTPException(429, "Too many wrong tokens. Try again later.", {"Retry-After": "5"}) from None

    def cookie_of(self, token: str) -> str:
        """What a browser keeps in place of a token."""
        return hmac.new(self._secret, _as_bytes(token), "sha256").hexdigest()

    def is_from_here(self, request: Request) -> bool:
        """Whether a form was sent by a page of this server: a page of another site could send one with the cookie.

        Programs, which send the token as a header, need no origin.
        """
        origin = request.headers.get("origin")
        if origin is None or origin == "null":
            return "authorization" in request.headers and origin is None
        try:
            return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
        except ValueError:
            return False


def cookie_name(request: Request) -> str:
    """The name of the cookie: browsers send those of one port of a machine to its other ports too."""
    port = None
    with contextlib.suppress(ValueError):  # A header `Host` may have any text.
        port = request.url.port
    return f"jaxdl_status_{port or request.scope['scheme']}"


def _header(request: Request) -> bytes:
    return request.headers.get("authorization", "").encode("latin-1", "replace")


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="replace")
