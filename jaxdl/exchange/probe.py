"""Measures a machine: latency and bandwidth of each mesh axis, and what one device does in a second.

All devices work at the same time, as in a step, so that what they share is shared. Every process of a run has to call
this alike, and gets the numbers of the slowest one.
"""

from __future__ import annotations

import functools
import math
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.exchange.cost import PERMUTE, TURN, Link, Machine, Speeds, joined
from jaxdl.parallel.collectives import packing
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.parallel.collectives.quantized import quantized_all_reduce
from jaxdl.parallel.collectives.select import Method, select_top_k
from jaxdl.parallel.mesh import platform

COLLECTIVES = ("all_reduce/float32", "all_reduce/bfloat16", "all_reduce/float16", "all_gather", "all_to_all")
"""What is measured on each axis, by the names of `Link.collectives`; of those that exist all but messages
to single devices, `PERMUTE` and `TURN`."""

_RANK, _NUM_MESSAGES, _NUM_OPERATIONS = 4, 16, 64
_SMALLEST_BYTES, _GROWTH, _LONG_SEC = 2**12, 4, 0.25
_TURNS = 4
"""Turns that are timed together: a message is slower, or faster, after another one in the other direction."""
_NEAR = 0.3
_WARM_UPS = 2
"""The first messages of a size on a connection take much longer than those that follow."""

Work = Callable[..., Any]
Run = Callable[[], Any]


def probe(
    mesh: Mesh,
    *,
    num_elements: int | None = None,
    density: float = 0.01,
    methods: Sequence[Method] = ("exact", "threshold"),
    bits: Sequence[int] = (8,),
    collectives: Sequence[str] = COLLECTIVES,
    num_repeats: int = 5,
    together: bool = False,
) -> Machine:
    """The figures of a mesh's devices: links of its axes of several devices, and speeds.

    With `together` also all-to-alls over all of these axes at once, which embedding tables send.

    `num_elements` (default 2**20 on a CPU, 2**24 elsewhere) float32 numbers are what one device works on, and of them
    the share `density` is selected by each of `methods`; give those of the largest bucket for the best predictions.
    Only these `methods`, `bits` and `collectives` can be predicted later. Times are medians of `num_repeats`
    interleaved runs of compiled functions on the slowest process, less the time of one that does nothing.
    """
    links = {
        axis: probe_link(mesh, axis, collectives, num_repeats=num_repeats)
        for axis, num_devices in mesh.shape.items()
        if num_devices > 1
    }
    if together and len(links) > 1:
        axes = tuple(links)
        links[joined(axes)] = probe_link(mesh, axes, ("all_to_all",), num_repeats=num_repeats)
    speeds = probe_speeds(mesh, num_elements, density, methods, bits, num_repeats=num_repeats)
    return Machine(links, speeds, source="measured", overlaps=platform(mesh) != "cpu")


