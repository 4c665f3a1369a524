"""A sum over devices that sends only a few bits an element: quantize, all-to-all, sum, quantize, all-gather.

The two-shot scheme: each device is the owner of one range of the elements. Every device quantizes what it has and sends
each range to its owner; the owner sums its range in float32, quantizes the sum and sends it to everybody. An integer
`psum` cannot do this: int8 wraps around, and int32 costs as much on the wire as float32.

2, 4 and 8 bits: integer levels of the block's largest magnitude, rounded at random so that the mean is right (QSGD,
Alistarh et al. 2017, section 3, with the maximum instead of the 2-norm). 1 bit: the sign, times the block's mean
magnitude (1-bit SGD, Seide et al. 2014, and the two-sided compression of 1-bit Adam, Tang et al. 2021, section 4); its
mean is wrong, so it is of use with error feedback only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxdl.parallel.collectives.primitive import (
    Axis,
    Result,
    alike,
    all_gather_same,
    axis_names,
    define,
    key_bits,
    num_devices,
)

_SCALE_BYTES = 4
_BLOCK_SIZES = {1: 1024, 2: 256, 4: 256, 8: 256}
_SMALLEST_SCALE = np.float32(2.0**-126)
"""A block whose scale is below the normal numbers is sent as zeros: its inverse might be infinite."""


class QuantizedOptions(TypedDict, total=False):
    """The options of `quantized_all_reduce`, for the types of its overloads."""

    bits: int
    block_size: int | None


@overload
def quantized_all_reduce(
    x: jax.Array, axis: Axis, key: jax.Array | None, *, return_error: Literal[True], **options: Unpack[QuantizedOptions]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def quantized_all_reduce(
    x: jax.Array, axis: Axis, key: jax.Array | None, **options: Unpack[QuantizedOptions]
) -> jax.Array: ...
def quantized_all_reduce(
    x: jax.Array,
    axis: Axis,
    key: jax.Array | None,
    *,
    bits: int = 8,
    block_size: int | None = None,
    return_error: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The sum of `x` `[n]` (float32, bfloat16 or float16) over the devices of `axis`, sent with `bits` an element.

    Returns `total` float32 `[n]`, the same on all devices bit for bit; with `return_error` also `error` float32 `[n]`,
    what this device's part of the sum lost: the sum over devices of x is `total` plus the sum over devices of `error`,
    within float32 rounding. Add the error to the next x (error feedback).

    `bits` is 8, 4, 2 (unbiased, for random `key`s) or 1 (biased: needs error feedback; the key is not used). A new key
    each step; it need not be the same on all devices, and devices of one `axis` draw independent numbers from one key.
    Those that differ only in their place on other axes draw the same numbers. Up to `block_size` elements (a multiple
    of 8; default 256, for 1 bit 1024) share a float32 scale, which is sent in the same message.

    A block with a NaN or an infinity on any device is NaN in `total` on all of them, and in the error of the devices
    that had it and of its owner: such trouble stays visible, but check the gradients before an error is kept. A block
    of magnitudes below about 1e-36 counts as zero. On one device the total is x and the error 0. Where n is no multiple
    of the devices' number times `block_size`, the ends are padded, which costs copies; few bytes.

    Raises ValueError for other bits, block sizes, dtypes and shapes, and when it is differentiated.
    """
    if jnp.ndim(x) != 1:
        raise ValueError(f"x of shape {jnp.shape(x)}: the sum is over one dimension [n]. Use x.reshape(-1).")
    if jnp.dtype(x.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"x of {x.dtype}: only float32, bfloat16 and float16 are quantized. Convert it to float32.")
    block_size = _checked_block_size(bits, block_size)
    if key is None and bits > 1:
        raise ValueError(f"key=None: {bits} bits are rounded at random. Pass a jax.random key, a new one each step.")
    axes = axis_names(axis)
    x, words = alike(axes, x, key_bits(key))
    results = quantized_all_reduce_p.bind(
        x, words, axes=axes, bits=bits, block_size=block_size, return_error=bool(return_error)
    )
    return tuple(results) if return_error else results[0]


def quantized_sent_bytes(n: int, num_devices: int, *, bits: int = 8, block_size: int | None = None) -> int:
    """Bytes that one device sends in `quantized_all_reduce` of n elements, by ring algorithms.

    That is one message to each other device, and then its own result passed on as often:
    2 (m-1) (r bits/8 + 4 r/b) for m devices, ranges of r elements (n/m, rounded up) and b elements a scale.
    """
    layout = _layout(n, num_devices, bits, _checked_block_size(bits, block_size))
    return 2 * (num_devices - 1) * layout.message_bytes


