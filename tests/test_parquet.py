"""Rows of Parquet and CSV files: by number, as numbers, as images; what is wrong with them is one message."""

from datetime import datetime
from decimal import Decimal as D

import jax
import numpy as np
import pyarrow
import pytest
from flax import nnx
from parquet_files import png, spark_row, write
from runs import ROOT

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Digits, ParquetImages, ParquetPhotos, Tabular, spec_from_json, spec_to_json
from jaxdl.data.images.image_values import encoded_of, eval_pixels, pixels_of
from jaxdl.data.images.photo import BadImage
from jaxdl.data.images.photos import Photos
from jaxdl.data.tables.row_groups import RowGroups
from jaxdl.models.features import layer_output


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Two files with 25 and 12 rows in groups of 10; x counts all rows."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, rows in (("part-0", range(25)), ("part-1", range(25, 37))):
        write(
            folder / f"{name}.parquet", {"x": list(rows), "z": [0.5 * x for x in rows], "label": [x % 3 for x in rows]}
        )
    return folder


# Row groups


def test_rows_are_found_by_number(numbers):
    groups = RowGroups(sorted(numbers.glob("*.parquet")), ["x"])
    assert len(groups) == 37
    group, row = groups.locate(np.array([0, 9, 10, 24, 25, 36]))
    assert (group.tolist(), row.tolist()) == ([0, 0, 1, 2, 3, 4], [0, 9, 0, 4, 0, 1])
    chosen = np.random.default_rng(0).integers(0, 37, 100)
    assert groups.read(chosen).column(0).to_pylist() == chosen.tolist()
    assert groups.read(np.zeros(0, np.int64)).num_rows == 0
    labels = {path.name: column.to_pylist() for path, column in groups.every("label")}
    assert labels == {"part-0.parquet": [x % 3 for x in range(25)], "part-1.parquet": [x % 3 for x in range(25, 37)]}
    assert groups.name(30).endswith("part-1.parquet, row 5")


def test_a_small_cache_reads_the_same(numbers):
    import pickle

    groups = pickle.loads(pickle.dumps(RowGroups(sorted(numbers.glob("*.parquet")), ["x"], cache_bytes=0)))
    for chosen in np.random.default_rng(1).integers(0, 37, (5, 8)):
        assert groups.read(chosen).column(0).to_pylist() == chosen.tolist()
    assert len(groups._kept) == 1


# Numbers


