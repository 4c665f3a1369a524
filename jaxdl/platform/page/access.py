"""Who may look at the page, and who may act: by where it listens, and by its token."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request

from jaxdl.core.web.tokens import Tokens

COOKIE = "jaxdl_status"
COOKIE_SEC = 7 * 86_400
_WRONG_SEC = 0.5
"""Wrong tokens are answered one after the other, each after this time."""


class Access:
    """The rights of a request.

    Args:
      tokens: whoever sends one of them may act; none: nobody may.
      everyone_looks: whether one may look without a token.
    """

    def __init__(self, tokens: Sequence[str], *, everyone_looks: bool) -> None:
        self.has_tokens, self._everyone_looks = bool(tokens), everyone_looks
        self._tokens, self._cookies = Tokens(tokens), Tokens([cookie_of(token) for token in tokens])
        self._lock = threading.Lock()

    def may_act(self, request: Request) -> bool:
        """Whether a request has a token: in its cookie, or in a header `Authorization: Bearer TOKEN`."""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        by_header = kind.lower() == "bearer" and self._tokens.match(_as_bytes(given.strip()))
        return by_header or self._cookies.match(_as_bytes(request.cookies.get(COOKIE, "")))

    def may_look(self, request: Request) -> bool:
        """Whether a request may see the page."""
        return self._everyone_looks or self.may_act(request)

    def is_token(self, given: str) -> bool:
        """Whether a text is one of the tokens; a wrong one is answered slowly."""
        if self._tokens.match(_as_bytes(given)):
            return True
        with self._lock:
            time.sleep(_WRONG_SEC)
        return False

    def is_from_here(self, request: Request) -> bool:
        """Whether a form was sent by a page of this server: a page of another site could send one with the cookie.

        Programs, which send the token as a header, need no origin.
        """
        origin = request.headers.get("origin")
        if origin is None or origin == "null":
            return "authorization" in request.headers and origin is None
        return urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()


def cookie_of(token: str) -> str:
    """What a browser keeps in place of a token."""
    return hashlib.sha256(b"jaxdl status page\0" + _as_bytes(token)).hexdigest()


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="replace")
