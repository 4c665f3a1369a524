"""How vectors are sent between devices: in float32, in bfloat16, or in 8 bits a number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxdl.parallel.collectives.quantized import decode_vectors, encode_vectors

WireType = Literal["float32", "bfloat16", "int8"]
Collective = Callable[[jax.Array], jax.Array]
Wire = Callable[[jax.Array, Collective], jax.Array]
"""Sends float32 vectors, along the last dimension, by a collective over other dimensions; what arrives is float32."""


def make_wire(kind: WireType, words: jax.Array | None, mesh: Mesh) -> Wire:
    """A wire of one step, inside a `shard_map` over all axes of the mesh.

    8 bits are rounded at random from the two `words` of the step's key, the number of the device and that of the
    message, and to the nearest without words. So is bfloat16 always: its error of at most 2^-9 is small beside that of
    a batch.
    """
    device, messages = lax.axis_index(mesh.axis_names), itertools.count()

    def send(x: jax.Array, collective: Collective) -> jax.Array:
        if kind == "int8":
            stream = next(messages) * mesh.size + device
            return decode_vectors(collective(encode_vectors(x, words, stream)))
        if kind == "bfloat16":
            # As bits: XLA for CPUs would send float32.
            bits = collective(lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16))
            return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
        return collective(x)

    return send


def vector_bytes(kind: WireType, columns: int) -> int:
    """The bytes of a vector on a wire."""
    return {"float32": 4 * columns, "bfloat16": 2 * columns, "int8": columns + 4}[kind]
