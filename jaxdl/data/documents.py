"""Documents of text from files: JSON lines, Parquet, plain text, tables of pairs, folders of the `datasets` library.

A format says how a file is cut into spans that can be read alone, so that several processes can read it, and reads
them. Which format a file has is seen by its name.
"""

from __future__ import annotations

import abc
import gzip
import inspect
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, NamedTuple

from jaxdl.config import ConfigError
from jaxdl.data.codec import import_text

PlainDocument = Literal["file", "line"]
COMPRESSED = (".gz", ".zst")
_formats: list[type[Format]] = []


class Reading(NamedTuple):
    """How documents are read: the name of the column with the text, and what a document of a plain file is."""

    column: str = "text"
    document: PlainDocument = "file"


class Span(NamedTuple):
    """A part of a file that is read alone: bytes, rows or groups of rows `start` to `stop`, `num_bytes` of text."""

    path: str
    start: int
    stop: int
    num_bytes: int


class Format(abc.ABC):
    """How files of one form are read. A subclass registers itself when its class statement runs."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """The ends of the names of such files, without that of a compression."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _formats.append(cls)

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether a file or folder has this form."""
        return path.is_file() and _suffix(path) in cls.suffixes

    @abc.abstractmethod
    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        """The spans of a file, in order, of about `span_bytes` where it can be cut."""

    @abc.abstractmethod
    def read(self, span: Span, reading: Reading) -> Iterator[str]:
        """The documents of a span, in order. Raises ConfigError for what cannot be read."""


class _Lines(Format):
    """Files whose lines are read alone: a span has the lines that begin in it. Compressed ones are one span."""

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        size = path.stat().st_size
        if path.suffix in COMPRESSED:
            return [Span(str(path), 0, size, size)]
        starts = range(0, size, span_bytes)
        return [Span(str(path), at, min(at + span_bytes, size), min(span_bytes, size - at)) for at in starts]

    def read(self, span: Span, reading: Reading) -> Iterator[str]:
        for number, line in enumerate(self._lines(span)):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{span.path}: {_line(span, number)} is not UTF-8 ({error.reason}).") from None
            yield from self.documents(text, span, number, reading)

    def _lines(self, span: Span) -> Iterator[bytes]:
        path = Path(span.path)
        with _opened(path) as file:
            if path.suffix in COMPRESSED:
                yield from file
                return
            if span.start:
                file.seek(span.start - 1)
                file.readline()  # The end of the line that begins in the span before, or its newline.
            while file.tell() < span.stop and (line := file.readline()):
                yield line

    @abc.abstractmethod
    def documents(self, line: str, span: Span, number: int, reading: Reading) -> Iterator[str]:
        """The documents of a line; `number` is its number in the span."""


class _JsonLines(_Lines):
    suffixes = (".jsonl", ".ndjson", ".json")

    def documents(self, line: str, span: Span, number: int, reading: Reading) -> Iterator[str]:
        if not line.strip():
            return
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{span.path}: {_line(span, number)} is not JSON ({error}). Each line must be one JSON object."
            ) from None
        where = f"{span.path}: {_line(span, number)}"
        text = _text_of(record, reading.column, where)
        if not text.isascii() and not _is_unicode(text):
            raise ConfigError(f"{where}: its {reading.column!r} has half a surrogate pair, which is no character.")
        yield text


class _Table(_Lines):
    """Tab-separated columns, each a document: pairs of sentences, for training a tokenizer."""

    suffixes = (".tsv",)

    def documents(self, line: str, span: Span, number: int, reading: Reading) -> Iterator[str]:
        yield from (cell for cell in line.rstrip("\r\n").split("\t") if cell)


class _Plain(_Lines):
    """A file that has no other format: it is a document, or each of its lines is."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return path.is_file() and not any(other.reads(path) for other in _formats if other is not cls)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        if reading.document == "line":
            return super().spans(path, reading, span_bytes)
        size = path.stat().st_size
        return [Span(str(path), 0, size, size)]

    def read(self, span: Span, reading: Reading) -> Iterator[str]:
        if reading.document == "line":
            yield from super().read(span, reading)
            return
        with _opened(Path(span.path)) as file:
            content = file.read()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{span.path}: not UTF-8 ({error.reason} at byte {error.start}). Leave the file out, or convert it."
            ) from None
        if text:
            yield text

    def documents(self, line: str, span: Span, number: int, reading: Reading) -> Iterator[str]:
        if text := line.rstrip("\r\n"):
            yield text


class _Parquet(Format):
    """A span is a range of row groups."""

    suffixes = (".parquet",)

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        with _parquet(path) as file:
            names = file.schema_arrow.names
            if reading.column not in names:
                raise ConfigError(f"{path}: it has no column {reading.column!r}, but {', '.join(names)}. Set column.")
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        sizes = []
        for group in groups:
            columns = (group.column(number) for number in range(group.num_columns))
            named = [one for one in columns if one.path_in_schema.split(".")[0] == reading.column]
            sizes.append(sum(one.total_uncompressed_size for one in named))
        return [Span(str(path), number, number + 1, size) for number, size in enumerate(sizes)]

    def read(self, span: Span, reading: Reading) -> Iterator[str]:
        with _parquet(Path(span.path)) as file:
            row_groups = list(range(span.start, span.stop))
            for batch in file.iter_batches(256, row_groups=row_groups, columns=[reading.column]):
                yield from _column_texts(batch.column(0).to_pylist(), span.path, reading.column)


