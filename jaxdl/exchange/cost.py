"""What an exchange costs before it is run: times by an alpha-beta model.

A message of b bytes over a link takes alpha + beta b. Collectives are counted as rings: an all-reduce among m devices
is 2 (m-1) messages, an all-gather or all-to-all m-1 (Thakur et al. 2005); bytes are those of the exchanges' own
`sent_bytes`. Added are the work on the device, at speeds that `jaxdl.exchange.probe` measures, and what the exchange
sends inside a replica. No overlap is assumed: the time is the most that an exchange adds to a step. What replicas that
agree less often add to an average step is `jaxdl.exchange.agreement.Agreement.cost`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from jaxdl.exchange.base import GradientLayout
from jaxdl.exchange.buckets import Bucket
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes
from jaxdl.parallel.collectives.select import Method
from jaxdl.parallel.mesh import GATHER_AXES, Axis

ALWAYS_MEASURED = ("all_reduce/float32", "all_gather")
"""The collectives that every exchange uses: between replicas, or inside one."""

PERMUTE = "permute"
"""The collective by which each device sends one message to another one."""

KeyT = TypeVar("KeyT", str, int)


TURN = "turn"
"""Two of these: each device but the last sends a message to the next one, and then each but the first one back."""


def joined(axes: Iterable[str]) -> str:
    """The key in `Machine.links` of collectives over several mesh axes at once."""
    return "+".join(axes)


_FLOAT_BYTES = 4
# What a device reads and writes of its part of the gradients, in float32 numbers an element.
JOIN, SPLIT, NORM = 2, 2, 1
ADD_RESIDUAL = 3
_TO_WIRE_DTYPE = 3


@dataclass(frozen=True)
class Link:
    """How one device sends over a mesh axis, when all devices do."""

    latency_sec: float
    """Of one message, however short."""
    bytes_per_sec: float
    """Bytes that one device sends in a second. Devices that share a network card have a part of it each."""
    collectives: Mapping[str, Link] = field(default_factory=dict)
    """Those collectives that differ: `all_reduce/bfloat16`, `all_gather`, `all_to_all`..."""
    curve: tuple[tuple[float, float], ...] = ()
    """Bytes and seconds of one collective as measured, from short to long. Between these points, and beyond the last
    one, times follow straight lines; without them latency and bandwidth alone."""

    def of(self, collective: str) -> Link:
        """The link as a collective sees it."""
        return self.collectives.get(collective, self)

    def seconds(self, num_messages: float, num_bytes: float) -> tuple[float, float]:
        """The time of `num_messages` messages, one after the other, and the time of their bytes."""
        latency = num_messages * self.latency_sec
        if not self.curve:
            return latency, num_bytes / self.bytes_per_sec
        points = list(self.curve)
        if len(points) == 1:
            points.insert(0, (0.0, min(latency, points[0][1])))
        number = next((i for i, point in enumerate(points[1:-1]) if num_bytes <= point[0]), len(points) - 2)
        (left, before), (right, after) = points[number], points[number + 1]
        slope = (after - before) / (right - left)
        if num_bytes > right:  # Far away a little noise of the last point would be much.
            left, before, slope = right, after, min(max(slope, 0.5 * after / right), 1.5 * after / right)
        total = max(0.0, before + (num_bytes - left) * slope)
        return min(latency, total), max(0.0, total - latency)


@dataclass(frozen=True)
class Speeds:
    """What one device does in a second while all of them work. What is not given costs no time."""

    memory_bytes_per_sec: float = math.inf
    """Bytes read and written by a simple operation on large arrays."""
    selection_elements_per_sec: Mapping[str, float] = field(default_factory=dict)
    """Method of `select_top_k` -> elements of which the largest are selected."""
    quantized_elements_per_sec: Mapping[int, float] = field(default_factory=dict)
    """Bits -> elements that go through a quantized sum: packed and unpacked, twice each."""
    entries_per_sec: float = math.inf
    """Sparse entries that are unpacked and added to a dense vector."""
    sorted_entries_per_sec: float = math.inf
    """Sparse entries that are sorted."""
    flops_per_sec: float = math.inf
    """Of products of a matrix and a thin one."""
    operation_sec: float = 0.0
    """The time of one operation on a small array, of which PowerSGD has hundreds."""


def known_speed(speeds: Mapping[KeyT, float], name: KeyT, what: str) -> float:
    """One of several speeds, infinite where none is given. Raises ValueError where only others are."""
    if speeds and name not in speeds:
        known = ", ".join(map(str, speeds))
        raise ValueError(f"{what} {name}: its speed is not known, only that of {known}. Measure it as well.")
    return speeds.get(name, math.inf)


class HasCost(Protocol):
    """What has a cost: a config of an exchange (`jaxdl.exchange.config.ExchangeConfig`)."""

    @property
    def figures(self) -> Figures:
        """What `cost` needs to know of a machine, beyond what is always measured."""
        ...

    def cost(self, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one `update` after all warm-ups. Raises ValueError for a speed that is not known."""
        ...


