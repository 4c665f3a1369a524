"""Data that is missing, damaged, empty or another user's: one message that names it, and nothing of it is lost."""

import os
import stat

import numpy as np
import pytest
from photographs import folder_of_photographs

from jaxdl.config import ConfigError
from jaxdl.data import Cache, ImageFolder, Photos, memory
from jaxdl.data.source import TrainRows
from jaxdl.data.store import ENCODED, Record, Store

PLAIN = Photos(size=16, workers=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("images"), classes=2, train=4, test=2, size=(40, 50))


@pytest.fixture
def images(tmp_path):
    """A folder of 8 training and 4 held-out images that a test may damage."""
    return folder_of_photographs(tmp_path / "images", classes=2, train=4, test=2, size=(40, 50))


def read_all(data):
    """Reads all examples of both splits; returns the splits' batches and the warnings."""
    splits, told = data.build(), []
    splits.train.tell(told.append)
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


# What another user has put in the place of a cache

STRANGE = {
    "another user's folder": r"the folder belongs to .*uid \d+\), so what is in it cannot be trusted by uid 12345",
    "a link": "it is a symbolic link that ",
    "a file": "it is no folder, and belongs to ",
    "a folder for all": r"other users can write to the folder \(mode 0777\).*chmod 700",
}


def put(kind, path, tmp_path, monkeypatch):
    """Puts something strange at the path; returns the file in it that must stay."""
    precious = tmp_path / "elsewhere" / "precious"
    precious.parent.mkdir()
    if kind == "a link":
        path.symlink_to(precious.parent)
    elif kind == "a file":
        path.write_text("x")
        precious = path
    else:
        path.mkdir()
        path.chmod(0o777 if kind == "a folder for all" else 0o700)
        precious = path / "lock"
    precious.write_text("x")
    if kind == "another user's folder":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    return precious


@pytest.mark.parametrize("kind", STRANGE)
def test_the_memory_cache_is_in_no_folder_of_others(kind, tmp_path, monkeypatch, folder):
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(memory, "memory_folder", lambda: shm)
    data = ImageFolder(path=str(folder), photos=PLAIN.replaced({"cache": Cache(short_side=32, memory_bytes=2**20)}))
    key = data.build().train.studio.cache_key()
    monkeypatch.setattr(memory, "shared_path", lambda key: shm / f"jaxdl-0-{key}")
    path = shm / f"jaxdl-0-{key}"
    precious = put(kind, path, tmp_path, monkeypatch)
    for use in (lambda: memory.shared_folder(key), data.build):
        with pytest.raises(ConfigError, match=f"cannot use {path}: {STRANGE[kind]}") as refused:
            use()
        assert "--data.photos.cache.memory-bytes 0" in str(refused.value)
    memory.clear_abandoned()
    assert precious.read_text() == "x"
    assert os.path.lexists(path), "what is not ours is not ours to remove"


def test_the_memory_cache_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_folder", lambda: tmp_path)
    found = memory.shared_folder("a-cache")
    assert found.name == f"jaxdl-{os.geteuid()}-a-cache"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    memory.release(found)
    assert not found.exists()


@pytest.mark.parametrize("kind", STRANGE)
def test_the_disk_cache_is_in_no_folder_of_others(kind, tmp_path, monkeypatch, folder):
    cache = Cache(form="encoded", disk=str(tmp_path / "disk"))
    data = ImageFolder(path=str(folder), photos=PLAIN.replaced({"cache": cache}))
    place = tmp_path / "disk" / data.build().train.studio.cache_key() / "0"
    place.parent.mkdir(parents=True)
    precious = put(kind, place, tmp_path, monkeypatch)
    _, _, told = read_all(data)
    assert len(told) == 1
    assert f"the disk cache takes nothing more: {place.parent}/" in told[0]
    assert precious.read_text() == "x"
    assert not list(precious.parent.glob("segment-*")), "nothing is written there"


@pytest.mark.parametrize("name", ["index", "segment-00000"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_cache_does_not_write_through_a_link(kind, name, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 10_000)
    place = tmp_path / "store"
    place.mkdir()
    if kind == "link":
        (place / name).symlink_to(precious)
    else:
        os.mkfifo(place / name)
    record = Record(np.zeros(100, np.uint8), 0, 0, 0)
    expected = f"{place / name}: it is {'a symbolic link' if kind == 'link' else 'no regular file'}"
    if name == "index":
        with pytest.raises(OSError, match=expected):
            Store(place, 10, 2**20, form=ENCODED, verify=True)
    else:
        store = Store(place, 10, 2**20, form=ENCODED, verify=True)
        assert not store.put(0, record)
        assert store.problem is not None
        assert store.problem.startswith(expected)
        store.close()
    assert precious.read_bytes() == b"x" * 10_000


# Damaged images


def test_an_image_that_is_met_again_and_again_is_damaged_once(images):
    """Of one piece of work too, in which it must not use up `max_bad`."""
    (images / "train" / "b" / "0.jpg").write_bytes(b"")
    splits = ImageFolder(path=str(images), photos=PLAIN.replaced({"max_bad": 1})).build()
    batch = splits.train.batch(np.full(8, 4))
    assert batch["label"].tolist() == [1] * 8
    assert batch["image"].any(axis=(1, 2, 3)).all(), "each is the next image, none is blank"


@pytest.mark.parametrize(("split", "noun", "count"), [("train", "training", 8), ("val", "held-out", 4)])
def test_a_split_that_is_damaged_is_an_error(split, noun, count, images):
    files = sorted((images / split).glob("*/*.jpg"))
    for path in files[: count // 2]:
        path.write_bytes(b"no image")
    train, _, told = read_all(ImageFolder(path=str(images), photos=PLAIN))
    assert len(told) == count // 2, "half of them are skipped"
    assert all(one["image"].any(axis=(1, 2, 3)).all() for one in train)
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"of the {count} {noun} images are damaged; the last is {split}/") as error:
        read_all(ImageFolder(path=str(images), photos=PLAIN))
    assert "it has no bytes. Mend the data" in str(error.value)
