"""Caches of images in places that are another user's, a link or full: they are refused, and nothing there changes."""

import errno
import os
import stat

import numpy as np
import pytest
from photographs import folder_of_photographs
from test_bad_inputs_data import PLAIN, photos_of, read_all

from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, ImageFolder
from jaxdl.data.images import shm
from jaxdl.data.images.private import private_folder
from jaxdl.data.images.store import ENCODED, Record, Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("images"), classes=2, train=4, test=2, size=(40, 50))


# What another user has put in the place of a cache

STRANGE = {
    "another user's folder": r"the folder belongs to .*uid \d+\), so uid 12345 cannot trust its contents",
    "a link": "it is a symbolic link made by ",
    "a file": "it is not a folder, and belongs to ",
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
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(shm, "memory_folder", lambda: memory)
    data = ImageFolder(folder=str(folder), photos=PLAIN.replaced({"cache": Cache(short_side=32, memory_bytes=2**20)}))
    key = photos_of(data).pipeline.cache_key()
    monkeypatch.setattr(shm, "shared_path", lambda key: memory / f"jaxdl-0-{key}")
    path = memory / f"jaxdl-0-{key}"
    precious = put(kind, path, tmp_path, monkeypatch)
    for use in (lambda: shm.shared_folder(key), data.build):
        with pytest.raises(ConfigError, match=f"cannot use {path}: {STRANGE[kind]}") as refused:
            use()
        assert "data.photos.cache.memory_bytes=0" in str(refused.value)
    shm.clear_abandoned()
    assert precious.read_text() == "x"
    assert os.path.lexists(path), "what is not ours is not ours to remove"


def test_the_memory_cache_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "memory_folder", lambda: tmp_path)
    found = shm.shared_folder("a-cache")
    assert found.name == f"jaxdl-{os.geteuid()}-a-cache"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    shm.release(found)
    assert not found.exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_a_memory_cache_that_cannot_be_made_is_refused(number, tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "memory_folder", lambda: tmp_path)
    path, opened, tries = shm.shared_path("a-cache"), os.open, []

    def fails(name, flags, *args, **options):
        if flags & os.O_CREAT:
            tries.append(name)
            assert len(tries) < 1000, "it is tried without end"
            raise OSError(number, os.strerror(number), name)
        return opened(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(ConfigError, match=f"cannot use {path}: {os.strerror(number)}. Or turn it off: data.photos"):
        shm.shared_folder("a-cache")
    with pytest.raises(OSError, match=os.strerror(number)):
        Store(tmp_path / "store", 10, 2**20, form=ENCODED, verify=True)
    assert tries == ["lock", "index"]
    monkeypatch.setattr(os, "open", opened)
    assert shm.shared_folder("a-cache") == path, "nothing is left of it"
    shm.release(path)


def test_a_memory_cache_that_is_always_removed_is_refused(tmp_path, monkeypatch):
    """By processes that end, between the steps in which it is made."""
    monkeypatch.setattr(shm, "memory_folder", lambda: tmp_path)
    made = []

    def removed(path):
        found = private_folder(path)
        if len(made) < removals:
            path.rmdir()
        made.append(path)
        return found

    monkeypatch.setattr(shm, "private_folder", removed)
    removals = 3
    shm.release(shm.shared_folder("a-cache"))
    assert len(made) == 4
    removals = 1000
    with pytest.raises(ConfigError, match=r"-a-cache: other processes keep removing it \(100 tries\)"):
        shm.shared_folder("a-cache")


@pytest.mark.parametrize("kind", STRANGE)
def test_the_disk_cache_is_in_no_folder_of_others(kind, tmp_path, monkeypatch, folder):
    cache = Cache(form="encoded", disk=str(tmp_path / "disk"))
    data = ImageFolder(folder=str(folder), photos=PLAIN.replaced({"cache": cache}))
    place = tmp_path / "disk" / photos_of(data).pipeline.cache_key() / "0"
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
    expected = f"{place / name}: it is {'a symbolic link' if kind == 'link' else 'not a regular file'}"
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
