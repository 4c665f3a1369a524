"""A profile of a program's instructions, from which XLA orders them for the actual network.

Without one XLA assumes that every collective is as fast as inside a node and starts it shortly before its result is
needed: on a slow network the step then waits for most of the message. The profile comes from the cost model of
`jaxdl.parallel.compiler.hlo`, as XLA's message ProfiledInstructionsProto, without running anything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from jaxdl.parallel.compiler.hlo import inner_computations, parse
from jaxdl.parallel.compiler.overlap import Links, Timeline, play

_LEAST_US = 1.0
"""Microseconds of the shortest kernel, with its launch."""
_EARLY = 4.0
"""A message counts at most so many times. XLA starts each as late as the times of the kernels after it allow, as if
those under way at once did not share a link: whatever comes between makes the step wait."""


def profile_of(text: str, axes: Mapping[str, int], links: Links) -> bytes:
    """The profile of a compiled, scheduled program on a mesh: microseconds of each kernel and each message."""
    module = parse(text)
    timeline = play(module, axes, links)
    early = {over_slow: _early(timeline, over_slow) for over_slow in (True, False)}
    messages = {message.name: early[message.over_slow] * message.seconds for message in timeline.messages}
    costs, scheduled = [], [module.entry]
    for name in scheduled:  # Loops inside are scheduled too, each for itself.
        for instruction in module.computations[name].values():
            scheduled += [inner for inner in inner_computations(instruction) if inner not in scheduled]
            if instruction.name in messages:
                costs.append((instruction.name, 1e6 * messages[instruction.name]))
            elif (seconds := module.seconds(name, instruction)) > 0:
                costs.append((instruction.name, max(_LEAST_US, 1e6 * seconds)))
    return b"".join(_field(1, _field(1, name.encode()) + b"\x11" + struct.pack("<d", cost)) for name, cost in costs)


def _early(timeline: Timeline, over_slow: bool) -> float:
    """How often the messages over one network count: as often as they fit into the backward pass, one after the other.

    If they counted more often, XLA would start each as soon as its content is there, though that makes the step wait
    for the one before.
    """
    total = sum(message.seconds * message.times for message in timeline.messages if message.over_slow == over_slow)
    backward = sum(end - begin for begin, end, what in timeline.spans if what == "backward")
    return min(_EARLY, max(1.0, backward / total)) if total else 1.0


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
