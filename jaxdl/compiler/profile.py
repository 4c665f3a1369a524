"""Tells XLA how long the instructions of a program take, so that it orders them for the network that is there.

XLA takes every collective for as fast as inside a node, and so starts it shortly before its result is needed: on a slow
network most of the message is waited for. From a profile it knows better. This makes one from the cost model of
`jaxdl.compiler.hlo`, in the form of XLA's message ProfiledInstructionsProto, without running anything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from jaxdl.compiler.hlo import parse
from jaxdl.compiler.overlap import Links, play

_LEAST_US = 1.0
"""What the shortest kernel takes, with its launch."""


def profile_of(text: str, axes: Mapping[str, int], links: Links) -> bytes:
    """The profile of a compiled, scheduled program on a mesh: microseconds of each kernel and each message."""
    module = parse(text)
    messages = {one.name: one.seconds for one in play(module, axes, links).messages}
    found = []
    for name, instructions in module.computations.items():
        for one in instructions.values():
            if one.name in messages:
                found.append((one.name, 1e6 * messages[one.name]))
            elif name == module.entry and (seconds := module.seconds(name, one)) > 0:
                found.append((one.name, max(_LEAST_US, 1e6 * seconds)))
    return b"".join(_field(1, _field(1, name.encode()) + b"\x11" + struct.pack("<d", cost)) for name, cost in found)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer with content of some length."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
