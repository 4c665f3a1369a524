"""Initial numbers of tables: each a pure function of (key, table, id, column), wherever it is."""

from __future__ import annotations

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.parallel.embedding.layout import Buffer
from jaxdl.parallel.embedding.places import id_of
from jaxdl.parallel.embedding.table import Table

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
    name = jnp.asarray(names)[here][table]
    num_columns = buffer.local_columns
    first = lax.axis_index(buffer.spread.inner) * num_columns if buffer.column_ways > 1 else 0
    columns = (first + jnp.arange(num_columns)).astype(jnp.uint32)
    unit = _unit(words[0] ^ name, words[-1], ids.astype(jnp.uint32), columns)
    return jnp.where(used[:, None], unit * jnp.asarray(scales)[here][table][:, None], 0)


def rows_of_ids(table: Table, words: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The initial rows of some ids of a table, float32 `[id, columns]`, made by the host: those of `initial_rows`."""
    name = np.full(1, zlib.crc32(table.name.encode()), np.uint32)
    unit = _unit(words[:1] ^ name, words[-1:], ids.astype(np.uint32), np.arange(table.columns, dtype=np.uint32))
    return unit * np.float32(_scale(table))


def _unit(named: Any, word: Any, ids: Any, columns: Any) -> Any:
    """Numbers between -1 and 1, float32 `[id, column]`; of NumPy's arrays and JAX's the same."""
    seed = _hashed(_hashed(_hashed(named) + word) + ids)
    bits = _hashed(seed[:, None] + columns * np.uint32(0x9E3779B9))
    # 24 bits, at the middles of their intervals: neither end is ever drawn.
    return (bits >> 8).astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24 - 1)


def _scale(table: Table) -> float:
    return 1 / math.sqrt(table.rows) if table.init_scale is None else table.init_scale


def _by_owner(buffer: Buffer) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of each device along `outer`, for its tables: first row, number of ids, checksum of the name, scale."""
    of = [[i for i, place in enumerate(buffer.owner) if place == owner] for owner in range(buffer.num_outer)]
    shape = (buffer.num_outer, max(map(len, of)))
    starts, limits = np.full(shape, np.iinfo(np.int32).max, np.int32), np.zeros(shape, np.int32)
    names, scales = np.zeros(shape, np.uint32), np.zeros(shape, np.float32)
    for owner, tables in enumerate(of):
        for place, index in enumerate(tables):
            table = buffer.tables[index]
            starts[owner, place], limits[owner, place] = buffer.offsets[index], table.rows
            names[owner, place] = zlib.crc32(table.name.encode())
            scales[owner, place] = _scale(table)
    starts[:, 0] = 0  # Of devices without a table too.
    return starts, limits, names, scales


def _hashed(x: Any) -> Any:
    """32 bits that depend on all of 32 bits: the mixer lowbias32 of Wellons' hash-prospector."""
    x = (x ^ (x >> 16)) * np.uint32(_ODD[0])
    x = (x ^ (x >> 15)) * np.uint32(_ODD[1])
    return x ^ (x >> 16)
