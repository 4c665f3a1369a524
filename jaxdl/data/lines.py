"""Files of lines, also compressed with gzip or zstd: spans of them that are read alone, and texts in JSON objects."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdl.config import ConfigError
from jaxdl.data.codec import import_text

COMPRESSED = (".gz", ".zst")
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLE = ".tsv"
"""The ends of the names of files whose lines are JSON objects, and of those with tab-separated columns."""


class Span(NamedTuple):
    """A part of a file that is read alone: bytes, rows or groups of rows `start` to `stop`, `num_bytes` of text."""

    path: str
    start: int
    stop: int
    num_bytes: int


def suffix_of(path: Path) -> str:
    """The end of a file's name in lower case, without that of a compression."""
    return Path(path.stem).suffix.lower() if path.suffix in COMPRESSED else path.suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """The file, decompressed while it is read. Raises ConfigError when it cannot be opened."""
    try:
        if path.suffix == ".gz":
            return io.BufferedReader(gzip.open(path, "rb"))  # pyright: ignore[reportArgumentType]
        if path.suffix == ".zst":
            pyarrow = import_text("pyarrow", str(path))
            return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read ({error.strerror or error}).") from None


@contextlib.contextmanager
def reading_file(path: str) -> Iterator[None]:
    """Turns errors of gzip, pyarrow and JSON into messages for the user: of a file that is cut off, for instance."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ConfigError(f"{path}: it cannot be read ({error}). Copy or download the file again.") from None


def line_spans(path: Path, span_bytes: int) -> list[Span]:
    """Spans of about so many bytes, each of the lines that begin in it; a compressed file is one."""
    size = path.stat().st_size
    if path.suffix in COMPRESSED:
        return [Span(str(path), 0, size, size)]
    starts = range(0, size, span_bytes)
    return [Span(str(path), at, min(at + span_bytes, size), min(span_bytes, size - at)) for at in starts]


def lines(span: Span) -> Iterator[str]:
    """The lines of a span, each with its end. Raises ConfigError for what is not UTF-8."""
    for number, line in enumerate(_raw_lines(span)):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place(span, number)} is not UTF-8 ({error.reason}). Correct it.") from None


def _raw_lines(span: Span) -> Iterator[bytes]:
    path = Path(span.path)
    with opened(path) as file:
        if path.suffix in COMPRESSED:
            yield from file
            return
        if span.start:
            file.seek(span.start - 1)
            file.readline()  # The end of the line that begins in the span before, or its newline.
        while file.tell() < span.stop and (line := file.readline()):
            yield line


def place(span: Span, number: int) -> str:
    """Where line `number` of a span is, counted from 0."""
    return f"{span.path}: line {number + 1}" + (f" after byte {span.start:,}" if span.start else "")


def json_object(line: str, where: str) -> Any:
    """The value of a line of JSON. Raises ConfigError, which begins with `where`, for what is none."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}). Each line must be one JSON object.") from None


def text_in(record: Any, field: str, where: str, advice: str) -> str | None:
    """The text of a field of a JSON object, None where it is null; `a.b` is the field `b` of the object `a`.

    Raises ConfigError, which begins with `where` and ends with `advice`, when there is no such text.
    """
    found = record
    for part in [field] if isinstance(record, dict) and field in record else field.split("."):
        if not isinstance(found, dict) or part not in found:
            names = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
            raise ConfigError(f"{where}: it has no {field!r}, but {names}. {advice}")
        found = found[part]
        if found is None:
            return None
    if not isinstance(found, str):
        raise ConfigError(f"{where}: its {field!r} is {type(found).__name__}, not a string. {advice}")
    if not found.isascii() and not _is_unicode(found):
        raise ConfigError(f"{where}: its {field!r} has half a surrogate pair, which is no character. Correct it.")
    return found


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
