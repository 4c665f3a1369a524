"""The rows of a DataFrame as Parquet files in a workdir: what an executor writes. No pyspark here.

Each partition writes a file for training and one for held-out rows, with row groups of one size (the last one of a file
may be smaller). The digest of rows does not depend on their order, since Spark promises none: a second `fit` on the
same rows is found to be that, and uses the files of the first, in their order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.tables.arrow_numbers import Where, feature_numbers, holds_numbers, label_numbers

LABEL = "label"
"""The column of the labels in what is written."""
SPLITS = ("train", "test")
ROW = "a row"
"""What messages call a row: in Spark it has no number."""
_DIGITS = 2**64


@dataclass(frozen=True)
class Columns:
    """What the user calls the columns of rows, which come as features, label, held out or not: for messages."""

    features: tuple[str, ...]
    label: str
    held_out: str
    written: tuple[str, ...]
    """The names of the features in the files."""
    is_table: bool = False
    """Whether they are columns of a table, whose labels may be words, and whose values may be missing."""


@dataclass(frozen=True)
class Written:
    """What a partition wrote of a split: its file, and its rows."""

    split: str
    file: str
    num_rows: int
    num_classes: int
    """The largest label plus 1; 0 in a table, whose classes the run counts."""
    digest: int
    """The sum of a 64-bit hash of each row, modulo 2^64."""


class PartitionWriter:
    """Writes the rows of a partition into a folder, whole files or none: a task that Spark repeats replaces them."""

    def __init__(self, folder: Path, partition: int, group_rows: int, columns: Columns) -> None:
        self._folder, self._partition, self._group_rows, self._columns = folder, partition, group_rows, columns
        self._partial = {split: folder / f".{split}-{partition}-{secrets.token_hex(4)}" for split in SPLITS}
        self._writers: dict[str, Any] = {}
        self._waiting: dict[str, list[Any]] = {split: [] for split in SPLITS}
        self._totals = {split: [0, 0, 0] for split in SPLITS}

    def write(self, batches: Iterator[Any]) -> list[Written]:
        """Writes batches of `pyarrow.RecordBatch`: features, label (numbers), held out (booleans).

        Raises ConfigError for a label that is no whole number from 0, a feature that a network cannot read (a null,
        NaN, an integer beyond 2^24), and a folder that cannot be written.
        """
        try:
            for batch in batches:
                self._take(batch)
            return self._finish()
        except OSError as error:
            host = socket.gethostname()
            raise ConfigError(
                f"workdir {self._folder}: the executor on {host} cannot write there ({error.strerror or error}). Give "
                "a folder on a file system that the driver and all executors share."
            ) from None
        finally:
            for writer in self._writers.values():
                with contextlib.suppress(OSError, ValueError):
                    writer.close()
            for path in self._partial.values():
                path.unlink(missing_ok=True)

    def _take(self, batch: Any) -> None:
        import pyarrow

        if not len(batch):
            return
        names, (*arrays, label, held_out) = self._columns, batch.columns
        for name, column in zip([*names.features, names.held_out], [*arrays, held_out], strict=True):
            if column.null_count and not (names.is_table and column is not held_out):
                raise ConfigError(f"column {name!r}: a row has null. Fill it, or drop such rows: df.na.drop().")
        labels = None if names.is_table else label_numbers(label, Where("labelCol", names.label, ROW))
        for name, array in zip(names.features, arrays, strict=True):
            if not names.is_table and holds_numbers(
                array.type
            ):  # Else images. The run would refuse these too, after its processes started.
                feature_numbers(array, Where("featuresCol", name, ROW))
        kept = pyarrow.RecordBatch.from_arrays(
            [*arrays, label if labels is None else pyarrow.array(labels)], [*names.written, LABEL]
        )
        held = np.asarray(held_out.to_numpy(zero_copy_only=False), bool)
        for split, chosen in ((SPLITS[0], ~held), (SPLITS[1], held)):
            rows = kept.filter(pyarrow.array(chosen))
            if len(rows):
                totals = self._totals[split]
                totals[0] += len(rows)
                totals[1] = max(totals[1], 0 if labels is None else int(labels[chosen].max()) + 1)
                totals[2] = (totals[2] + digest_of(rows)) % _DIGITS
                self._waiting[split].append(rows)
                self._write_groups(split, rest=False)

    def _write_groups(self, split: str, *, rest: bool) -> None:
        """Writes the row groups that are full, and with `rest` the last one."""
        import pyarrow
        import pyarrow.parquet as parquet

        waiting = self._waiting[split]
        count = sum(map(len, waiting))
        full = count if rest else count // self._group_rows * self._group_rows
        if not full:
            return
        table = pyarrow.Table.from_batches(waiting)
        if split not in self._writers:
            self._writers[split] = parquet.ParquetWriter(self._partial[split], table.schema, compression="zstd")
        self._writers[split].write_table(table.slice(0, full), row_group_size=self._group_rows)
        self._waiting[split] = table.slice(full).to_batches()

    def _finish(self) -> list[Written]:
        written = []
        for split in SPLITS:
            self._write_groups(split, rest=True)
            if split not in self._writers:
                continue
            self._writers.pop(split).close()
            name = f"{split}-{self._partition:05d}.parquet"
            os.replace(self._partial[split], self._folder / name)
            written.append(Written(split, name, *self._totals[split]))
        return written


def digest_of(rows: Any) -> int:
    """The sum of the 64-bit BLAKE2 hashes of the rows of a `pyarrow.RecordBatch`, modulo 2^64."""
    total = 0
    for values in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        hashed = hashlib.blake2b(digest_size=8)
        for value in values:
            hashed.update(value if isinstance(value, bytes) else repr(value).encode())
            hashed.update(b"\0")
        total += int.from_bytes(hashed.digest(), "little")
    return total % _DIGITS
