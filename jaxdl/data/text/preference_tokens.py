"""Rows with preferences in tokens: read from files, and what cannot be used is counted and named."""

from __future__ import annotations

import dataclasses
import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import Codec
from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.data.text.forms import EVERY_FILE, is_searched
from jaxdl.data.text.preference_rows import PreferenceTokens
from jaxdl.data.text.preference_texts import Columns, PairTexts, UnusableRow, common_length, pair_texts
from jaxdl.data.text.row_files import find_rows, read_rows, row_spans

_AT_ONCE = 1024
"""Pairs that are tokenized at a time."""
_NAMED, _LISTED = 3, 12
_WHOLE = 1 << 62


class Unused:
    """The rows that are not used, by the reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        """Counts a row; the first places of each reason are named."""
        self.counts[reason] += 1
        places = self._places.setdefault(reason, [])
        if len(places) < _NAMED:
            places.append(place)

    def take(self, other: Unused) -> None:
        """Counts those of another too."""
        self.counts.update(other.counts)
        for reason, places in other._places.items():
            self._places[reason] = [*self._places.get(reason, []), *places][:_NAMED]

    def __bool__(self) -> bool:
        return bool(self.counts)

    def text(self, num_rows: int) -> str:
        """What is said of them, of all rows."""
        total = sum(self.counts.values())
        reasons = (
            f"{count:,}: {reason} ({', '.join(self._places[reason])}{', ...' if count > _NAMED else ''})"
            for reason, count in self.counts.most_common()
        )
        return f"{total:,} of {num_rows:,} rows are left out: {'; '.join(reasons)}"


class ReadPairs(NamedTuple):
    """The pairs of files in tokens, and where each is, for messages."""

    pairs: PreferenceTokens
    places: list[str]
    unused: Unused
    num_rows: int
    num_merged: int
    """Pairs whose prompt ends within a token of an answer, or is rendered otherwise alone: its end is learned too."""
    not_used: list[str]
    """What else was not used, in words: columns, and files in the folders that have no rows by their names."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """How rows become tokens.

    Attributes:
      columns: their names.
      codec: the tokenizer; its opening begins each text that no template has rendered, and its end follows it.
      template: makes texts of messages.
      now: what it takes for the present.
    """

    columns: Columns
    codec: Codec
    template: ChatTemplate
    now: datetime.datetime


def read_pairs(paths: Sequence[str], glob: str, reader: Reader) -> ReadPairs:
    """The pairs of files in tokens. Raises ConfigError for what cannot be found or read, and where none is usable."""
    if glob != EVERY_FILE and not any(is_searched(expand_home(path)) for path in paths):
        raise ConfigError(f"glob = {glob!r}: no path is a folder of files, so it has no effect. Leave it out.")
    files, others = find_rows(paths, glob)

    def rows() -> Iterator[tuple[str, Any]]:
        for name, path in files:
            spans = row_spans(Path(path), _WHOLE)
            of_file = (row for span in spans for row in read_rows(span, reader.columns.every))
            yield from ((f"{name}: row {number + 1:,}", row) for number, row in enumerate(of_file))

    read = tokenized(rows(), reader, ", ".join(paths))
    if others:
        read.not_used.append(f"{len(others):,} files that are not read: {_some(others)}")
    return read


def tokenized(rows: Iterable[tuple[str, Any]], reader: Reader, what: str) -> ReadPairs:
    """The pairs of rows in tokens; each row with its place, for messages. Raises ConfigError where none is usable.

    `what` are all of them, for messages.
    """
    unused, places, num_rows, num_objects, num_merged = Unused(), list[str](), 0, 0, 0
    tokens, answers = list[np.ndarray](), list[int]()
    names: Counter[str] = Counter()

    def usable() -> Iterator[tuple[str, PairTexts]]:
        nonlocal num_rows, num_objects
        for place, row in rows:
            num_rows += 1
            num_objects += isinstance(row, dict)
            names.update(list(row) if isinstance(row, dict) else ())
            try:
                yield place, pair_texts(row, reader.columns, reader.template, reader.now)
            except UnusableRow as error:
                unused.add(str(error), place)

    for group in _groups(usable()):
        for (place, _), (merged, start, both) in zip(group, _encoded(group, reader.codec), strict=True):
            if any(len(text) <= start for text in both) or both[0] == both[1]:
                unused.add("answers that differ in no token", place)
                continue
            num_merged += merged
            places.append(place)
            tokens += [np.array(text, np.int32) for text in both]
            answers += [max(1, start)] * 2
    if not places:
        raise ConfigError(_why_none(what, reader.columns, unused, num_rows, names))
    starts = np.concatenate([[0], np.cumsum([len(text) for text in tokens])]).astype(np.int64)
    pairs = PreferenceTokens(np.concatenate(tokens), starts, np.array(answers, np.int64))
    return ReadPairs(pairs, places, unused, num_rows, num_merged, _not_used(reader.columns, names, num_objects))


def _not_used(columns: Columns, names: Counter[str], num_rows: int) -> list[str]:
    """What of the files was not used, in words. Raises ConfigError for the name of a prompt that no row has."""
    told = []
    if not names[columns.prompt]:
        if columns.prompt != Columns().prompt:
            raise ConfigError(f"--data.prompt {columns.prompt}: no row has this column, but {_some(names)}.")
        told.append("there is no column of prompts, so they are what both answers begin with (--data.prompt)")
    elif (lacking := num_rows - names[columns.prompt]) > 0:
        told.append(f"{lacking:,} rows have no {columns.prompt!r}: it is what both answers begin with")
    if others := {name: count for name, count in names.items() if name not in columns.every}:
        told.append(f"columns that are not used: {_some(others)}")
    return told


def _some(names: Collection[str]) -> str:
    """The first of these names, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


def _groups(pairs: Iterator[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for pair in pairs:
        group.append(pair)
        if len(group) == _AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _encoded(group: Sequence[tuple[str, PairTexts]], codec: Codec) -> Iterator[tuple[bool, int, list[list[int]]]]:
    """Of each pair: whether its prompt is cut, the place of the answers' first token, and the tokens of both texts.

    The answers begin where the tokens of a text and those of the prompt alone differ, as in TRL.
    """
    flat = [text for _, pair in group for text in pair[:3]]
    encoded = iter(codec.encode_many(flat))
    for _, pair in group:
        prompt, *both = next(encoded), next(encoded), next(encoded)
        if not pair.rendered:
            prompt = [*codec.opening, *prompt]
            both = [_ended([*codec.opening, *text], codec.separator) for text in both]
        start = min(common_length(prompt, text) for text in both)
        yield start < len(prompt), start, both


def _ended(tokens: list[int], end: Sequence[int]) -> list[int]:
    """The tokens with what ends a text, unless they end so."""
    return tokens if tokens[-len(end) :] == list(end) else [*tokens, *end]


def _why_none(where: str, columns: Columns, unused: Unused, num_rows: int, names: Counter[str]) -> str:
    if not num_rows:
        return f"{where}: there is no row in it."
    known = f"The columns there are {_some(names)}" if names else "There are no columns"
    return (
        f"{where}: no pair can be used. {unused.text(num_rows)}. {known}; a row needs "
        f"{columns.chosen!r} and {columns.rejected!r}, and perhaps {columns.prompt!r}. Name them with "
        "--data.prompt, --data.chosen, --data.rejected."
    )
