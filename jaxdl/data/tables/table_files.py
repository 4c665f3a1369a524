"""Files of tables, CSV and Parquet, as columns of Arrow; cells of CSV stay texts until a column is fitted."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import import_text
from jaxdl.data.tables.arrow_numbers import is_list
from jaxdl.data.tables.row_groups import check_names, find_files, open_parquet, reading
from jaxdl.data.text_files import open_text, suffix_of

DELIMITERS = ",;\t|"
PARQUET = (".parquet", ".pq", ".parq")
_EXCEL = (".xlsx", ".xls", ".ods")
_JSON = (".json", ".jsonl", ".ndjson")
_MARK = b"PAR1"
_LARGEST_BLOCK = 2**31 - 2


class Format(NamedTuple):
    """How CSV files are written, as far as options say."""

    delimiter: str | None = None
    encoding: str = "utf-8"


class TableRows(NamedTuple):
    """The rows of some files."""

    columns: dict[str, Any]
    """`pyarrow.ChunkedArray` by name, all of one length."""
    comma: bool
    """Whether commas in numbers are decimal ones: in files whose delimiter is another."""
    metadata: Any
    """That of the schema of the last file, in which pandas names its index."""
    starts: tuple[int, ...]
    """The first row of each file."""

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(next(iter(self.columns.values()))) if self.columns else 0


_USUAL = Format()


def read_tables(patterns: Sequence[str], option: str, how: Format = _USUAL) -> TableRows:
    """The rows of the files of some patterns, file after file.

    Raises ConfigError for files that cannot be read, have other columns than the first one, or no rows.
    """
    import pyarrow

    first, tables, starts, comma, metadata = None, [], [0], False, None
    paths = find_files(patterns, option)
    for path in paths:
        table, here = _read(path, how)
        table = _flat(table, str(path))
        comma, metadata = comma or here, table.schema.metadata
        if first is not None and set(first) != set(table.column_names):
            differing = ", ".join(repr(name) for name in sorted(set(first) ^ set(table.column_names))[:5])
            raise ConfigError(f"{path}: only it, or only {paths[0]}, has {differing}. All files must have the same.")
        first = first or table.column_names
        tables.append(table.replace_schema_metadata(None).select(first))
        starts.append(starts[-1] + table.num_rows)
    with reading(paths[0], "together with the files after it: the types of their columns differ", "Make them alike."):
        joined = pyarrow.concat_tables(tables, promote_options="permissive")
    if not joined.num_rows:
        raise ConfigError(f"{option} {patterns[0]}: there are no rows in it. Give files with rows.")
    columns = dict(zip(joined.column_names, joined.columns, strict=True))
    return TableRows(columns, comma, metadata, tuple(starts[:-1]))


def _read(path: Path, how: Format) -> tuple[Any, bool]:
    """(the file as a `pyarrow.Table`, whether its commas are decimal ones)."""
    suffix = suffix_of(path)
    if suffix in _EXCEL:
        raise ConfigError(f"{path}: spreadsheets are not read. Save it as CSV, or pandas.read_excel(...).to_parquet.")
    if suffix in _JSON:
        raise ConfigError(f"{path}: JSON is not read as a table. Save it as CSV, or pandas.read_json(...).to_parquet.")
    if path.is_dir():
        raise ConfigError(f"{path}: it is a folder. Name the files in it, for instance {path / '*.csv'}.")
    with reading(path, ""), path.open("rb") as file:
        is_parquet = suffix in PARQUET or file.read(4) == _MARK
    if is_parquet:
        file = open_parquet(path)
        with reading(path, ""):
            check_names(file.schema_arrow.names, str(path))
            return file.read(), False
    return _read_csv(path, how)


def _read_csv(path: Path, how: Format) -> tuple[Any, bool]:
    arrow_csv: Any = import_text("pyarrow.csv", str(path))
    import pyarrow

    content = _text(path, how.encoding)
    if not content.strip():
        raise ConfigError(f"{path}: it is empty. Give a file with a line of names, and rows.")
    head = content[: 1 << 16].decode("utf-8", errors="ignore")
    delimiter = how.delimiter or _delimiter(head)
    if len(delimiter) != 1:
        raise ConfigError(f"--data.delimiter {delimiter!r}: give one character.")
    names = [name.strip() for name in next(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter))]
    check_names(names, str(path))
    block = min(len(content) + 1, _LARGEST_BLOCK)
    with reading(path, "as CSV with a line of names"):
        table = arrow_csv.read_csv(
            pyarrow.BufferReader(content),
            read_options=arrow_csv.ReadOptions(column_names=names, skip_rows_after_names=1, block_size=block),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
            ),
        )
    return table, delimiter != ","


def _text(path: Path, encoding: str) -> bytes:
    """The content of a file as UTF-8 without a mark. Raises ConfigError for what is in another encoding."""
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ConfigError(f"--data.encoding {encoding}: there is no such encoding. Give utf-8 or latin-1.") from None
    if name.startswith(("utf-16", "utf-32")):  # Their marks are errors of `open_text`.
        return path.read_bytes().decode(encoding, errors="replace").encode()
    with reading(path, ""), open_text(path) as file:
        content = file.read()
    try:
        text = content if name == "utf-8" and content.decode() else content.decode(encoding).encode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line:,} is not {encoding} ({content[max(0, error.start - 10) : error.start + 10]!r}). Name "
            "its encoding: --data.encoding latin-1, or cp1252, for instance."
        ) from None
    if b"\0" in text[: 1 << 16]:
        raise ConfigError(
            f"{path}: it has bytes of zero, as text in UTF-16 has. Name its encoding: --data.encoding utf-16-le, or "
            "utf-16-be; or remove them."
        )
    return text


def _delimiter(head: str) -> str:
    """The delimiter that the line of names has most often outside of quotes."""
    line, quoted = [], False
    for letter in head:
        quoted ^= letter == '"'
        if letter == "\n" and not quoted:
            break
        if not quoted:
            line.append(letter)
    return max(DELIMITERS, key=line.count)


def _flat(table: Any, what: str) -> Any:
    """The table with the fields of structs, `a.b`, and the numbers of lists of one length, `v[0]`, as columns."""
    import pyarrow
    import pyarrow.types as types

    while any(types.is_struct(kind) for kind in table.schema.types):
        metadata = table.schema.metadata
        table = table.flatten().replace_schema_metadata(metadata)
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        columns |= parts_of_list(name, column) if is_list(column.type) else {name: column}
    check_names(table.column_names, what)
    if columns.keys() == set(table.column_names):
        return table
    return pyarrow.table(columns).replace_schema_metadata(table.schema.metadata)


def parts_of_list(name: str, column: Any) -> dict[str, Any]:
    """The columns `v[0]`, `v[1]` of lists that have all as many values; other lists stay one column, `v`."""
    import pyarrow.compute

    compute: Any = pyarrow.compute
    lengths = [length for length in compute.unique(compute.list_value_length(column)).to_pylist() if length is not None]
    if len(lengths) != 1 or not lengths[0] or is_list(column.type.value_type):
        return {name: column}
    return {f"{name}[{place}]": compute.list_element(column, place) for place in range(lengths[0])}


def select(columns: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Some rows of columns."""
    import pyarrow

    chosen = pyarrow.array(rows)
    return {name: column.take(chosen) for name, column in columns.items()}
