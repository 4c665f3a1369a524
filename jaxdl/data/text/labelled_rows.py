"""Reads labelled texts: CSV and TSV, JSON lines, Parquet, and folders that the `datasets` library wrote."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import import_text
from jaxdl.data.lines import JSON_LINES, LARGEST_DOCUMENT, open_lines, reading_file, record_spans, records, text_in
from jaxdl.data.tables.row_groups import check_names, find_files
from jaxdl.data.text_files import suffix_of

_DELIMITERS = ",;\t|"
_SHOWN = 3
_ADVICE = "Set --data.text or --data.label."
_readers: list[type[Reader]] = []


class Columns(NamedTuple):
    """The names of the columns that are read."""

    text: str
    text_pair: str
    label: str
    must_pair: bool
    """Whether there must be a column of second texts; else they are read where it is there."""


class Row(NamedTuple):
    """A text, its second one where there are pairs, and its label, each None where it lacks."""

    where: str
    text: str | None
    pair: str | None
    label: Any


@dataclasses.dataclass
class Table:
    """The labelled texts of some files, those that lack something left out."""

    texts: list[str] = dataclasses.field(default_factory=list)
    pairs: list[str] = dataclasses.field(default_factory=list)
    """The second texts; none where texts are single."""
    labels: list[Any] = dataclasses.field(default_factory=list)
    """Words and whole numbers."""
    names: tuple[str, ...] = ()
    """The names of the classes, where the files say so: labels are then these, and numbers in the files."""
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    """Why rows were left out -> how many."""
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why rows were left out -> where the first ones are."""

    def add(self, row: Row, paired: bool) -> None:
        """Adds a row, or counts it as left out."""
        label = label_value(row.label, row.where)
        if self.names and isinstance(label, int):
            label = self._name_of(label, row.where)
        lacks = (
            "no text" if not (row.text or "").strip() else
            "no second text" if paired and not (row.pair or "").strip() else
            "no label" if label is None else ""
        )  # fmt: skip
        if lacks:
            self.left_out[lacks] += 1
            if self.left_out[lacks] <= _SHOWN:
                self.first[lacks] = ", ".join(filter(None, (self.first.get(lacks), row.where)))
            return
        self.texts.append(row.text or "")
        if paired:
            self.pairs.append(row.pair or "")
        self.labels.append(label)

    def _name_of(self, label: int, where: str) -> str | None:
        """The name of a class by its number in the file. Raises ConfigError for a number of none."""
        if label == -1:  # So `datasets` marks a row without a label.
            return None
        if not 0 <= label < len(self.names):
            raise ConfigError(f"{where}: its label is {label}, and the file names {len(self.names)} classes from 0.")
        return self.names[label]

    def about_left_out(self, what: str) -> str:
        """What is said of rows that were left out of `what`; empty for none."""
        texts = [
            f"{count:,} with {why} ({self.first[why]}{', ...' if count > _SHOWN else ''})"
            for why, count in self.left_out.items()
        ]
        return f"left out of {what}: {'; '.join(texts)}" if texts else ""


