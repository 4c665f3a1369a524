"""Initial numbers of tables: each a pure function of (key, table, id, column), wherever it is."""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.embedding.layout import Buffer
from jaxdl.embedding.places import id_of

_ODD = (0x7FEB352D, 0x846CA68B)


def initial_rows(buffer: Buffer, words: jax.Array) -> jax.Array:
    """The rows of this device, float32 `[local rows, local columns]`, inside a `shard_map`; zeros in unused ones.

    `words` are the data of a random key, uint32. Nothing else as large as the rows is made.
    """
    starts, limits, names, scales = _by_owner(buffer)
    here = lax.axis_index(buffer.spread.outer) if buffer.spread.outer else 0
    local = jnp.arange(buffer.local_rows, dtype=jnp.int32)
    table = jnp.sum(local[:, None] >= jnp.asarray(starts)[here], axis=1) - 1
    row = local - jnp.asarray(starts)[here][table]
    inner = lax.axis_index(buffer.spread.inner) if buffer.row_ways > 1 else 0
    ids = id_of(inner, row, buffer.row_ways, buffer.groups)
    used = (ids >= 0) & (ids < jnp.asarray(limits)[here][table])
    seed = _hashed(words[0] ^ jnp.asarray(names)[here][table])
    seed = _hashed(_hashed(seed + words[-1]) + ids.astype(jnp.uint32))
    num_columns = buffer.columns // buffer.column_ways
    first = lax.axis_index(buffer.spread.inner) * num_columns if buffer.column_ways > 1 else 0
    columns = (first + jnp.arange(num_columns)).astype(jnp.uint32)
    bits = _hashed(seed[:, None] + columns * np.uint32(0x9E3779B9))
    # 24 bits, at the middles of their intervals: neither end is ever drawn.
    unit = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-23) + np.float32(2.0**-24 - 1)
    return jnp.where(used[:, None], unit * jnp.asarray(scales)[here][table][:, None], 0)


def _by_owner(buffer: Buffer) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each device along `outer`, for its tables: first row, number of ids, checksum of the name, scale."""
    of = [[i for i, one in enumerate(buffer.owner) if one == owner] for owner in range(buffer.num_outer)]
    shape = (buffer.num_outer, max(map(len, of)))
    starts, limits = np.full(shape, np.iinfo(np.int32).max, np.int32), np.zeros(shape, np.int32)
    names, scales = np.zeros(shape, np.uint32), np.zeros(shape, np.float32)
    for owner, tables in enumerate(of):
        for place, index in enumerate(tables):
            table = buffer.tables[index]
            starts[owner, place], limits[owner, place] = buffer.offsets[index], table.rows
            names[owner, place] = zlib.crc32(table.name.encode())
            scales[owner, place] = 1 / math.sqrt(table.rows) if table.init_scale is None else table.init_scale
    starts[:, 0] = 0  # Of devices without a table too.
    return starts, limits, names, scales


def _hashed(x: jax.Array) -> jax.Array:
    """32 bits that depend on all of 32 bits: the mixer lowbias32 of Wellons' hash-prospector."""
    x = (x ^ (x >> 16)) * np.uint32(_ODD[0])
    x = (x ^ (x >> 15)) * np.uint32(_ODD[1])
    return x ^ (x >> 16)
