"""Data that is missing, damaged or empty: one message that names it, and nothing of it is lost."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from photographs import folder_of_photographs

from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, ImageFolder, ImageTars, Photos, PhotoSource, TextFiles
from jaxdl.data.source import TrainRows

PLAIN = Photos(size=16, workers=0)


@pytest.fixture
def images(tmp_path):
    """A folder of 8 training and 4 held-out images that a test may damage."""
    return folder_of_photographs(tmp_path / "images", classes=2, train=4, test=2, size=(40, 50))


def photos_of(data):
    """The training photographs."""
    source = data.build().train
    assert isinstance(source, PhotoSource)
    return source


def read_all(data):
    """Reads all examples of both splits; returns the splits' batches and the warnings."""
    splits, told = data.build(), []
    splits.train.on_warning(told.append)
    count = len(splits.train)
    try:
        rows = [TrainRows(np.arange(count), np.zeros(count, np.int64), 0)]
        train = [
            {name: values.copy() for name, values in one.items()} for one in splits.train.train_batches(iter(rows))
        ]
        test = [
            {name: values.copy() for name, values in one.items()}
            for one in splits.test.eval_batches(iter([np.arange(len(splits.test))]))
        ]
    finally:
        splits.train.close()
    return train, test, told


# Damaged images


def test_an_image_that_is_met_again_and_again_is_damaged_once(images):
    """Of one piece of work too, in which it must not use up `max_bad`."""
    (images / "train" / "b" / "0.jpg").write_bytes(b"")
    splits = ImageFolder(folder=str(images), photos=PLAIN.replaced({"max_bad": 1})).build()
    batch = splits.train.batch(np.full(8, 4))
    assert batch["label"].tolist() == [1] * 8
    assert batch["image"].any(axis=(1, 2, 3)).all(), "each is the next image, none is blank"


@pytest.mark.parametrize(("split", "noun", "count"), [("train", "training", 8), ("val", "held-out", 4)])
def test_a_split_that_is_damaged_is_an_error(split, noun, count, images):
    files = sorted((images / split).glob("*/*.jpg"))
    for path in files[: count // 2]:
        path.write_bytes(b"no image")
    train, _, told = read_all(ImageFolder(folder=str(images), photos=PLAIN))
    assert len(told) == count // 2, "half of them are skipped"
    assert all(one["image"].any(axis=(1, 2, 3)).all() for one in train)
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"of the {count} {noun} images are damaged; the last is {split}/") as error:
        read_all(ImageFolder(folder=str(images), photos=PLAIN))
    assert "it has no bytes. Repair the data" in str(error.value)


# Folders of images


def empty_class(root):
    (root / "train" / "c").mkdir()


def one_class(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split / "b")


def no_images(root):
    for path in root.rglob("*.jpg"):
        path.unlink()


def not_trained_on(root):
    shutil.copytree(root / "val" / "a", root / "val" / "zebra")


def file_instead(root):
    shutil.rmtree(root / "val")
    (root / "val").write_text("")


def loop(root):
    (root / "train" / "a" / "again").symlink_to(root / "train")


def dangling(root):
    (root / "train" / "a" / "9.jpg").symlink_to(root / "nowhere.jpg")


def around(root):
    (root / "train" / "a" / "9.jpg").symlink_to("9.jpg")


FOLDERS = [
    (one_class, "all of its 4 images are of one class, 'a'; classification needs 2 or more"),
    (empty_class, "/train/c: this class folder has no images"),
    (no_images, "none of its images is in a class folder"),
    (not_trained_on, "it has the classes zebra, which are not in train. Remove them"),
    (lambda root: shutil.rmtree(root / "val"), "it has train/, and none of val/, valid/, validation/, test/, testing/"),
    (file_instead, "/val: it is a file, not a folder"),
    (loop, "/train/a/again: this link points to a folder that contains it"),
    (dangling, "/train/a/9.jpg: this link points to a missing file"),
    (around, "/train/a/9.jpg: it cannot be read (Too many levels of symbolic links)"),
]


@pytest.mark.parametrize("number", range(len(FOLDERS)))
def test_a_folder_that_cannot_be_trained_on_is_refused(number, images):
    damage, reason = FOLDERS[number]
    damage(images)
    with pytest.raises(ConfigError) as refused:
        ImageFolder(folder=str(images), photos=PLAIN).build()
    assert reason in str(refused.value)


def test_a_folder_without_permission_is_refused(images, monkeypatch):
    """Root may read all, so the system's answer is made here; os.walk itself would pass over the folder."""
    scandir = os.scandir

    def denied(path="."):
        if str(path).endswith("/train/b"):
            raise PermissionError(13, os.strerror(13), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ConfigError, match=r"/train/b: it cannot be read \(Permission denied\)"):
        ImageFolder(folder=str(images), photos=PLAIN).build()


