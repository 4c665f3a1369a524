"""Hostile inputs: messages that are nearly right, and bytes that are no messages at all, all from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 1.0, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, "", " ",
    "0", "x", "x" * 300, "x" * 70_000, "\x00", "\x1b[2J", "\u202e", "\ud800", "\U0001f600", "../../etc/passwd",
    "<script>", "' or 1=1", "%s%n", [], {}, [None], [[]], {"": 0}, ["x"] * 1000, list(range(300)), {"__class__": 1},
    "a" * 32, "b" * 64, "NaN", float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
"""Values that a field may not have, or that are at the edge of what it may have."""
RAW: list[Callable[[random.Random], bytes]] = [
    lambda draw: draw.randbytes(draw.randrange(1, 2000)),
    lambda draw: b"\n" * draw.randrange(1, 5000),
    lambda draw: b"\0" * draw.randrange(1, 5000),
    lambda draw: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200),
    lambda draw: b"SSH-2.0-OpenSSH_9.2\r\n",
    lambda draw: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    lambda draw: b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * draw.randrange(1, 5000),
    lambda draw: b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    lambda draw: b"[" * draw.randrange(1, 100_000) + b"\n",
    lambda draw: b'{"a":' * draw.randrange(1, 30_000) + b"\n",
    lambda draw: b"1" * draw.randrange(1, 10_000) + b"\n",
    lambda draw: b'"' + b"x" * draw.randrange(1, 200_000),
    lambda draw: b"jxa1" + draw.randbytes(12),
    lambda draw: b"jxa1" + b"\xff" * 12 + draw.randbytes(100),
    lambda draw: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(40),
    lambda draw: b"{}\n" * draw.randrange(1, 500),
]
"""What is no message of any listener here."""


def changed(draw: random.Random, value: Any) -> Any:
    """A JSON value with one part exchanged, left out, doubled or nested."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        name = draw.choice(list(value))
        what = draw.randrange(6)
        if what == 0:
            return {key: inner for key, inner in value.items() if key != name}
        if what == 1:
            return value | {draw.choice(["kind", "x", "proof", "nonce", "\0", "__proto__"]): draw.choice(NASTY)}
        return value | {name: changed(draw, value[name])}
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], changed(draw, value[place]), *value[place:]]
    if draw.random() < 0.05:
        deep: Any = copy.deepcopy(draw.choice(NASTY))
        for _ in range(draw.choice([3, 40, 200, 900])):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    return copy.deepcopy(draw.choice(NASTY))  # Else a change of this input would be one of all later ones.


def as_line(value: Any) -> bytes:
    """A JSON value as a line. Numbers that are none are written as Python does: `NaN`."""
    return json.dumps(value).encode() + b"\n"


def flipped(draw: random.Random, data: bytes) -> bytes:
    """Bytes with some of them changed, cut out, doubled or put in."""
    bytes_ = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        if not bytes_:
            break
        place, what = draw.randrange(len(bytes_)), draw.randrange(5)
        end = min(len(bytes_), place + draw.choice([1, 2, 16, 200]))
        if what == 0:
            bytes_[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            del bytes_[place:end]
        elif what == 2:
            bytes_[place:place] = bytes_[place:end] * draw.choice([1, 3, 50])
        elif what == 3:
            bytes_[place:place] = draw.choice([b"\0", b"\n", b"\r\n", b"\xff", b'"', b"}", b"\\u0000", b" " * 500])
        else:
            bytes_[place:end] = draw.randbytes(end - place)
    return bytes(bytes_)
