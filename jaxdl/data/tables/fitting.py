"""Which kind each column of a table is, by its training rows, and which columns a network cannot use, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.tables.arrow_numbers import EXACT_WHOLE
from jaxdl.data.tables.cells import Cells, Style, number_style, parse_number
from jaxdl.data.tables.column_kinds import Column, DateColumn, NumberColumn, WordColumn
from jaxdl.data.tables.dates import PARTS, date_form, date_parts, has_zone, parse_date

READ = 0.9
"""A column of texts is one of numbers, or of dates, if so many of its rows are; the others count as missing."""
MOST_WORDS = 1000
"""Words of a column that have an id of their own, the most frequent ones."""
_NEARLY_ALL = 0.5
"""A column with a different text in more than so many of its rows is free text, or an identifier."""
_FEW_ROWS = 20
"""In fewer rows nothing is said of how many values are different."""
_LISTED = 20
_EXACT = 2.0**53
_GAPS = 20
"""Numbers of a range of which a growing identifier has one, at least."""
_DAY_SEC = 86400.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the options say of columns: names of those that are numbers, words, dates, or not read."""

    numbers: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    day_first: bool | None = None

    def of(self, name: str) -> str | None:
        """The kind that was chosen for a column."""
        kinds = {"number": self.numbers, "words": self.words, "date": self.dates}
        return next((kind for kind, names in kinds.items() if name in names), None)


