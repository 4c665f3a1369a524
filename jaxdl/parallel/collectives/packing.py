"""How sparse entries are sent: one buffer of uint32 words a message.

* `packed`, 4 bytes an entry: the high 16 bits of a word are the value as bfloat16 (rounded to nearest even), the low
  16 bits the index inside its block of 65,536 positions. Entries are in ascending order of index; before them
  is, for each block, the number of entries up to its end, from which the receiver finds every entry's block.
* `plain`, 8 bytes an entry: the values as float32, then the indices as int32.

Entries whose index is n or more are padding: they are at the end, have the value 0 and come back with the index n,
which a scatter drops.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Wire = Literal["packed", "plain"]
"""The name of a wire format."""

BLOCK_SIZE = 1 << 16
"""Positions in a block: as many as 16 bits can tell apart."""

MAX_POSITIONS = 2**31 - 1
"""The largest n: indices are int32, and n itself stands for "nowhere"."""

_HIGH_HALF = np.uint32(0xFFFF0000)


def num_blocks(n: int) -> int:
    """How many blocks n positions have."""
    return -(-n // BLOCK_SIZE)


def num_words(k: int, n: int, wire: Wire = "packed") -> int:
    """The size of a message of k entries, in words of 4 bytes."""
    return k + num_blocks(n) if check_wire(wire) == "packed" else 2 * k


def check_wire(wire: str) -> str:
    """The name itself. Raises ValueError for one that is no wire format."""
    if wire not in get_args(Wire):
        raise ValueError(f"wire={wire!r}: no such wire format. Take one of {', '.join(map(repr, get_args(Wire)))}.")
    return wire


def pack(values: jax.Array, indices: jax.Array, n: int, *, wire: Wire = "packed") -> jax.Array:
    """uint32 `[num_words(k, n, wire)]`: the message of `values [k]` at `indices [k]` (int32, ascending, 0 or more).

    `values` are float32, bfloat16 or float16. NaN stays NaN and infinity stays infinity; finite values above 3.39e38
    become infinity in the packed format.
    """
    inside = indices < n
    values = jnp.where(inside, values.astype(jnp.float32), 0)
    indices = jnp.where(inside, indices, n)
    if check_wire(wire) == "plain":
        return jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint32) for x in (values, indices)])
    low = lax.bitcast_convert_type(indices, jnp.uint32) & ~_HIGH_HALF
    block_ends = np.minimum(np.arange(1, num_blocks(n) + 1, dtype=np.int64) * BLOCK_SIZE, n).astype(np.int32)
    return jnp.concatenate([_rank(indices, block_ends, "left"), _bfloat16_bits(values) | low])


def unpack(words: jax.Array, k: int, n: int, *, wire: Wire = "packed") -> tuple[jax.Array, jax.Array]:
    """`(values, indices)`, float32 `[k]` and int32 `[k]`: what `pack` was given, the values rounded to the format."""
    assert words.shape == (num_words(k, n, wire),), (words.shape, k, n, wire)
    if wire == "plain":
        return lax.bitcast_convert_type(words[:k], jnp.float32), lax.bitcast_convert_type(words[k:], jnp.int32)
    blocks = num_blocks(n)
    num_until, entries = words[:blocks], words[blocks:]
    block = _rank(num_until, np.arange(k, dtype=np.uint32), "right")
    index = lax.bitcast_convert_type(block * BLOCK_SIZE + (entries & ~_HIGH_HALF), jnp.int32)
    return lax.bitcast_convert_type(entries & _HIGH_HALF, jnp.float32), jnp.where(block < blocks, index, n)


def rounded(values: jax.Array, wire: Wire = "packed") -> jax.Array:
    """float32: the values as they come out at the other end."""
    values = values.astype(jnp.float32)
    if check_wire(wire) == "plain":
        return values
    return lax.bitcast_convert_type(_bfloat16_bits(values), jnp.float32)


def _bfloat16_bits(values: jax.Array) -> jax.Array:
    """The values as bfloat16, in the high half of uint32 words.

    By way of the bits: XLA may take a conversion to bfloat16 and back for superfluous and leave both out.
    """
    bits = lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return bits.astype(jnp.uint32) << 16


def _rank(ascending: jax.Array, limits: np.ndarray, side: Literal["left", "right"]) -> jax.Array:
    """uint32: how many elements are below (right: not above) each limit.

    Unrolled, the search is a few gathers that XLA fuses into one kernel; as a loop it is many.
    """
    return jnp.searchsorted(ascending, jnp.asarray(limits), side=side, method="scan_unrolled").astype(jnp.uint32)
