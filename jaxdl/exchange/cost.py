"""What an exchange costs before it is run: times by an alpha-beta model.

A message of b bytes over a link takes alpha + beta b. Collectives are counted as rings: an all-reduce among m devices
is 2 (m-1) messages, an all-gather or all-to-all m-1 (Thakur et al. 2005); bytes are those of the exchanges' own
`sent_bytes`. Added are the work on the device, at speeds that `jaxdl.exchange.probe` measures, and what the exchange
sends inside a replica. Nothing overlaps with anything: the time is what an exchange adds to a step at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.collectives.halves import all_reduce_sent_bytes
from jaxdl.exchange.base import GradientLayout
from jaxdl.exchange.buckets import Bucket, make_buckets
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.powersgd import PowerSGD, matrix_shape
from jaxdl.exchange.quantized import Quantized, Sign
from jaxdl.exchange.topk import TopK
from jaxdl.mesh import Axis

ExchangeChoice = Dense | TopK | Quantized | PowerSGD | Sign
"""The exchanges whose cost is known."""

_FLOAT_BYTES = 4
# What a device reads and writes of its part of the gradients, in float32 numbers an element.
_JOIN, _SPLIT, _NORM = 2, 2, 1
_TO_WIRE_DTYPE = 3
_ADD_RESIDUAL, _ZERO_SENT, _ADD_ERROR = 3, 2, 4
_EMPTY_TOTAL = 1
_POWERSGD = 7
"""Two products that read the matrix, one that writes the total, and the error."""
_OWN_ENTRIES = 3
"""Rounding, packing and keeping what was not sent: as much work as receiving the own entries this many times."""


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
        """What a collective of so many messages takes, one after the other, and what their bytes take."""
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


@dataclass(frozen=True)
class Machine:
    """The figures of the devices and of what connects them."""

    links: Mapping[str, Link]
    """Mesh axis -> how a device sends over it."""
    speeds: Speeds = Speeds()
    source: str = "given"
    """Where the figures come from: measured or given."""


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
        """One vector of so many elements on each device."""
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
        mine, its = dataclasses.astuple(self), dataclasses.astuple(other)
        return Cost(*(a + b for a, b in zip(mine, its, strict=True)))


def predict(config: ExchangeChoice, gradients: Gradients, machine: Machine) -> Cost:
    """The cost of one `update` of an exchange, after all warm-ups. Raises ValueError for a speed that is not known."""
    if gradients.num_replicas == 1:
        return Cost()
    dense, compressed = buckets(config, gradients)
    dtype = config.wire_dtype if isinstance(config, Dense) else "float32"
    costs = [_dense(bucket, dtype, gradients, machine) for bucket in dense]
    for bucket in compressed:
        if isinstance(config, TopK):
            costs.append(_top_k(config, bucket, gradients, machine))
        elif isinstance(config, Quantized | Sign):
            costs.append(_quantized(config, bucket, gradients, machine))
        elif isinstance(config, PowerSGD):
            costs.append(_powersgd(config, bucket, gradients, machine))
    return sum(costs, Cost())


def inner_step_sec(gradients: Gradients, machine: Machine, axis: str = Axis.FSDP.value) -> float:
    """The reduce-scatter of gradients and the all-gather of parameters inside a replica: equal for every exchange.

    XLA does both in the step, outside of the exchange, for what is split over `axis`; both are float32 here.
    """
    ways = gradients.layout.inner.get(axis, 1)
    if ways == 1 or axis not in machine.links:
        return 0.0
    split = [name for name in gradients.shapes if axis in gradients.layout.used(name)]
    num_bytes = (ways - 1) * _FLOAT_BYTES * sum(math.prod(gradients.shapes[name]) for name in split)
    links = [machine.links[axis].of(kind) for kind in ("reduce_scatter", "all_gather")]
    return sum(sum(link.seconds(ways - 1, num_bytes)) for link in links)


def break_even_density(
    config: TopK, gradients: Gradients, machine: Machine, *, dense: Dense | None = None
) -> float | None:
    """The density at which `config` takes as long as `dense` (default: float32); None where it always takes longer.

    Below it top-k is faster. Where nothing costs but bytes it is 2 b_dense / (m b_entry) for m replicas, b_dense bytes
    an element and b_entry bytes an entry. At most 1.
    """
    limit = predict(dense or Dense(), gradients, machine).total_sec

    def excess(density: float) -> float:
        return predict(config.model_copy(update={"density": density}), gradients, machine).total_sec - limit

    lowest = 1 / max(2, gradients.num_elements)
    if excess(lowest) >= 0:
        return None
    if excess(1.0) <= 0:
        return 1.0
    low, high = lowest, 1.0
    if config.algorithm == "all_gather" and not _slow(machine).of("all_gather").curve:
        # Entries are sent and added one by one: the time is a straight line, but for rounding to whole entries.
        slope = (excess(1.0) - excess(0.5)) / 0.5
        return min(1.0, max(lowest, 1.0 - excess(1.0) / slope))
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if excess(middle) >= 0 else (middle, high)
    return math.sqrt(low * high)


def buckets(config: ExchangeChoice, gradients: Gradients) -> tuple[list[Bucket], list[Bucket]]:
    """The messages of an exchange as `update` makes them: dense ones, and compressed ones."""
    layout = gradients.layout
    if isinstance(config, Compressed):
        leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gradients.shapes.items()}
        return config.engine(layout).buckets(leaves)
    names = config.ordered(list(gradients.shapes), layout)
    return make_buckets(names, gradients.shapes, layout, max_elements=config.bucket_elements), []


def _link(machine: Machine, axis: str) -> Link:
    if axis not in machine.links:
        raise ValueError(f"no link for mesh axis {axis}: the machine has {', '.join(machine.links)}. Measure it again.")
    return machine.links[axis]


def _slow(machine: Machine) -> Link:
    return _link(machine, Axis.REPLICA.value)


def _gathers(bucket: Bucket, count: int, gradients: Gradients, machine: Machine) -> float:
    """Seconds for making a bucket whole inside the replica this many times."""
    found = 0.0
    for axis, num_bytes in bucket.split_bytes(gradients.layout).items():
        link = _link(machine, axis).of("all_gather")
        found += sum(link.seconds(gradients.layout.inner[axis] - 1, num_bytes))
    return count * found


def _passes_sec(num_elements: float, num_accesses: float, machine: Machine) -> float:
    return num_elements * num_accesses * _FLOAT_BYTES / machine.speeds.memory_bytes_per_sec


def _dense(bucket: Bucket, dtype: str, gradients: Gradients, machine: Machine) -> Cost:
    m, n = gradients.num_replicas, bucket.num_own
    sent = all_reduce_sent_bytes(n, m, dtype)
    link = _slow(machine).of(f"all_reduce/{dtype}")
    accesses = _JOIN + _SPLIT + _NORM + (_TO_WIRE_DTYPE if dtype != "float32" else 0)
    latency, wire = link.seconds(2 * (m - 1), sent)
    return Cost(
        latency_sec=latency,
        wire_sec=wire,
        compute_sec=_passes_sec(n, accesses, machine),
        inner_sec=_gathers(bucket, 1, gradients, machine),
        sent_bytes=sent,
    )


def _two_shots(num_bytes: float, num_replicas: int, machine: Machine) -> tuple[float, float]:
    """(latency, wire) seconds of an all-to-all and an all-gather that send about half of the bytes each."""
    links = [_slow(machine).of(kind) for kind in ("all_to_all", "all_gather")]
    shots = [link.seconds(num_replicas - 1, num_bytes / 2) for link in links]
    return sum(latency for latency, _ in shots), sum(wire for _, wire in shots)


def _top_k(config: TopK, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
    m, n, speeds = gradients.num_replicas, bucket.num_own, machine.speeds
    k = config.num_kept(n, config.density)
    sent = config.sent_bytes(n, m)
    selected, accesses = float(n), _JOIN + _SPLIT + _NORM + _EMPTY_TOTAL
    if config.algorithm == "all_gather":
        link = _slow(machine).of("all_gather")
        latency, wire = link.seconds(m - 1, sent)
        entries, sorted_entries = float((m + _OWN_ENTRIES) * k), 0
    else:
        latency, wire = _two_shots(sent, m, machine)
        # The owner of a range adds up as many entries as a device sends, and selects from the range once more.
        entries, sorted_entries = float((2 + _OWN_ENTRIES) * k), k
        selected += n / m
    num_splits = 1
    if config.error_feedback:
        num_splits += 1
        accesses += _ADD_RESIDUAL + _ZERO_SENT + _ADD_ERROR + _SPLIT + _NORM
    if config.momentum_correction is not None:
        num_splits += 1
        accesses += _ADD_RESIDUAL + _JOIN + _ZERO_SENT + _SPLIT
    compute = _passes_sec(n, accesses, machine)
    compute += entries / speeds.entries_per_sec + sorted_entries / speeds.sorted_entries_per_sec
    rate = _known(speeds.selection_elements_per_sec, config.method, "selection")
    return Cost(
        latency_sec=latency,
        wire_sec=wire,
        selection_sec=selected / rate,
        compute_sec=compute,
        inner_sec=_gathers(bucket, num_splits, gradients, machine),
        sent_bytes=sent,
    )


def _quantized(config: Quantized | Sign, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
    m, n = gradients.num_replicas, bucket.num_own
    sent = config.sent_bytes(n, m)
    latency, wire = _two_shots(sent, m, machine)
    bits = config.bits if isinstance(config, Quantized) else 1
    rate = _known(machine.speeds.quantized_elements_per_sec, bits, "quantization")
    accesses = _JOIN + _SPLIT + _NORM
    if config.error_feedback:
        accesses += _ADD_RESIDUAL + _SPLIT + _NORM
    return Cost(
        latency_sec=latency,
        wire_sec=wire,
        compute_sec=n / rate + _passes_sec(n, accesses, machine),
        inner_sec=_gathers(bucket, 1 + config.error_feedback, gradients, machine),
        sent_bytes=sent,
    )


def _powersgd(config: PowerSGD, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
    m, speeds = gradients.num_replicas, machine.speeds
    shapes = [
        matrix_shape(shape, stacked=name in gradients.layout.stacked)
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    ]
    factors = [config.rank * sum(count * size[side] for count, *size in shapes) for side in (0, 1)]
    # Each of the devices that hold the same sends its share of a factor, and gathers the others'.
    entries = sum(-(-size // bucket.ways) for size in factors)
    sent = all_reduce_sent_bytes(entries, m, jnp.float32)
    link = _slow(machine).of("all_reduce/float32")
    shots = [link.seconds(2 * (m - 1), sent / 2) for _ in factors]
    products = 3 * 2 * config.rank * bucket.num_elements
    # Gram-Schmidt, twice: each column against all columns before it, a product and a difference.
    projections = config.rank * (config.rank - 1)
    orthogonal = 4 * sum(count * rows for count, rows, _ in shapes) * projections
    operations = len(shapes) * (2 * projections + 3 * config.rank)
    accesses = _POWERSGD + _NORM + (_ADD_RESIDUAL + _NORM if config.error_feedback else 0)
    return Cost(
        latency_sec=sum(latency for latency, _ in shots),
        wire_sec=sum(wire for _, wire in shots),
        compute_sec=operations * speeds.operation_sec
        + (products + orthogonal) / speeds.flops_per_sec
        + _passes_sec(bucket.num_elements, accesses, machine),
        sent_bytes=sent,
    )


def _known(speeds: Mapping[Any, float], name: str | int, what: str) -> float:
    if not speeds:
        return math.inf
    if name not in speeds:
        raise ValueError(
            f"{what} {name}: its speed is not known, only that of {', '.join(map(str, speeds))}. Measure it as well."
        )
    return speeds[name]