def test_columns_are_read_and_normalized(numbers):
    splits = Tabular(train=(f"{numbers}/part-0*",), test=(f"{numbers}/part-1*",), features=("z", "x")).build()
    spec = splits.train.spec
    assert (spec.columns, spec.num_classes, len(splits.train), len(splits.test)) == (("z", "x"), 3, 25, 12)
    batch = splits.train.batch(np.array([4, 2]))
    assert batch["x"].tolist() == [[2.0, 4.0], [1.0, 2.0]]
    assert batch["label"].tolist() == [1, 2]
    every = splits.train.batch(np.arange(25))
    read = np.asarray(spec.inputs({"x": every["x"]})[0])
    np.testing.assert_allclose(read.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(read.std(axis=0), 1, atol=1e-6)
    assert spec_from_json(spec_to_json(spec)) == spec
    plain = Tabular(train=(f"{numbers}/part-0*",), test=(f"{numbers}/part-1*",), normalize=False).build().train.spec
    assert (plain.columns, plain.mean, plain.std) == (("x", "z"), (0.0, 0.0), (1.0, 1.0))


def test_each_class_is_held_out(numbers):
    splits = Tabular(train=(f"{numbers}/part-*",), test_fraction=0.25).build()
    labels = splits.test.batch(np.arange(len(splits.test)))["label"]
    assert np.bincount(labels).tolist() == [3, 3, 3]
    seen = [splits.train.batch(np.arange(len(splits.train)))["x"], splits.test.batch(np.arange(9))["x"]]
    assert sorted(np.concatenate(seen)[:, 0].tolist()) == list(range(37))


def test_csv_and_lists_are_the_same_numbers(numbers, tmp_path):
    (tmp_path / "a.csv").write_text("x,z,label\n" + "".join(f"{x},{0.5 * x},{x % 3}\n" for x in range(25)))
    pairs = write(
        tmp_path / "lists.parquet", {"v": [[x, 0.5 * x] for x in range(25)], "label": [x % 3 for x in range(25)]}
    )
    files = (f"{numbers}/part-0*", str(tmp_path / "a.csv"), pairs)
    sources = [Tabular(train=(one,)).build().train for one in files]
    assert len({source.content() for source in sources}) == 1
    assert sources[2].spec.columns == ("v[0]", "v[1]")


@pytest.mark.slow
def test_a_run_of_a_table_learns_and_predicts(tmp_path):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    columns = {f"c{place}": x[:, place] for place in range(x.shape[1])} | {"label": y}
    changes = {"data.train": (write(tmp_path / "cancer.parquet", columns),), "epochs": 6, "schedule.warmup_epochs": 1}
    changes |= {"report.curves": False, "report.tensorboard": False}
    for name in ("config", "logistic"):
        experiment = jaxdl.load(f"{ROOT}/configs/tabular_mlp.py:{name}", changes).replaced({"mesh.cpu_devices": None})
        run = jaxdl.train(experiment, tmp_path / name, quiet=True)
        assert run.metrics["accuracy"] > 0.93
    predictor = jaxdl.restore(tmp_path / "config")
    found = predictor.predict(x[:50])
    assert (found.argmax(axis=1) == y[:50]).mean() > 0.9
    np.testing.assert_array_equal(
        predictor.predict({name: columns[name][:50] for name in columns if name != "label"}), found
    )
    hidden = predictor.features(x[:5], "hidden2")
    assert hidden.shape == (5, 64)
    with pytest.raises(
        ConfigError, match=r"layer stage4: the network has no such layer; it has head, hidden1, hidden2\."
    ):
        predictor.features(x[:5], "stage4")
    with pytest.raises(ConfigError, match=r"predict: got float64 \[2, 3\]; this network reads numbers \[batch, 30\]"):
        predictor.predict(np.zeros((2, 3)))


@pytest.mark.parametrize(
    ("columns", "changes", "problem"),
    [
        ({"x": [1.0, 2.0], "y": [0, 1]}, {}, r"it has no column 'label'; it has x, y\."),
        ({"x": [1.0, 2.0], "label": [0, 1]}, {"features": ("w",)}, r"it has no column 'w'"),
        ({"x": [1.0, None], "label": [0, 1]}, {}, r"column 'x' is null in row 1\."),
        ({"x": [1.0, float("inf")], "label": [0, 1]}, {}, r"column 'x' is not finite in row 1\."),
        ({"x": [1.0, 1e39], "label": [0, 1]}, {}, r"column 'x' is not finite in row 1\."),
        ({"x": [3, None], "label": [0, 1]}, {}, r"column 'x' is null in row 1\."),
        ({"x": [[3, 4], [5, None]], "label": [0, 1]}, {}, r"column 'x' has a null in row 1\."),
        ({"x": [2**24, 2**24 + 1], "label": [0, 1]}, {}, r"'x' has the integer 16777217 in row 1; .* exact up to 1677"),
        ({"x": [-(2**63), 0], "label": [0, 1]}, {}, r"'x' has the integer -9223372036854775808 in row 0"),
        ({"x": [[3, 4], [5, 2**40]], "label": [0, 1]}, {}, r"'x' has the integer 1099511627776 in row 1"),
        ({"x": [D("16777217"), D("1")], "label": [0, 1]}, {}, r"'x' has the integer 16777217 in row 0"),
        ({"x": [datetime(2024, 1, 1)] * 2, "label": [0, 1]}, {}, r"contains timestamp\[us\], not numbers.*data table"),
        ({"x": [1.0, 2.0], "label": [0, 2**53 + 1]}, {}, r"the label 'label' is 9007199254740993 in row 1\."),
        ({"x": [1.0, 2.0], "label": [D("1"), D("0." + 20 * "9")]}, {}, r"the label 'label' is 0\.9{20} in row 1\."),
        ({"x": ["a", "b"], "label": [0, 1]}, {}, r"column 'x' contains text, not numbers\."),
        ({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]}, {}, r"the lists of 'x' have 1, 2 numbers\."),
        ({"x": [1.0, 2.0], "label": [0, None]}, {}, r"the label 'label' is null in row 1\."),
        ({"x": [1.0, 2.0], "label": [0.0, 0.5]}, {}, r"the label 'label' is 0\.5 in row 1\. Labels are whole"),
        ({"x": [1.0, 2.0], "label": [0, -1]}, {}, r"the label 'label' is -1 in row 1\."),
        ({"x": [1.0, 2.0], "label": ["a", "b"]}, {}, r"the label 'label' contains text.*StringIndexer"),
        ({"x": [1.0, 2.0, 3.0], "label": [0, 1, 2]}, {"num_classes": 2}, r"there is a label 2; 2 classes are"),
        ({"x": [1.0, 2.0], "label": [0, 0]}, {}, r"1 class"),
        ({"label": [0, 1]}, {}, r"no column but the label"),
        ({"x": [1.0], "label": [0]}, {}, r"one row cannot be divided"),
    ],
)  # fmt: skip
def test_a_bad_table_is_one_message(tmp_path, columns, changes, problem):
    path = write(tmp_path / "bad.parquet", columns)
    with pytest.raises(ConfigError, match=problem) as error:
        Tabular(train=(path,), **changes).build()
    assert "\n" not in str(error.value)


