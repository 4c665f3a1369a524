"""A simulation of a scheduled program: when each collective runs, and how much of it overlaps with compute.

The program runs once in its scheduled order: kernels in sequence on one stream, collectives on another, in the order in
which they start; an instruction waits for the results that it needs. Kernels take the least time that an H100 needs
(`jaxdl.parallel.compiler.hlo`), messages that of their bytes on links of given speed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxdl.parallel.compiler.groups import KINDS, axes_of, sent_bytes
from jaxdl.parallel.compiler.hlo import (
    Instruction,
    Module,
    inner_computations,
    is_collective,
    shapes_bytes,
    shapes_of,
    trip_count,
)
from jaxdl.parallel.compiler.roofline import part_of
from jaxdl.parallel.mesh import SLOW_AXES


@dataclass(frozen=True)
class Links:
    """The bandwidth of one device, in bytes a second, and the latency of a message, in seconds."""

    replica_bytes_per_sec: float
    inner_bytes_per_sec: float = 4.5e11
    """NVLink of an H100, one direction."""
    replica_latency_sec: float = 20e-6
    inner_latency_sec: float = 5e-6
    apart: bool = False
    """Whether messages between replicas have a separate stream, so that those inside a replica do not wait for them."""

    def seconds(self, over_slow: bool, num_bytes: float) -> float:
        """The time of a message of which one device sends this many bytes."""
        if over_slow:
            return self.replica_latency_sec + num_bytes / self.replica_bytes_per_sec
        return self.inner_latency_sec + num_bytes / self.inner_bytes_per_sec


@dataclass
class Message:
    """A collective of the schedule."""

    name: str
    kind: str
    axes: tuple[str, ...]
    sent_bytes: float
    """Bytes that one device sends, by ring algorithms."""
    is_async: bool
    times: int = 1
    """How often it runs: more than once inside a loop."""
    started_sec: float = 0.0
    """When it may start; the link may still be busy then."""
    begin_sec: float = 0.0
    end_sec: float = 0.0
    needed_sec: float = 0.0
    """When its result is waited for."""
    compute_sec: float = 0.0
    """Kernels between start and done, as scheduled."""
    kernels: dict[str, int] = field(default_factory=dict)

    @property
    def over_slow(self) -> bool:
        """Whether it crosses the slow network: between replicas, or between stages, which may lie on it too."""
        return not set(SLOW_AXES).isdisjoint(self.axes)

    @property
    def seconds(self) -> float:
        """Its time on the link."""
        return self.end_sec - self.begin_sec

    @property
    def hidden(self) -> float:
        """The share of its time on the link that overlaps with compute."""
        return min(1.0, self.busy_sec / self.seconds) if self.seconds > 0 else 1.0

    busy_sec: float = 0.0
    """Compute that ran while it was on the link."""


@dataclass
class Timeline:
    """One simulated run of a program."""

    messages: list[Message]
    spans: list[tuple[float, float, str]]
    """(begin, end, what) of the kernels: forward, backward, tables or rest."""
    total_sec: float
    compute_sec: float

    @property
    def backward(self) -> tuple[float, float]:
        """When the backward pass begins and ends; XLA may run a kernel of it early."""
        spans = [(begin, end) for begin, end, what in self.spans if what == "backward"]
        if not spans:
            return 0.0, 0.0
        # It begins where the most time of forward kernels lies before, less that of backward ones.
        ahead = most = 0.0
        first = spans[0][0]
        last = max(begin for begin, _ in spans)
        for begin, end, what in self.spans:
            if begin > last:
                break
            ahead += (end - begin) * {"forward": 1, "backward": -1}.get(what, 0)
            if ahead > most:
                most, first = ahead, end
        return min((begin for begin, _ in spans if begin >= first), default=first), max(end for _, end in spans)

    @property
    def exchange(self) -> list[Message]:
        """The messages over the slow network."""
        return [message for message in self.messages if message.over_slow]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends over the slow network."""
        return sum(message.sent_bytes * message.times for message in self.exchange)

    @property
    def hidden_share(self) -> float:
        """The share of the bytes over the slow network that are sent while kernels run."""
        total = self.sent_bytes
        return (
            sum(message.sent_bytes * message.times * message.hidden for message in self.exchange) / total
            if total
            else 1.0
        )

    @property
    def network_sec(self) -> float:
        """The busy time of the slow network."""
        return sum(message.seconds * message.times for message in self.exchange)

    @property
    def waiting_sec(self) -> float:
        """The time that messages add to that of the kernels."""
        return self.total_sec - self.compute_sec


