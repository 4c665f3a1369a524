"""Measures a machine: latency and bandwidth of each mesh axis, and what one device does in a second.

All devices work at the same time, as in a step, so that what they share is shared. Every process of a run has to call
this alike, and gets the numbers of process 0.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.collectives import packing
from jaxdl.collectives.quantized import quantized_all_reduce
from jaxdl.collectives.select import Method, select_top_k
from jaxdl.exchange.cost import Link, Machine, Speeds

COLLECTIVES = ("all_reduce/float32", "all_reduce/bfloat16", "all_reduce/float16", "all_gather", "all_to_all")
"""What is measured on each axis, by the names of `Link.collectives`."""

_RANK, _NUM_MESSAGES, _NUM_OPERATIONS = 4, 16, 64
_SMALLEST_BYTES, _LONG_SEC = 2**14, 0.02

Work = Callable[..., Any]


def probe(
    mesh: Mesh,
    *,
    num_elements: int | None = None,
    density: float = 0.01,
    methods: Sequence[Method] = ("exact", "threshold"),
    bits: Sequence[int] = (8,),
    collectives: Sequence[str] = COLLECTIVES,
    num_repeats: int = 5,
) -> Machine:
    """The figures of a mesh's devices: links of its axes of several devices, and speeds.

    `num_elements` (default 2**20 on a CPU, 2**24 elsewhere) float32 numbers are what one device works on, and of them
    the share `density` is selected by each of `methods`; give those of the largest bucket for the best predictions.
    Only these `methods`, `bits` and `collectives` can be predicted later. Times are medians of `num_repeats`
    interleaved runs of compiled functions, less the time of one that does nothing.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    size = num_elements or (2**20 if on_cpu else 2**24)
    largest = 2**22 if on_cpu else 2**26
    links = {
        axis: _probe_link(mesh, axis, collectives, largest, num_repeats)
        for axis, num_devices in mesh.shape.items()
        if num_devices > 1
    }
    return Machine(links, _probe_speeds(mesh, size, density, methods, bits, num_repeats), source="measured")