def encode_vectors(x: jax.Array, words: jax.Array | None, stream: jax.Array) -> jax.Array:
    """Vectors as messages of 8 bits a number: float32 `[..., n]` -> uint8 `[..., n + 4]`, each with a scale of its own.

    Numbers are levels of the vector's largest magnitude, rounded at random so that the mean is right, from two uint32
    `words` of a key and the number of a `stream`, which differs between messages with one key; to the nearest level
    without words. A vector with a NaN or an infinity is read as NaN.
    """
    top = _top_level(8)
    scales = jnp.abs(x).max(-1, keepdims=True) / top
    scales = jnp.where(jnp.isfinite(scales), jnp.where(scales >= _SMALLEST_SCALE, scales, 0), jnp.nan)
    levels = jnp.clip(x * jnp.where(scales > 0, 1 / scales, 0), -top, top)
    down = jnp.floor(levels)
    drawn = jnp.float32(0.5) if words is None else _uniform(x.shape, _seeds(words, stream))
    codes = (down + (drawn < levels - down) + top).astype(jnp.int32).astype(jnp.uint8)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*x.shape[:-1], _SCALE_BYTES)
    return jnp.concatenate([codes, scale_bytes], axis=-1)


def decode_vectors(messages: jax.Array) -> jax.Array:
    """What `encode_vectors` made: uint8 `[..., n + 4]` -> float32 `[..., n]`."""
    scale_bytes = messages[..., None, -_SCALE_BYTES:]
    return _values(messages[..., :-_SCALE_BYTES], 8) * lax.bitcast_convert_type(scale_bytes, jnp.float32)


def _checked_block_size(bits: int, block_size: int | None) -> int:
    if bits not in _BLOCK_SIZES:
        raise ValueError(f"bits={bits}: an element is sent with 1, 2, 4 or 8 bits. Choose one of these.")
    size = _BLOCK_SIZES[bits] if block_size is None else block_size
    if size < 8 or size % 8:
        raise ValueError(f"block_size={size}: blocks are packed into whole bytes. Choose a multiple of 8.")
    return int(size)


@dataclass(frozen=True)
class _Layout:
    """How n elements are cut: a range for each device, blocks of equal size in each range."""

    n: int
    num_ranges: int
    num_blocks: int
    """In one range."""
    block: int
    bits: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_ranges, self.num_blocks, self.block

    @property
    def range_size(self) -> int:
        return self.num_blocks * self.block

    @property
    def payload_bytes(self) -> int:
        return self.range_size * self.bits // 8

    @property
    def message_bytes(self) -> int:
        return self.payload_bytes + _SCALE_BYTES * self.num_blocks


