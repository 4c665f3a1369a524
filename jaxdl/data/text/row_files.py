"""Rows of files as dictionaries: CSV and TSV, JSON lines and arrays, Parquet, folders of the `datasets` library.

A file is cut into spans that can be read alone, so that several processes can read it. Of Parquet and data sets only
the columns that are asked for are read.
"""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import import_text
from jaxdl.data.lines import JSON_LINES, TABLE, Span, line_spans, reading_file, record_spans, records
from jaxdl.data.tables.row_groups import check_names
from jaxdl.data.text.cells import cell_rows, header, of_cell
from jaxdl.data.text.forms import EVERY_FILE, Form, find_documents, is_dataset, is_searched

_BATCH = 256
"""Rows of a columnar file that are made at a time."""
_BESIDE = " (a table beside other rows: its path, or --data.glob, must name it)"


class RowFormat(Form):
    """How the rows of files of one form are read."""

    has_types: ClassVar[bool] = True
    """Whether values are more than texts."""

    def names(self, path: Path, wanted: Collection[str]) -> list[str] | None:
        """The names of the columns, None where each row has its own. `wanted` are those that are looked for.

        Raises ConfigError for a file that cannot be read, and one that has two of the wanted columns of one name.
        """
        del path, wanted
        return None

    def classes(self, path: Path, column: str) -> tuple[str, ...]:
        """The names of the classes whose numbers a column has, if the file has them."""
        del path, column
        return ()

    @abc.abstractmethod
    def spans(self, path: Path, span_bytes: int, columns: Collection[str] | None = None) -> list[Span]:
        """The spans of a file, in order, of about `span_bytes` where it can be cut; their bytes are those of `columns`,
        where that is known; None is all."""

    @abc.abstractmethod
    def rows(self, span: Span, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
        """(where it is, for messages; the row) of each row of a span, in order: a dictionary where the file is sound.

        Of columns that are not asked for a row has at most the name. Raises ConfigError for what cannot be read.
        """


class _CellRows(RowFormat):
    """Cells below a line with the names of the columns, separated by commas, semicolons, tabs or bars."""

    suffixes = (".csv", TABLE)
    has_types = False

    def names(self, path: Path, wanted: Collection[str]) -> list[str]:
        return header(path, wanted)[1]

    def spans(self, path: Path, span_bytes: int, columns: Collection[str] | None = None) -> list[Span]:
        return line_spans(path, path.stat().st_size + 1)

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
        return cell_rows(span, columns)


class _JsonRows(RowFormat):
    """A JSON object in each line, or one array of them."""

    suffixes = JSON_LINES

    def spans(self, path: Path, span_bytes: int, columns: Collection[str] | None = None) -> list[Span]:
        return record_spans(path, span_bytes)

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
        return records(span)


class _ParquetRows(RowFormat):
    """A span is a row group."""

    suffixes = (".parquet",)

    def names(self, path: Path, wanted: Collection[str]) -> list[str]:
        with _open_parquet(path) as file:
            return _checked(file.schema_arrow.names, wanted, path)

    def classes(self, path: Path, column: str) -> tuple[str, ...]:
        with _open_parquet(path) as file:
            told = (file.schema_arrow.metadata or {}).get(b"huggingface")
        feature = json.loads(told).get("info", {}).get("features", {}).get(column) if told else None
        return tuple(feature.get("names") or ()) if isinstance(feature, dict) else ()

    def spans(self, path: Path, span_bytes: int, columns: Collection[str] | None = None) -> list[Span]:
        del span_bytes
        with _open_parquet(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        sizes = []
        for group in groups:
            parts = [group.column(number) for number in range(group.num_columns)]
            sizes.append(sum(part.total_uncompressed_size for part in parts
                             if columns is None or part.path_in_schema.split(".")[0] in columns))  # fmt: skip
        return [Span(str(path), number, number + 1, size) for number, size in enumerate(sizes)]

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
        with _open_parquet(Path(span.path)) as file:
            groups = [file.metadata.row_group(number).num_rows for number in range(span.stop)]
            names = _checked(file.schema_arrow.names, columns, Path(span.path))
            taken = [name for name in names if name in columns]
            if taken:
                batches = file.iter_batches(_BATCH, row_groups=list(range(span.start, span.stop)), columns=taken)
                rows = (row for batch in batches for row in batch.to_pylist())
            else:  # Without a column there are no batches.
                rows = ({} for _ in range(sum(groups[span.start :])))
            yield from _placed(rows, names, columns, span.path, sum(groups[: span.start]))


class _DatasetRows(RowFormat):
    """A folder that `datasets.Dataset.save_to_disk` wrote; of a DatasetDict, one split of it. A span is rows."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return is_dataset(path)

    def names(self, path: Path, wanted: Collection[str]) -> list[str]:
        return _checked(_open_dataset(path).column_names, wanted, path)

    def classes(self, path: Path, column: str) -> tuple[str, ...]:
        return tuple(getattr(_open_dataset(path).features.get(column), "names", None) or ())

    def spans(self, path: Path, span_bytes: int, columns: Collection[str] | None = None) -> list[Span]:
        data = _open_dataset(path)
        row_bytes = max(1, data.data.nbytes // max(1, len(data)))
        rows = max(1, span_bytes // row_bytes)
        cuts = [*range(0, len(data), rows), len(data)]
        return [Span(str(path), at, end, (end - at) * row_bytes) for at, end in itertools.pairwise(cuts)]

    def rows(self, span: Span, columns: Collection[str]) -> Iterator[tuple[str, Any]]:
        data = _open_dataset(Path(span.path))
        names = data.column_names
        taken = [name for name in names if name in columns]
        data = data.select_columns(taken).with_format(None)

        def rows() -> Iterator[dict[str, Any]]:
            for start in range(span.start, span.stop, _BATCH) if taken else ():
                values = data[start : min(start + _BATCH, span.stop)]
                yield from (dict(zip(taken, row, strict=True)) for row in zip(*(values[x] for x in taken), strict=True))
            yield from ({} for _ in range(0 if taken else span.stop - span.start))

        yield from _placed(rows(), names, columns, span.path, span.start)


def _placed(
    rows: Iterator[dict[str, Any]], names: Sequence[str], columns: Collection[str], path: str, first: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a columnar file from number `first`, with the names of the columns that were not read."""
    others = dict.fromkeys(name for name in names if name not in columns)
    for number, row in enumerate(rows, first):
        yield f"{path}: row {number:,}", {name: without_nones(value) for name, value in row.items()} | others


def _checked(names: Sequence[str], wanted: Collection[str], path: Path) -> list[str]:
    check_names([name for name in names if name in wanted], str(path))
    return list(names)


def without_nones(value: Any) -> Any:
    """A value without the entries of dictionaries that are None: Arrow gives each struct the fields of all."""
    if isinstance(value, dict):
        return {name: without_nones(entry) for name, entry in value.items() if entry is not None}
    return [without_nones(entry) for entry in value] if isinstance(value, list) else value


def _open_parquet(path: Path) -> Any:
    """An open Parquet file. Raises ConfigError."""
    import_text("pyarrow", str(path))
    parquet = import_text("pyarrow.parquet", str(path))
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError.
        raise ConfigError(f"{path}: it cannot be read as Parquet ({error}).") from None


def _open_dataset(path: Path) -> Any:
    """The data set in a folder that `datasets` wrote. Raises ConfigError, also for one of several splits."""
    datasets = import_text("datasets", str(path))
    try:
        data = datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # The library checks little.
        why = error if isinstance(error, OSError | ValueError) else "it has no rows, or is damaged"
        raise ConfigError(f"{path}: the datasets library cannot load it ({why}).") from None
    if isinstance(data, dict):
        raise ConfigError(
            f"{path}: it has the splits {', '.join(data)}. Name the folder of one, {path}/{next(iter(data))}."
        )
    return data


def find_rows(paths: Sequence[str], glob: str) -> tuple[list[tuple[str, str]], list[str]]:
    """((name, path) of the files with rows, the names of other files in the folders that were searched).

    In a folder without a pattern, CSV and TSV beside rows of other forms are others: mostly they are about these rows.
    Raises ConfigError where there is none, and for a file that was named and has no rows by its name.
    """
    found = [(name, path) for name, path in find_documents(paths, glob)]
    others = [(name, path) for name, path in found if RowFormat.find(path) is None]
    named = {Path(text).expanduser().resolve() for text in paths}
    wrong = next((path for _, path in others if path.resolve() in named), None)
    if wrong is not None or len(others) == len(found):
        suffixes = ", ".join(suffix for form in RowFormat.registered for suffix in form.suffixes)
        raise ConfigError(
            f"{wrong or others[0][1]}: it has no rows by its name. Rows are in files {suffixes}, which but for Parquet "
            "may be compressed, and in folders that Dataset.save_to_disk wrote."
        )
    beside = _tables_beside_rows(paths) - named if glob == EVERY_FILE else set[Path]()
    unread = {path for _, path in others} | beside
    left_out = [name + (_BESIDE if path in beside else "") for name, path in found if path in unread]
    return [(name, str(path)) for name, path in found if path not in unread], left_out


def _tables_beside_rows(paths: Sequence[str]) -> set[Path]:
    """The CSV and TSV files of each folder that has rows of other forms too, resolved."""
    beside = set[Path]()
    for folder in (path for path in paths if is_searched(expand_home(path))):
        forms = {path.resolve(): RowFormat.find(path) for _, path in find_documents([folder], EVERY_FILE)}
        tables = {path for path, form in forms.items() if form and not form.has_types}
        if any(form and form.has_types for form in forms.values()):
            beside |= tables
    return beside


def row_spans(path: Path, span_bytes: int) -> list[Span]:
    """The spans of a file or folder that `find_rows` found, each of about so many bytes where it can be cut."""
    with reading_file(str(path)):
        return row_format(path).spans(path, span_bytes)


def read_rows(span: Span, columns: Collection[str]) -> Iterator[Any]:
    """The rows of a span as JSON would have them; see `RowFormat.rows`.

    A cell of CSV that is empty is null, and a list of messages where it is one by its text.
    """
    form = row_format(Path(span.path))
    with reading_file(span.path):
        for where, row in form.rows(span, columns):
            yield row if form.has_types else {name: of_cell(value, f"{where}: its {name!r}")
                                              for name, value in row.items()}  # fmt: skip


def row_format(path: Path) -> RowFormat:
    """The format of a file or folder that has rows by its name."""
    form = RowFormat.find(path)
    assert form is not None
    return form
