"""Pairs of texts in files: tab-separated, JSON lines, or a file of each language; read in parts, also compressed."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.lines import (
    JSON_LINES,
    TABLE,
    Span,
    line_spans,
    lines,
    open_lines,
    place,
    reading_file,
    record_spans,
    records,
    text_in,
)
from jaxdl.data.remote import reading
from jaxdl.data.text.texts import FileTexts, Texts
from jaxdl.data.text_files import is_compressed, suffix_of

Pair = tuple[str, str]


class PairTexts(Texts):
    """The pairs of a split, as texts: the source and the target of each pair of which neither is empty."""

    noun = "pairs"
    texts_each = 2

    @abc.abstractmethod
    def pairs(self, part: Any) -> Iterator[tuple[str | None, str | None]]:
        """The pairs of a part, in order, None for a null. Raises ConfigError for what cannot be read."""

    def every(self) -> Iterator[Pair]:
        """All pairs, in order, without those that have a null."""
        for part in self.parts(1 << 62):
            for source, target in self.pairs(part):
                if source is not None and target is not None:
                    yield source, target

    def read(self, part: Any) -> Iterator[str | None]:
        """The texts of the pairs of a part, the source first; a pair with a null is one null."""
        for source, target in self.pairs(part):
            if source is None or target is None:
                yield None
            elif source.strip() and target.strip():
                yield source
                yield target


@dataclasses.dataclass(frozen=True)
class PairFiles(PairTexts, FileTexts):
    """Pairs in one file, or in two: that of the sources and that of the targets."""

    paths: tuple[str, ...]
    split: str

    def __post_init__(self) -> None:
        for path in self.paths:
            with reading(path):
                is_file = Path(path).is_file()
            if not is_file:
                raise ConfigError(f"{path}: no such file. Files of pairs are named relative to --data.folder.")

    def named_files(self) -> list[tuple[str, str]]:
        """(name, path) of each file; names are without their folders."""
        return [(Path(path).name, path) for path in self.paths]

    @property
    def identity(self) -> list[Any]:
        """The form of the files, and their states."""
        return [type(self).__name__, self.state]

    def parts(self, part_bytes: int) -> list[Any]:
        """Spans of lines of about so many bytes; a compressed file is one."""
        return line_spans(Path(self.paths[0]), part_bytes)

    def why_none(self) -> str:
        """The message for files without a pair."""
        names = " and ".join(self.paths)
        return f"--data.{self.split}: {names}: the split {self.split} has no pair of two texts that are not empty."


class TabSeparated(PairFiles):
    """A source, a tab and a target in each line."""

    def pairs(self, part: Span) -> Iterator[Pair]:
        """The pairs of the lines of a span. Raises ConfigError for a line of another form."""
        with reading_file(part.path):
            for number, line in enumerate(lines(part)):
                cells = line.rstrip("\r\n").split("\t")
                if len(cells) != 2:
                    raise ConfigError(
                        f"{place(part, number)}: {len(cells)} columns, not a source and a target with a tab between "
                        "them."
                    )
                yield cells[0], cells[1]


@dataclasses.dataclass(frozen=True)
class JsonPairs(PairFiles):
    """A JSON object in each line, or an array of them, with two fields of texts."""

    fields: tuple[str, str]

    @property
    def identity(self) -> list[Any]:
        """The fields, and what identifies the files."""
        return [self.fields, *super().identity]

    def parts(self, part_bytes: int) -> list[Any]:
        """Spans of lines of about so many bytes; a file that is one array is one."""
        return record_spans(Path(self.paths[0]), part_bytes)

    def pairs(self, part: Any) -> Iterator[tuple[str | None, str | None]]:
        """The pairs of the objects of a span, None for a null. Raises ConfigError for one without the fields."""
        advice = "Name the fields with --data.source and --data.target."
        with reading_file(part.path):
            for where, record in records(part):
                source, target = (text_in(record, field, where, advice) for field in self.fields)
                yield source, target


class _Beside(NamedTuple):
    """As many lines of the file of the sources and of that of the targets."""

    source: Span
    target: Span

    @property
    def num_bytes(self) -> int:
        return self.source.num_bytes + self.target.num_bytes


class TwoFiles(PairFiles):
    """A file of sources, and one with their translations in the same lines."""

    def parts(self, part_bytes: int) -> list[_Beside]:
        """As many lines of both files: they are counted, since those of one line differ in length."""
        sizes = [size for _, size, _ in self.state]
        if any(is_compressed(Path(path)) for path in self.paths):
            part_bytes = sum(sizes)
        cuts = [(0, 0)]
        if part_bytes < sum(sizes):
            with open_lines(Path(self.paths[0])) as sources, open_lines(Path(self.paths[1])) as targets:
                at = [sources.tell(), targets.tell()]  # Behind their byte order marks.
                for source, target in self._beside(sources, targets):
                    at = [at[0] + len(source), at[1] + len(target)]
                    if sum(at) - sum(cuts[-1]) >= part_bytes:
                        cuts.append((at[0], at[1]))
        if cuts[-1] != tuple(sizes):
            cuts.append((sizes[0], sizes[1]))

        def spans(begins: tuple[int, int], ends: tuple[int, int]) -> Iterator[Span]:
            for path, begin, end in zip(self.paths, begins, ends, strict=True):
                yield Span(path, begin, end, end - begin)

        return [_Beside(*spans(begins, ends)) for begins, ends in itertools.pairwise(cuts)]

    def pairs(self, part: _Beside) -> Iterator[Pair]:
        """The pairs of the lines. Raises ConfigError if one file has more."""
        with reading_file(" and ".join(self.paths)):
            for source, target in self._beside(lines(part.source), lines(part.target)):
                yield source.rstrip("\r\n"), target.rstrip("\r\n")

    def _beside(self, sources: Iterator[Any], targets: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        for source, target in itertools.zip_longest(sources, targets):
            if source is None or target is None:
                longer, shorter = reversed(self.paths) if source is None else self.paths
                raise ConfigError(
                    f"{longer} has more lines than {shorter}. Line n of one translates line n of the other."
                )
            yield source, target


def pair_files(files: Sequence[str], fields: tuple[str, str], split: str) -> PairFiles:
    """The pairs of one file or two, whose form is seen by the name.

    Raises ConfigError for a file that is not there, and for two of which one has pairs by its name.
    """
    paths = tuple(str(expand_home(file)) for file in files)
    if len(paths) == 2:
        for path in paths:
            if suffix_of(Path(path)) in (TABLE, *JSON_LINES):
                raise ConfigError(
                    f"--data.{split}: {path} has pairs by its name. Two files are one of sources and one of targets, a "
                    "text on each line; join several files of pairs into one."
                )
        return TwoFiles(paths, split)
    if has_fields(paths):
        return JsonPairs(paths, split, fields)
    return TabSeparated(paths, split)


def has_fields(files: Sequence[str]) -> bool:
    """Whether the pairs of these files are fields of JSON objects, by the names of the files."""
    return len(files) == 1 and suffix_of(Path(files[0])) in JSON_LINES