def _layout(n: int, num_ranges: int, bits: int, block_size: int) -> _Layout:
    """Blocks are a little smaller than `block_size` where that leaves less of the last one empty."""
    wanted = max(1, -(-n // num_ranges))
    num_blocks = -(-wanted // block_size)
    block = 8 * -(-wanted // (8 * num_blocks))
    return _Layout(n, num_ranges, num_blocks, block, bits)


def _rounded_sum(
    x: jax.Array, words: jax.Array, *, axes: tuple[str, ...], bits: int, block_size: int, return_error: bool
) -> list[jax.Array]:
    (n,), m = x.shape, num_devices(axes)
    x = x.astype(jnp.float32)
    if m == 1 or n == 0:
        return [x, jnp.zeros_like(x)][: 1 + return_error]
    layout = _layout(n, m, bits, block_size)
    me = lax.axis_index(axes)
    ranges = jnp.pad(x, (0, m * layout.range_size - n)).reshape(layout.shape)
    message, kept = _encode(ranges, jnp.int32(0), layout, _seeds(words, 2 * me))
    received = lax.all_to_all(message, axes, 0, 0, tiled=True)
    owned = _sum_rows(_decode(received, layout))
    if bits == 1:  # A sign has no zero: the empty places at the end hold something now.
        owned = jnp.where(_real(owned.shape, me * layout.range_size, n), owned, 0)
    message, kept_sum = _encode(owned, me * layout.range_size, layout, _seeds(words, 2 * me + 1))
    total = _decode(all_gather_same(message[0], axes), layout).reshape(-1)[:n]
    if not return_error:
        return [total]
    lost = ranges - kept
    mine = lax.dynamic_slice_in_dim(lost, me, 1) + (owned - kept_sum)
    return [total, lax.dynamic_update_slice_in_dim(lost, mine, me, 0).reshape(-1)[:n]]


def _encode(
    x: jax.Array, start: jax.Array, layout: _Layout, seeds: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`[range, block, element]` -> (messages uint8 `[range, byte]`, what they will be read as).

    `start` is the index of the first element; elements after the last real one must be 0.
    """
    magnitudes = jnp.abs(x)
    if layout.bits == 1:
        first = start + layout.block * lax.iota(jnp.int32, x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1)
        num_real = jnp.clip(layout.n - first, 1, layout.block).astype(jnp.float32)
        scales = magnitudes.sum(-1, keepdims=True) / num_real
    else:
        scales = magnitudes.max(-1, keepdims=True) / _top_level(layout.bits)
    scales = jnp.where(jnp.isfinite(scales), jnp.where(scales >= _SMALLEST_SCALE, scales, 0), jnp.nan)
    if layout.bits == 1:
        codes = (x >= 0).astype(jnp.uint8)
    else:
        top = _top_level(layout.bits)
        levels = jnp.clip(x * jnp.where(scales > 0, 1 / scales, 0), -top, top)
        down = jnp.floor(levels)
        # `floor(levels + u)` would round the sum first, and so be a little biased.
        codes = (down + (_uniform(x.shape, seeds) < levels - down) + top).astype(jnp.int32).astype(jnp.uint8)
    payload = _pack(codes, layout.bits).reshape(x.shape[0], layout.payload_bytes)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(x.shape[0], -1)
    return jnp.concatenate([payload, scale_bytes], axis=1), _values(codes, layout.bits) * scales


def _decode(messages: jax.Array, layout: _Layout) -> jax.Array:
    """Messages uint8 `[range, byte]` -> float32 `[range, block, element]`."""
    num_messages = messages.shape[0]
    payload = messages[:, : layout.payload_bytes].reshape(num_messages, layout.num_blocks, -1)
    scale_bytes = messages[:, layout.payload_bytes :].reshape(num_messages, layout.num_blocks, 1, _SCALE_BYTES)
    return _values(_unpack(payload, layout.bits), layout.bits) * lax.bitcast_convert_type(scale_bytes, jnp.float32)


def _top_level(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _values(codes: jax.Array, bits: int) -> jax.Array:
    """Codes are counted from the lowest level up; a sign is 0 or 1."""
    numbers = codes.astype(jnp.int32).astype(jnp.float32)
    return 2 * numbers - 1 if bits == 1 else numbers - _top_level(bits)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """uint8 `[..., element]` of `bits` each -> uint8 `[..., byte]`: a byte holds element i of each part of the block.

    So the parts are read one after the other; neighbours in one byte would be read with strides.
    """
    if bits == 8:
        return codes
    parts = codes.reshape(*codes.shape[:-1], 8 // bits, -1)
    return (parts << _shifts(bits)).sum(-2, dtype=jnp.uint8)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    """What `_pack` packed."""
    if bits == 8:
        return packed
    parts = (packed[..., None, :] >> _shifts(bits)) & jnp.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _shifts(bits: int) -> jax.Array:
    return (lax.iota(jnp.uint8, 8 // bits) * jnp.uint8(bits))[:, None]


def _sum_rows(x: jax.Array) -> jax.Array:
    """`[row, ...]` -> `[1, ...]`, the rows added one after the other: the same bits on every platform."""
    total = x[0]
    for row in range(1, x.shape[0]):
        total = total + x[row]
    return total[None]


def _real(shape: tuple[int, ...], start: jax.Array, n: int) -> jax.Array:
    """Where elements, counted from `start`, are among the first n."""
    return start + lax.iota(jnp.int32, int(np.prod(shape))).reshape(shape) < n


def _mixed(x: jax.Array, second: jax.Array | None = None) -> jax.Array:
    """uint32 -> uint32: every input bit changes every output bit half of the time; `second` chooses another such map.

    `triple32` of Wellons, "Prospecting for Hash Functions" (2018). A counter and a hash are several times cheaper than
    JAX's own generator, and the whole of it is fused into the rounding.
    """
    x = (x ^ (x >> 17)) * jnp.uint32(0xED5AD4BB)
    x = x ^ (x >> 11)
    if second is not None:
        x = x + second
    x = x * jnp.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * jnp.uint32(0x31848BAB)
    return x ^ (x >> 14)


def _seeds(words: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two uint32 from the key's two words and the number of the stream: a device in one of the two shots."""
    stream = _mixed(stream.astype(jnp.uint32))
    first, other = words[0], words[1]
    return _mixed(first + _mixed(other + stream)), _mixed(other ^ _mixed(first ^ ~stream))


def _uniform(shape: tuple[int, ...], seeds: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Independent numbers of [0, 1), multiples of 2^-24, one for each element; only its index and the seeds matter."""
    index = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return (_mixed(index ^ seeds[0], seeds[1]) >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)


def _results(
    x: jax.ShapeDtypeStruct, words: jax.ShapeDtypeStruct, *, return_error: bool, **params: object
) -> list[Result]:
    del words, params
    return [Result(x.shape, jnp.float32, same=True), Result(x.shape, jnp.float32)][: 1 + return_error]


def _no_derivative(*operands: object, **params: object) -> Any:
    raise ValueError(
        "quantized_all_reduce has no derivative: it rounds. Pass jax.lax.stop_gradient(x), or take the gradients first "
        "and sum them afterwards."
    )


def _implementation(x: jax.Array, words: jax.Array, **params: Any) -> list[jax.Array]:
    # With `vmap(axis_name=...)` a derivative around it meets not the primitive but this function, whose bits would
    # silently have a derivative of zero.
    run = jax.custom_jvp(functools.partial(_rounded_sum, **params))
    run.defjvp(_no_derivative)
    return run(x, words)


quantized_all_reduce_p = define("quantized_all_reduce", _implementation, _results, core_ndims=(1, 1))
ad.primitive_jvps[quantized_all_reduce_p] = _no_derivative
