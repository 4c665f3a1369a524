"""Tokens are compared in a time that says nothing of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence


class Tokens:
    """The tokens of a server; only their hashes are kept. False where there is none."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [_digest(token.encode()) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, given: bytes) -> bool:
        """Whether what is given is one of the tokens; it takes as long whatever it is."""
        found = _digest(given)
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        return any(matches)

    def match_header(self, header: bytes) -> bool:
        """Whether a header `Authorization: Bearer TOKEN` has one of the tokens; it takes as long whatever it has."""
        given = bearer(header)
        return self.match(given or b"") and given is not None


def bearer(header: bytes) -> bytes | None:
    """The token in a header `Authorization: Bearer TOKEN`; None in one of another kind."""
    kind, _, given = header.partition(b" ")
    return given.strip() if kind.lower() == b"bearer" else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