def fit_link(num_messages: float, num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link for which a collective of so many messages and bytes takes these times, by weighted least squares.

    Errors count relative to the time, so that short messages decide the latency and long ones the bandwidth.
    """
    sizes, times = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    columns = np.stack([np.full_like(sizes, num_messages), sizes], axis=1) / times[:, None]
    # Columns of one size, or the smaller one is taken for rounding.
    scale = np.linalg.norm(columns, axis=0)
    latency, inverse = np.linalg.lstsq(columns / scale, np.ones_like(times))[0] / scale
    if latency < 0:  # Noise: then bytes explain all of it.
        latency, inverse = 0.0, np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2)
    if inverse <= 0:  # Or none of it.
        latency, inverse = float(np.median(times)) / num_messages, 1e-15
    return Link(float(latency), float(1 / inverse))


def _probe_link(mesh: Mesh, axis: str, collectives: Sequence[str], largest: int, num_repeats: int) -> Link:
    num_devices = mesh.shape[axis]
    found = {}
    for kind in collectives:
        works, sent = [], []
        sizes = [_SMALLEST_BYTES, 16 * _SMALLEST_BYTES]
        for size in sizes:
            work, num_bytes = _collective(kind, axis, num_devices, size)
            works.append((work, size // 4))
            sent.append(num_bytes)
        times = _timed(mesh, works, num_repeats)
        # The largest size that takes not too long: a slow network needs no long messages to be seen.
        growth = _LONG_SEC / max(times[1], 1e-6)
        size = sizes[1] * 2 ** int(np.clip(np.floor(np.log2(max(growth, 1))), 1, np.log2(largest / sizes[1])))
        work, num_bytes = _collective(kind, axis, num_devices, size)
        times += _timed(mesh, [(work, size // 4)], num_repeats)
        num_messages = (2 if kind.startswith("all_reduce") else 1) * (num_devices - 1)
        found[kind] = fit_link(num_messages, [*sent, num_bytes], times)
    base = found.get("all_reduce/float32", next(iter(found.values())))
    return Link(base.latency_sec, base.bytes_per_sec, found)


def _collective(kind: str, axis: str, num_devices: int, size: int) -> tuple[Work, float]:
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
    dtype = jnp.dtype(kind.partition("/")[2])
    # The sum of 16-bit numbers has to stay one, as in an exchange.
    return lambda x: lax.psum(x.astype(dtype), axis).astype(jnp.float32), 2 * share * size / 4 * dtype.itemsize


def _probe_speeds(
    mesh: Mesh, size: int, density: float, methods: Sequence[Method], bits: Sequence[int], num_repeats: int
) -> Speeds:
    k = max(1, int(density * size))
    spread = np.arange(k) * (size // k)
    indices, rows = jnp.asarray(spread, jnp.int32), max(8, int(size**0.5))
    sorted_size = min(size, _NUM_MESSAGES * k)

    def select(method: Method) -> Work:
        return lambda x: select_top_k(x, k, method)

    def quantize(num_bits: int) -> Work:
        # Two devices in one: all of the work, and nothing sent.
        halves, key = (2, size // 2), jax.random.key(0)

        def work(x: jax.Array) -> Any:
            one = x[: size // 2 * 2].reshape(halves)
            return jax.vmap(
                lambda half: quantized_all_reduce(half, "i", key, bits=num_bits, return_error=True), axis_name="i"
            )(one)

        return work

    def receive(x: jax.Array) -> Any:
        words = packing.pack(x[:k], indices, size)

        def add(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            values, at = packing.unpack(words, k, size)
            return total.at[at].add(values, mode="drop", unique_indices=True), None

        return lax.scan(add, x, length=_NUM_MESSAGES)[0]

    def sort(x: jax.Array) -> Any:
        order = lax.bitcast_convert_type(x[:sorted_size], jnp.uint32)
        return lax.sort((order, x[:sorted_size]), num_keys=1, is_stable=False)

    works = [
        lambda x: x * 2,
        *map(select, methods),
        *map(quantize, bits),
        receive,
        sort,
        functools.partial(_product, rows),
        functools.partial(_project, rows),
    ]
    copied, *times = _timed(mesh, [(work, size) for work in works], num_repeats)
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


def _timed(mesh: Mesh, works: Sequence[tuple[Work, int]], num_repeats: int) -> list[float]:
    """Seconds of functions of float32 `[size]` on every device at once, less those of one that does nothing."""
    everywhere = PartitionSpec(tuple(mesh.axis_names))
    inputs = {size: _normal(mesh, size, everywhere) for size in {size for _, size in works}}

    def compiled(work: Work, size: int) -> Callable[[], Any]:
        def one_device(x: jax.Array) -> Any:
            return jax.tree.map(lambda leaf: leaf.reshape(1, -1), work(x.reshape(-1)))

        # Nobody reads the results, so their types need not be right.
        mapped = jax.shard_map(one_device, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        x = inputs[size]
        function = jax.jit(mapped).lower(x).compile()
        return lambda: function(x)

    smallest = min(inputs)
    runs = [compiled(lambda x: x[:1], smallest), *(compiled(work, size) for work, size in works)]
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(num_repeats + 1):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())  # One at a time: two collectives in flight could wait for each other.
            if repeat > 0:  # The first round warms up.
                times[number].append(time.perf_counter() - start)
    idle = times[0]
    rest = [statistics.median(a - b for a, b in zip(one, idle, strict=True)) for one in times[1:]]
    # Where the difference is lost in the noise, the time itself is at least of the right order.
    least = [0.1 * statistics.median(one) for one in times[1:]]
    return _agreed([max(pair) for pair in zip(rest, least, strict=True)])


def _normal(mesh: Mesh, size: int, spec: PartitionSpec) -> jax.Array:
    """float32 `[devices, size]`, normal numbers, a row on each device."""
    sharding = NamedSharding(mesh, spec)
    row = np.random.default_rng(0).standard_normal((1, size), np.float32)
    return jax.make_array_from_callback((mesh.size, size), sharding, lambda _: row)


def _agreed(values: list[float]) -> list[float]:
    """The numbers of process 0, in every process: all have to decide alike."""
    if jax.process_count() == 1:
        return values
    return [float(value) for value in multihost_utils.broadcast_one_to_all(np.asarray(values, np.float64))]
