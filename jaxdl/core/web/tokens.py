"""Tokens are compared in a time that says nothing of them, and cannot be tried quickly."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Sequence

WRONG_SEC = 0.5
"""Wrong tokens of one address are answered one after the other, each after this time."""
MOST_WAIT, MOST_WAIT_ALL = 4, 16
"""So many wrong tokens wait for their answer, of one address and of all. Whoever sends more is refused at once."""
_MOST_KNOWN = 1024


class TooMany(Exception):
    """Too many wrong tokens were sent just now: this one was not looked at."""


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


class Trials:
    """Compares tokens that clients send, so that nobody can try many. Of one event loop."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._waiting: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """(address, hash of a token) of those who were let in: wrong tokens of others do not keep them out."""

    async def match(self, address: str, given: bytes) -> bool:
        """Whether what a client at this address sent is one of the tokens.

        A wrong one is answered slowly, and keeps no other request waiting. Raises TooMany, whatever was sent, where
        too many wrong ones wait for their answer, but not for a token that was right before from the same address.
        """
        key = address, _digest(given)
        known = key in self._known
        if not known and (self._waiting[address] >= MOST_WAIT or self._waiting.total() >= MOST_WAIT_ALL):
            raise TooMany
        if self._tokens.match(given):
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
            return True
        self._waiting[address] += 1
        try:
            async with self._locks.setdefault(address, asyncio.Lock()):
                await asyncio.sleep(WRONG_SEC)
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address], self._locks[address]
        return False


def bearer(header: bytes) -> bytes | None:
    """The token in a header `Authorization: Bearer TOKEN`; None in one of another kind."""
    kind, _, given = header.partition(b" ")
    return given.strip() if kind.lower() == b"bearer" else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