def test_names_may_have_spaces_other_letters_and_no_encoding(images):
    strange = [b"a b.jpg", "\u00fc\u4e2d\u6587.jpg".encode(), b"latin-\xe9.jpg", b"line\nbreak.jpg"]
    content = (images / "train" / "a" / "0.jpg").read_bytes()
    for name in strange[1:]:
        Path(os.fsdecode(os.fsencode(images / "train" / "a") + b"/" + name)).write_bytes(content)
    Path(os.fsdecode(os.fsencode(images / "train" / "a") + b"/" + strange[0])).write_bytes(b"")
    (images / "train" / ".ipynb_checkpoints").mkdir()
    (images / "train" / ".ipynb_checkpoints" / "0.jpg").write_bytes(content)
    data = ImageFolder(folder=str(images), photos=PLAIN)
    _, _, told = read_all(data)
    assert told == ["images: train/a/a b.jpg is skipped: it has no bytes"]
    source = photos_of(data)
    assert (len(source), source.spec.num_classes) == (12, 2), "a hidden folder is no class"
    records = source.pipeline.records[0]
    for index in range(12):
        records.name(index).encode()


# Tar files


@pytest.fixture
def tars(images, tmp_path):
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            for path in sorted((images / split).glob("*/*.jpg")):
                for suffix, content in (
                    ("jpg", path.read_bytes()),
                    ("cls", str("ab".index(path.parent.name)).encode()),
                ):
                    member = tarfile.TarInfo(f"{path.parent.name}{path.stem}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return ImageTars(train=(f"{tmp_path}/train.tar",), test=(f"{tmp_path}/val.tar",), photos=PLAIN)


def without_end(path):
    """Cut where its last member ends, which the library takes for the end of a whole file."""
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    os.truncate(path, last.offset_data + -(-last.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)


TARS = [
    (lambda path: path.unlink(), {}, "train.tar: no such file"),
    (lambda path: path.write_bytes(b""), {}, "train.tar: not a tar file"),
    (lambda path: path.write_bytes(b"x" * 5000), {}, "train.tar: not a tar file"),
    (lambda path: os.truncate(path, path.stat().st_size // 2), {}, "train.tar: not a tar file"),
    (without_end, {}, "labels (its end is missing (two empty blocks): copy or make it again)"),
    (lambda path: (path.unlink(), path.mkdir()), {}, "train.tar: it cannot be read"),
    (lambda path: (path.unlink(), path.symlink_to("nowhere")), {}, "/nowhere"),
    (lambda path: None, {"train": ("/nowhere/train-{000..003}.tar",)}, "/nowhere: no such folder"),
    (lambda path: None, {"train": ("train-{5..3}.tar",)}, "{5..3} is an empty range"),
    (lambda path: None, {"train": ("nowhere://x/train.tar",)}, "nowhere://x/train.tar: it cannot be reached"),
    (lambda path: None, {"train": ("http://127.0.0.1:9/train.tar",)}, "http://127.0.0.1:9/train.tar: it "),
]


@pytest.mark.parametrize("number", range(len(TARS)))
def test_a_tar_file_that_cannot_be_read_is_refused(number, tars, tmp_path):
    damage, changes, reason = TARS[number]
    damage(tmp_path / "train.tar")
    with pytest.raises(ConfigError) as refused:
        tars.replaced(changes).build()
    if reason != "/nowhere":
        assert reason in str(refused.value)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "link", "garbage"])
def test_a_damaged_table_of_a_tar_file_is_made_again(damage, tars, tmp_path):
    cache = Cache(form="encoded", disk=str(tmp_path / "disk"))
    data = tars.replaced({"photos": PLAIN.replaced({"cache": cache})})
    content = data.build().content()
    path, *others = sorted((tmp_path / "disk").glob("tars-*.table"))
    assert len(others) == 1
    whole = path.read_bytes()
    precious = tmp_path / "precious"
    if damage == "link":
        path.rename(precious)
        path.symlink_to(precious)
    else:
        half, flipped = whole[: len(whole) // 2], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:]
        path.write_bytes({"empty": b"", "cut": half, "flipped": flipped, "garbage": os.urandom(200)}[damage])
    assert data.build().content() == content
    assert path.read_bytes() == whole
    assert not path.is_symlink()
    assert damage != "link" or precious.read_bytes() == whole


# Text

TEXTS = [
    ({"a.txt": b""}, {}, "empty; there is no text to train on"),
    ({"a.txt": b"too short"}, {"length": 100}, "length = 100: the training text has"),
    ({"a.txt": b"x" * 200, "b.txt": b""}, {"length": 300}, "length = 300: the training text has"),
    ({}, {}, "no file in it matches"),
    ({"a.txt": b"x" * 500}, {"glob": "/etc/*"}, "Give a pattern inside the folders of paths"),
    ({"a.txt": b"x" * 500}, {"tokenizer": "nowhere.json"}, "tokenizer nowhere.json: no such file"),
    ({"a.txt": b"x" * 500}, {"tokenizer": "GARBAGE"}, "not a JSON file of the tokenizers library"),
]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_text_that_cannot_be_trained_on_is_refused(number, tmp_path):
    files, changes, reason = TEXTS[number]
    (tmp_path / "text").mkdir()
    for name, content in files.items():
        (tmp_path / "text" / name).write_bytes(content)
    if changes.get("tokenizer") == "GARBAGE":
        (tmp_path / "tokenizer.json").write_bytes(b"\xff{}")
        changes = {"tokenizer": str(tmp_path / "tokenizer.json")}
    data = TextFiles(paths=(str(tmp_path / "text"),), glob="*.txt", length=16).replaced(changes)
    with pytest.raises(ConfigError) as refused:
        data.build()
    assert reason in str(refused.value)


def test_a_text_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(ConfigError, match=r"x/y: it cannot be read \(Permission denied\)"):
        TextFiles(paths=("x/y",)).build()
