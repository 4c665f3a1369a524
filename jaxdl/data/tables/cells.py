"""The cells of one column of a table: numbers, times or texts as they came, and which of them are missing."""

from __future__ import annotations

import datetime
import decimal
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxdl.data.tables.arrow_numbers import is_list

_OF_PANDAS = """#N/A #NA -1.#IND -1.#QNAN -NaN -nan 1.#IND 1.#QNAN <NA> N/A NA NULL NaN None n/a nan null NaT"""
MISSING = frozenset(_OF_PANDAS.split()) | {"", "?", "#N/A N/A"}
"""Texts that stand for a missing value: those of pandas, and the question mark of the UCI archive."""
TRUE, FALSE = "true", "false"
_PLAIN = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_GROUPED = {
    ",": re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?"),
    ".": re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+(?:,\d*)?"),
}
_COMMA = re.compile(r"[+-]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][+-]?\d+)?")
_CODE = re.compile(r"0\d+")

Form = Literal["numbers", "booleans", "times", "texts", "other"]
Style = Literal["point", "comma", "groups", "boolean"]
"""How texts write numbers: 1234.5; 1234,5 or 1.234,5; 1,234.5; true and false."""


@dataclass(frozen=True)
class Cells:
    """A column as an array of Arrow, with what is asked of it."""

    arrow: Any
    form: Form

    @classmethod
    def of(cls, column: Any) -> Cells:
        """Of a `pyarrow.Array` or `ChunkedArray`; categories become the values that they stand for."""
        import pyarrow
        import pyarrow.types as types

        array: Any = column.combine_chunks() if hasattr(column, "chunks") else column
        if isinstance(array, pyarrow.ChunkedArray):  # What has no chunk stays one.
            array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else pyarrow.array([], array.type)
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        if types.is_null(kind):
            return cls(array.cast(pyarrow.string()), "texts")
        if types.is_boolean(kind):
            return cls(array, "booleans")
        if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            return cls(array, "numbers")
        if types.is_time(kind) or types.is_duration(kind):
            return cls(_seconds_of(array), "numbers")
        if types.is_date(kind) or types.is_timestamp(kind):
            return cls(array, "times")
        if types.is_string(kind) or types.is_large_string(kind) or kind == pyarrow.string_view():
            return cls(array, "texts")
        return cls(array, "other")

    def __len__(self) -> int:
        return len(self.arrow)

    @property
    def type_name(self) -> str:
        """The type in messages."""
        return "text" if self.form == "texts" else "lists" if is_list(self.arrow.type) else str(self.arrow.type)

    def take(self, rows: np.ndarray) -> Cells:
        """Those of some rows."""
        import pyarrow

        return Cells(self.arrow.take(pyarrow.array(rows)), self.form)

    @functools.cached_property
    def _encoded(self) -> tuple[list[str], np.ndarray]:
        if self.form == "other":
            values = self.arrow.to_pylist()
            distinct = list(dict.fromkeys(map(_text_of, values)))
            return distinct, np.array([distinct.index(_text_of(value)) for value in values], np.int64)
        encoded = self.arrow.dictionary_encode()
        texts = [_text_of(value) for value in encoded.dictionary.to_pylist()]
        numbers: dict[str, int] = {}
        places = np.array([-1 if text in MISSING else numbers.setdefault(text, len(numbers)) for text in texts] or [-1])
        indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return list(numbers), np.where(indices < 0, -1, places[np.maximum(indices, 0)]).astype(np.int64)

    @property
    def texts(self) -> list[str]:
        """The different values as texts, without blanks around them, in the order in which they first come."""
        return self._encoded[0]

    @property
    def places(self) -> np.ndarray:
        """Which of `texts` each row has, int64 [row]; -1 where it is missing."""
        return self._encoded[1]

    @functools.cached_property
    def values(self) -> np.ndarray:
        """Numbers as float64 [row], booleans as 0 and 1, times as seconds since 1970 (in UTC); NaN where missing.

        Infinity counts as missing. For texts see `read`.
        """
        import pyarrow
        import pyarrow.compute as compute

        array = self.arrow
        if self.form == "times":
            seconds = array.cast(pyarrow.timestamp("us", getattr(array.type, "tz", None)), safe=False)
            values = seconds.cast(pyarrow.int64()).cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            return values / 1e6
        assert self.form in ("numbers", "booleans"), self.form
        if self.form == "booleans":
            array = array.cast(pyarrow.int8())
        numbers = compute.cast(array, pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        return np.where(np.isfinite(numbers), numbers, np.nan)

    def read(self, parse: Callable[[str], float | None]) -> tuple[np.ndarray, np.ndarray]:
        """(what `parse` gives of the texts, float64 [row], NaN for None and where missing; which texts it gave None of)

        The latter are places in `texts`.
        """
        parsed = [parse(text) for text in self.texts]
        known = np.array([math.nan if value is None else value for value in parsed] or [math.nan])
        unread = np.array([place for place, value in enumerate(parsed) if value is None], np.int64)
        return np.where(self.places < 0, np.nan, known[np.maximum(self.places, 0)]), unread


def parse_number(text: str, style: Style) -> float | None:
    """The number that a text writes in a style; None if it does not, or it is too large."""
    if style == "boolean":
        return {TRUE: 1.0, FALSE: 0.0, "t": 1.0, "f": 0.0, "1": 1.0, "0": 0.0}.get(text.lower())
    if style == "comma" and (_COMMA.fullmatch(text) or _GROUPED["."].fullmatch(text)):
        text = text.replace(".", "").replace(",", ".")
    elif style == "groups" and _GROUPED[","].fullmatch(text):
        text = text.replace(",", "")
    elif style == "comma" or not _PLAIN.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def number_style(texts: Sequence[str], *, comma: bool) -> tuple[Style, int]:
    """(the style in which most of some texts are numbers, how many are).

    Texts such as 1,234 are 1.234 if `comma`, else 1234. Texts with a zero before other digits are codes, not numbers.
    """
    if {text.lower() for text in texts} in ({TRUE, FALSE}, {TRUE}, {FALSE}, {"t", "f"}):
        return "boolean", len(texts)
    if any(_CODE.fullmatch(text) for text in texts):
        return "point", 0
    styles: tuple[Style, ...] = ("point", "comma", "groups") if comma else ("point", "groups", "comma")
    counts: dict[Style, int] = {style: sum(parse_number(text, style) is not None for text in texts) for style in styles}
    return max(counts.items(), key=lambda item: item[1])


def _text_of(value: Any) -> str:
    """A value as the text by which words are compared: equal for 3, 3.0 and "3", and for True and "true"."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else "" if math.isnan(value) else repr(value)
    if isinstance(value, decimal.Decimal):
        return str(int(value)) if value == int(value) else str(value.normalize())
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    text = str(value).strip()
    return text.lower() if text.lower() in (TRUE, FALSE) else text


def _seconds_of(array: Any) -> Any:
    """Times of day and durations as seconds, float64."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.types as types

    compute: Any = pyarrow.compute
    unit = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[array.type.unit]
    whole = pyarrow.int32() if types.is_time32(array.type) else pyarrow.int64()
    return compute.divide(array.cast(whole).cast(pyarrow.float64()), float(unit))


def cells_of(values: Any) -> Cells:
    """The cells of a column that a user has in memory: a list, an array, a column of a data frame or of Arrow."""
    import pyarrow

    if isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return Cells.of(values)
    if hasattr(values, "to_arrow"):  # Of polars.
        return Cells.of(values.to_arrow())
    try:
        return Cells.of(pyarrow.array(values, from_pandas=True))
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):  # Of several types: their texts are read.
        texts = [None if _is_missing(value) else _text_of(value) for value in values]
        return Cells.of(pyarrow.array(texts, pyarrow.string()))


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):  # Of pandas.NA, which has no truth.
        return True


def columns_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dictionaries, one for each row, as columns; a row that lacks a name that another has is missing there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {str(name): [row.get(name) for row in rows] for name in names}