@dataclass(frozen=True)
class Figures:
    """Which of a machine's figures the cost of an exchange needs, as arguments of `jaxdl.exchange.probe.probe`."""

    methods: tuple[Method, ...] = ()
    bits: tuple[int, ...] = ()
    collectives: tuple[str, ...] = ()
    """Besides `ALWAYS_MEASURED`."""

    def __or__(self, other: Figures) -> Figures:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Figures(*(tuple(dict.fromkeys(mine + its)) for mine, its in pairs))

    @classmethod
    def of(cls, configs: Iterable[HasCost]) -> Figures:
        """What all of these exchanges need together."""
        return functools.reduce(operator.or_, (config.figures for config in configs), cls())


@dataclass(frozen=True)
class Machine:
    """The figures of the devices and of what connects them."""

    links: Mapping[str, Link]
    """Mesh axis -> how a device sends over it; where it was measured also several axes at once, by `joined`."""
    speeds: Speeds = Speeds()
    source: str = "given"
    """Where the figures come from: measured or given."""
    overlaps: bool = False
    """Whether messages can be sent while the devices compute, as on GPUs."""

    def link(self, axis: str) -> Link:
        """How a device sends over a mesh axis. Raises ValueError for one that was not measured."""
        if axis not in self.links:
            raise ValueError(
                f"no link for mesh axis {axis}: the machine has {', '.join(self.links)}. Measure it again."
            )
        return self.links[axis]

    def link_over(self, axes: Iterable[str]) -> Link | None:
        """How a device sends over several mesh axes at once; None if that was not measured."""
        return self.links.get(joined(axes))

    @property
    def slow(self) -> Link:
        """The link between replicas."""
        return self.link(Axis.REPLICA.value)

    def passes_sec(self, num_elements: float, num_accesses: float) -> float:
        """Seconds for reading and writing `num_accesses` float32 numbers for each element."""
        return num_elements * num_accesses * _FLOAT_BYTES / self.speeds.memory_bytes_per_sec

    def two_shots_sec(self, num_bytes: float, num_replicas: int) -> tuple[float, float]:
        """(latency, wire) seconds of an all-to-all and an all-gather that send about half of the bytes each."""
        links = [self.slow.of(kind) for kind in ("all_to_all", "all_gather")]
        shots = [link.seconds(num_replicas - 1, num_bytes / 2) for link in links]
        return sum(latency for latency, _ in shots), sum(wire for _, wire in shots)

    def gathers_sec(self, bucket: Bucket, layout: GradientLayout, count: int) -> float:
        """Seconds for gathering a bucket inside the replica this many times."""
        gather_sec = 0.0
        for axis, num_bytes in bucket.split_bytes(layout).items():
            gather_sec += sum(self.link(axis).of("all_gather").seconds(layout.inner[axis] - 1, num_bytes))
        return count * gather_sec


NOMINAL_SPEEDS: Mapping[str, Speeds] = {
    "cpu": Speeds(
        memory_bytes_per_sec=4e9,
        selection_elements_per_sec={"exact": 1.5e8, "threshold": 1.5e8, "block": 4e8, "mstopk": 3e7},
        quantized_elements_per_sec={8: 1e8, 4: 1e8, 2: 1e8, 1: 2e8},
        entries_per_sec=1e8,
        sorted_entries_per_sec=1e7,
        flops_per_sec=1e10,
        operation_sec=5e-6,
    ),
    "gpu": Speeds(
        memory_bytes_per_sec=2e12,
        selection_elements_per_sec={"exact": 1e11, "threshold": 1e11, "block": 2e11, "mstopk": 1.5e10},
        quantized_elements_per_sec={8: 4e10, 4: 4e10, 2: 4e10, 1: 4e10},
        entries_per_sec=1e10,
        sorted_entries_per_sec=3e9,
        flops_per_sec=2e13,
        operation_sec=4e-6,
    ),
}
"""Orders of magnitude by platform, for when nothing is measured; those of a GPU follow from its memory's speed."""


