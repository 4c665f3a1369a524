"""Rows with preferences in tokens: read from files, and what cannot be used is counted and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.data.text.preference_rows import PreferenceTokens
from jaxdl.data.text.preference_texts import Columns, PairTexts, UnusableRow, common_length, pair_texts
from jaxdl.data.text.row_files import find_rows, read_rows, row_spans

_AT_ONCE = 1024
"""Pairs that are tokenized at a time."""
_NAMED = 3
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
    other_files: list[str]
    """Files in the folders that have no rows by their names."""


def read_pairs(
    paths: Sequence[str], glob: str, columns: Columns, codec: Codec, template: ChatTemplate, opening: Sequence[int]
) -> ReadPairs:
    """The pairs of files in tokens. `opening` begins each text that no template has rendered, and its end follows it.

    Raises ConfigError for what cannot be found or read, and where no row can be used.
    """
    files, others = find_rows(paths, glob)
    unused, places, num_rows, num_merged = Unused(), list[str](), 0, 0
    tokens, answers = list[np.ndarray](), list[int]()
    names: Counter[str] = Counter()

    def usable() -> Iterator[tuple[str, PairTexts]]:
        nonlocal num_rows
        for name, path in files:
            number = 0
            for span in row_spans(Path(path), _WHOLE):
                for row in read_rows(span, columns.every):
                    number, num_rows = number + 1, num_rows + 1
                    names.update(list(row) if isinstance(row, dict) else ())
                    place = f"{name}: row {number:,}"
                    try:
                        yield place, pair_texts(row, columns, template)
                    except UnusableRow as error:
                        unused.add(str(error), place)

    for group in _groups(usable()):
        for (place, _), (merged, start, both) in zip(group, _encoded(group, codec, opening), strict=True):
            if any(len(text) <= start for text in both) or both[0] == both[1]:
                unused.add("answers that differ in no token", place)
                continue
            num_merged += merged
            places.append(place)
            tokens += [np.array(text, np.int32) for text in both]
            answers += [max(1, start)] * 2
    if not places:
        raise ConfigError(_why_none(paths, columns, unused, num_rows, names))
    starts = np.concatenate([[0], np.cumsum([len(text) for text in tokens])]).astype(np.int64)
    pairs = PreferenceTokens(np.concatenate(tokens), starts, np.array(answers, np.int64))
    return ReadPairs(pairs, places, unused, num_rows, num_merged, others)


def _groups(pairs: Iterator[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    for pair in pairs:
        group.append(pair)
        if len(group) == _AT_ONCE:
            yield group
            group = []
    if group:
        yield group


def _encoded(
    group: Sequence[tuple[str, PairTexts]], codec: Codec, opening: Sequence[int]
) -> Iterator[tuple[bool, int, list[list[int]]]]:
    """Of each pair: whether its prompt is cut, the place of the answers' first token, and the tokens of both texts.

    The answers begin where the tokens of a text and those of the prompt alone differ, as in TRL.
    """
    flat = [text for _, pair in group for text in pair[:3]]
    encoded = iter(codec.encode_many(flat))
    for _, pair in group:
        prompt, *both = next(encoded), next(encoded), next(encoded)
        if not pair.rendered:
            prompt = [*opening, *prompt]
            both = [_ended([*opening, *text], codec.separator) for text in both]
        start = min(common_length(prompt, text) for text in both)
        yield start < len(prompt), start, both


def _ended(tokens: list[int], end: Sequence[int]) -> list[int]:
    """The tokens with what ends a text, unless they end so."""
    return tokens if tokens[-len(end) :] == list(end) else [*tokens, *end]


def _why_none(paths: Sequence[str], columns: Columns, unused: Unused, num_rows: int, names: Counter[str]) -> str:
    where = ", ".join(paths)
    if not num_rows:
        return f"{where}: there is no row in it."
    known = ", ".join(name for name, _ in names.most_common(12)) or "none"
    return (
        f"{where}: no pair can be used. {unused.text(num_rows)}. The columns there are {known}; a row needs "
        f"{columns.chosen!r} and {columns.rejected!r}, and perhaps {columns.prompt!r}. Name them with "
        "--data.prompt, --data.chosen, --data.rejected."
    )
