"""Arrays of a checkpoint read in pieces of rows: no host needs the memory for tables besides what it keeps of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxdl.training.checkpoint.fingerprint import PIECE_BYTES, part_fingerprint
from jaxdl.training.checkpoint.literal import literal


class StoredRows:
    """An array `[rows, ...]` in a checkpoint, as Orbax writes it: TensorStore's zarr in an OCDBT database."""

    def __init__(self, folder: Path, item: str, name: str) -> None:
        """Raises what TensorStore raises for files that are damaged or cannot be read."""
        # A URL would not have all names.
        files = {"driver": "file", "path": f"{literal(folder) / item}/"}
        database = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
        self._stored: Any = tensorstore.open({"driver": "zarr", "kvstore": database}, open=True, read=True).result()
        self.shape: tuple[int, ...] = tuple(self._stored.shape)
        self.dtype: np.dtype[Any] = self._stored.dtype.numpy_dtype

    def pieces(self, start: int, stop: int, columns: Sequence[slice] = ()) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows) of the rows from `start` to `stop`, in order; of `columns`, an index for each dimension."""
        height = self._stored.chunk_layout.read_chunk.shape[0]
        row_bytes = self.dtype.itemsize * max(1, int(np.prod(self.shape[1:])))
        # Whole chunks, or each would be read and decoded several times.
        step = max(1, PIECE_BYTES // (row_bytes * height)) * height
        for first in range(start // step * step, stop, step):
            begin, end = max(first, start), min(first + step, stop)
            yield begin, np.asarray(self._stored[(slice(begin, end), *columns)].read().result())


def _device() -> Any:
    """A CPU, if JAX may use one: rows need not be sent to another device."""
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend="cpu")[0]
    return jax.local_devices()[0]


class Summed:
    """The fingerprint of an array that is seen in pieces, each once."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape, self._words = tuple(shape), np.zeros(2, np.uint32)

    def add(self, first: int, rows: np.ndarray) -> None:
        """Adds whole rows from number `first` on."""
        starts = (first, *(0 for _ in self._shape[1:]))
        self._words += part_fingerprint(jax.device_put(rows, _device()), self._shape, starts)

    @property
    def words(self) -> np.ndarray:
        """Two uint32, as `fingerprint.fingerprints` gives them."""
        return self._words