class Reader(abc.ABC):
    """How files of one form are read. A subclass registers itself when its class statement runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _readers.append(cls)

    @classmethod
    @abc.abstractmethod
    def reads(cls, path: Path) -> bool:
        """Whether a file or folder has this form."""

    @abc.abstractmethod
    def rows(self, path: Path, columns: Columns, split: str) -> tuple[Iterator[Row], bool, tuple[str, ...]]:
        """(the rows, whether they have second texts, the names of the classes if the file has them).

        Raises ConfigError for what cannot be read. `split` is which part is asked for, where there are several.
        """


class _Suffixed(Reader):
    """Files that are known by the end of their names, without that of a compression."""

    suffixes: ClassVar[tuple[str, ...]]

    @classmethod
    def reads(cls, path: Path) -> bool:
        return suffix_of(path) in cls.suffixes and not path.is_dir()


class _Cells(_Suffixed):
    """Cells below a line with the names of the columns, separated by commas, semicolons, tabs or bars."""

    suffixes = (".csv", ".tsv")

    def rows(self, path: Path, columns: Columns, split: str) -> tuple[Iterator[Row], bool, tuple[str, ...]]:
        del split
        import csv

        csv.field_size_limit(LARGEST_DOCUMENT)
        lines = _decoded(path)
        first = lines.partition("\n")[0].rstrip("\r")
        headers = {mark: next(csv.reader([first], delimiter=mark), []) for mark in _DELIMITERS}
        wanted = {columns.text, columns.label}
        mark = next((mark for mark, names in headers.items() if wanted <= set(names)), None)
        if mark is None:
            names = max(headers.values(), key=len)
            raise ConfigError(
                f"{path}: its first line must have the names of the columns, {columns.text!r} and {columns.label!r} "
                f"among them; it has {', '.join(map(repr, names[:6])) or 'nothing'}. {_ADVICE}"
            )
        names = headers[mark]
        check_names([name for name in names if name in (*wanted, columns.text_pair)], str(path))
        plain = mark == "\t" and _is_plain(lines, len(names))
        reader = (
            _plain_cells(lines) if plain else csv.reader(io.StringIO(lines, newline=""), delimiter=mark, strict=True)
        )
        paired = _paired(columns, names, str(path))

        def rows() -> Iterator[Row]:
            number = 0
            try:
                for number, cells in enumerate(reader):
                    if not number or not cells:
                        continue
                    where = f"{path}: row {number:,}"
                    if len(cells) != len(names):
                        raise ConfigError(
                            f"{where}: it has {len(cells)} cells, and the first line {len(names)} names. Correct it; a "
                            "cell with the separator or a line break in it must stand in double quotes."
                        )
                    found = dict(zip(names, cells, strict=True))
                    pair = found[columns.text_pair] if paired else None
                    yield Row(where, found[columns.text], pair, found[columns.label])
            except csv.Error as error:
                raise ConfigError(f"{path}: after row {number:,}: {error}. Correct it.") from None

        return rows(), paired, ()


def _decoded(path: Path) -> str:
    with open_lines(path) as file:
        content = file.read(LARGEST_DOCUMENT + 1)
    if len(content) > LARGEST_DOCUMENT:
        raise ConfigError(f"{path}: more than {LARGEST_DOCUMENT / 1e9:,.1f} GB of text. Cut it into several files, or "
                          "write Parquet.")  # fmt: skip
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line:,} is not UTF-8 ({error.reason}). Convert it, from Latin-1 for instance: iconv -f "
            "LATIN1 -t UTF-8 FILE > NEW."
        ) from None


def _is_plain(lines: str, num_columns: int) -> bool:
    """Whether each line alone is a row: then quotes at the begin of a text belong to it."""
    return all(line.count("\t") == num_columns - 1 for line in lines.split("\n") if line.strip("\r"))


def _plain_cells(lines: str) -> Iterator[list[str]]:
    for line in lines.split("\n"):
        if line.strip("\r"):
            yield [_unquoted(cell) for cell in line.rstrip("\r").split("\t")]


def _unquoted(cell: str) -> str:
    """A cell without the quotes that a program has put around all of it."""
    inside = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inside.replace('""', "")
    return inside.replace('""', '"') if quoted else cell


class _Json(_Suffixed):
    """A JSON object in each line, or one array of them."""

    suffixes = JSON_LINES

    def rows(self, path: Path, columns: Columns, split: str) -> tuple[Iterator[Row], bool, tuple[str, ...]]:
        del split
        spans = record_spans(path, 1 << 40)
        first = next((record for span in spans for _, record in records(span)), {})
        paired = _paired(columns, list(first) if isinstance(first, dict) else [], str(path))

        def rows() -> Iterator[Row]:
            for span in spans:
                for where, record in records(span):
                    if not isinstance(record, dict) or columns.label not in record:
                        names = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
                        raise ConfigError(f"{where}: it has no {columns.label!r}, but {names}. {_ADVICE}")
                    pair = text_in(record, columns.text_pair, where, "Set --data.text-pair.") if paired else None
                    yield Row(where, text_in(record, columns.text, where, _ADVICE), pair, record[columns.label])

        return rows(), paired, ()


class _Parquet(_Suffixed):
    """Files with columns of texts and labels."""

    suffixes = (".parquet",)

    def rows(self, path: Path, columns: Columns, split: str) -> tuple[Iterator[Row], bool, tuple[str, ...]]:
        del split
        parquet = import_text("pyarrow.parquet", str(path))
        try:
            file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: it cannot be read as Parquet ({error}).") from None
        names, paired = _checked(columns, file.schema_arrow.names, str(path))
        check_names([name for name in file.schema_arrow.names if name in names], str(path))
        told = (file.schema_arrow.metadata or {}).get(b"huggingface")
        features = json.loads(told).get("info", {}).get("features", {}) if told else {}
        classes = features.get(columns.label, {})
        batches = (batch.to_pydict() for batch in file.iter_batches(1024, columns=names))
        known = tuple(classes.get("names") or ()) if isinstance(classes, dict) else ()
        return _of_columns(batches, columns, paired, str(path)), paired, known


class _DatasetFolder(Reader):
    """A folder that `save_to_disk` of a Dataset or a DatasetDict wrote."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    def rows(self, path: Path, columns: Columns, split: str) -> tuple[Iterator[Row], bool, tuple[str, ...]]:
        data = import_text("datasets", str(path)).load_from_disk(str(path))
        if hasattr(data, "keys"):
            tried = ("train",) if split == "train" else ("test", "validation")
            name = next((name for name in tried if name in data), None)
            if name is None:
                raise ConfigError(f"{path}: none of its splits is {' or '.join(tried)}; it has {', '.join(data)}. Give "
                                  "the folder of one of them.")  # fmt: skip
            data = data[name]
        names, paired = _checked(columns, data.column_names, str(path))
        known = tuple(getattr(data.features[columns.label], "names", None) or ())
        data = data.select_columns(names)
        batches = (data[first : first + 1024] for first in range(0, len(data), 1024))
        return _of_columns(batches, columns, paired, str(path)), paired, known


