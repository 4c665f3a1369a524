"""What is guessed of arrays: class numbers, images, and what is said where they are neither; data to evaluate."""

import numpy as np
import pytest
from test_arrays import IMAGES, Frame, X, Y, arrays

from jaxdl.core.errors import ConfigError
from jaxdl.data import ArraySpec, spec_to_json
from jaxdl.data.array_spec import ArrayInfo
from jaxdl.data.arrays.in_memory import like
from jaxdl.training.run.workdir.records import Workdir, keep_spec
from jaxdl.training.tasks import Classification, Task


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (Y / 1, r"y float32 \[\] contains no class numbers. Class numbers are whole numbers, none missing: y.astype"),
        (Y > 1, r"y bool \[\] .* y.astype\(int\)"),
        (Y[:, None], r"y int32 \[1\] .* y\[:, 0\]"),
        (np.eye(4)[Y], r"y float32 \[4\] .* y.argmax"),
        (Y - 1, r"numbers below 0, .* numpy.unique"),
        (Y * 10**9 // 3, r"larger than there are examples"),
        (Y * 0, "it has 1 class"),
    ],
)
def test_what_is_no_class_number_is_said(y, words):
    spec = arrays((X, y)).build().train.spec
    with pytest.raises(ConfigError, match=words):
        Classification().fitted(spec, lambda batch: batch)


def test_large_numbers_are_classes_where_that_is_said():
    assert arrays((X, Y * 10**6), num_classes=4 * 10**6).build().train.spec.sizes()["num_classes"] == 4 * 10**6
    assert arrays((X, Y * 300)).build().train.spec.sizes()["num_classes"] == 901


@pytest.mark.parametrize(
    ("images", "advice"),
    [
        (IMAGES[..., 0] / 255, r"x\[..., None\]"),
        (np.tile(IMAGES, 3).transpose(0, 3, 1, 2) / 255, r"x.transpose\(0, 2, 3, 1\)"),
        (IMAGES.astype(int), r"x.astype\('uint8'\)"),
    ],
)
def test_what_is_no_image_is_said(images, advice):
    with pytest.raises(ConfigError, match=f"data: they are arrays .* needs images. .*{advice}"):
        Task.fitted(Classification(), arrays((images, Y)).build().train.spec, lambda batch: batch)
    assert arrays((IMAGES / 255, Y)).build().train.spec.fits("images")


def test_data_to_evaluate_have_the_arrays_of_the_training():
    """In any order, with others beside them, and with other numbers among the labels."""
    spec = arrays({"a": X, "b": X[:, 0], "y": Y}).build().train.spec
    found = like(Frame({"y": Y[:2] % 2, "more": Y[:2], "b": X[:2, 1], "a": X[:2]}), spec, "evaluate")
    assert found.spec == spec
    np.testing.assert_array_equal(found.batch(np.array([1]))["b"], X[1:2, 1].astype(np.float32))
    with pytest.raises(ConfigError, match=r"evaluate: there is no b among a, y. The network was trained on a float32"):
        like({"a": X, "y": Y}, spec, "evaluate")
    with pytest.raises(ConfigError, match="evaluate: float32 is not the dtype of y among"):
        like({"a": X, "b": X[:, 0], "y": Y / 2}, spec, "evaluate")
    with pytest.raises(ConfigError, match=r"evaluate: uint8 is not the dtype of x among .*x float32 \[8, 8, 1\]"):
        like((IMAGES, Y), arrays((IMAGES / 255, Y)).build().train.spec, "evaluate")
    unsigned = like({"a": X, "b": X[:, 0], "y": Y.astype(np.uint8)}, spec, "evaluate")
    assert unsigned.batch(np.arange(4))["y"].dtype == np.int32
    images = arrays((IMAGES, Y)).build().train.spec
    assert like((IMAGES, Y * 0), images, "evaluate").spec == images
    more = like({"x": IMAGES, "when": X, "y": Y}, images, "evaluate")
    assert more.spec == images
    assert sorted(more.batch(np.arange(2))) == ["image", "label"]
    with pytest.raises(ConfigError, match=r"^evaluate: x has 21 rows, y has 20"):
        like((IMAGES, Y[1:]), images, "evaluate")


RAW = ArraySpec((ArrayInfo("x", (8, 8), "uint8"), ArrayInfo("y", (), "int32", num_classes=4)))
"""What was guessed of grey levels without a dimension of channels, before they were images."""


def test_arrays_are_read_as_a_run_recorded_them(tmp_path):
    """Whatever is guessed of them now: its network was trained on what `data.json` says."""
    (tmp_path / "data.json").write_text(spec_to_json(RAW))
    recorded = Workdir(tmp_path).read_spec()
    splits = arrays((IMAGES[..., 0], Y)).build()
    assert splits.train.spec.modality == "images"
    found = splits.read_as(recorded)
    keep_spec(tmp_path, found.train.spec)
    np.testing.assert_array_equal(found.test.batch(np.arange(3))["x"], IMAGES[:3, ..., 0])
    assert found.content() == splits.content()
    assert arrays((IMAGES, Y)).build().read_as(recorded) is None
    assert arrays((IMAGES[..., 0] / 255, Y)).build().read_as(recorded) is None
    with pytest.raises(
        ConfigError, match=r"was trained on arrays \(.*x uint8 \[8, 8\].* are images \(8 x 8 x 1, .* now"
    ):
        keep_spec(tmp_path, splits.train.spec)
    assert (tmp_path / "data.json").read_text() == spec_to_json(RAW)
