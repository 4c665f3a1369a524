"""Dates and times in texts: the form in which a column writes them, and what a network reads of them."""

from __future__ import annotations

import calendar
import datetime
import math
import re
from collections.abc import Sequence

import numpy as np

_TIME = (
    r"(?:(?:\s*,\s*|[T\s]+)(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2}(?:[.,]\d+)?))?"
    r"\s*(?P<half>[AaPp]\.?[Mm]\.?)?\s*(?P<zone>Z|z|UTC|GMT|[+-]\d{2}:?\d{2}|[+-]\d{2})?)?"
)
_YEAR, _MONTH, _DAY = r"(?P<year>\d{4})", r"(?P<month>\d{1,2})", r"(?P<day>\d{1,2})"
_SHORT, _NAME = r"(?P<year>\d{4}|\d{2})", r"(?P<name>[A-Za-z]{3,9})\.?"
FORMS = {
    "year first": re.compile(rf"{_YEAR}([-/.]){_MONTH}\2{_DAY}{_TIME}"),
    "day first": re.compile(rf"{_DAY}([-/.]){_MONTH}\2{_SHORT}{_TIME}"),
    "month first": re.compile(rf"{_MONTH}([-/.]){_DAY}\2{_SHORT}{_TIME}"),
    "day and name": re.compile(rf"{_DAY}[-\s.]*{_NAME}[-\s,]+{_YEAR}{_TIME}"),
    "name and day": re.compile(rf"{_NAME}\s*{_DAY}(?:st|nd|rd|th)?,?\s+{_YEAR}{_TIME}"),
}
"""How texts write dates; each may have a time behind it."""
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAY_SEC = 86400.0
_YEAR_DAYS = 365.2425
PARTS = ("day", "year sin", "year cos", "week sin", "week cos", "hour sin", "hour cos")
"""The numbers of a date: days, and its place in the year, in the week and in the day."""


def parse_date(text: str, form: str) -> float | None:
    """Seconds since 1970 of a text in one of `FORMS`, in UTC where it names no zone; None if it is in another."""
    if (found := FORMS[form].fullmatch(text)) is None:
        return None
    part = found.groupdict()
    year, name = int(part["year"]), part.get("name")
    if len(part["year"]) == 2:
        year += 1900 if year >= 70 else 2000
    if name is not None:
        month = next((n for n, start in enumerate(_MONTHS, 1) if name.lower().startswith(start)), 0)
    else:
        month = int(part["month"])
    try:
        day = datetime.date(year, month, int(part["day"]))
    except ValueError:  # The 30th of February.
        return None
    seconds = calendar.timegm(day.timetuple())
    return None if (time := _time_of(part)) is None else seconds + time


def _time_of(part: dict[str, str | None]) -> float | None:
    """Seconds since midnight of UTC; None for a time that there is not."""
    hour, minute = int(part["hour"] or 0), int(part["minute"] or 0)
    second = float((part["second"] or "0").replace(",", "."))
    if half := part["half"]:
        if not 1 <= hour <= 12:
            return None
        hour = hour % 12 + (12 if half.lower().startswith("p") else 0)
    if hour > 24 or minute > 59 or second >= 61:
        return None
    seconds = 3600 * hour + 60 * minute + second
    zone = part["zone"]
    if zone and zone[0] in "+-":
        away = 3600 * int(zone[1:3]) + 60 * int(zone[3:].lstrip(":") or 0)
        seconds -= away if zone[0] == "+" else -away
    return seconds


def has_zone(text: str, form: str) -> bool:
    """Whether a text in a form names a time zone."""
    found = FORMS[form].fullmatch(text)
    return found is not None and found["zone"] is not None


def date_form(texts: Sequence[str], *, day_first: bool | None) -> tuple[str, int, bool]:
    """(the form in which most of some texts are dates, how many are, whether another would do as well).

    The last is of days and months of which none is beyond 12. With `day_first` it is known which comes first.
    """
    other = None if day_first is None else "month first" if day_first else "day first"
    wanted = [form for form in FORMS if form != other]
    counts = {form: sum(parse_date(text, form) is not None for text in texts) for form in wanted}
    form, count = max(counts.items(), key=lambda item: item[1])
    rival = {"day first": "month first", "month first": "day first"}.get(form, "")
    if count and counts.get(rival, -1) == count and all("." in text for text in texts):
        return "day first", count, False  # With points the day comes first everywhere.
    return form, count, bool(count) and counts.get(rival, -1) == count


def date_parts(seconds: np.ndarray, offset_days: float) -> dict[str, np.ndarray]:
    """The numbers of dates, float64 [row] each, by the names in `PARTS`; days count from `offset_days` after 1970."""
    days = seconds / _DAY_SEC
    # The first of January 1970 was a Thursday, and 1968 a leap year, so that years begin nearly where they should.
    turns = {"year": days / _YEAR_DAYS, "week": (days + 3) / 7, "hour": days}
    parts = {"day": days - offset_days}
    for name, turn in turns.items():
        angle = 2 * math.pi * (turn - np.floor(turn))
        parts |= {f"{name} sin": np.sin(angle), f"{name} cos": np.cos(angle)}
    return parts