def play(module: Module, axes: Mapping[str, int], links: Links) -> Timeline:
    """Simulates the entry computation; `axes` are the mesh's, with their sizes."""
    if not module.scheduled:
        raise ValueError("this program is not scheduled, so the order of its instructions is meaningless.")
    return _play(module, module.entry, axes, links)


def _play(module: Module, computation: str, axes: Mapping[str, int], links: Links) -> Timeline:
    now = compute = 0.0
    free = {True: 0.0, False: 0.0}
    in_flight: dict[str, Message] = {}
    messages: list[Message] = []
    spans: list[tuple[float, float, str]] = []
    for instruction in module.computations[computation].values():
        if is_collective(instruction) and instruction.kind.endswith("-done"):
            message = in_flight.pop(instruction.operands[0], None)
            if message is not None:
                message.needed_sec = now
                now = max(now, message.end_sec)
            continue
        if is_collective(instruction):
            message = _message(module, instruction, axes)
            if message is None:
                if (
                    instruction.kind.endswith("-update")
                    and instruction.operands
                    and instruction.operands[0] in in_flight
                ):
                    in_flight[instruction.name] = in_flight.pop(instruction.operands[0])
                continue
            message.started_sec = now
            stream = links.apart and message.over_slow
            message.begin_sec = max(now, free[stream])
            message.end_sec = message.begin_sec + links.seconds(message.over_slow, message.sent_bytes)
            free[stream] = message.end_sec
            messages.append(message)
            if message.is_async:
                in_flight[instruction.name] = message
            else:
                message.needed_sec, now = now, message.end_sec
            continue
        seconds, kernels = module.seconds(computation, instruction), module.kernels(computation, instruction)
        inner = _inner(module, instruction, axes, links)
        compute += seconds
        # Messages of a loop wait for those in flight, and later ones wait for them.
        streams = {links.apart and message.over_slow for message in inner.messages} if inner else set()
        now = max([now, *(free[stream] for stream in streams)])
        for message in inner.messages if inner else ():
            lasts, message.times = message.seconds, message.times * trip_count(instruction)
            message.started_sec = message.begin_sec = now
            message.end_sec = message.needed_sec = now + lasts
            messages.append(message)
        lasts = max(seconds, inner.total_sec * trip_count(instruction)) if inner else seconds
        if lasts > 0:
            spans.append((now, now + lasts, part_of(instruction)))
        for message in in_flight.values():
            message.compute_sec += seconds
            beside = max(0.0, min(now + lasts, message.end_sec) - max(now, message.begin_sec))
            message.busy_sec += beside * seconds / lasts if lasts else 0.0
            for sort, number in kernels.items():
                message.kernels[sort] = message.kernels.get(sort, 0) + number
        now += lasts
        for stream in streams:
            free[stream] = now
    return Timeline(messages, spans, max(now, *free.values()), compute)


def _inner(module: Module, instruction: Instruction, axes: Mapping[str, int], links: Links) -> Timeline | None:
    """A simulation of one iteration of a loop, or of the longest branch of a conditional."""
    played = [
        _play(module, name, axes, links) for name in inner_computations(instruction) if name in module.computations
    ]
    return max(played, key=lambda inner: inner.total_sec, default=None)


def _message(module: Module, instruction: Instruction, axes: Mapping[str, int]) -> Message | None:
    """The collective that an instruction is or starts; None for one among single devices."""
    line, kind, result = instruction.line, instruction.kind, instruction.result
    is_async = kind.endswith("-start")
    if kind == "async-start":
        wrapped = module.computations.get(instruction.called("calls") or "", {})
        inside = next((x for x in wrapped.values() if x.kind in KINDS), None)
        if inside is None:
            return None
        line, kind, result, is_async = inside.line, inside.kind, inside.result, True
    base = kind.removesuffix("-start")
    if base not in KINDS:
        return None
    over = axes_of(line, axes)
    if not over:
        return None
    shapes = shapes_of(re.sub(r"/\*.*?\*/", "", result))
    if instruction.kind.endswith("-start") and instruction.kind not in ("async-start", "all-reduce-start"):
        shapes = shapes[len(shapes) // 2 :]  # (operands, results)
    ways = math.prod(axes[axis] for axis in over)
    sent = sent_bytes(base, ways, shapes_bytes(shapes))
    return Message(instruction.name, base, over, sent, is_async)
