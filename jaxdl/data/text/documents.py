"""Documents of text from files: JSON lines, Parquet, plain text, tables of pairs, folders of the `datasets` library.

A format says how a file is cut into spans that can be read alone, so that several processes can read it, and reads
them. Which format a file has is seen by its name.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.lines import LARGEST_DOCUMENT, TABLE, Span, line_spans, lines, open_lines, reading_file, text_in
from jaxdl.data.text.forms import EVERY_FILE, Form, find_documents, is_searched
from jaxdl.data.text.row_files import RowFormat, row_format
from jaxdl.data.text.texts import FileTexts
from jaxdl.data.text_files import suffix_of

PlainDocument = Literal["file", "line"]


class Reading(NamedTuple):
    """How documents are read: the name of the column with the text, and what a document of a plain file is."""

    column: str = "text"
    document: PlainDocument = "file"


class Format(Form):
    """How the documents of files of one form are read."""

    settings: ClassVar[tuple[str, ...]] = ("column",)
    """The fields of `Reading` that have an effect on such files."""

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


class _Rows(Format):
    """Rows, of which one column has the documents."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        return suffix_of(path) != TABLE and RowFormat.find(path) is not None

    def spans(self, path: Path, reading: Reading, span_bytes: int) -> list[Span]:
        form, column = row_format(path), reading.column
        names = form.names(path, [column])
        if names is not None and column not in names:
            raise ConfigError(f"{path}: it has no column {column!r}; it has {', '.join(names)}. Set column.")
        return form.spans(path, span_bytes, [column])

    def read(self, span: Span, reading: Reading) -> Iterator[str | None]:
        for where, row in row_format(Path(span.path)).rows(span, [reading.column]):
            yield text_in(row, reading.column, where, "Set column.")


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
        return path.is_file() and not any(other.reads(path) for other in cls.registered if other is not cls)

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


def format_of(path: Path) -> Format:
    """The format of a file, or of a folder of the `datasets` library."""
    form = Format.find(path)
    assert form is not None, "plain text is what has no other form"
    return form


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
    if glob != EVERY_FILE and not any(is_searched(expand_home(path)) for path in paths):
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
