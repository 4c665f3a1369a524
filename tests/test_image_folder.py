"""A folder of photographs: its layouts, what is held out, what is said of it, and odd files; and what names a class."""

import dataclasses
import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from mistakes import refusal
from photographs import encoded, folder_of_photographs, photograph
from PIL import Image

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.data import Cache, ImageFolder, ImageSpec, Photos
from jaxdl.data.images.given import reader_for
from jaxdl.data.images.layout import is_held_out
from jaxdl.models import ResNet
from jaxdl.optim import SGD
from jaxdl.report.judged import judged
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.init_images import colour_remark, has_other_classes

PLAIN = Photos(size=32, workers=0)
JPEG = encoded(photograph(40, 50))


def write(root, *names, content=JPEG):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def names_of(source):
    records = source.pipeline.records[source._split]
    return {records.name(index).split("/", 1)[1] for index in range(len(records))}


def opened(root, **fields):
    return ImageFolder(folder=str(root), photos=PLAIN, **fields).build()


LAYOUTS = [
    ("train", "val", {}), ("train", "valid", {}), ("train", "validation", {}), ("train", "test", {}),
    ("Training", "Testing", {}), ("a", "b", {"train_folder": "a", "test_folder": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("train", "test", "fields"), LAYOUTS)
def test_folders_of_training_and_held_out_images(train, test, fields, tmp_path):
    write(tmp_path, *(f"{train}/{name}/1.jpg" for name in ("cat", "dog")), f"{test}/dog/2.jpg")
    splits = opened(tmp_path, **fields)
    assert (names_of(splits.train), names_of(splits.test)) == ({"cat/1.jpg", "dog/1.jpg"}, {"dog/2.jpg"})
    assert splits.train.spec.class_names == ("cat", "dog")


def test_val_goes_before_test_which_is_named(tmp_path):
    write(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg", "test/cat/3.jpg")
    splits = opened(tmp_path)
    assert names_of(splits.test) == {"cat/2.jpg"}
    assert "folders beside the ones that are read: 1 (test)" in splits.train.pipeline.records[0].remark
    write(tmp_path, "train/cat/0.jpg")
    held = opened(tmp_path, test_fraction=0.2)
    assert (names_of(held.train), names_of(held.test)) == ({"cat/1.jpg", "dog/1.jpg"}, {"cat/0.jpg"})


def test_what_is_held_out_depends_on_the_path_alone(tmp_path):
    every = [f"{name}/{number}.jpg" for name in ("cat", "dog", "train") for number in range(20)]
    write(tmp_path, *every)  # One of the classes is of trains.
    splits = opened(tmp_path)
    held = names_of(splits.test)
    assert held == {name for name in every if is_held_out(name, 0.2)}
    assert names_of(splits.train) == set(every) - held
    write(tmp_path, *(f"{name}/{number}.jpg" for name in ("cat", "dog", "train", "ant") for number in range(20, 40)))
    more = opened(tmp_path)
    assert held < names_of(more.test), "more images, and a class before the others"
    assert names_of(splits.train) < names_of(more.train)
    assert names_of(opened(tmp_path, test_fraction=0.1).test) < names_of(more.test)
    # For ever: SHA-256 of the path.
    assert [number for number in range(20) if is_held_out(f"cat/{number}.jpg", 0.2)] == RECORDED
    composed = "caf\u00e9/1.jpg"
    assert is_held_out(composed, 0.5) == is_held_out(unicodedata.normalize("NFD", composed), 0.5)


RECORDED = [0, 13, 14, 19]


def one_class(root):
    write(root, "cat/1.jpg", "cat/2.jpg")


def inside_another(root):
    write(root, "flowers/cat/1.jpg", "flowers/dog/1.jpg")


def empty_class(root):
    write(root, "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg")
    (root / "train" / "owl").mkdir()


def no_validation(root):
    write(root, "train/cat/1.jpg", "train/dog/1.jpg")


def no_training(root):
    write(root, "test/cat/1.jpg", "cat/2.jpg")


def no_classes(root):
    write(root, "1.jpg", "2.jpg")


def archive(root):
    write(root, "photos.zip")


def heic(root):
    write(root, *(f"{name}/{number}.HEIC" for name in ("cat", "dog") for number in range(9)))


def all_held_out(root):
    write(root, *(f"cat/{number}.jpg" for number in (0, 13)), *(f"dog/{number}.jpg" for number in range(9)))


def dangling(root):
    write(root, "cat/1.jpg", "dog/1.jpg")
    (root / "dog" / "2.jpg").symlink_to(root / "none.jpg")


REFUSED = [
    (one_class, "all of its 2 images are of one class, 'cat'"),
    (inside_another, "If the classes are cat, dog, give --data.folder"),
    (empty_class, "train/owl: this class folder has no images"),
    (no_validation, "it has train/, and none of val/, valid/, validation/, test/, testing/ with held-out images. Make"),
    (no_training, "it has test/, and no train/ beside it"),
    (no_classes, "it has no class folders. It has 1.jpg, 2.jpg."),
    (archive, "it has no class folders. It has photos.zip."),
    (heic, "Not read are photographs in HEIC, which the package pillow-heif reads"),
    (all_held_out, "all images of the class 'cat' are in the part of 0.2 that is held out"),
    (dangling, "dog/2.jpg: this link points to a missing file"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_other_layouts_are_refused_in_one_message(number, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxdl.data.images.folder.reads_heic", lambda: False)
    make, reason = REFUSED[number]
    make(tmp_path)
    config = Path(__file__).parent.parent / "configs" / "image_folder.py"
    message = refusal(capsys, "--config", config, "--data.folder", tmp_path, "--mesh.cpu-devices", "8")
    assert reason in message


def test_odd_files_are_read_or_named(tmp_path):
    pixels = photograph(60, 80)
    Image.fromarray(np.asarray(Image.fromarray(pixels).convert("L")).astype(np.uint16) << 8).save(tmp_path / "16.png")
    write(tmp_path, *(f"train/{name}/{number}.jpg" for name in ("cat", "dog") for number in range(6)), "val/cat/1.jpg")
    odd = {
        "turned.jpg": encoded(pixels, orientation=6), "cmyk.jpg": encoded(pixels, mode="CMYK"),
        "16.png": (tmp_path / "16.png").read_bytes(), "film.gif": encoded(pixels, "GIF", mode="P", save_all=True),
        "dot.png": encoded(pixels[:1, :1], "PNG"), "b c \u4e2d\u6587 \u00e9.jpg": JPEG, "sub/folder/1.jpg": JPEG,
    }  # fmt: skip
    for name, content in odd.items():
        write(tmp_path, f"train/dog/{name}", content=content)
    write(tmp_path, "train/cat/cut.jpg", content=JPEG[: len(JPEG) // 2])
    write(tmp_path, "train/cat/text.jpg", content=b"no image")
    write(tmp_path, "train/cat/notes.txt", "train/cat/raw.CR2", "train/loose.jpg", "train/cat/.hidden.jpg")
    (tmp_path / "train" / "dog" / "link.jpg").symlink_to(tmp_path / "train" / "cat" / "0.jpg")
    splits = opened(tmp_path)
    assert len(splits.train) == 6 + 2 + 6 + len(odd) + 1
    warnings = []
    splits.train.on_warning(warnings.append)
    batch = splits.train.batch(np.arange(len(splits.train)))
    assert batch["image"].shape == (22, 32, 32, 3)
    told = "\n".join(warnings)
    assert "Not used are images in no class folder: 1 (loose.jpg); raw photographs, which must be developed: 1" in told
    for text in ("files with names of other kinds", "1 (cat/notes.txt)", "cut.jpg is skipped", "text.jpg is skipped"):
        assert text in told
    facts = dict(splits.facts())
    splits.train.close()
    assert facts["classes"] == "2: cat 8 + 1, dog 14 + 0 (training + held out); nothing is held out of dog"
    assert facts["images"] == (
        "JPEG 19, PNG 2, GIF 1; 50 x 40 pixels 17, 80 x 60 pixels 4, 1 x 1 pixels 1; 1 cannot be read: "
        "train/cat/text.jpg (it cannot be read (cannot identify image file))"
    )
    assert facts["copies"].startswith("1 held-out images are training images too, so the accuracy is too high: val/cat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("photographs"))


@pytest.mark.parametrize("cache", [Cache(), Cache(short_side=48, disk="cache")])
def test_photographs_are_cropped_as_the_evaluation_does(cache, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ImageFolder(folder=str(folder), photos=PLAIN.replaced({"eval_size": 40, "cache": cache}))
    splits = data.build()
    batch = splits.test.eval_batch(np.arange(len(splits.test)))
    splits.test.close()
    reader = reader_for(data, splits.test.spec)
    names, images = reader.read(reader.find(str(folder / "val")), warn=pytest.fail)
    assert [Path(name).parent.name for name in names] == ["a", "a", "b", "b", "c", "c"]
    np.testing.assert_array_equal(images, batch["image"])
    given = Image.open(names[0])
    close = [reader.pixels(given), reader.pixels(np.asarray(given))]  # Decoded by Pillow, in full.
    assert all(np.abs(x.astype(int) - images[0]).mean() < 3 for x in close)


def test_a_run_names_the_classes_and_shows_its_mistakes(folder, tmp_path, capsys):
    experiment = Experiment(
        data=ImageFolder(folder=str(folder), photos=PLAIN),
        model=ResNet(depth=8, width=4), optimizer=SGD(learning_rate=0.1), batch_size=8, steps=2,
    )  # fmt: skip
    run = jaxdl.train(experiment, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "classes    3: a 8 + 2, b 8 + 2, c 8 + 2 (training + held out)" in printed
    assert f"confusion  {tmp_path}/run/confusion.png" in printed
    classes = json.loads((tmp_path / "run" / "summary.json").read_text())["classes"]
    assert list(classes) == ["a", "b", "c"]
    right = sum(one["recall"] * one["examples"] for one in classes.values())
    assert right == pytest.approx(6 * run.metrics["accuracy"], abs=1e-3)
    assert json.loads((tmp_path / "run" / "data.json").read_text())["class_names"] == ["a", "b", "c"]
    for name in ("confusion.png", "mistakes.png"):
        assert min(Image.open(tmp_path / "run" / name).size) > 300
    predictor = jaxdl.restore(tmp_path / "run")
    file = str(folder / "val" / "b" / "1.jpg")
    found = predictor.predict(file)
    again, everything = predictor.predict([Path(file), Image.open(file)]), predictor.predict(folder / "val")
    np.testing.assert_allclose(again[0].probabilities, found.probabilities, rtol=1e-5)
    assert found.name == again[0].name == run.predict(file).name in "abc"
    assert [Path(one.source).parent.name for one in everything] == list("aabbcc")
    right = np.mean([one.name == Path(one.source).parent.name for one in everything])
    assert right == pytest.approx(run.metrics["accuracy"])
    assert found.probability == pytest.approx(found.probabilities.max())
    assert str(found).startswith(f"{file}: {found.name} ")
    with pytest.raises(ConfigError, match=r"none\.jpg: No such file"):
        predictor.predict("none.jpg")
    spoilt = write(tmp_path / "new", "1.jpg")
    write(spoilt, "2.jpg", content=b"no image")
    with pytest.warns(UserWarning, match=r"2\.jpg is left out: it cannot be read"):
        assert len(predictor.predict(spoilt)) == 1
    os.rename(folder / "val" / "c", folder / "val" / "d")
    os.rename(folder / "train" / "c", folder / "train" / "d")
    with pytest.raises(ConfigError, match="trained on other classes: number 2 is 'c', and 'd'"):
        predictor.evaluate(ImageFolder(folder=str(folder), photos=PLAIN))


def test_the_table_counts_what_is_confused():
    class Source:
        spec, parts = ImageSpec(8, 8, 1, 3, (0.0,), (1.0,), ("cat", "dog", "owl")), {}

        def name_of(self, index):
            return f"{index}.png"

        def batch(self, indices):
            return {"image": np.stack([np.full((8, 8, 1), index, np.uint8) for index in indices])}

    each = {
        "label": np.array([0, 0, 1, 1, 1, -1]), "predicted": np.array([0, 1, 1, 0, 0, 2]),
        "confidence": np.array([0.9, 0.6, 0.8, 0.5, 0.7, 0.9]), "label_probability": np.full(6, 0.1),
    }  # fmt: skip
    made = judged({}, each, Source())
    np.testing.assert_array_equal(made.table, [[1, 1, 0], [2, 1, 0], [0, 0, 0]])
    assert made.classes()["dog"] == {"examples": 3, "recall": 0.3333, "precision": 0.5}
    assert made.classes()["owl"] == {"examples": 0, "recall": None, "precision": None}
    mistakes, number = made._mistakes()
    assert ([one.source for one in mistakes], number) == (["4.png", "1.png", "3.png"], 3), "the surest first"
    assert (mistakes[0].label, mistakes[0].predicted, mistakes[0].image[0, 0, 0]) == ("dog", "cat", 4)
    assert made.weakest() == "dog 1 of 3, cat 1 of 2"
    summed = judged({"confusion": made.table.reshape(-1).astype(np.float32)}, {}, Source())
    np.testing.assert_array_equal(summed.table, made.table)


def test_a_network_that_saw_other_colours_is_told_of(tmp_path):
    spec = ImageSpec(32, 32, 3, 2, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4), ("cat", "dog"))
    other = {"modality": "images", "height": 32, "width": 32, "channels": 3, "num_classes": 2,
             "mean": [127.5] * 3, "std": [127.5] * 3, "class_names": ["oak", "elm"]}  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps(other))
    assert "--data.photos.mean 127.5 127.5 127.5 --data.photos.std 127.5 127.5 127.5 does as" in colour_remark(
        tmp_path, spec
    )
    assert has_other_classes(tmp_path, spec), "so that its layer of as many classes is not taken"
    assert not has_other_classes(tmp_path, dataclasses.replace(spec, class_names=("oak", "elm")))
    assert not has_other_classes(tmp_path, dataclasses.replace(spec, class_names=())), "not known"