@dataclasses.dataclass
class Fitted:
    """The columns that a network reads, and lines about those that it does not, or only in part."""

    columns: list[Column] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> why, and which option takes it in."""
    notes: list[str] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """The columns that are left out in one line; empty for none."""
        number = len(self.left_out)
        shown = [f"{name!r} ({why})" for name, why in self.left_out.items()]
        more = f"; and {number - _LISTED:,} more" if number > _LISTED else ""
        return f"{number:,} {_columns(number)} left out: {'; '.join(shown[:_LISTED])}{more}" if shown else ""


def _columns(number: int) -> str:
    return "column is" if number == 1 else "columns are"


def fit_columns(columns: Mapping[str, Any], rows: np.ndarray, choice: Choice, *, comma: bool) -> Fitted:
    """The kinds of columns (arrays of Arrow) by the values in `rows`, which are those of training.

    `comma` says that commas in numbers are decimal ones. Raises ConfigError for a chosen kind that does not fit, and
    for dates of which it is not clear whether the day comes first.
    """
    fitted = Fitted()
    for name, array in columns.items():
        if name in choice.left_out:
            fitted.left_out[name] = "--data.leave-out names it"
            continue
        cells = Cells.of(array).take(rows)
        made = _fit(name, cells, choice, fitted.notes, comma=comma)
        if isinstance(made, str):
            fitted.left_out[name] = made
        else:
            fitted.columns.append(made)
    return fitted


def _fit(name: str, cells: Cells, choice: Choice, notes: list[str], *, comma: bool) -> Column | str:
    """The column, or why it is left out."""
    chosen = choice.of(name)
    if cells.form == "other":
        if chosen is not None:
            raise ConfigError(f"--data: column {name!r} contains {cells.type_name}: no number, no word, no date.")
        return f"it contains {cells.type_name}: no number, no word, no date"
    known = cells.places >= 0 if cells.form == "texts" else ~np.isnan(cells.values)
    if not known.any():
        return "no training row has a value"
    if chosen == "words":
        return _words(name, cells)
    if cells.form == "texts":
        return _fit_texts(name, cells, choice, chosen, notes, comma=comma)
    if cells.form == "times" and chosen != "number":
        return _date(name, "year first", cells.values)
    if chosen == "date":
        raise ConfigError(f"--data.dates: column {name!r} contains {cells.type_name}, not dates. Leave it out.")
    return _number(name, "boolean" if cells.form == "booleans" else "point", cells.values, chosen is not None)


def _is_grouped(text: str) -> bool:
    """Whether a text may also be a whole number whose thousands are set apart by points."""
    other = parse_number(text, "comma")
    return other is not None and other != parse_number(text, "point")


def _fit_texts(
    name: str, cells: Cells, choice: Choice, chosen: str | None, notes: list[str], *, comma: bool
) -> Column | str:
    style, parsed = number_style(cells.texts, comma=comma)
    numbers, not_numbers = cells.read(lambda text: parse_number(text, style))
    form, _, ambiguous = date_form(cells.texts, day_first=choice.day_first)
    dates, not_dates = cells.read(lambda text: parse_date(text, form))
    least = READ * max(int((cells.places >= 0).sum()), 1)
    is_number, is_date = ((~np.isnan(values)).sum() >= least for values in (numbers, dates))
    if chosen == "number" or (chosen is None and parsed and is_number):
        if np.isnan(numbers).all():
            raise ConfigError(f"--data.numbers: column {name!r} has no numbers, but texts such as {cells.texts[0]!r}.")
        if comma and style == "point" and (first := next(filter(_is_grouped, cells.texts), None)) is not None:
            notes.append(f"column {name!r}: numbers such as {first} are read with a decimal point, not as thousands")
        made = _number(name, style, numbers, chosen is not None)
        return made if isinstance(made, str) else _expecting(made, cells, not_numbers, "number", notes)
    if chosen == "date" or (chosen is None and is_date):
        if np.isnan(dates).all():
            raise ConfigError(f"--data.dates: column {name!r} has no dates, but texts such as {cells.texts[0]!r}.")
        if ambiguous:
            raise ConfigError(
                f"column {name!r}: in dates such as {cells.texts[0]!r} the day or the month may come first, and none "
                "of the training rows tells. Give --data.day-first True, or False."
            )
        zones = [has_zone(text, form) for text in cells.texts if parse_date(text, form) is not None]
        if any(zones) and not all(zones):
            notes.append(f"column {name!r}: some of its times have a time zone; those without one are taken as UTC")
        made = _date(name, form, dates)
        return made if isinstance(made, str) else _expecting(made, cells, not_dates, "date", notes)
    rows, different = int((cells.places >= 0).sum()), len(cells.texts)
    if different > 1 and rows >= _FEW_ROWS and different > _NEARLY_ALL * rows and chosen is None:
        what = f"all {rows:,} texts differ" if different == rows else f"{different:,} different texts in {rows:,} rows"
        return f"{what}, as in an identifier or free text; --data.words {_typed(name)} takes it in"
    return _words(name, cells)


def _expecting(column: Any, cells: Cells, unread: np.ndarray, kind: str, notes: list[str]) -> Column:
    """The column with the texts that count as missing, which are noted."""
    if not len(unread):
        return column
    texts, rows = [cells.texts[place] for place in unread.tolist()], int(np.isin(cells.places, unread).sum())
    shown = ", ".join(repr(text[:40]) for text in texts[:3]) + (", ..." if len(texts) > 3 else "")
    notes.append(
        f"column {column.name!r}: {rows:,} of {len(cells):,} training rows have {shown}, which is no {kind}: there the "
        f"value counts as missing (--data.words {_typed(column.name)} reads the column as words)"
    )
    return dataclasses.replace(column, as_missing=tuple(texts))


def _number(name: str, style: Style, values: np.ndarray, chosen: bool) -> Column | str:
    known = values[~np.isnan(values)]
    if (known == known[0]).all() and len(known) == len(values) and not chosen:
        return f"all training rows have {known[0]:g}"
    if not chosen and len(known) == len(values) and (why := _identifies(values)):
        return f"{why}; --data.numbers {_typed(name)} takes it in"
    offset = float(np.round(np.median(known))) if np.abs(known).max() > EXACT_WHOLE else 0.0
    return NumberColumn(name, style, offset)


def _identifies(values: np.ndarray) -> str:
    """Why whole numbers are those of an identifier: they number the rows, or are too large for a measurement."""
    if len(values) < _FEW_ROWS or (values != np.floor(values)).any():
        return ""
    if len(np.unique(values)) == len(values) and np.abs(values).max() > _EXACT:
        return "all its numbers differ, and are beyond 2^53, as in an identifier"
    # Rows that were left out make gaps, and held-out rows are missing here.
    spread, grows = np.ptp(values) / len(values), bool((np.diff(values) > 0).all())
    if (grows and spread < _GAPS) or (spread < 2 and len(np.unique(values)) == len(values)):
        return "it numbers the rows, as an identifier does"
    return ""


def _date(name: str, form: str, seconds: np.ndarray) -> Column | str:
    known = seconds[~np.isnan(seconds)]
    offset = float(np.floor(np.median(known) / _DAY_SEC))
    parts = date_parts(known, offset)
    vary = tuple(part for part in PARTS if np.ptp(parts[part]) > 1e-9)
    if not vary:
        return "all training rows have one date"
    return DateColumn(name, form, offset, vary)


def _words(name: str, cells: Cells) -> Column | str:
    rows = np.bincount(cells.places[cells.places >= 0], minlength=len(cells.texts))
    if len(rows) == 1 and rows[0] == len(cells):
        return f"all training rows have {cells.texts[0][:40]!r}"
    # A word of one row is an unknown one: so training has examples of those.
    order = sorted(range(len(rows)), key=lambda place: (-rows[place], cells.texts[place]))
    frequent = [cells.texts[place] for place in order if rows[place] > 1 or len(cells) < _FEW_ROWS]
    return WordColumn(name, tuple(frequent[:MOST_WORDS]))


def _typed(name: str) -> str:
    """A name as it is typed after an option."""
    return name if name.replace("_", "").replace(".", "").isalnum() else f"'{name}'"
