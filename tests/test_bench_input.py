"""`bench input`: the sides see the same images, and what is not installed is said."""

import importlib.util
import json

import numpy as np
import pytest
from photographs import encoded, photograph

from jaxdl.data.images.photo import Photo
from jaxdl.performance.bench.__main__ import main
from jaxdl.performance.bench.input import conclusions, make_images, summarize


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        (folder / f"{number}.jpg").write_bytes(encoded(photograph(96, 128, seed=number)))
    return folder


@pytest.mark.slow
def test_it_measures_what_is_there_and_names_what_is_not(images, tmp_path, capsys):
    sides = ["tf.data", "jaxdl", "jaxdl, filling the cache", "jaxdl from memory"]
    options = ["--images", str(images), "--num-images", "32", "--num-rounds", "1", "--size", "32", "--workers", "1"]
    main(["input", *options, "--json", str(tmp_path / "input.json"), "--sides", *sides])
    results = json.loads((tmp_path / "input.json").read_text())["results"]
    for name in sides[1:]:
        assert len(results[name]["core"]) == len(results[name]["machine"]) == 1
        assert min(results[name]["core"] + results[name]["machine"]) > 0
    assert 0 <= results["jaxdl from memory"]["differ"] < 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "12 files of" in printed
    assert "memory against the first epoch" in printed
    if importlib.util.find_spec("tensorflow") is None:
        assert "No module named 'tensorflow'" in results["tf.data"]["missing"]


def test_the_made_images_are_average_ones_of_imagenet(tmp_path):
    files = sorted(make_images(tmp_path / "made", 6).iterdir())
    sizes = [file.stat().st_size for file in files]
    assert 90_000 < np.mean(sizes) < 130_000
    assert {(Photo(file.read_bytes()).height, Photo(file.read_bytes()).width) for file in files} == {(375, 500)}


def test_ratios_are_of_rounds():
    ours, theirs = np.zeros((1, 2, 2, 3), np.uint8), np.full((1, 2, 2, 3), 3, np.uint8)
    results = {
        "jaxdl": {"core": [100.0, 300.0, 200.0], "machine": [400.0], "pixels": ours},
        "jaxdl, filling the cache": {"core": [10.0, 20.0, 30.0]},
        "jaxdl from memory": {"core": [100.0, 400.0, 90.0]},
        "tf.data": {"core": [50.0, 100.0, 400.0], "machine": [100.0], "pixels": theirs},
        "torch, Pillow": {"missing": "not measured: No module named 'torch'"},
    }
    summarize(results)
    assert results["tf.data"]["core ratio"] == 2
    assert results["tf.data"]["machine ratio"] == 4
    assert results["tf.data"]["differ"] == 3
    assert conclusions(results) == ["memory against the first epoch, which fills the cache: 10.0 x (one core)"]


MISTAKES = [
    (["--size", "0"], "--size 0: too small to measure. Give 1 or more"),
    (["--sides", "dali"], "--sides dali: there is no such side; choose from 'jaxdl'"),
    (["--images", "/nowhere"], "/nowhere: no such folder"),
    (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_mistakes_are_told(args, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["input", *args])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
