"""Rows of Parquet files by number: file after file, and in a file row group after row group.

A row's number is all that a run keeps of it, so the order of training stays a pure function of (seed, position). A row
group is what is read at once; the latest ones stay in memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import find_paths
from jaxdl.data.codec import import_text
from jaxdl.data.text_files import BROKEN

CACHE_BYTES = 1 << 28
"""Bytes of row groups that a reader keeps."""


def find_files(patterns: Sequence[str], option: str) -> list[Path]:
    """The files of some patterns, each pattern's sorted by name. Raises ConfigError for a pattern without files."""
    if not patterns:
        raise ConfigError(f"{option}: no files are given. Give some, such as {option} 'train-*.parquet'.")
    files = []
    for pattern in patterns:
        here = find_paths(pattern)
        if not here:
            raise ConfigError(f"{option} {pattern}: there is no such file. Give names of files; * stands for any text.")
        files += here
    return files


def check_columns(known: Sequence[str], wanted: Sequence[str], what: str) -> None:
    """Raises ConfigError, which begins with `what`, for a wanted column that is not there."""
    for name in wanted:
        if name not in known:
            raise ConfigError(f"{what}: it has no column {name!r}; it has {', '.join(known)}. Name one of these.")


def check_names(names: Sequence[str], what: str) -> None:
    """Raises ConfigError, which begins with `what`, for a table with two columns of one name."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(
            f"{what}: it has {names.count(twice[0])} columns named {twice[0]!r}. Rename them, or leave them out."
        )


class RowGroups:
    """The rows of some Parquet files, of some of their columns. Files are opened when they are read.

    It may be pickled for a worker process, which then has a cache of its own.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        columns: Sequence[str],
        cache_bytes: int = CACHE_BYTES,
        *,
        others: Sequence[str] = (),
    ) -> None:
        """Raises ConfigError for a file that is not a Parquet file, or lacks one of the columns or of `others`."""
        self.paths, self.columns, self.cache_bytes = list(paths), list(columns), cache_bytes
        self._places: list[tuple[int, int]] = []
        self._types: list[dict[str, Any]] = []
        counts, sizes = [], []
        for number, path in enumerate(self.paths):
            file = open_parquet(path)
            with reading(path, "as a Parquet file", "Make it again."):
                schema = file.schema_arrow
            check_columns(schema.names, [*columns, *others], str(path))
            check_names([name for name in schema.names if name in (*columns, *others)], str(path))
            self._types.append({name: schema.field(name).type for name in columns})
            for group in range(file.metadata.num_row_groups):
                self._places.append((number, group))
                metadata = file.metadata.row_group(group)
                counts.append(metadata.num_rows)
                parts = [metadata.column(place) for place in range(metadata.num_columns)]
                names = [part.path_in_schema.partition(".")[0] for part in parts]
                sizes += [
                    part.total_uncompressed_size for part, name in zip(parts, names, strict=True) if name in columns
                ]
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        self.most_rows = max(counts, default=0)
        """Rows of the largest row group."""
        self.is_kept = sum(sizes) <= cache_bytes
        """Whether the cache keeps all row groups, so that a reader reads each once."""
        self._prepare()

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[int, Any] = {}
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("_lock", "_files", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def types(self, column: str) -> Iterator[tuple[Path, Any]]:
        """(file, Arrow's type of one of `columns` in it) of all files."""
        for path, types in zip(self.paths, self._types, strict=True):
            yield path, types[column]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row group, row in it) of rows by number: int64 [row] each; row groups are counted over all files."""
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        return groups, indices - self._starts[groups]

    def rows_beside(self, index: int) -> range:
        """The numbers of the rows of the row group of a row."""
        [group], _ = self.locate(np.array([index]))
        return range(int(self._starts[group]), int(self._starts[group + 1]))

    def name(self, index: int) -> str:
        """The file of a row and its number in the file, for messages."""
        [group], [row] = self.locate(np.array([index]))
        return f"{self.paths[self._places[group][0]]}, row {self._row_in_file(int(group), int(row))}"

    def _row_in_file(self, group: int, row: int) -> int:
        """The number in its file of a row of a row group."""
        number = self._places[group][0]
        first = next(place for place, (file, _) in enumerate(self._places) if file == number)
        return int(self._starts[group] - self._starts[first]) + row

    def read(self, indices: np.ndarray) -> Any:
        """A `pyarrow.Table` of these rows in this order.

        Each row group is read once, however many rows of it are asked for. Raises ConfigError, with the file and the
        rows, for a row group that cannot be read, and for files whose columns have types that do not go together.
        """
        import pyarrow

        groups, rows = self.locate(np.asarray(indices, np.int64))
        order = np.argsort(groups, kind="stable")
        parts = [
            self._group(group).take(pyarrow.array(rows[order][groups[order] == group]))
            for group in np.unique(groups).tolist()
        ]
        if not parts:
            return self._group(0).slice(0, 0)
        with reading(self.paths[0].parent, "together: its files differ in the types of columns", "Make them alike."):
            table = pyarrow.concat_tables(parts, promote_options="permissive")
        return table.take(pyarrow.array(np.argsort(order, kind="stable")))

    def every(self, column: str) -> Iterator[tuple[Path, Any]]:
        """(file, one column of its rows as a `pyarrow.ChunkedArray`) of all files; nothing is kept.

        Raises ConfigError for a file that cannot be read.
        """
        for path in self.paths:
            file = open_parquet(path)
            with reading(path, f"in its column {column!r}", "Make it again."):
                values = file.read([column]).column(0)
            yield path, values

    def _group(self, group: int) -> Any:
        with self._lock:
            if group in self._kept:
                self._kept.move_to_end(group)
                return self._kept[group]
            number, inner = self._places[group]
            if number not in self._files:
                self._files[number] = open_parquet(self.paths[number])
            first = self._row_in_file(group, 0)
            last = first + int(self._starts[group + 1] - self._starts[group]) - 1
            with reading(self.paths[number], f"in rows {first} to {last}, its row group {inner}", "Make it again."):
                table = self._files[number].read_row_group(inner, columns=self.columns, use_threads=False)
            self._kept[group] = table
            while len(self._kept) > 1 and sum(table.nbytes for table in self._kept.values()) > self.cache_bytes:
                self._kept.popitem(last=False)
            return table


def open_parquet(path: Path) -> Any:
    """A `pyarrow.parquet.ParquetFile`. Raises ConfigError for a file that is not one, or cannot be read."""
    parquet = import_text("pyarrow.parquet", str(path))
    with reading(path, "as a Parquet file", "Make it again."):
        return parquet.ParquetFile(path)


@contextlib.contextmanager
def reading(path: Path, how: str, advice: str = "") -> Iterator[None]:
    """Context of calls of pyarrow: raises ConfigError, one line, for a file that cannot be read."""
    import pyarrow

    try:
        yield
    except ConfigError:
        raise
    except (*BROKEN, TypeError, pyarrow.ArrowException) as error:
        why = " ".join(str(error).split())[:200]
        text = " ".join(filter(None, (f"{path}: it cannot be read", how, f"({why}).", advice)))
        raise ConfigError(text) from None
