"""Columns that are no features: the index of pandas is left out, and what tells the label is warned of."""

import json

import numpy as np
import pytest

from jaxdl.data import Arrays, Tabular
from jaxdl.data.arrays.examples import Examples
from jaxdl.data.spec import spec_from_json, spec_to_json
from jaxdl.data.tables.columns import NumbersSpec
from jaxdl.data.tables.table_index import index_columns, numbers_rows, suspects

pandas = pytest.importorskip("pandas")


def frame(rows=120):
    """Noise, sorted by the label: a column that numbers the rows predicts it without fault."""
    random = np.random.default_rng(0)
    found = pandas.DataFrame(random.normal(size=(rows, 3)), columns=list("abc"))
    return found.assign(label=np.arange(rows) * 3 // rows)


FRAMES = {
    "a filter": lambda one: one[one.a > -1],
    "a filter and a reset": lambda one: one[one.a > -1].reset_index(drop=True),
    "shuffled": lambda one: one.sample(frac=1, random_state=0),
    "several levels": lambda one: one.set_index([pandas.Index(range(1, 241, 2)), pandas.Index(list("xy") * 60)]),
    "a range that begins later": lambda one: one.set_index(pandas.RangeIndex(5, 125)),
    "texts": lambda one: one.set_index(pandas.Index([f"row {number}" for number in range(120)])),
    "dates": lambda one: one.set_index(pandas.date_range("2020-01-01", periods=120)),
    "the label": lambda one: one.set_index("label"),
}


def written(made, path, form):
    """The columns of the file, and its path."""
    if form == "Parquet":
        made.to_parquet(path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    made.to_csv(path.with_suffix(".csv"))
    if form == "CSV twice":
        pandas.read_csv(path.with_suffix(".csv")).to_csv(path.with_suffix(".csv"))
    return path.with_suffix(".csv")


def warnings(splits):
    told = []
    splits.train.on_warning(told.append)
    return told


@pytest.mark.parametrize("form", ["Parquet", "CSV", "CSV twice"])
@pytest.mark.parametrize("kind", FRAMES)
def test_the_index_of_pandas_is_no_feature(kind, form, tmp_path):
    if kind == "several levels" and form == "CSV":
        return  # Two columns without a name.
    made = FRAMES[kind](frame())
    splits = Tabular(train=(str(written(made, tmp_path / "train", form)),)).build()
    assert splits.train.spec.columns == ("a", "b", "c")
    assert splits.train.remark() == "the columns are a, b, c"
    told = warnings(splits)
    assert all("left out, since pandas wrote it as the index of its rows" in one for one in told)
    has_column = form != "Parquet" or not isinstance(made.index, pandas.RangeIndex)
    assert len(told) == (has_column and not (kind == "the label" and form != "CSV twice"))


def test_a_named_index_is_known_by_the_metadata(tmp_path):
    path = written(FRAMES["a filter"](frame()).rename_axis("id"), tmp_path / "train", "Parquet")
    splits = Tabular(train=(str(path),)).build()
    assert splits.train.spec.columns == ("a", "b", "c")
    assert "since pandas wrote it as the index of its rows: 'id'." in warnings(splits)[0]
    named = Tabular(train=(str(path),), features=("a", "id")).build()
    assert named.train.spec.columns == ("a", "id"), "what is named is used"
    assert [one.split(" numbers")[0] for one in warnings(named)] == ["data tabular: column 'id'"]


def test_a_run_that_was_begun_with_the_index_goes_on(tmp_path):
    """As the version before read them: all columns but the label, in the order of the file."""
    made = frame()[lambda one: one.a > -1]
    path = written(made, tmp_path / "train", "CSV")
    splits = Tabular(train=(str(path),)).build()
    [column] = [one for one in pandas.read_csv(path) if one.startswith("Unnamed")]
    every = pandas.read_csv(path).rename(columns={column: ""}).drop(columns="label")
    named = tmp_path / "named.parquet"  # The same numbers, under names that are no index.
    every.rename(columns={"": "number"}).assign(label=made.label.to_numpy()).to_parquet(named, index=False)
    before = Tabular(train=(str(named),)).build()
    spec = before.train.spec
    spec = NumbersSpec(("", *spec.columns[1:]), spec.num_classes, spec.mean, spec.std)
    found = splits.read_as(spec_from_json(spec_to_json(spec)))
    assert found is not None
    assert found.content() == before.content()
    assert "goes on so" in warnings(found)[0]
    assert splits.read_as(splits.train.spec).train is splits.train
    other = NumbersSpec(("x", *spec.columns[1:]), spec.num_classes, spec.mean, spec.std)
    assert splits.read_as(other) is None


def test_files_may_differ_in_whether_they_have_an_index(tmp_path):
    written(frame(), tmp_path / "train", "CSV")
    frame(60).to_csv(tmp_path / "test.csv", index=False)
    splits = Tabular(train=(str(tmp_path / "train.csv"),), test=(str(tmp_path / "test.csv"),)).build()
    assert splits.train.spec.columns == splits.test.spec.columns == ("a", "b", "c")


def test_names_of_columns_alone():
    names = ["", "Unnamed: 0", "Unnamed: 0.1", "Unnamed: 0_level_1", "__index_level_3__", "index", "Unnamed", "id", "a"]
    assert index_columns(names) == tuple(names[:5])
    metadata = {b"pandas": json.dumps({"index_columns": ["id", {"kind": "range"}, "gone"]}).encode()}
    assert index_columns(["id", "a"], metadata) == ("id",)
    for damaged in (b"{", b"[]", b"\xff", b'{"index_columns": null}'):
        assert index_columns(["id", "a"], {b"pandas": damaged}) == ()


# What tells the label

COLUMNS = {
    "the label": (lambda label, random: label, "one number for all rows of a class"),
    "the label, renamed": (lambda label, random: 7 - 2.5 * label, "one number for all rows of a class"),
    "row numbers": (lambda label, random: np.arange(len(label)), "numbers the rows"),
    "rows from 1": (lambda label, random: np.arange(len(label)) + 1, "numbers the rows"),
    "filtered rows": (lambda label, random: np.sort(random.choice(500, len(label), replace=False)), "numbers the rows"),
    "shuffled rows": (lambda label, random: random.permutation(len(label)), "numbers the rows"),
    "noise": (lambda label, random: random.normal(size=len(label)), ""),
    "sorted noise": (lambda label, random: np.sort(random.normal(size=len(label))), ""),
    "whole numbers": (lambda label, random: random.integers(0, 50, len(label)), ""),
    "a constant": (lambda label, random: np.ones(len(label)), ""),
    "nearly the label": (lambda label, random: np.where(np.arange(len(label)) == 3, 9, label), ""),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_what_tells_the_label_is_suspected(kind):
    random = np.random.default_rng(0)
    label = random.integers(0, 3, 90)
    make, why = COLUMNS[kind]
    x = np.stack([random.normal(size=90), make(label, random)], axis=1).astype(np.float32)
    found = suspects(x, ["a", "b"], label)
    assert [name for name, _ in found] == (["b"] if why else [])
    assert all(why in reason for _, reason in found)
    assert suspects(x[:5], ["a", "b"], label[:5]) == [], "in five rows all may be chance"


def test_rows_are_numbered_in_each_file():
    rows = np.concatenate([np.arange(20), np.arange(10)])
    assert numbers_rows(rows, [0, 20])
    assert not numbers_rows(rows, [0])


@pytest.mark.parametrize("form", ["pair", "dictionary", "frame"])
def test_frames_in_memory_are_looked_at_too(form):
    made = frame().rename_axis("Unnamed: 0").reset_index().assign(row=np.arange(120))
    x, y = made.drop(columns="label"), made.label
    value = {"pair": (x, y), "dictionary": {"x": x, "y": y}, "frame": made}[form]
    notes = " ".join(Examples.of(value).rows("data.train").notes)
    assert "'Unnamed: 0'" in notes
    assert ("column 'row' of x numbers the rows" in notes) == (form != "frame")
    splits = Arrays(train=(x[["a", "b"]], y), test=(x[["a", "b"]], y)).build()
    assert not warnings(splits)


def test_many_names_are_shortened(tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = {"v": [[1.0, 2.0, 3.0]] * 10} | {f"c{number}": np.arange(10.0) ** 2 for number in range(30)}
    table = pyarrow.table(columns | {"label": [0, 1] * 5})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    remark = Tabular(train=(str(tmp_path / "train.parquet"),)).build().train.remark()
    assert remark.startswith("the columns are v[0..2], c0, c1, ")
    assert remark.endswith(", c18 and 11 more (data.json has all)")