def probe_link(
    mesh: Mesh,
    axis: str | tuple[str, ...],
    collectives: Sequence[str] = COLLECTIVES,
    *,
    num_repeats: int = 5,
    compiled: dict[Any, Run] | None = None,
    long_sec: float = _LONG_SEC,
    sizes: Mapping[str, int] = types.MappingProxyType({}),
) -> Link:
    """How a device of the mesh sends over an axis, or several at once, by these collectives, while all devices do.

    Each is timed for longer and longer messages, until one takes `long_sec` or is as long as any bucket; times of
    longer ones are extrapolated. Of collectives in `sizes` only messages of so many bytes are timed. `compiled` keeps
    the functions for another call, after the network has changed.
    """
    compiled = {} if compiled is None else compiled
    if "idle" not in compiled:
        compiled["idle"] = _compiled(mesh, lambda x: x[:1], _normal(mesh, _SMALLEST_BYTES // 4))
    num_devices = mesh.shape[axis] if isinstance(axis, str) else math.prod(mesh.shape[name] for name in axis)
    largest = 2**22 if platform(mesh) == "cpu" else 2**26
    links = {}
    for kind in collectives:
        size, sent, times = sizes.get(kind, _SMALLEST_BYTES), [], []
        while True:
            work, num_bytes = _collective(kind, axis, num_devices, size)
            if (kind, axis, size) not in compiled:
                compiled[kind, axis, size] = _compiled(mesh, work, _normal(mesh, size // 4))
            sent.append(num_bytes)
            [seconds] = _timed(mesh, [compiled[kind, axis, size]], compiled["idle"], num_repeats)
            times.append(seconds / _TURNS if kind == TURN else seconds)
            if kind in sizes or size >= largest or times[-1] > long_sec:
                break
            size *= _GROWTH
        links[kind] = fit_link(num_messages(kind, num_devices), sent, times)
    base = links.get("all_reduce/float32", next(iter(links.values())))
    return Link(base.latency_sec, base.bytes_per_sec, links, base.curve)


def num_messages(kind: str, num_devices: int) -> int:
    """How many messages, one after the other, a collective of this name has in a ring of `num_devices`."""
    if kind in (PERMUTE, TURN):
        return 1 if kind == PERMUTE else 2
    return (2 if kind.startswith("all_reduce") else 1) * (num_devices - 1)


def fit_link(num_messages: float, num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link for which collectives of `num_messages` messages, and of these bytes, take these times.

    Of the lines through the longest message and another one (or of latency or bandwidth alone) the one is taken that
    the points are nearest to, by the sum of absolute logarithms of ratios: what is far off does not decide. The points
    near to it then give latency and bandwidth by least squares of relative errors, neither below zero. The median times
    by size, made to grow with it, are the link's curve.
    """
    given, times = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    sizes = np.unique(given)
    times = np.array([np.median(times[given == size]) for size in sizes])
    columns = np.stack([np.full_like(sizes, num_messages), sizes], axis=1)
    lines = [np.array([times[-1] / num_messages, 0.0]), np.array([0.0, times[-1] / sizes[-1]])]
    lines += [np.linalg.solve(columns[[number, -1]], times[[number, -1]]) for number in range(len(sizes) - 1)]

    def errors(line: np.ndarray) -> np.ndarray:
        return np.abs(np.log(columns @ line / times))

    nearest = min((line for line in lines if (line >= 0).all()), key=lambda line: float(errors(line).sum()))
    near = errors(nearest) < _NEAR
    latency, inverse = _positive_least_squares(columns[near] / times[near, None], np.ones(int(near.sum())))
    curve = tuple(zip(sizes.tolist(), np.maximum.accumulate(times).tolist(), strict=True))
    return Link(float(latency), float(1 / max(inverse, 1e-15)), curve=curve)


def _positive_least_squares(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The two numbers, neither negative, whose combination of the two columns comes closest to what is wanted."""
    scale = np.linalg.norm(columns, axis=0)  # Columns of one size, or the smaller one is taken for rounding.
    both = np.linalg.lstsq(columns / scale, wanted)[0] / scale
    if (both >= 0).all():
        return both
    alone = [
        np.where(np.arange(2) == column, columns[:, column] @ wanted / scale[column] ** 2, 0.0) for column in (0, 1)
    ]
    return min(alone, key=lambda solution: float(np.linalg.norm(columns @ solution - wanted)))


def _collective(kind: str, axis: str | tuple[str, ...], num_devices: int, size: int) -> tuple[Work, float]:
    """A function of `size` bytes (float32) on each device, and the bytes that it makes a device send."""
    share = (num_devices - 1) / num_devices
    if kind == "all_gather":
        part = size // 4 // num_devices
        return lambda x: lax.all_gather(x[:part], axis, tiled=True), (num_devices - 1) * 4 * part
    if kind == "all_to_all":
        part = size // 4 // num_devices
        return (
            lambda x: lax.all_to_all(x[: part * num_devices].reshape(num_devices, part), axis, 0, 0, tiled=True),
            share * 4 * part * num_devices,
        )
    if kind == PERMUTE:
        return lambda x: lax.ppermute(x, axis, [(i, (i + 1) % num_devices) for i in range(num_devices)]), size
    if kind == TURN:
        ahead = [(i, i + 1) for i in range(num_devices - 1)]
        back = [(i + 1, i) for i in range(num_devices - 1)]

        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.ppermute(lax.ppermute(x, axis, ahead), axis, back), None

        return lambda x: lax.scan(turn, x, length=_TURNS)[0], 2 * size
    dtype = jnp.dtype(kind.partition("/")[2])
    sent = all_reduce_sent_bytes(size // 4, num_devices, dtype)
    return lambda x: lax.psum(x, axis) if dtype == jnp.float32 else half_all_reduce(x, axis, dtype), sent


def probe_speeds(
    mesh: Mesh,
    num_elements: int | None = None,
    density: float = 0.01,
    methods: Sequence[Method] = ("exact", "threshold"),
    bits: Sequence[int] = (8,),
    *,
    num_repeats: int = 5,
) -> Speeds:
    """What one device does in a second while all devices of the mesh work; see `probe`."""
    size = num_elements or (2**20 if platform(mesh) == "cpu" else 2**24)
    k, rows = max(1, int(density * size)), max(8, int(size**0.5))
    sorted_size = min(size, _NUM_MESSAGES * k)
    works: list[Work] = [
        lambda x: x * 2,
        *(functools.partial(select_top_k, k=k, method=method) for method in methods),
        *(functools.partial(_quantize, number) for number in bits),
        functools.partial(_receive, k),
        functools.partial(_sort, sorted_size),
        functools.partial(_product, rows),
        functools.partial(_project, rows),
    ]
    x = _normal(mesh, size)
    idle = _compiled(mesh, lambda x: x[:1], _normal(mesh, 1024))
    copied, *times = _timed(mesh, [_compiled(mesh, work, x) for work in works], idle, num_repeats)
    selected, times = times[: len(methods)], times[len(methods) :]
    quantized, (received, sorted_, multiplied, projected) = times[: len(bits)], times[len(bits) :]
    return Speeds(
        memory_bytes_per_sec=8 * size / copied,
        selection_elements_per_sec={name: size / value for name, value in zip(methods, selected, strict=True)},
        quantized_elements_per_sec={name: size / value for name, value in zip(bits, quantized, strict=True)},
        # What the dense vector itself costs is counted as memory.
        entries_per_sec=_NUM_MESSAGES * k / max(received - copied, 0.1 * received),
        sorted_entries_per_sec=sorted_size / sorted_,
        flops_per_sec=3 * 2 * rows * rows * _RANK / multiplied,
        operation_sec=projected / _NUM_OPERATIONS,
    )


def _quantize(num_bits: int, x: jax.Array) -> Any:
    """A quantized sum over two devices in one: all of the work, and nothing sent."""
    halves, key = x[: x.size // 2 * 2].reshape(2, x.size // 2), jax.random.key(0)
    return jax.vmap(lambda half: quantized_all_reduce(half, "i", key, bits=num_bits, return_error=True), axis_name="i")(
        halves
    )


def _receive(k: int, x: jax.Array) -> Any:
    """Several messages of k entries, spread evenly, added to x."""
    indices = jnp.asarray(np.arange(k) * (x.size // k), jnp.int32)
    words = packing.pack(x[:k], indices, x.size)

    def add(total: jax.Array, _: None) -> tuple[jax.Array, None]:
        values, at = packing.unpack(words, k, x.size)
        return total.at[at].add(values, mode="drop", unique_indices=True), None

    return lax.scan(add, x, length=_NUM_MESSAGES)[0]


def _sort(size: int, x: jax.Array) -> Any:
    order = lax.bitcast_convert_type(x[:size], jnp.uint32)
    return lax.sort((order, x[:size]), num_keys=1, is_stable=False)


def _product(rows: int, x: jax.Array) -> Any:
    """The three thin products of one step of PowerSGD."""
    matrix = x[: rows * rows].reshape(rows, rows)
    left = jnp.matmul(matrix, matrix[:, :_RANK], precision=lax.Precision.HIGHEST)
    right = jnp.matmul(matrix.T, left, precision=lax.Precision.HIGHEST)
    return jnp.matmul(left, right.T, precision=lax.Precision.HIGHEST)


def _project(rows: int, x: jax.Array) -> Any:
    """A chain of small operations, as in Gram-Schmidt."""
    columns = x[: _RANK * rows].reshape(_RANK, rows)
    column = columns[0]
    for number in range(_NUM_OPERATIONS // 2):
        other = columns[1 + number % (_RANK - 1)]
        column = column - jnp.sum(other * column) * other
    return column


def _compiled(mesh: Mesh, work: Work, x: jax.Array) -> Run:
    """Runs a function of float32 `[size]` on every device at once, each with its row of x."""
    everywhere = PartitionSpec(tuple(mesh.axis_names))

    def one_device(x: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(1, -1), work(x.reshape(-1)))

    # The results are discarded, so their types need not be right.
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    function = jax.jit(mapped).lower(x).compile()
    return lambda: function(x)


def _timed(mesh: Mesh, runs: Sequence[Run], idle: Run, num_repeats: int) -> list[float]:
    """Seconds that the runs take, less those of one that does nothing; the same numbers in every process."""
    times = np.zeros((num_repeats + _WARM_UPS, 1 + len(runs)))
    for repeat, number in np.ndindex(*times.shape):
        start_together(mesh)
        start = time.perf_counter()
        # One at a time: two collectives in flight could wait for each other.
        jax.block_until_ready([idle, *runs][number]())
        times[repeat, number] = time.perf_counter() - start
    times = times[_WARM_UPS:]
    if jax.process_count() > 1:  # The times of the slowest process, in every process: all have to decide alike.
        times = np.asarray(multihost_utils.process_allgather(times.astype(np.float32)), np.float64).max(axis=0)
    rest = np.median(times[:, 1:] - times[:, :1], axis=0)
    # Where the difference is lost in the noise, the time itself is at least of the right order.
    return np.maximum(rest, 0.1 * np.median(times[:, 1:], axis=0)).tolist()


def repeated_sum(mesh: Mesh, axis: str) -> Callable[[int], float]:
    """A compiled `function(count)`: `count` all-reduces of one float32 number over an axis, one after the other.

    Each needs the result of the one before, and all are one program: the time of a call over `count` is the latency of
    one, without that of starting a program. Returns what the last one gave, which is `count` (exactly, up to 2**24).
    """

    def one_device(count: jax.Array) -> jax.Array:
        is_first = lax.axis_index(axis) == 0

        def add(_: jax.Array, total: jax.Array) -> jax.Array:
            return lax.psum(jnp.where(is_first, total + 1, 0.0), axis)

        return lax.fori_loop(0, count, add, jnp.float32(0))

    everywhere = NamedSharding(mesh, PartitionSpec())
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    function = jax.jit(mapped).lower(jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)).compile()

    def run(count: int) -> float:
        return float(function(jax.make_array_from_callback((), everywhere, lambda _: np.int32(count))))

    return run


def start_together(mesh: Mesh) -> None:
    """Returns in every process of the mesh at about the same time."""
    if jax.process_count() > 1:
        jax.block_until_ready(_meeting(mesh)())


@functools.lru_cache(maxsize=8)
def _meeting(mesh: Mesh) -> Run:
    return _compiled(mesh, lambda x: lax.psum(x, tuple(mesh.axis_names)), _normal(mesh, 1))


def _normal(mesh: Mesh, size: int) -> jax.Array:
    """float32 `[devices, size]`, normal numbers, a row on each device."""
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    row = np.random.default_rng(0).standard_normal((1, size), np.float32)
    return jax.make_array_from_callback((mesh.size, size), sharding, lambda _: row)
