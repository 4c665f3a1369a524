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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import EXAMPLE_WEIGHT
from jaxdl.data.tables.arrow_numbers import Where, feature_numbers, holds_numbers, label_numbers
from jaxdl.data.tables.row_weights import weight_numbers
from jaxdl.platform.spark.invalid import NOT_USED, Form, invalid_of, is_missing

LABEL, WEIGHT = "label", EXAMPLE_WEIGHT
"""The columns of the labels and of the weights in what is written."""
SPLITS = ("train", "test")
ROW = "a row"
"""What messages call a row: in Spark it has no number."""
_DIGITS = 2**64


@dataclass(frozen=True)
class Columns:
    """What the user calls the columns of rows, which come as features, label, weight, held out or not: for messages."""

    features: tuple[str, ...]
    label: str
    held_out: str
    written: tuple[str, ...]
    """The names of the features in the files."""
    form: Form = "numbers"
    """What the features are: the labels of a table and of texts may be words, and a table's values may be missing."""
    weight: str = ""
    """The column of the weights, empty where there is none."""
    predicts_number: bool = False
    """Whether the label is a number that is to be predicted, not a class."""
    skips: bool = False
    """Whether rows that cannot be trained on are left out and counted; else they are an error."""

    @property
    def needs_class_numbers(self) -> bool:
        """Whether labels must be class numbers."""
        return not self.predicts_number and self.form in ("images", "numbers")

    @property
    def roles(self) -> tuple[tuple[str, str], ...]:
        """(name, why a row is left out that lacks a value there) of the columns, in the order in which they come."""
        features = tuple((name, NOT_USED[self.form].format(name)) for name in self.features)
        others = [(self.label, f"no label in {self.label!r}")]
        others += [(self.weight, f"no weight in {self.weight!r}")] if self.weight else []
        return (*features, *others, (self.held_out, f"null in {self.held_out!r}"))


@dataclass(frozen=True)
class Written:
    """What a partition wrote of a split: its file, and its rows."""

    split: str
    file: str
    num_rows: int
    num_classes: int
    """The largest label plus 1; 0 where labels are no class numbers."""
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
        self.left_out: Counter[str] = Counter()
        """Why rows were left out -> how many."""

    def write(self, batches: Iterator[Any]) -> list[Written]:
        """Writes batches of `pyarrow.RecordBatch`: features, label, weight if there is one, held out (booleans).

        Raises ConfigError for a label that is no whole number from 0 (where it is to be one), a feature that a network
        cannot read (a null, NaN, an integer beyond 2^24), what is no weight, and a folder that cannot be written. Rows
        that lack a value are left out instead, and counted in `left_out`, if the columns say so.
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

        columns = self._usable(batch.columns)
        if not len(columns[0]):
            return
        names = self._columns
        kept, labels = self._checked(columns)
        held = np.asarray(columns[-1].to_numpy(zero_copy_only=False), bool)
        written = [*names.written, LABEL, *([WEIGHT] if names.weight else [])]
        rows = pyarrow.RecordBatch.from_arrays(kept, written)
        for split, chosen in ((SPLITS[0], ~held), (SPLITS[1], held)):
            part = rows.filter(pyarrow.array(chosen))
            if len(part):
                totals = self._totals[split]
                totals[0] += len(part)
                totals[1] = max(totals[1], 0 if labels is None else int(labels[chosen].max()) + 1)
                totals[2] = (totals[2] + digest_of(part)) % _DIGITS
                self._waiting[split].append(part)
                self._write_groups(split, rest=False)

    def _usable(self, columns: list[Any]) -> list[Any]:
        """The columns of the rows that have all values that training needs; the others are counted, or an error."""
        import pyarrow

        names, used = self._columns, np.ones(len(columns[0]), bool)
        count = len(names.features)
        for place, (column, (name, why)) in enumerate(zip(columns, names.roles, strict=True)):
            if names.skips:
                missing = used & (invalid_of(column, names.form) if place < count else is_missing(column))
                self.left_out.update({why: int(missing.sum())} if missing.any() else {})
                used &= ~missing
            elif column.null_count and ((place < count and names.form != "table") or place == len(columns) - 1):
                raise ConfigError(f"column {name!r}: a row has null. Fill it, or drop such rows: df.na.drop().")
            elif place < count and names.form == "texts" and invalid_of(column, names.form).any():
                raise ConfigError(f"column {name!r}: a row has no text, blanks alone. Drop such rows.")
        return columns if used.all() else [column.filter(pyarrow.array(used)) for column in columns]

    def _checked(self, columns: list[Any]) -> tuple[list[Any], np.ndarray | None]:
        """(the columns as they are written, their class numbers). Raises ConfigError for what cannot be trained on."""
        import pyarrow

        names, count = self._columns, len(self._columns.features)
        for name, array in zip(names.features, columns, strict=False):
            # The run would refuse these too, after its processes started.
            if names.form == "numbers" and holds_numbers(array.type):
                feature_numbers(array, Where("featuresCol", name, ROW))
        label, labels = columns[count], None
        if names.needs_class_numbers:
            labels = label_numbers(label, Where("labelCol", names.label, ROW))
            label = pyarrow.array(labels)
        elif names.predicts_number:
            missing = is_missing(label)
            if missing.any():
                raise ConfigError(
                    f"labelCol: the label {names.label!r} is null or not finite in a row. Drop such rows."
                )
        if not names.weight:
            return [*columns[:count], label], labels
        weights = weight_numbers(columns[count + 1], Where("weightCol", names.weight, ROW))
        return [*columns[:count], label, pyarrow.array(weights)], labels

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