def test_integers_booleans_and_decimals_are_exact(tmp_path):
    """Beside floating-point numbers, which are rounded to float32."""
    columns = {
        "long": pyarrow.array([2**24, -(2**24), 3], pyarrow.int64()),
        "byte": pyarrow.array([255, 0, 1], pyarrow.uint8()),
        "flag": [True, False, True],
        "whole": [D("16777216"), D("-5"), D("0")],
        "price": [D("12345678.91"), D("0.10"), D("-0.5")],
        "time": [1.7e9, 1.7e9 + 1, 0.1],
        "lists": [[2**24, 1], [0, 2], [5, 3]],
        "label": [D("1"), D("0"), D("1")],
    }
    path = write(tmp_path / "a.parquet", columns, group=2)
    write(tmp_path / "b.parquet", {name: pyarrow.array(one)[:0] for name, one in columns.items()})
    source = Tabular(train=(f"{tmp_path}/*.parquet",), test=(path,)).build().train
    rows = source.batch(np.arange(3))
    expected = [
        [2**24, 255, 1, 16777216, np.float32(12345678.91), np.float32(1.7e9), 2**24, 1],
        [-(2**24), 0, 0, -5, np.float32(0.1), np.float32(1.7e9), 0, 2],
        [3, 1, 1, 0, -0.5, np.float32(0.1), 5, 3],
    ]
    assert rows["x"].astype(np.float64).tolist() == np.array(expected, np.float64).tolist()
    assert rows["label"].tolist() == [1, 0, 1]
    frame = {name: np.zeros(1) for name in source.spec.columns} | {"long": np.array([2**24 + 1])}
    with pytest.raises(ConfigError, match=r"predict: column 'long' has the integer 16777217 in row 0"):
        source.spec.to_predict(frame, "predict")
    with pytest.raises(ConfigError, match=r"predict: column 'byte' has the integer 16777217 in row 0"):
        source.spec.to_predict(np.array([[0, 2**24 + 1, 0, 0, 0, 0, 0, 0]]), "predict")


@pytest.mark.parametrize("kind", [Tabular, ParquetImages, ParquetPhotos])
def test_files_that_are_not_there_or_no_parquet(kind, tmp_path):
    with pytest.raises(ConfigError, match="no files are given"):
        kind().build()
    with pytest.raises(ConfigError, match="there is no such file"):
        kind(train=(f"{tmp_path}/*.parquet",)).build()
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"a\.parquet: it cannot be read as a Parquet file"):
        kind(train=(f"{tmp_path}/a.parquet",)).build()


# Images


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """(splits of the digits, folder with the same rows as Parquet files)."""
    folder, splits = tmp_path_factory.mktemp("digits"), Digits().build()
    for name, source in (("train", splits.train), ("test", splits.test)):
        rows = source.batch(np.arange(len(source)))
        images = [png(image) for image in rows["image"]]
        write(folder / f"{name}.parquet", {"image": images, "label": rows["label"]}, group=64)
    return splits, folder


@pytest.mark.parametrize("memory_bytes", [2**30, 2**16])
def test_images_in_parquet_are_those_of_the_digits(digits, memory_bytes):
    splits, folder = digits
    files = {"train": (f"{folder}/train.parquet",), "test": (f"{folder}/test.parquet",)}
    made = ParquetImages(**files, memory_bytes=memory_bytes).build()
    assert made.train.spec == splits.train.spec
    for own, other in ((made.train, splits.train), (made.test, splits.test)):
        assert len(own) == len(other)
        indices, _ = own.order(3).rows(500, 64)
        np.testing.assert_array_equal(indices, other.order(3).rows(500, 64)[0])
        for name, values in other.batch(indices).items():
            np.testing.assert_array_equal(own.batch(indices)[name], values)


def test_held_out_images_are_of_all_classes(digits):
    made = ParquetImages(train=(f"{digits[1]}/train.parquet",), test_fraction=0.1, memory_bytes=0).build()
    assert len(made.train) + len(made.test) == 1438
    labels = made.test.batch(np.arange(len(made.test)))["label"]
    assert set(labels.tolist()) == set(range(10))
    assert made.train.content() != made.test.content()


