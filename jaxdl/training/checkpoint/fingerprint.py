"""Fingerprints of arrays: 64 bits computed on the devices, the same on every mesh."""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.parallel.cluster.agree import from_each_process

PIECE_BYTES = 2**26
"""Of rows that are in memory at once; also the size of the chunks in which tables are written."""
NUMPY_BYTES = 2**24
"""Of arrays of CPUs that NumPy sums: 0.1 s, while the program for 80 small arrays takes 3 s to compile."""
_FETCHES, _FETCH_SEC = 5, 0.1
"""How often words that are stale are fetched, and the time between."""
_WORDS = (
    (0x9E3779B9, ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None))),
    (0x7F4A7C15, ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None))),
)
"""For each of the two words: a seed, and the finalizer as (shift to xor with, odd factor to multiply by)."""
_WITHOUT_BITS = ("bool", "int2", "int4", "uint2", "uint4")
"""Types that cannot be bit-cast."""


def fingerprints(tree: Any) -> Any:
    """64 bits of each array, as two uint32, `[2]`, in a tree like the given one.

    Each word is the sum modulo 2**32, over the elements, of `mix(bits ^ mix(place))`, where `bits` are the bits of the
    element, `place` is its row-major index in the global array, and `mix` is a bijection of 32 bits in which each input
    bit changes about half of the output bits: the finalizer of MurmurHash3 (Appleby) for one word and lowbias32
    (Wellons) for the other. Elements of 8 bytes count as two. Sums can be taken in any order, so each device sums its
    shard of an array, and the devices exchange two numbers.

    One changed element of up to 4 bytes changes both words with certainty. Any other change (several elements, values
    swapped, a sign, a shift) goes undetected with a probability of about 2**-64, unless someone who knows
    these constants made it: fingerprints guard against accidents, not forgery. They do not cover shape and dtype: an
    array and its reshaped copy have the same fingerprint.
    """
    return jax.tree.map(_fingerprint, tree)


def tag_fingerprints(tree: Any, tag: jax.Array) -> Any:
    """`fingerprints` as three words each, `[3]`: two that are mixed with the `tag`, a uint32 scalar, and the tag.

    Once in some 700 checkpoints on two CPU devices the words that were fetched were those of the checkpoint before, as
    if their memory had been read before it was written. `tagged_texts` notices that.
    """
    return jax.tree.map(lambda x: tag_fingerprint(x, tag), tree)


def tag_fingerprint(x: jax.Array, tag: jax.Array, shape: tuple[int, ...] | None = None) -> jax.Array:
    """The words of one array, or of its part of this shape at its beginning, of types up to 4 bytes."""
    starts = None if shape is None else np.zeros(len(shape), np.uint32)
    return jnp.concatenate([_fingerprint(x, shape, starts) ^ tag_words(tag), tag[None]])


def tag_words(tag: Any) -> Any:
    """What the two words of a fingerprint with a tag are mixed with, two uint32."""
    numpy = jnp if isinstance(tag, jax.Array) else np
    return numpy.uint32(tag) * numpy.array([0x9E3779B1, 0x85EBCA77], numpy.uint32)


