"""Embedding tables written in pieces of rows, one after the other: no host needs memory for what is under way.

Orbax hands TensorStore whole arrays. All of an array is compressed then before the disk has taken it, so the memory of
the host has tables twice, or once where they are in files. What is written here is what Orbax would write, but for the
height of chunks: its handler of trees lists the arrays, and merges the databases of the processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import future

from jaxdl.parallel.mesh import on_hosts
from jaxdl.training.checkpoint.fingerprint import PIECE_BYTES

_AT_ONCE = 2
"""Pieces that are under way: the processor compresses one while the disk takes the other."""
_SMALLER = 64
"""How many times smaller chunks may be than asked for."""


class _Part(NamedTuple):
    """What a process writes of an array."""

    index: tuple[slice, ...]
    values: np.ndarray


class RowsHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of the arrays of tables, which writes them in pieces where one of them needs it."""

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Starts to write the arrays; returns what waits for that.

        Arrays on devices are copied before it returns, those on hosts are not.
        """
        if not any(needs_pieces(x) for x in values):
            return await super().serialize(values, infos, args)
        # All of them: two writers would disturb each other in the database.
        parts = [_parts(x) for x in values]

        async def write() -> None:
            for x, info, mine in zip(values, infos, parts, strict=True):
                await info.await_path_creation()
                await _write(Path(info.parent_dir), info.name, x, mine, info.ts_context)

        return [future.CommitFutureAwaitingContractedSignals(write(), name="table_rows_save")]


def needs_pieces(x: jax.Array) -> bool:
    """Whether Orbax would have all of an array in memory once more, or would write large shards in one chunk each."""
    large = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize > PIECE_BYTES
    return on_hosts(x) or (large and jax.process_count() == 1 and chunk_bytes(x) is None)


def chunk_bytes(x: jax.Array) -> int | None:
    """The size of the chunks in which Orbax is to write rows; None for one chunk a shard.

    Orbax makes chunks of equal size, so their rows divide those of a shard. A prime number of rows would be written row
    by row.
    """
    rows, *columns = x.sharding.shard_shape(x.shape)
    row_bytes = x.dtype.itemsize * math.prod(columns)
    if tuple(columns) != x.shape[1:] or rows * row_bytes <= PIECE_BYTES:
        return None
    height = _dividing(rows, row_bytes)
    return None if height is None else height * row_bytes


def chunk_rows(x: jax.Array) -> int:
    """The rows of the chunks in which `RowsHandler` writes an array.

    If there are several processes, those of a shard that they divide, or all of a shard: two processes cannot write the
    same chunk. One process alone writes chunks of any number of rows.
    """
    rows, *columns = x.sharding.shard_shape(x.shape)
    row_bytes = x.dtype.itemsize * math.prod(columns)
    if rows * row_bytes <= PIECE_BYTES:
        return max(1, rows)
    if jax.process_count() == 1:
        return max(1, PIECE_BYTES // row_bytes)
    return _dividing(rows, row_bytes) or rows


def _dividing(rows: int, row_bytes: int) -> int | None:
    """The largest number of rows up to `PIECE_BYTES` that divides `rows`; None if all are much smaller."""
    most = max(1, PIECE_BYTES // row_bytes)
    height = next(height for height in range(most, 0, -1) if rows % height == 0)
    return height if height >= most // _SMALLER else None


def _parts(x: jax.Array) -> list[_Part]:
    """What this process writes, of equal copies the first."""
    # The buffers of devices are used again by the next step, also on CPUs, where a view of them would be no copy.
    taken = np.asarray if on_hosts(x) else np.array
    return [_Part(shard.index, taken(shard.data)) for shard in x.addressable_shards if shard.replica_id == 0]


async def _write(folder: Path, name: str, x: jax.Array, parts: Sequence[_Part], context: Any) -> None:
    """Writes the parts, piece by piece. Raises what TensorStore raises."""
    first, height = jax.process_index() == 0, chunk_rows(x)
    spec = _spec(folder, name, x, height)
    # The first process writes the description of the array; the others know it.
    store: Any = await tensorstore.open(spec, open=True, create=first, assume_metadata=not first, context=context)
    for (rows, *columns), values in parts:
        start, stop, _ = rows.indices(x.shape[0])
        row_bytes = values.nbytes // max(1, len(values))
        step = max(1, _AT_ONCE * PIECE_BYTES // max(1, height * row_bytes)) * height
        for begin in range(start // step * step, stop, step):
            begin, end = max(begin, start), min(begin + step, stop)
            piece = values[begin - start : end - start]
            # It changes no more, so TensorStore needs no copy.
            await store[(slice(begin, end), *columns)].write(piece, can_reference_source_data_indefinitely=True)


def _spec(folder: Path, name: str, x: jax.Array, height: int) -> dict[str, Any]:
    """What TensorStore opens: the array as Orbax describes it, in the database of this process."""
    columns = x.sharding.shard_shape(x.shape)[1:]
    return {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder.absolute()}/ocdbt.process_{jax.process_index()}/"},
            "path": f"{name}/",
            "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 10**8, "manifest_kind": "single"},
            "assume_config": True,
            "cache_pool": "cache_pool#ocdbt",
        },
        "dtype": x.dtype.name,
        "metadata": {
            "shape": list(x.shape),
            "chunks": [height, *columns],
            "compressor": {"id": "zstd", "level": 1},
        },
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
        "store_data_equal_to_fill_value": True,
    }
