"""Tables with words, dates and gaps: what a column is, what is left out, odd files, and rows that users give."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.data import Table, spec_from_json, spec_to_json
from jaxdl.data.tables.dates import date_form, parse_date

ROWS = range(40)


def csv_file(folder, head, line, encoding="utf-8", mark=""):
    """A CSV file of 40 rows; `line(i)` is row i."""
    path = folder / "rows.csv"
    path.write_bytes((mark + head + "\n" + "".join(f"{line(i)}\n" for i in ROWS)).encode(encoding))
    return str(path)


def kind(i):
    return "ab"[i % 2]


def number(i):
    return f"{1.5 * i + 0.25:.2f}"


def told(splits):
    """What a run would warn of."""
    lines = []
    splits.train.on_warning(lines.append)
    splits.test.on_warning(lines.append)
    return "\n".join(lines)


def every(source):
    return source.batch(np.arange(len(source)))


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """A file with each kind of column."""
    folder = tmp_path_factory.mktemp("people")

    def line(i):
        name, town = f"name {i}", ("Rome", "Oslo", "Lima", "")[i % 4] if i != 39 else "Bern"
        return f"{1000 + i},{name},{town},{i * 2.5 if i % 5 else 'NA'},{i % 3 == 0},2024-0{i % 9 + 1}-11,same,{kind(i)}"

    return csv_file(folder, "id,name,town,age,member,since,always,grade", line)


def test_kinds_of_columns_and_what_is_left_out(people):
    splits = Table(file=(people,), label="grade").build()
    spec = splits.train.spec
    assert {column.name: column.kind for column in spec.columns} == {
        "town": "words", "age": "number", "member": "number", "since": "date"
    }  # fmt: skip
    assert spec.class_names == ("a", "b")
    assert set(spec.word_columns[0].words) == {"Lima", "Oslo", "Rome"}  # Bern is in one row, so an unknown word.
    lines = told(splits)
    assert "3 columns are left out" in lines
    assert "'id' (it numbers the rows, as an identifier does; --data.numbers id takes it in)" in lines
    assert "--data.words name takes it in" in lines
    assert "'always' (all training rows have 'same')" in lines
    named = Table(file=(people,), label="grade", numbers=("id",), words=("name",), leave_out=("since",)).build()
    assert {"id", "name"} <= {column.name for column in named.train.spec.columns}
    assert "'since' (--data.leave-out names it)" in told(named)
    assert [c.name for c in Table(file=(people,), label="grade", features=("age",)).build().train.spec.columns] == [
        "age"
    ]


def test_the_preparation_is_that_of_the_training_rows(people):
    splits = Table(file=(people,), label="grade").build()
    spec, batch = splits.train.spec, every(splits.train)
    assert spec_from_json(spec_to_json(spec)) == spec
    known = batch["numbers"][:, 0][~np.isnan(batch["numbers"][:, 0])]
    low, middle, high = np.quantile(known.astype(np.float64), (0.25, 0.5, 0.75))
    assert (spec.center[0], spec.scale[0]) == (middle, high - low)
    x, words = (np.asarray(x) for x in spec.inputs(batch))
    z = (batch["numbers"][:, 0].astype(np.float64) - middle) / (high - low)
    z = np.where(np.isnan(z), 0, z)
    np.testing.assert_allclose(x[:, 0], z / np.sqrt(1 + (z / 3) ** 2), atol=1e-5)
    np.testing.assert_array_equal(x[:, len(spec.numbers)], np.isnan(batch["numbers"][:, 0]))
    assert words.dtype == np.int32
    # The same rows by a recorded spec are the same arrays.
    again = splits.test.read_as(spec_from_json(spec_to_json(spec)))
    assert again.content() == splits.test.content()


def test_held_out_rows_stay_held_out_when_rows_are_added(tmp_path):
    head, lines = "x,y\n", [f"{number(i)},{kind(i)}\n" for i in range(300)]
    (tmp_path / "a.csv").write_text(head + "".join(lines[:200]))
    (tmp_path / "b.csv").write_text(head + "".join(lines))
    tests = [Table(file=(str(tmp_path / name),), label="y").build().test for name in ("a.csv", "b.csv")]
    first, more = ({float(x) for x in every(test)["numbers"][:, 0]} for test in tests)
    assert first <= more
    assert 25 < len(first) < 55
    assert all(x < 0.25 + 1.5 * 200 for x in first)
    other = Table(file=(str(tmp_path / "a.csv"),), label="y", split_seed=1).build().test
    assert {float(x) for x in every(other)["numbers"][:, 0]} != first


CSV = {
    "a mark": ("x,y", lambda i: f"{number(i)},{kind(i)}", {"mark": "\ufeff"}, {}),
    "semicolons, decimal commas": ("x;y", lambda i: f"{number(i).replace('.', ',')};{kind(i)}", {}, {}),
    "tabs": ("x\ty", lambda i: f"{number(i)}\t{kind(i)}", {}, {}),
    "blanks": (" x , y", lambda i: f" {number(i)} , {kind(i)} ", {}, {}),
    "latin-1": ("x,é,y", lambda i: f"{number(i)},ü,{kind(i)}", {"encoding": "latin-1"}, {"encoding": "latin-1"}),
    "utf-16": ("x,é,y", lambda i: f"{number(i)},ü,{kind(i)}", {"encoding": "utf-16"}, {"encoding": "utf-16"}),
    "an empty column": ("x,e,y", lambda i: f"{number(i)},,{kind(i)}", {}, {}),
    "an index of pandas": (",x,y", lambda i: f"{i},{number(i)},{kind(i)}", {}, {}),
    "Booleans of the label": ("x,y", lambda i: f"{number(i)},{i % 2 == 0}", {}, {}),
}


@pytest.mark.parametrize("case", CSV)
def test_odd_csv_files_are_the_same_numbers(tmp_path, case):
    head, line, written, options = CSV[case]
    splits = Table(file=(csv_file(tmp_path, head, line, **written),), label="y", **options).build()
    values = np.concatenate([every(source)["numbers"][:, 0] for source in (splits.train, splits.test)])
    np.testing.assert_array_equal(np.sort(values), np.float32([1.5 * i + 0.25 for i in ROWS]))


def test_words_keep_quotes_and_newlines_and_codes_their_zeros(tmp_path):
    path = csv_file(tmp_path, "w,zip,big,y", lambda i: f'"a ""b"",\n{i % 2}",0{i % 3},"{i % 7 + 1},000.5",{kind(i)}')
    spec = Table(file=(path,), label="y").build().train.spec
    words = {column.name: set(column.words) for column in spec.word_columns}
    assert words == {"w": {'a "b",\n0', 'a "b",\n1'}, "zip": {"00", "01", "02"}}
    assert spec.numbers == ("big",)
    assert 1000.5 <= spec.center[0] <= 7000.5


@pytest.mark.parametrize(
    ("head", "line", "options", "message"),
    [
        ("x,x,y", lambda i: f"1,{i},{kind(i)}", {}, "it has 2 columns named 'x'"),
        ("x,y", lambda i: f"{number(i)},a", {}, "1 class"),
        ("x,y", lambda i: f"{number(i)},", {}, "no row has a value"),
        ("x,y", lambda i: f"{number(i)},n{i}" if i else "1", {}, "Expected 2 columns, got 1"),
        ("x,z", lambda i: f"{number(i)},a", {}, "data.label y: it has no column 'y'; it has x, z"),
        (
            "x,y",
            lambda i: f"same,{kind(i)}",
            {},
            r"no column is left but the label 'y'. 1 column is left out: 'x' \(all",
        ),
        ("d,y", lambda i: f"{i % 12 + 1}/{i % 5 + 1}/2024,{kind(i)}", {}, "Give data.day_first=True, or False"),
        ("x,y", lambda i: f"é{i},{kind(i)}", {}, "is not ascii"),
        ("x,y", lambda i: f"{number(i)},{kind(i)}", {"words": ("z",)}, "data.words z: it has no column 'z'"),
        ("x,y", lambda i: f"{number(i)},{kind(i)}", {"words": ("y",)}, "data.words y: it is the label"),
        ("x,y", lambda i: f"{number(i)},{kind(i)}", {"target": "number"}, "has 'a', which is no number"),
        ("x,y", lambda i: f"{number(i)},{kind(i)}", {"dates": ("x",)}, "has no dates, but texts such as '1.75'"),
        ("x,y", lambda i: f"{number(i)},5.5", {"target": "number"}, "all training rows have 5.5"),
    ],
)
def test_what_cannot_be_used_is_one_message(tmp_path, head, line, options, message):
    encoding = {"encoding": "ascii"} if "ascii" in message else {}
    with pytest.raises(ConfigError, match=message):
        Table(file=(csv_file(tmp_path, head, line),), **{"label": "y", **options, **encoding}).build()


def test_files_that_are_no_tables(tmp_path):
    for name, content, message in (
        ("a.csv", b"", "it is empty"),
        ("b.csv", b"x,y\n", "there are no rows"),
        ("c.xlsx", b"PK", "spreadsheets are not read"),
        ("d.parquet", b"PAR1" + b"0" * 64, "cannot be read as a Parquet file"),
        ("e.csv", bytes(range(256)) * 9, "is not utf-8"),
        ("f.csv", "x,y\n1,a\n2,b\n".encode("utf-16-le"), "data.encoding utf-16-le"),
        ("g.json", b'[{"x": 1, "y": "a"}]', "JSON is not read as a table"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Table(file=(str(tmp_path / name),), label="y").build()
    with pytest.raises(ConfigError, match="no files are given"):
        Table().build()
    with pytest.raises(ConfigError, match="it is a folder"):
        Table(file=(str(tmp_path),), label="y").build()


def test_dates_are_read_in_each_form():
    day = datetime.datetime(2024, 3, 14, tzinfo=datetime.UTC).timestamp()
    for text, form, more in (
        ("2024-03-14", "year first", 0), ("2024/3/14 06:30", "year first", 23400), ("14.3.2024", "day first", 0),
        ("3/14/24 1:05 PM", "month first", 47100), ("14 March 2024", "day and name", 0),
        ("Mar 14, 2024", "name and day", 0), ("2024-03-14T02:00:00+02:00", "year first", 0),
        ("2024-03-14T00:00:00.5Z", "year first", 0.5), ("14-Mar-2024", "day and name", 0),
    ):  # fmt: skip
        assert parse_date(text, form) == day + more, text
        found, count, ambiguous = date_form([text], day_first=None)
        assert (found, count, ambiguous) == (form, 1, False), text
    assert parse_date("2024-02-30", "year first") is None
    assert date_form(["3/4/2024"], day_first=None)[2]
    assert date_form(["3/4/2024"], day_first=False)[0] == "month first"


def test_parquet_of_many_types(tmp_path):
    start = datetime.datetime(2024, 1, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    table = pa.table({
        "when": pa.array([start + datetime.timedelta(hours=7 * i) for i in ROWS], pa.timestamp("us", "Europe/Berlin")),
        "price": pa.array([decimal.Decimal(i) / 4 for i in ROWS], pa.decimal128(20, 4)),
        "size": pa.array(["lo", "hi"] * 20).dictionary_encode(),
        "person": pa.array([{"age": 0.5 * i, "home": {"town": "uv"[i % 2]}} for i in ROWS]),
        "vector": pa.array([[1.5 * i, (i * 7 % 5) / 2] for i in ROWS]),
        "ragged": pa.array([[1.0] * (i % 3) for i in ROWS]),
        "map": pa.array([[("k", 1)]] * 40, pa.map_(pa.string(), pa.int64())),
        "bytes": pa.array([b"x" * i for i in ROWS]),
        "nothing": pa.nulls(40),
        "large": pa.array([2**40 + (i * 7919) % 40 // 2 for i in ROWS]),
        "code": pa.array([2**62 + (i * 7919) ** 3 for i in ROWS], pa.uint64()),
        "flag": pa.array([None if i % 7 == 0 else i % 3 == 0 for i in ROWS]),
        "infinite": pa.array([float("inf") if i == 3 else i / 3 for i in ROWS]),
        "wide": pa.array(["p", "q", "r", "s"] * 10, pa.large_string()),
        "y": pa.array([float(i % 4) + 0.5 for i in ROWS]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet")
    splits = Table(file=(str(tmp_path / "t.parquet"),), label="y").build()
    spec = splits.train.spec
    kinds = {column.name: column.kind for column in spec.columns}
    assert kinds == {
        "when": "date", "price": "number", "size": "words", "person.age": "number", "person.home.town": "words",
        "vector[0]": "number", "vector[1]": "number", "large": "number", "flag": "number", "infinite": "number",
        "wide": "words",
    }  # fmt: skip
    lines = told(splits)
    assert "5 columns are left out" in lines
    assert "'code' (all its numbers differ, and are beyond 2^53, as in an identifier; --data.numbers code" in lines
    # Of integers beyond 2^24 float32 keeps the differences.
    large = every(splits.train)["numbers"][:, spec.numbers.index("large")]
    assert len(np.unique(large)) > 15
    # The label is standardized: 0.5, 1.5, 2.5, 3.5 in units.
    mean, std = spec.target_scale()
    np.testing.assert_allclose(np.unique(every(splits.train)["label"] * std + mean), [0.5, 1.5, 2.5, 3.5], atol=1e-5)


def test_rows_that_users_give(people):
    import pandas

    spec = Table(file=(people,), label="grade").build().train.spec
    frame = pandas.read_csv(people)
    from_file, from_frame = spec.to_predict(people, "predict"), spec.to_predict(frame, "predict")
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for other in (
        from_frame,
        spec.to_predict(records, "predict"),
        spec.to_predict(pa.Table.from_pandas(frame), "predict"),
    ):
        for name in ("numbers", "words"):
            np.testing.assert_array_equal(other[name], from_file[name])
    row = {"town": "Rome", "age": 7, "member": True, "since": datetime.date(2024, 3, 11)}
    same = {"town": " Rome", "age": "7.0", "member": "TRUE", "since": "2024-03-11"}
    for name in ("numbers", "words"):
        np.testing.assert_array_equal(spec.to_predict(row, "predict")[name], spec.to_predict(same, "predict")[name])
    missing = spec.to_predict(dict.fromkeys(row), "predict")
    assert np.isnan(missing["numbers"]).all()
    assert missing["words"].tolist() == [[0]]
    with pytest.warns(UserWarning, match="1 row has 'Atlantis': training rows had no such word"):
        assert spec.to_predict(row | {"town": "Atlantis"}, "predict")["words"].tolist() == [[1]]
    with pytest.warns(UserWarning, match="training had no such columns: 'height'"):
        spec.to_predict(row | {"height": 3}, "predict")
    for given, message in (
        ({"town": "Rome"}, "the columns 'age', 'member', 'since' are missing"),
        (row | {"age": "old"}, "column 'age': 1 row has 'old': none is a number. Correct it, or give None"),
        (row | {"since": "soon"}, "column 'since': 1 row has 'soon': none is a date"),
        (row | {"since": 3}, "none is a date"),
        (row | {"age": [[1, 2]]}, "none is a number"),
        (np.zeros((2, 4)), "got ndarray. Give rows as a dictionary"),
        ({"town": ["Rome"], "age": [1, 2], "member": [True], "since": [None]}, "different numbers of rows"),
    ):
        with pytest.raises(ConfigError, match=message):
            spec.to_predict(given, "predict")


def test_cells_that_are_no_numbers_count_as_missing_and_are_named(tmp_path):
    path = csv_file(tmp_path, "x,y", lambda i: f"{number(i) if i not in (1, 2) else 'unknown'},{kind(i)}")
    splits = Table(file=(path,), label="y").build()
    assert "rows have 'unknown', which is no number" in told(splits) or "row has 'unknown'" in told(splits)
    batch = every(splits.train)["numbers"], every(splits.test)["numbers"]
    assert sum(int(np.isnan(x).sum()) for x in batch) == 2


def test_labels_that_are_missing_or_rare(tmp_path):
    path = csv_file(tmp_path, "x,y", lambda i: f"{number(i)},{kind(i) if i % 5 else ''}")
    splits = Table(file=(path,), label="y").build()
    assert "8 rows without a value of 'y' are left out" in told(splits)
    assert len(splits.train) + len(splits.test) == 32
    train, test = tmp_path / "train.csv", tmp_path / "test.csv"
    train.write_text("x,y\n" + "".join(f"{number(i)},{i % 2}\n" for i in ROWS))
    test.write_text("y,x\n2,1.5\n1,2.5\n")
    splits = Table(file=(str(train),), test=(str(test),), label="y", target="classes").build()
    assert splits.train.spec.class_names == ("0", "1", "2")
    assert splits.train.spec.class_counts() == (20, 20, 0)
    assert "no training row has the class '2'" in told(splits)
    assert every(splits.test)["label"].tolist() == [2, 1]
    assert every(splits.test)["numbers"].tolist() == [[1.5], [2.5]]
