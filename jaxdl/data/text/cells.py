"""Rows of CSV and TSV."""

from __future__ import annotations

import ast
import contextlib
import csv
import io
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.data.lines import (
    JSON,
    LARGEST_DOCUMENT,
    TABLE,
    RepeatedKey,
    Span,
    line_spans,
    lines,
    open_lines,
    unique,
)
from jaxdl.data.tables.row_groups import check_names
from jaxdl.data.text_files import suffix_of

_MARKS = ",;\t|"
"""What may separate cells."""
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")


def header(path: Path, wanted: Collection[str]) -> tuple[str, list[str]]:
    """(what separates cells, the names of the columns): that with the most of the wanted names.

    Raises ConfigError for text that is not UTF-8, and for two wanted columns of one name.
    """
    csv.field_size_limit(LARGEST_DOCUMENT)
    with _opened(path) as file:
        first = file.readline().rstrip("\r\n")
    usual = "\t" if suffix_of(path) == TABLE else ","
    found = []
    for mark in _MARKS:
        names = next(csv.reader([first], delimiter=mark), [])
        count = sum(name in wanted for name in names)
        found.append((count, bool(count) and mark == usual, len(names), mark, names))
    *_, mark, names = max(found, key=lambda choice: choice[:3])
    check_names([name for name in names if name in wanted], str(path))
    return mark, names


def cell_rows(span: Span, wanted: Collection[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """(where it is, the row) of each row below the names of the columns; `span` is the whole file.

    Tab-separated files in which each line alone is a row may have quotes at the beginning of a text. Raises ConfigError
    for rows that have other numbers of cells than there are names.
    """
    path, number = Path(span.path), 0
    mark, names = header(path, wanted)
    if mark == "\t" and all(line.count(mark) == len(names) - 1 for line in _filled(span)):
        rows = (list(map(_unquoted, line.split(mark))) for line in _filled(span))
    else:
        rows = _quoted(path, mark)
    try:
        for number, cells in enumerate(rows):
            if not number or not cells:
                continue
            where = f"{path}: row {number:,}"
            if len(cells) != len(names):
                raise ConfigError(
                    f"{where}: it has {len(cells)} cells, and the first line {len(names)} names. Correct it; a cell "
                    "with the separator or a line break in it must stand in double quotes."
                )
            yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}: after row {number:,}: {error}. Correct it.") from None


def _quoted(path: Path, mark: str) -> Iterator[list[str]]:
    with _opened(path) as file:
        yield from csv.reader(file, delimiter=mark, strict=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """The file as text with the ends of its lines: a reader of csv ends none at U+2028. Raises ConfigError."""
    with open_lines(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        try:
            yield text
        except UnicodeDecodeError:
            for _ in lines(line_spans(path, path.stat().st_size + 1)[0]):
                pass  # It raises with the number of the line.
            raise


def _filled(span: Span) -> Iterator[str]:
    return (line for line in (line.rstrip("\r\n") for line in lines(span)) if line)


def _unquoted(cell: str) -> str:
    """A cell without the quotes that a program has put around all of it."""
    inside = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inside.replace('""', "")
    return inside.replace('""', '"') if quoted else cell


def of_cell(text: str, where: str) -> Any:
    """What a cell is, which has no type: None where it is empty, a list of messages, or the text.

    Lists are JSON, or as Python writes them, which pandas does. Raises ConfigError for one that cannot be read.
    """
    if not text:
        return None
    if not _MESSAGES.match(text):
        return text
    for read in (JSON.decode, _literal):
        try:
            if isinstance(value := read(text.strip()), list):
                return value
        except RepeatedKey as error:
            raise ConfigError(f"{where}: {error}. Name each once.") from None
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    raise ConfigError(
        f"{where} begins like a list of messages, but cannot be read as one. Write JSON into the cells, or write JSON "
        "lines or Parquet."
    )


def _literal(text: str) -> Any:
    """What Python writes of a list. Raises ValueError, RepeatedKey where a dictionary has a key twice."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            unique([(ast.literal_eval(key), None) for key in node.keys if key is not None])
    return ast.literal_eval(tree)
