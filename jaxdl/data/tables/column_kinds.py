"""What a network reads of a column of a table: a number, a date, or one of some words; fitted on training rows.

A `Column` says how cells become numbers (NaN where missing) and ids of words, in a network's data as in its use. It is
made by `jaxdl.data.tables.fitting`, and is a part of the spec of the data, which every run stores in `data.json`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxdl.data.tables.cells import Cells, Style, parse_number
from jaxdl.data.tables.dates import date_parts, parse_date

MISSING_ID, UNKNOWN_ID, FIRST_ID = 0, 1, 2
"""The ids of a missing word, of one that training rows did not have (or once), and of the first known one."""
_NAMED = 3


@dataclasses.dataclass
class Surprises:
    """What cells had that the training rows did not lead to expect, by column: counts of their texts."""

    unread: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    """Texts that are no number, or no date; they count as missing."""
    unknown: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    """Words that the training rows did not have."""

    def lines(self, kinds: Mapping[str, str]) -> list[str]:
        """Of each such column a line; `kinds` are those of the columns, by name."""
        lines = []
        for name, texts in self.unread.items():
            of = "none is a date" if kinds.get(name) == "date" else "none is a number"
            lines.append(f"column {name!r}: {_counted(texts)}: {of}, so there the value counts as missing")
        for name, texts in self.unknown.items():
            lines.append(f"column {name!r}: {_counted(texts)}: training rows had no such word, so it is an unknown one")
        return lines


def _counted(texts: Counter[str]) -> str:
    rows, shown = sum(texts.values()), ", ".join(repr(text[:40]) for text, _ in texts.most_common(_NAMED))
    return f"{rows:,} {'row has' if rows == 1 else 'rows have'} {shown}{', ...' if len(texts) > _NAMED else ''}"


_by_kind: dict[str, type[Column]] = {}


@dataclasses.dataclass(frozen=True)
class Column(abc.ABC):
    """A column that a network reads. A subclass, a frozen dataclass, registers itself by its `kind`."""

    name: str
    kind: ClassVar[str]
    num_words: ClassVar[int | None] = None
    """How many ids its words have; None for a column of numbers."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _by_kind[cls.kind] = cls

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that it makes: none."""
        return ()

    @abc.abstractmethod
    def encode(self, cells: Cells, surprises: Surprises) -> np.ndarray:
        """The numbers of cells, float64 [row, number] with NaN where missing; or the ids of words, int32 [row]."""

    @abc.abstractmethod
    def described(self) -> str:
        """Name and, if it says something, form or number of words."""

    @abc.abstractmethod
    def example(self) -> Any:
        """A value that the column may have."""

    def to_json(self) -> dict[str, Any]:
        """The fields, with the kind."""
        return {"kind": self.kind} | dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Column:
        """The column of `to_json`."""
        fields: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if name != "kind"
        }
        return _by_kind[values["kind"]](**fields)


@dataclasses.dataclass(frozen=True)
class NumberColumn(Column):
    """A column of numbers or booleans, of which `offset` is subtracted in float64: the network reads float32."""

    style: Style = "point"
    offset: float = 0.0
    as_missing: tuple[str, ...] = ()
    """Texts of training rows that are no numbers; they count as missing."""
    kind: ClassVar[str] = "number"

    @property
    def numbers(self) -> tuple[str, ...]:
        """It makes one, of its own name."""
        return (self.name,)

    def encode(self, cells: Cells, surprises: Surprises) -> np.ndarray:
        """The numbers less the offset, float64 [row, 1]."""
        if cells.form in ("numbers", "booleans"):
            values = cells.values
        else:
            values, unread = cells.read(lambda text: parse_number(text, self.style))
            _note(surprises.unread, self.name, cells, unread, self.as_missing)
        return values[:, None] - self.offset

    def described(self) -> str:
        """The name."""
        return self.name

    def example(self) -> Any:
        """The offset, or a truth."""
        return True if self.style == "boolean" else self.offset


@dataclasses.dataclass(frozen=True)
class DateColumn(Column):
    """A column of dates, perhaps with times; `parts` are those of `jaxdl.data.tables.dates.PARTS` that vary."""

    form: str = "year first"
    offset_days: float = 0.0
    parts: tuple[str, ...] = ("day",)
    as_missing: tuple[str, ...] = ()
    """Texts of training rows that are no dates; they count as missing."""
    kind: ClassVar[str] = "date"

    @property
    def numbers(self) -> tuple[str, ...]:
        """One for each part, `name (week sin)`."""
        return tuple(f"{self.name} ({part})" for part in self.parts)

    def encode(self, cells: Cells, surprises: Surprises) -> np.ndarray:
        """The parts, float64 [row, part]."""
        if cells.form == "times":
            seconds = cells.values
        else:
            seconds, unread = cells.read(lambda text: parse_date(text, self.form))
            _note(surprises.unread, self.name, cells, unread, self.as_missing)
        every = date_parts(seconds, self.offset_days)
        return np.stack([every[part] for part in self.parts], axis=1)

    def described(self) -> str:
        """Name and form."""
        return f"{self.name} ({self.form})"

    def example(self) -> Any:
        """A day in the form of the column."""
        forms = {"year first": "2024-01-31", "day first": "31.1.2024", "month first": "1/31/2024"}
        return forms.get(self.form, "31 Jan 2024" if self.form == "day and name" else "Jan 31, 2024")


@dataclasses.dataclass(frozen=True)
class WordColumn(Column):
    """A column of words; those of `words` have the ids from `FIRST_ID` on."""

    words: tuple[str, ...] = ()
    kind: ClassVar[str] = "words"

    @property
    def num_words(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The known words, the unknown one, and the missing one."""
        return len(self.words) + FIRST_ID

    def encode(self, cells: Cells, surprises: Surprises) -> np.ndarray:
        """The ids, int32 [row]."""
        numbers = {word: number for number, word in enumerate(self.words, FIRST_ID)}
        ids = np.array([numbers.get(text, UNKNOWN_ID) for text in cells.texts] or [MISSING_ID], np.int32)
        _note(surprises.unknown, self.name, cells, np.flatnonzero(ids == UNKNOWN_ID))
        return np.where(cells.places < 0, np.int32(MISSING_ID), ids[np.maximum(cells.places, 0)])

    def described(self) -> str:
        """Name and number of words."""
        return f"{self.name} ({len(self.words)})"

    def example(self) -> Any:
        """The most frequent word."""
        return self.words[0] if self.words else ""


def _note(
    into: dict[str, Counter[str]], name: str, cells: Cells, places: np.ndarray, expected: tuple[str, ...] = ()
) -> None:
    """Counts the rows of texts at these places, without those that are expected."""
    places = np.array([place for place in places.tolist() if cells.texts[place] not in expected], np.int64)
    if len(places):
        counts = np.bincount(cells.places[cells.places >= 0], minlength=len(cells.texts))
        into[name] = Counter({cells.texts[place]: int(counts[place]) for place in places.tolist()})