class _DatasetFolder(Format):
    """A folder that `datasets.Dataset.save_to_disk` wrote; of a DatasetDict, one split of it. A span is rows."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        data = _dataset(str(path))
        if reading.column not in data.column_names:
            raise ConfigError(
                f"{path}: it has no column {reading.column!r}, but {', '.join(data.column_names)}. Set column."
            )
        row_bytes = max(1, data.data.nbytes // max(1, len(data)))
        rows = max(1, span_bytes // row_bytes)
        cuts = [*range(0, len(data), rows), len(data)]
        return [Span(str(path), at, end, (end - at) * row_bytes) for at, end in itertools.pairwise(cuts)]

    def read(self, span: Span, reading: Reading) -> Iterator[str]:
        data = _dataset(span.path)
        for start in range(span.start, span.stop, 256):
            rows = data[start : min(start + 256, span.stop)]
            yield from _column_texts(rows[reading.column], span.path, reading.column)


def format_of(path: Path) -> Format:
    """The format of a file, or of a folder of the `datasets` library."""
    return next(form for form in _formats if form.reads(path))()


def find_documents(paths: Sequence[str], glob: str) -> list[tuple[str, Path]]:
    """(name, path) of the files of `paths`, each once, sorted by name, and of folders that `datasets` wrote.

    A name is relative to the folder that was searched, so it is the same on every machine. Raises ConfigError when a
    path has none.
    """
    found: dict[Path, str] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_file() or _DatasetFolder.reads(path):
            named = [(path.name, path)]
        elif path.is_dir():
            try:
                files = [file for file in path.glob(glob) if file.is_file()]
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(f"glob = {glob!r}: {error}. Give a pattern inside the folders of paths.") from None
            hidden = [file for file in files if any(part[0] == "." for part in file.relative_to(path).parts)]
            named = [(file.relative_to(path).as_posix(), file) for file in files if file not in set(hidden)]
            if not named:
                raise ConfigError(f"{text}: no file in it matches {glob!r}. Change glob, or name another folder.")
        else:
            raise ConfigError(f"{text}: no such file or folder.")
        for name, file in named:
            found.setdefault(file.resolve(), name)
    return sorted((name, path) for path, name in found.items())


def read_documents(paths: Sequence[str], reading: Reading, glob: str = "**/*") -> Iterator[str]:
    """All documents of files, in order. Raises ConfigError for what cannot be read."""
    for _, path in find_documents(paths, glob):
        form = format_of(path)
        for span in form.spans(path, reading, 1 << 40):
            yield from read_span(span, reading)


def read_span(span: Span, reading: Reading) -> Iterator[str]:
    """The documents of a span, in order. Raises ConfigError for what cannot be read, such as a file that is cut off."""
    try:
        yield from format_of(Path(span.path)).read(span, reading)
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:  # Of gzip, pyarrow, JSON.
        raise ConfigError(f"{span.path}: it cannot be read ({error}). Copy or download the file again.") from None


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix in COMPRESSED else path.suffix.lower()


def _line(span: Span, number: int) -> str:
    return f"line {number + 1}" + (f" after byte {span.start:,}" if span.start else "")


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.suffix == ".gz":
            return io.BufferedReader(gzip.open(path, "rb"))  # pyright: ignore[reportArgumentType]
        if path.suffix == ".zst":
            pyarrow = import_text("pyarrow", str(path))
            return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read ({error.strerror or error}).") from None


def _parquet(path: Path) -> Any:
    import_text("pyarrow", str(path))
    parquet = import_text("pyarrow.parquet", str(path))
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError.
        raise ConfigError(f"{path}: it cannot be read as Parquet ({error}).") from None


def _dataset(path: str) -> Any:
    datasets = import_text("datasets", path)
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the datasets library cannot load it ({error}).") from None
    if isinstance(found, dict):
        raise ConfigError(
            f"{path}: it has the splits {', '.join(found)}. Name the folder of one, {path}/{next(iter(found))}."
        )
    return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_of(record: Any, column: str, where: str) -> str:
    if not isinstance(record, dict) or column not in record:
        names = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{where}: it has no {column!r}, but {names}. Set column.")
    if not isinstance(record[column], str):
        raise ConfigError(f"{where}: its {column!r} is {type(record[column]).__name__}, not a string. Set column.")
    return record[column]


def _column_texts(values: Sequence[Any], path: str, column: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise ConfigError(f"{path}: column {column!r} has a {type(value).__name__}, not a string. Set column.")
        yield value