@dataclass(frozen=True)
class Gradients:
    """What is exchanged: as much of it as one device sees."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name -> local shape."""
    num_replicas: int
    layout: GradientLayout = field(default_factory=GradientLayout)

    @property
    def num_elements(self) -> int:
        """Elements of one device."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @classmethod
    def flat(cls, num_elements: int, num_replicas: int) -> Gradients:
        """One vector of `num_elements` on each device."""
        return cls({"gradient": (num_elements,)}, num_replicas)


@dataclass(frozen=True)
class Cost:
    """Seconds of one exchange, part by part, and bytes that one device sends over the slow axis."""

    latency_sec: float = 0.0
    """Messages over the slow axis, however short."""
    wire_sec: float = 0.0
    """Bytes over the slow axis."""
    selection_sec: float = 0.0
    """Finding the largest entries."""
    compute_sec: float = 0.0
    """All other work on the device."""
    inner_sec: float = 0.0
    """What the exchange gathers inside a replica; not the step's own collectives there, see `inner_step_sec`."""
    sent_bytes: float = 0.0

    @property
    def total_sec(self) -> float:
        """All parts, one after the other."""
        return self.latency_sec + self.wire_sec + self.selection_sec + self.compute_sec + self.inner_sec

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, factor: float) -> Cost:
        return Cost(*(factor * part for part in dataclasses.astuple(self)))

    def beside(self, seconds: float) -> Cost:
        """What is left of it if its messages are sent during `seconds` of other work; the bytes stay."""
        wire = min(self.wire_sec, seconds)
        latency = min(self.latency_sec, seconds - wire)
        return dataclasses.replace(self, wire_sec=self.wire_sec - wire, latency_sec=self.latency_sec - latency)


def predict(config: HasCost, gradients: Gradients, machine: Machine) -> Cost:
    """The cost of one `update` of an exchange, after all warm-ups. Raises ValueError for a speed that is not known."""
    return Cost() if gradients.num_replicas == 1 else config.cost(gradients, machine)


def inner_step_sec(gradients: Gradients, machine: Machine) -> float:
    """The reduce-scatter of gradients and the all-gather of parameters inside a replica: equal for every exchange.

    XLA does both in the step, outside of the exchange, over `GATHER_AXES`; both are float32 here.
    """
    seconds = 0.0
    for axis in (axis for axis in GATHER_AXES if axis in machine.links and axis in gradients.layout.inner):
        split = [name for name in gradients.shapes if axis in gradients.layout.used(name)]
        others = gradients.layout.inner[axis] - 1
        num_bytes = others * _FLOAT_BYTES * sum(math.prod(gradients.shapes[name]) for name in split)
        links = [machine.links[axis].of(kind) for kind in ("reduce_scatter", "all_gather")]
        seconds += sum(sum(link.seconds(others, num_bytes)) for link in links)
    return seconds


def all_reduce_cost(bucket: Bucket, gradients: Gradients, machine: Machine, dtype: str = "float32") -> Cost:
    """The cost of summing a bucket by one all-reduce in `dtype`."""
    m, n = gradients.num_replicas, bucket.num_own
    sent = all_reduce_sent_bytes(n, m, dtype)
    latency, wire = machine.slow.of(f"all_reduce/{dtype}").seconds(2 * (m - 1), sent)
    accesses = JOIN + SPLIT + NORM + (_TO_WIRE_DTYPE if dtype != "float32" else 0)
    return Cost(
        latency_sec=latency,
        wire_sec=wire,
        compute_sec=machine.passes_sec(n, accesses),
        inner_sec=machine.gathers_sec(bucket, gradients.layout, 1),
        sent_bytes=sent,
    )