def test_the_three_forms_of_an_image():
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    for pixels in (colours, colours[..., :1]):
        for value in (png(pixels), spark_row(pixels), pixels.tolist()):
            np.testing.assert_array_equal(pixels_of(value), pixels)
            np.testing.assert_array_equal(pixels_of(encoded_of(value)), pixels)
    np.testing.assert_array_equal(pixels_of(colours[..., 0].tolist()), colours[..., :1])
    assert pixels_of(png(colours), channels=1).shape == (5, 7, 1)
    assert pixels_of(colours[..., :1].tolist(), channels=3).shape == (5, 7, 3)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "null"),
        (b"", "no bytes"),
        (b"no image", "cannot be read"),
        ({"data": b""}, "no field 'height'"),
        ({"height": None, "width": 1, "mode": 0, "data": b"1"}, "some are null"),
        ({"height": 1, "width": 1, "mode": 0, "data": None}, "some are null"),
        ({"height": -1, "width": -1, "mode": 0, "data": b"1"}, "it is -1 x -1"),
        ([[], []], "have no numbers"),
        ([[1.0, float("nan")]], "not grey levels"),
        ({"height": 1, "width": 1, "mode": 5, "data": b"1"}, "mode is 5"),
        ({"height": 1, "width": 2, "mode": 0, "data": b"1"}, "1 bytes, not 1 x 2 x 1"),
        ([[1, 2], [3]], "not \\[height, width\\]"),
        ([[1, 300]], "not grey levels"),
    ],
)  # fmt: skip
def test_what_is_no_image(value, problem):
    with pytest.raises(BadImage, match=problem):
        pixels_of(value)


def test_images_of_other_sizes_are_one_message(tmp_path):
    images = [png(np.zeros((8, 8, 1), np.uint8)), png(np.zeros((8, 9, 1), np.uint8))] * 4
    path = write(tmp_path / "a.parquet", {"picture": images, "label": [0, 0, 1, 1] * 2})
    with pytest.raises(ConfigError, match=r"row 1: its image is 8 x 9, that of the first row 8 x 8\. .*parquet_photos"):
        ParquetImages(train=(path,), test=(path,), image="picture").build()
    with pytest.raises(ConfigError, match=r"no column 'image'; it has picture, label"):
        ParquetImages(train=(path,)).build()


def test_photographs_are_cropped_as_the_config_says(tmp_path):
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (20 + place, 30, 3), np.uint8) for place in range(8)]
    rows = {"image": [png(one) for one in pixels], "label": [0, 1] * 4}
    path = write(tmp_path / "a.parquet", rows, group=3)
    photos = Photos(size=16, workers=0)
    splits = ParquetPhotos(train=(path,), test=(path,), photos=photos).build()
    try:
        [batch] = splits.test.eval_batches(iter([np.arange(8)]))
        for place, one in enumerate(rows["image"]):
            np.testing.assert_array_equal(batch["image"][place], eval_pixels(one, photos))
        assert batch["label"].tolist() == rows["label"]
    finally:
        splits.train.close()
        splits.test.close()


# Features of a layer


def test_features_of_a_layer(tiny_run):
    images = tiny_run.plan.splits.test.batch(np.arange(6))["image"]
    predictor = jaxdl.restore(tiny_run.workdir)
    np.testing.assert_allclose(predictor.features(images, "head"), predictor.logits(images), rtol=1e-6, atol=1e-6)
    pooled, whole = (predictor.features(images, "stage1", pool=pool) for pool in (True, False))
    assert whole.shape == (6, 8, 8, 32)
    np.testing.assert_allclose(pooled, whole.mean(axis=(1, 2)), rtol=1e-5, atol=1e-6)
    head = predictor.params["head"]
    logits = pooled @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    np.testing.assert_allclose(logits, predictor.logits(images), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(predictor.features(images, "stage1_block1"), pooled)
    with pytest.raises(ConfigError, match="stem_conv, stem_norm"):
        predictor.features(images, "stage2")
    assert predictor.features(images, "stage1_block1.conv1").shape == (6, 32)


class Looped(nnx.Module):
    """A layer that is only called inside a loop, in which it is another object."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x):
        graph, state = nnx.split(self.inner)
        return jax.lax.scan(lambda x, _: (nnx.merge(graph, state)(x), None), x, None, length=3)[0]


def test_a_layer_inside_a_loop_has_no_single_output():
    module = Looped(nnx.Rngs(0))
    with pytest.raises(ConfigError, match="does not call it by itself, but inside a loop"):
        layer_output(module, "inner", np.zeros((1, 2), np.float32))
    assert "__call__" in vars(nnx.Linear), "the class is as it was"
