"""Rows of files as dictionaries: JSON lines, JSON arrays, Parquet, and folders of the `datasets` library.

A file is cut into spans that can be read alone, so that several processes can read it. Of Parquet and data sets only
the columns that are asked for are read.
"""

from __future__ import annotations

import abc
import inspect
import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxdl.core.config import ConfigError
from jaxdl.data.lines import JSON_LINES, Span, reading_file, record_spans, records
from jaxdl.data.text.documents import find_documents, is_dataset, open_dataset, open_parquet
from jaxdl.data.text_files import suffix_of

_BATCH = 256
"""Rows of a columnar file that are made at a time."""
_formats: list[type[RowFormat]] = []


class RowFormat(abc.ABC):
    """How the rows of files of one form are read. A subclass registers itself when its class statement runs."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """The ends of the names of such files, without that of a compression."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _formats.append(cls)

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether a file or folder has this form."""
        return path.is_file() and suffix_of(path) in cls.suffixes

    @abc.abstractmethod
    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        """The spans of a file, in order, of about `span_bytes` where it can be cut."""

    @abc.abstractmethod
    def rows(self, span: Span, columns: Collection[str]) -> Iterator[Any]:
        """The rows of a span, in order: dictionaries where the file is sound. Raises ConfigError otherwise.

        Of columns that are not asked for a row has at most the name.
        """


class _JsonRows(RowFormat):
    """A JSON object in each line, or one array of them."""

    suffixes = JSON_LINES

    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        return record_spans(path, span_bytes)

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[Any]:
        del columns
        for _, record in records(span):
            yield record


class _ParquetRows(RowFormat):
    """A span is a row group."""

    suffixes = (".parquet",)

    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        del span_bytes
        with open_parquet(path) as file:
            sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
        return [Span(str(path), number, number + 1, size) for number, size in enumerate(sizes)]

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[Any]:
        with open_parquet(Path(span.path)) as file:
            names = file.schema_arrow.names
            taken = [name for name in names if name in columns]
            others = dict.fromkeys(name for name in names if name not in columns)
            if not taken:  # Without a column there are no batches.
                yield from (dict(others) for _ in range(file.metadata.row_group(span.start).num_rows))
                return
            for batch in file.iter_batches(_BATCH, row_groups=list(range(span.start, span.stop)), columns=taken):
                yield from (_cleaned(row) | others for row in batch.to_pylist())


class _DatasetRows(RowFormat):
    """A folder that `datasets.Dataset.save_to_disk` wrote; of a DatasetDict, one split of it. A span is rows."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return is_dataset(path)

    def spans(self, path: Path, span_bytes: int) -> list[Span]:
        data = open_dataset(str(path))
        row_bytes = max(1, data.data.nbytes // max(1, len(data)))
        rows = max(1, span_bytes // row_bytes)
        cuts = [*range(0, len(data), rows), len(data)]
        return [Span(str(path), at, end, (end - at) * row_bytes) for at, end in itertools.pairwise(cuts)]

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[Any]:
        data = open_dataset(span.path)
        taken = [name for name in data.column_names if name in columns]
        others = dict.fromkeys(name for name in data.column_names if name not in columns)
        if not taken:
            yield from (dict(others) for _ in range(span.start, span.stop))
            return
        data = data.select_columns(taken).with_format(None)
        for start in range(span.start, span.stop, _BATCH):
            values = data[start : min(start + _BATCH, span.stop)]
            for row in zip(*(values[name] for name in taken), strict=True):
                yield _cleaned(dict(zip(taken, row, strict=True))) | others


def _cleaned(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose values are `without_nones`; one that is None stays."""
    return {name: without_nones(value) for name, value in row.items()}


def without_nones(value: Any) -> Any:
    """A value without the entries of dictionaries that are None: Arrow gives each struct the fields of all."""
    if isinstance(value, dict):
        return {name: without_nones(entry) for name, entry in value.items() if entry is not None}
    return [without_nones(entry) for entry in value] if isinstance(value, list) else value


def find_rows(paths: Sequence[str], glob: str) -> tuple[list[tuple[str, str]], list[str]]:
    """((name, path) of the files with rows, the names of other files in the folders that were searched).

    Raises ConfigError where there is none, and for a file that was named and has no rows by its name.
    """
    found = [(name, path) for name, path in find_documents(paths, glob)]
    others = [(name, path) for name, path in found if not any(form.reads(path) for form in _formats)]
    named = {Path(text).expanduser().resolve() for text in paths}
    wrong = next((path for _, path in others if path.resolve() in named), None)
    if wrong is not None or len(others) == len(found):
        suffixes = ", ".join((*JSON_LINES, ".parquet"))
        raise ConfigError(
            f"{wrong or others[0][1]}: it has no rows by its name. Rows are in files {suffixes}, of which the first "
            "may be compressed, and in folders that Dataset.save_to_disk wrote."
        )
    left_out = {name for name, _ in others}
    return [(name, str(path)) for name, path in found if name not in left_out], sorted(left_out)


def row_spans(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file or folder that `find_rows` found, each of about so many bytes where it can be cut."""
    with reading_file(str(path)):
        return _format_of(path).spans(path, span_bytes)


def read_rows(span: Span, columns: Collection[str]) -> Iterator[Any]:
    """The rows of a span; see `RowFormat.rows`."""
    with reading_file(span.path):
        yield from _format_of(Path(span.path)).rows(span, columns)


def _format_of(path: Path) -> RowFormat:
    return next(form for form in _formats if form.reads(path))()
