"""Files of lines, also compressed: spans of them that are read alone, and texts in JSON objects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.data.text_files import BROKEN, is_compressed, open_text

LARGEST_DOCUMENT = 1 << 30
"""Bytes of a file that is read as a whole: it is in memory, with its tokens."""
JSON_LINES = (".jsonl", ".ndjson", ".json")
TABLE = ".tsv"
"""The ends of the names of files whose lines are JSON objects, and of those with tab-separated columns."""


class RepeatedKey(ValueError):
    """An object has a key twice, of which Python would take the last."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises RepeatedKey."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return made


JSON = json.JSONDecoder(object_pairs_hook=unique)
"""Reads JSON. Raises ValueError, RepeatedKey for an object that has a key twice."""


class Span(NamedTuple):
    """A part of a file that is read alone: bytes, rows or groups of rows `start` to `stop`, `num_bytes` of text."""

    path: str
    start: int
    stop: int
    num_bytes: int


def open_lines(path: Path) -> IO[bytes]:
    """The file, decompressed while it is read, behind its byte order mark. Raises ConfigError."""
    try:
        return open_text(path)
    except BROKEN as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: it cannot be read ({why}).") from None


@contextlib.contextmanager
def reading_file(path: str) -> Iterator[None]:
    """Turns errors of gzip, pyarrow and JSON into messages for the user: of a file that is cut off, for instance."""
    try:
        yield
    except ConfigError:
        raise
    except (*BROKEN, RecursionError) as error:
        raise ConfigError(f"{path}: it cannot be read ({error}). Copy or download the file again.") from None


def line_spans(path: Path, span_bytes: int) -> list[Span]:
    """Spans of about so many bytes, each of the lines that begin in it; a compressed file is one."""
    size = path.stat().st_size
    if is_compressed(path):
        return [Span(str(path), 0, size, size)]
    starts = range(0, size, span_bytes)
    return [Span(str(path), at, min(at + span_bytes, size), min(span_bytes, size - at)) for at in starts]


def lines(span: Span) -> Iterator[str]:
    """The lines of a span, each with its end. Raises ConfigError for what is not UTF-8."""
    for number, line in enumerate(_raw_lines(span)):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{place(span, number)} is not UTF-8 ({error.reason}). Convert it, from Latin-1 for instance: iconv -f "
                "LATIN1 -t UTF-8 FILE > NEW."
            ) from None


def _raw_lines(span: Span) -> Iterator[bytes]:
    path = Path(span.path)
    with open_lines(path) as file:
        if is_compressed(path):
            yield from file
            return
        if span.start > file.tell():  # The first line begins behind a byte order mark.
            file.seek(span.start - 1)
            file.readline()  # The end of the line that begins in the span before, or its newline.
        while file.tell() < span.stop and (line := file.readline()):
            yield line


def record_spans(path: Path, span_bytes: int) -> list[Span]:
    """Spans of a file of JSON, as `line_spans`; a file that is one array is one span."""
    return line_spans(path, path.stat().st_size + 1 if _is_array(path) else span_bytes)


def records(span: Span) -> Iterator[tuple[str, Any]]:
    """The values of a span of JSON lines, or of a file that is one array of them; each with where it is, for messages.

    Raises ConfigError for what cannot be read.
    """
    if span.start == 0 and _is_array(Path(span.path)):
        with open_lines(Path(span.path)) as file:
            content = file.read(LARGEST_DOCUMENT + 1)
        if len(content) > LARGEST_DOCUMENT:
            raise ConfigError(
                f"{span.path}: it is one JSON array of more than {LARGEST_DOCUMENT / 1e9:,.1f} GB, which would be in "
                "memory as a whole. Write JSON lines: one object on each line."
            )
        try:
            values = JSON.decode(content.decode())
        except ValueError as error:
            raise ConfigError(f"{span.path}: it begins like a JSON array, but is not one ({error}).") from None
        yield from ((f"{span.path}: element {number + 1} of the array", value) for number, value in enumerate(values))
        return
    for number, line in enumerate(lines(span)):
        if line.strip():
            where = place(span, number)
            yield where, json_object(line, where)


def _is_array(path: Path) -> bool:
    """Whether a file is one JSON array, by its first character."""
    with open_lines(path) as file:
        while start := file.read(64):
            if start.strip():
                return start.lstrip()[:1] == b"["
    return False


def place(span: Span, number: int) -> str:
    """Where line `number` of a span is, counted from 0."""
    return f"{span.path}: line {number + 1}" + (f" after byte {span.start:,}" if span.start else "")


def json_object(line: str, where: str) -> Any:
    """The value of a line of JSON. Raises ConfigError, which begins with `where`, for what is not JSON."""
    try:
        return JSON.decode(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}). Each line must be one JSON object.") from None


def text_in(record: Any, field: str, where: str, advice: str) -> str | None:
    """The text of a field of a JSON object, None where it is null; `a.b` is the field `b` of the object `a`.

    Raises ConfigError, which begins with `where` and ends with `advice`, when there is no such text.
    """
    value = record
    for part in [field] if isinstance(record, dict) and field in record else field.split("."):
        if not isinstance(value, dict) or part not in value:
            names = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise ConfigError(f"{where}: it has no {field!r}, but {names}. {advice}")
        value = value[part]
        if value is None:
            return None
    if not isinstance(value, str):
        raise ConfigError(f"{where}: its {field!r} is {type(value).__name__}, not a string. {advice}")
    if not value.isascii() and not _is_unicode(value):
        raise ConfigError(f"{where}: its {field!r} has half a surrogate pair, which is not a character. Correct it.")
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