def _checked(columns: Columns, names: Sequence[str], what: str) -> tuple[list[str], bool]:
    """(the columns to read, whether there are pairs). Raises ConfigError for those that are not there."""
    for name in (columns.text, columns.label):
        if name not in names:
            raise ConfigError(f"{what}: it has no column {name!r}; it has {', '.join(names)}. {_ADVICE}")
    paired = _paired(columns, names, what)
    return [columns.text, *((columns.text_pair,) if paired else ()), columns.label], paired


def _paired(columns: Columns, names: Sequence[str], what: str) -> bool:
    if columns.must_pair and columns.text_pair not in names:
        raise ConfigError(f"{what}: it has no column {columns.text_pair!r}; it has {', '.join(names)}. Set "
                          "--data.text-pair.")  # fmt: skip
    return columns.text_pair in names


def _of_columns(batches: Iterator[dict[str, Any]], columns: Columns, paired: bool, what: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        texts, labels = batch[columns.text], batch[columns.label]
        pairs = batch[columns.text_pair] if paired else [None] * len(texts)
        for text, pair, label in zip(texts, pairs, labels, strict=True):
            where = f"{what}: row {number:,}"
            for name, value in ((columns.text, text), (columns.text_pair, pair)):
                if not isinstance(value, str | None):
                    raise ConfigError(f"{where}: its {name!r} is {type(value).__name__}, not a text. {_ADVICE}")
            yield Row(where, text, pair, label)
            number += 1


def label_value(label: Any, where: str) -> str | int | None:
    """A label as a word or a whole number, None where it is missing. Raises ConfigError for what is no class."""
    if isinstance(label, bool):
        return str(label).lower()
    if label is None or isinstance(label, int):
        return label
    if isinstance(label, float):
        if label != label:  # NaN
            return None
        if label.is_integer():
            return int(label)
        raise ConfigError(f"{where}: its label is {label!r}: a measure, not a class. Give words or whole numbers.")
    if not isinstance(label, str):
        raise ConfigError(
            f"{where}: its label is {type(label).__name__} ({str(label)[:40]}): each text has one class, a word or a "
            "whole number. Give a row for each."
        )
    return label.strip() or None


def read_table(given: Sequence[str], columns: Columns, split: str) -> Table:
    """The labelled texts of files, patterns and folders. Raises ConfigError for what cannot be read, or has none."""
    option, table, paired = f"--data.{split}", Table(), None
    for path in find_files(given, option):
        reader = next((reader for reader in _readers if reader.reads(path)), None)
        if reader is None:
            what = "a folder that the datasets library did not write" if path.is_dir() else "no form that is known"
            raise ConfigError(
                f"{option} {path}: {what}. Give files of CSV (.csv, .tsv), JSON lines (.jsonl, .json) or Parquet, or a "
                f"folder of datasets.save_to_disk{f'; such as {path}/*.csv' if path.is_dir() else ''}."
            )
        with reading_file(str(path)):
            rows, has_pairs, names = reader().rows(path, columns, split)
            if paired not in (None, has_pairs):
                raise ConfigError(f"{path}: {'it has' if has_pairs else 'it lacks'} a column {columns.text_pair!r}, "
                                  "unlike the files before it. All must have the same.")  # fmt: skip
            if names and table.labels and names != table.names:
                raise ConfigError(f"{path}: its classes are {', '.join(names)}, and those of the files before it "
                                  f"{', '.join(table.names) or 'have no names'}. All must have the same.")  # fmt: skip
            paired, table.names = has_pairs, names or table.names
            for row in rows:
                table.add(row, has_pairs)
    if not table.texts:
        lacks = table.about_left_out("it")
        raise ConfigError(f"{option} {given[0]}: there is no labelled text in it{f' ({lacks})' if lacks else ''}. Give "
                          "files with rows.")  # fmt: skip
    return table
