"""Documents of text from files: JSON lines, Parquet, plain text, tables of pairs, folders of the `datasets` library.

A format says how a file is cut into spans that can be read alone, so that several processes can read it, and reads
them. Which format a file has is seen by its name.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import import_text
from jaxdl.data.lines import (
    JSON_LINES,
    LARGEST_DOCUMENT,
    TABLE,
    Span,
    line_spans,
    lines,
    open_lines,
    reading_file,
    record_spans,
    records,
    text_in,
)
from jaxdl.data.remote import is_hidden
from jaxdl.data.tables.row_groups import check_columns, check_names
from jaxdl.data.text.texts import FileTexts
from jaxdl.data.text_files import files_matching, suffix_of

PlainDocument = Literal["file", "line"]
EVERY_FILE = "**/*"
"""The pattern that all files of a folder match."""
_formats: list[type[Format]] = []


class Reading(NamedTuple):
    """How documents are read: the name of the column with the text, and what a document of a plain file is."""

    column: str = "text"
    document: PlainDocument = "file"


class Format(abc.ABC):
    """How files of one form are read. A subclass registers itself when its class statement runs."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """The ends of the names of such files, without that of a compression."""
    settings: ClassVar[tuple[str, ...]] = ("column",)
    """The fields of `Reading` that have an effect on such files."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _formats.append(cls)

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether a file or folder has this form."""
        return path.is_file() and suffix_of(path) in cls.suffixes

    @abc.abstractmethod
    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        """The spans of a file, in order, of about `span_bytes` where it can be cut."""

    @abc.abstractmethod
    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        """The documents of a span, in order, None for a null. Raises ConfigError for what cannot be read."""


class _Lines(Format):
    """Files whose lines are read alone: a span has the lines that begin in it. Compressed ones are one span."""

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        return line_spans(path, span_bytes)

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        for line in lines(span):
            yield from self.documents(line.rstrip("\r\n"))

    @abc.abstractmethod
    def documents(self, line: str) -> Iterator[str]:
        """The documents of a line, which is without its end."""


class _Json(Format):
    """A JSON object in each line, or one array of them."""

    suffixes = JSON_LINES

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        return record_spans(path, span_bytes)

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        for where, record in records(span):
            yield text_in(record, reading.column, where, "Set column.")


class _Csv(Format):
    """Rows below a line with the names of the columns; cells in quotes may have several lines. A file is one span."""

    suffixes = (".csv",)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        return line_spans(path, path.stat().st_size + 1)

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        import csv

        csv.field_size_limit(LARGEST_DOCUMENT)
        # A reader of csv ends no line at a carriage return or U+2028 in quotes, so it gets the ends as they are.
        with open_lines(Path(span.path)) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
            rows = csv.reader(text, strict=True)
            try:
                names = next(rows, [])
                check_columns(names, [reading.column], span.path)
                check_names(names, span.path)
                column = names.index(reading.column)
                for row in rows:
                    if row and len(row) != len(names):
                        raise ConfigError(
                            f"{span.path}: the row that ends in line {rows.line_num} has {len(row)} cells, and the "
                            f"first line {len(names)} names. Correct it."
                        )
                    if row:
                        yield row[column]
            except csv.Error as error:
                raise ConfigError(f"{span.path}: line {rows.line_num}: {error}. Correct it.") from None


class _Table(_Lines):
    """Tab-separated columns, each a document: pairs of sentences, for training a tokenizer."""

    suffixes = (TABLE,)
    settings = ()

    def documents(self, line: str) -> Iterator[str]:
        yield from filter(None, line.split("\t"))


class _Plain(_Lines):
    """A file that has no other format: it is a document, or each of its lines is."""

    settings = ("document",)

    @classmethod
    def reads(cls, path: Path) -> bool:
        return path.is_file() and not any(other.reads(path) for other in _formats if other is not cls)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        if reading.document == "line":
            return super().spans(path, reading, span_bytes)
        size = path.stat().st_size
        if size > LARGEST_DOCUMENT:
            raise _too_large(str(path), f"{size / 1e9:,.1f} GB")
        return [Span(str(path), 0, size, size)]

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        if reading.document == "line":
            yield from super().read(span, reading)
            return
        with open_lines(Path(span.path)) as file:
            content = file.read(LARGEST_DOCUMENT + 1)
        if len(content) > LARGEST_DOCUMENT:
            raise _too_large(span.path, f"more than {LARGEST_DOCUMENT / 1e9:,.1f} GB, decompressed,")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{span.path}: not UTF-8 ({error.reason} at byte {error.start}). Leave the file out, or convert it."
            ) from None
        if text:
            yield text

    def documents(self, line: str) -> Iterator[str]:
        yield from filter(None, [line])


def _too_large(path: str, size: str) -> ConfigError:
    return ConfigError(
        f"{path}: {size} of plain text would be one document. If each of its lines is a document, set document to "
        "line; otherwise cut it into a file for each document, or write JSON lines."
    )


class _Parquet(Format):
    """A span is a range of row groups."""

    suffixes = (".parquet",)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        with open_parquet(path) as file:
            _check_column(path, reading.column, file.schema_arrow.names)
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        sizes = []
        for group in groups:
            columns = (group.column(number) for number in range(group.num_columns))
            named = [column for column in columns if column.path_in_schema.split(".")[0] == reading.column]
            sizes.append(sum(column.total_uncompressed_size for column in named))
        return [Span(str(path), number, number + 1, size) for number, size in enumerate(sizes)]

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        with open_parquet(Path(span.path)) as file:
            row_groups = list(range(span.start, span.stop))
            for batch in file.iter_batches(256, row_groups=row_groups, columns=[reading.column]):
                yield from _column_texts(batch.column(0).to_pylist(), span.path, reading.column)


class _DatasetFolder(Format):
    """A folder that `datasets.Dataset.save_to_disk` wrote; of a DatasetDict, one split of it. A span is rows."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return is_dataset(path)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        data = open_dataset(str(path))
        _check_column(path, reading.column, data.column_names)
        row_bytes = max(1, data.data.nbytes // max(1, len(data)))
        rows = max(1, span_bytes // row_bytes)
        cuts = [*range(0, len(data), rows), len(data)]
        return [Span(str(path), at, end, (end - at) * row_bytes) for at, end in itertools.pairwise(cuts)]

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        data = open_dataset(span.path)
        for start in range(span.start, span.stop, 256):
            rows = data[start : min(start + 256, span.stop)]
            yield from _column_texts(rows[reading.column], span.path, reading.column)


def is_dataset(path: Path) -> bool:
    """Whether a path is a folder that the `datasets` library wrote."""
    return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def format_of(path: Path) -> Format:
    """The format of a file, or of a folder of the `datasets` library."""
    return next(form for form in _formats if form.reads(path))()


def find_documents(paths: Sequence[str], glob: str) -> list[tuple[str, Path]]:
    """(name, path) of the files of `paths`, each once, sorted by name, and of folders that `datasets` wrote.

    A name is relative to the folder that was searched, so it is the same on every machine. Raises ConfigError when a
    path has none.
    """
    names: dict[Path, str] = {}
    for text in paths:
        path = expand_home(text)
        if _is_searched(path):
            named = _matching(path, text, glob)
        elif path.is_file() or path.is_dir():
            named = [(path.name, path)]
        else:
            raise ConfigError(f"{text}: no such file or folder.")
        for name, file in named:
            names.setdefault(file.resolve(), name)
    return sorted((name, path) for path, name in names.items())


def _is_searched(path: Path) -> bool:
    return path.is_dir() and not is_dataset(path)


def _matching(folder: Path, given: str, glob: str) -> list[tuple[str, Path]]:
    """(name, path) of the files of a folder, without hidden ones."""
    named = [(file.relative_to(folder).as_posix(), file) for file in files_matching(folder, glob)]
    named = [(name, file) for name, file in named if not is_hidden(name)]
    if not named:
        raise ConfigError(f"{given}: no file in it matches {glob!r}. Change glob, or name another folder.")
    return named


def document_texts(groups: Sequence[Sequence[str]], glob: str, reading: Reading) -> list[DocumentTexts]:
    """The documents of each group of files and folders.

    Raises ConfigError for what cannot be found, and for a glob or a setting of `reading` that has no effect on them.
    """
    texts = [DocumentTexts(tuple((name, str(path)) for name, path in find_documents(paths, glob)), reading)
             for paths in groups]  # fmt: skip
    files = [Path(path) for group in texts for _, path in group.files]
    for why in without_effect(files, [path for paths in groups for path in paths], glob, reading).values():
        raise ConfigError(f"{why}. Leave it out.")
    return texts


def without_effect(files: Sequence[Path], paths: Sequence[str], glob: str, reading: Reading) -> dict[str, str]:
    """The settings that are not the default and have no effect on the `files` that were found in `paths`, and why."""
    reasons = {}
    if glob != EVERY_FILE and not any(_is_searched(expand_home(path)) for path in paths):
        reasons["glob"] = f"glob = {glob!r}: no path is a folder of files, so it has no effect"
    used = {name for path in files for name in format_of(path).settings}
    for name, value in reading._asdict().items():
        if name not in used and value != Reading._field_defaults[name]:
            reasons[name] = f"{name} = {value!r}: it has no effect on files such as {files[0].name}"
    return reasons


def read_documents(paths: Sequence[str], reading: Reading, glob: str = EVERY_FILE) -> Iterator[str]:
    """All documents of files, in order, without nulls. Raises ConfigError for what cannot be read."""
    (texts,) = document_texts([paths], glob, reading)
    yield from texts.every()


@dataclasses.dataclass(frozen=True)
class DocumentTexts(FileTexts):
    """The documents of files, each with its name: what `python -m jaxdl.data prepare` tokenizes."""

    files: tuple[tuple[str, str], ...]
    reading: Reading
    noun = "documents"

    def named_files(self) -> tuple[tuple[str, str], ...]:
        """`files`; names are relative to the folders that were searched."""
        return self.files

    @property
    def identity(self) -> list[Any]:
        """How the files are read, and their states."""
        # CSV was plain text once: those tokens are others.
        read_anew = ["columns of CSV"] if any(suffix_of(Path(name)) == ".csv" for name, _ in self.files) else []
        return [self.reading, *read_anew, self.state]

    def parts(self, part_bytes: int) -> list[Span]:
        """Spans of the files, each of about so many bytes where its format can be cut."""
        return [span for path in self.sources for span in format_of(path).spans(path, self.reading, part_bytes)]

    def read(self, part: Span) -> Iterator[str | None]:
        """The documents of a span, in order, None for a null."""
        with reading_file(part.path):
            yield from format_of(Path(part.path)).read(part, self.reading)

    def every(self) -> Iterator[str]:
        """All documents, in order, without nulls."""
        for span in self.parts(1 << 40):
            yield from (text for text in self.read(span) if text is not None)

    def why_none(self) -> str:
        """The message for files without text, with the first names."""
        names = ", ".join(name for name, _ in self.files[:3])
        return f"{names}: there is no text in {'them' if len(self.files) > 1 else 'it'}."


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ConfigError(f"{path}: it has no column {column!r}, but {', '.join(names)}. Set column.")


def open_parquet(path: Path) -> Any:
    """An open Parquet file. Raises ConfigError."""
    import_text("pyarrow", str(path))
    parquet = import_text("pyarrow.parquet", str(path))
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError.
        raise ConfigError(f"{path}: it cannot be read as Parquet ({error}).") from None


def open_dataset(path: str) -> Any:
    """The data set in a folder that `datasets` wrote. Raises ConfigError, also for one of several splits."""
    datasets = import_text("datasets", path)
    try:
        data = datasets.load_from_disk(path)
    except (OSError, ValueError, IndexError, KeyError) as error:  # The library checks little.
        why = error if isinstance(error, OSError | ValueError) else "it has no rows, or is damaged"
        raise ConfigError(f"{path}: the datasets library cannot load it ({why}).") from None
    if isinstance(data, dict):
        raise ConfigError(
            f"{path}: it has the splits {', '.join(data)}. Name the folder of one, {path}/{next(iter(data))}."
        )
    return data


def _column_texts(values: Sequence[Any], path: str, column: str) -> Iterator[str | None]:
    for value in values:
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{path}: column {column!r} has a {type(value).__name__}, not a string. Set column.")
        yield value
