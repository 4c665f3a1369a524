"""predict.py, which reads rows without jaxdl, beside what the run read."""

import datetime
import decimal
import math

import numpy as np
import pandas
import pytest

from jaxdl.data.tables.dates import FORMS, parse_date
from jaxdl.inference.export import program

MISSING = {"", "NA"}


def day(text, form="day first", part="day"):
    column = {"column": "when", "name": f"when ({part})", "pattern": FORMS[form].pattern, "offset_days": 0.0}
    return program.number_of({"when": text}, column, MISSING)


@pytest.mark.parametrize(
    ("text", "style", "number"),
    [("1,5", "comma", 1.5), ("1.234,5", "comma", 1234.5), ("1.5", "comma", None), ("-1.5", "comma", None),
     ("1,234", "groups", 1234.0), ("1.5", "point", 1.5), ("1,5", "point", None), ("true", "boolean", 1.0)],
)  # fmt: skip
def test_numbers_are_those_of_their_column(text, style, number):
    assert program.parse_number(text, style) == number


@pytest.mark.parametrize("text", ["14.2.2024", "1.12.1999 23:59"])
def test_dates_are_those_of_the_run(text):
    assert day(text) * 86400 == pytest.approx(parse_date(text, "day first"))


@pytest.mark.parametrize("text", ["2024-02-14", "20240214", "30.2.2024", "14.2.2024 25:00", "soon"])
@pytest.mark.parametrize("part", ["day", "week sin", "hour cos"])
def test_what_is_no_date_in_the_form_of_the_column_is_missing(text, part):
    assert math.isnan(day(text, part=part))


def test_days_that_come_as_days_are_read():
    when = datetime.datetime(2024, 2, 14, tzinfo=datetime.UTC)
    for given in (when, when.date(), pandas.Timestamp(when)):
        assert day(given) * 86400 == when.timestamp()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, None), (float("nan"), None), (pandas.NA, None), (pandas.NaT, None), ("NA", None), (3.0, "3"),
     (np.True_, "true"), (decimal.Decimal("1.50"), "1.5"), (datetime.date(2024, 2, 14), "2024-02-14"),
     (" Red ", "Red")],
)  # fmt: skip
def test_words_are_those_of_the_run(value, text):
    assert program.text_of({"word": value}, "word", MISSING) == text


def test_files_are_read_as_the_run_reads_them(tmp_path):
    path, cells = tmp_path / "rows.csv", {"encoding": "utf-8", "delimiter": None}
    path.write_text('a ;"b;c" ;d\n1,5;"x;y";\n', encoding="utf-8-sig")
    assert program.rows_of_file(path, cells) == [{"a": "1,5", "b;c": "x;y", "d": ""}]
    path.write_text("a,b\n")
    with pytest.raises(SystemExit, match="it has no rows"):
        program.rows_of_file(path, cells)