class Stale(OSError):
    """What was fetched from the devices is not what was computed there."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the fingerprints that were fetched are those of another checkpoint")


def tagged_texts(tree: Any, tag: int) -> Any:
    """The fingerprints of `tag_fingerprints` fetched, each as 16 hexadecimal digits, awaited. Raises Stale."""
    tree = jax.block_until_ready(tree)

    def fetch(x: jax.Array, words: np.ndarray) -> str:
        for _ in range(_FETCHES):
            if int(words[2]) == tag:
                return text(words[:2] ^ tag_words(np.uint32(tag)))
            time.sleep(_FETCH_SEC)
            words = np.array(jnp.copy(x.addressable_data(0)))  # JAX keeps what it has fetched of the array itself.
        raise Stale

    return jax.tree.map(fetch, tree, jax.device_get(tree))


def text(words: np.ndarray) -> str:
    """A fingerprint, two uint32, as 16 hexadecimal digits."""
    return f"{int(words[0]):08x}{int(words[1]):08x}"


@functools.partial(jax.jit, static_argnums=1)  # Traced once for all arrays of one shape and dtype: a state has many.
def _fingerprint(x: jax.Array, shape: tuple[int, ...] | None = None, starts: Any = None) -> jax.Array:
    """Of an array, or of its part that begins at `starts` of an array of this `shape`, of types up to 4 bytes.

    What of the part lies outside of that array is not counted.
    """
    bits = _bits(x)
    if shape is None:
        return jnp.stack(_sums(bits, _places(bits.shape)))
    counted = None  # Taken out as rows, an array that is split over devices would be split anew.
    for dim in (dim for dim, size in enumerate(shape) if size < bits.shape[dim]):
        inside = lax.broadcasted_iota(np.uint32, bits.shape, dim) + starts[dim] < shape[dim]
        counted = inside if counted is None else counted & inside
    return jnp.stack(_sums(bits, _places(bits.shape, shape, starts), counted))


def _sums(bits: Any, places: Sequence[Any], counted: Any = None) -> list[Any]:
    """The two words of elements with these bits, at these places, of JAX's arrays or NumPy's; of the `counted` ones."""
    sums = []
    for seed, rounds in _WORDS:
        mixed = np.uint32(seed)
        for place in places:
            mixed = _mix(place ^ mixed, rounds)
        words = _mix(bits ^ mixed, rounds)
        sums.append((words if counted is None else jnp.where(counted, words, 0)).sum(dtype=np.uint32))
    return sums


def on_cpus(x: Any) -> bool:
    """Whether it is an array of JAX on CPUs, whole or in parts."""
    return isinstance(x, jax.Array) and all(device.platform == "cpu" for device in x.sharding.device_set)


def host_fingerprints(arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]] | None = None) -> np.ndarray:
    """`fingerprints` of arrays in the memory of hosts or on CPUs, uint32 `[array, 2]`; all processes call it.

    Of arrays that are larger than their `shapes` the parts of these sizes, at their beginnings.

    Each process sums the parts of its own host, of equal copies the first, and sends two numbers for each array. So the
    CPUs need no collectives between each other, which are Gloo's, also where the run is on GPUs. NumPy sums those that
    have up to `NUMPY_BYTES` together.
    """
    small = sum(x.nbytes for x in arrays) <= NUMPY_BYTES
    sums = np.zeros((len(arrays), 2), np.uint32)
    for number, given in enumerate(arrays):
        is_key = jnp.issubdtype(given.dtype, jax.dtypes.prng_key)
        x = jax.random.key_data(given) if is_key else given
        shape = x.shape if shapes is None or is_key else shapes[number]
        for shard in x.addressable_shards:
            if shard.replica_id == 0:
                starts = [extent.indices(size)[0] for extent, size in zip(shard.index, x.shape, strict=True)]
                data = shard.data
                if shape != x.shape:
                    data = data[tuple(slice(max(0, size - at)) for size, at in zip(shape, starts, strict=True))]
                if not data.size:
                    continue
                if small:
                    sums[number] += _numpy_fingerprint(np.asarray(data), shape, starts)
                    continue
                for first, rows in in_pieces(data):
                    sums[number] += part_fingerprint(rows, shape, [starts[0] + first, *starts[1:]])
    every = [np.frombuffer(content, np.uint32) for content in from_each_process(sums.tobytes())]
    return np.asarray(np.sum(every, axis=0, dtype=np.uint32)).reshape(sums.shape)


def _numpy_fingerprint(x: Any, shape: Sequence[int], starts: Any) -> np.ndarray:
    """`part_fingerprint` without a program."""
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag], axis=-1)
    if x.dtype.name in _WITHOUT_BITS:
        x = x.astype(np.int8)
    unsigned = {1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, np.uint32)
    bits = x.reshape(*x.shape, 1).copy().view(unsigned).astype(np.uint32)
    bits = bits if bits.shape[-1] > 1 else bits[..., 0]
    parts = bits.shape[len(shape) :]  # Of a complex number, or of 8 bytes.
    starts = np.asarray([*starts, *[0] * len(parts)], np.uint32)
    places = _places(bits.shape, [*shape, *parts], starts, _numpy_iota)
    with np.errstate(over="ignore"):  # Products are modulo 2**32; those of scalars warn.
        return np.stack(_sums(bits, places))


def _numpy_iota(dtype: Any, shape: Sequence[int], dim: int) -> np.ndarray:
    """`lax.broadcasted_iota`, which has a size of 1 along the other dimensions."""
    del dtype
    return np.arange(shape[dim], dtype=np.uint32).reshape([-1 if i == dim else 1 for i in range(len(shape))])


def part_fingerprint(x: jax.Array, shape: Sequence[int], starts: Sequence[int]) -> np.ndarray:
    """What a part, which begins at `starts`, adds to the fingerprint of an array of this shape, as two uint32."""
    return np.asarray(jax.block_until_ready(_fingerprint(x, tuple(shape), np.asarray(starts, np.uint32))))


def in_pieces(x: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """(first row, rows) of an array in the memory of the host: a program would have a copy of all it reads."""
    values, device = np.asarray(x), x.device  # A view.
    height = max(1, PIECE_BYTES * len(values) // max(1, values.nbytes))
    for first in range(0, len(values), height):
        yield first, jax.device_put(values[first : first + height], device)


def row_fingerprints(arrays: Sequence[jax.Array], tag: jax.Array | int = 0) -> jax.Array:
    """64 bits of each row of several arrays `[rows, ...]` with equally many rows, as two uint32, `[rows, 2]`.

    As `fingerprints`, of the elements of a row in all arrays; the place of an element is its column. They are mixed
    with the `tag`, uint32, as those of `tag_fingerprints`.
    """
    words = []
    for seed, rounds in _WORDS:
        total = jnp.uint32(0)
        for number, x in enumerate(arrays):
            bits = _bits(x)
            mixed = _mix(jnp.uint32(seed) + jnp.uint32(number), rounds)
            for place in _places(bits.shape[1:]):
                mixed = _mix(place ^ mixed, rounds)
            total += jnp.sum(_mix(bits ^ mixed, rounds), axis=tuple(range(1, bits.ndim)), dtype=jnp.uint32)
        words.append(total)
    return jnp.stack(words, axis=1) ^ tag_words(jnp.asarray(tag, jnp.uint32))


def _bits(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32; elements of 8 bytes add a last dimension of 2."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.name in _WITHOUT_BITS:
        x = x.astype(jnp.int8)
    size = x.dtype.itemsize
    if size > 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]).astype(jnp.uint32)


def _places(
    part: Sequence[int], shape: Sequence[int] | None = None, starts: Any = None, iota: Any = lax.broadcasted_iota
) -> list[Any]:
    """The row-major index of each element: one uint32, or several for arrays of more than 2**32 elements.

    Of the elements of a `part` of so many, which begins at `starts` of an array of this `shape`; else of all.
    """
    groups: list[Any] = []
    count = 1
    for dim, size in enumerate(part if shape is None else shape):
        index = iota(np.uint32, part, dim)
        if starts is not None:
            index = index + starts[dim]
        if groups and count * size <= 2**32:
            groups[-1] = groups[-1] * np.uint32(size) + index
            count *= size
        else:
            groups.append(index)
            count = max(1, size)
    return groups


def _mix(x: Any, rounds: Sequence[tuple[int, int | None]]) -> Any:
    for shift, factor in rounds:
        x = x ^ (x >> np.uint32(shift))
        if factor is not None:
            x = x * np.uint32(factor)
    return x


def first_sums(tree: Any) -> Any:
    """The fingerprints in checkpoints of format 1, needed to read them: the position-weighted sum of an array's bits.

    They miss some changes: with factors of 2**31, two changed signs cancel.
    """

    def weighted_sum(x: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        place = jnp.uint32(1)
        for dim, size in enumerate(x.shape):
            place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)

    return jax.tree.map(weighted_sum, tree)
