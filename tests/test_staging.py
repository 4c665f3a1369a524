"""Copies of data on the disk of a node: made once, checked, gone on with, made again where the source has changed."""

import collections
import errno
import fcntl
import os
import shutil
import tarfile
import threading
from pathlib import Path

import fsspec
import jax
import pytest
from runs import ONE_DEVICE, tiny_experiment

import jaxdl
from jaxdl.data import (
    Clicks,
    Digits,
    Documents,
    ImageFolder,
    ImageTars,
    Mixture,
    MovieLens,
    Stage,
    Tabular,
    TextFiles,
    remote,
    staging,
)
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.report.status import State, read_record
from jaxdl.training.tasks import LanguageModelling

TEXTS = {"a.txt": "one " * 300, "b.txt": "two " * 200, "c.txt": "three " * 100}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source" / "books"
    folder.mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def reads(monkeypatch):
    """How often each file was read from its source."""
    count, original = collections.Counter(), remote.read

    def read(address, start=0, length=None):
        count[os.path.basename(address)] += 1
        return original(address, start, length)

    monkeypatch.setattr(remote, "read", read)
    return count


def contents(folder):
    return {path.name: path.read_text() for path in sorted(Path(folder).iterdir())}


def test_files_are_copied_once_and_again_when_they_change(tmp_path, source, reads):
    said = []
    copy = Stage(tmp_path / "disk", said.append).folder(str(source))
    assert os.path.basename(copy) == "books"
    assert contents(copy) == TEXTS
    assert "of 2.6 kB" in said[-1]
    assert Stage(tmp_path / "disk").folder(f"{source}/") == copy
    assert set(reads.values()) == {1}
    (source / "b.txt").write_text("four " * 200)
    (source / "c.txt").unlink()
    os.truncate(os.path.join(copy, "a.txt"), 5)
    Stage(tmp_path / "disk").folder(str(source))
    assert contents(copy) == {"a.txt": TEXTS["a.txt"], "b.txt": "four " * 200}
    assert reads == {"a.txt": 2, "b.txt": 2, "c.txt": 1}


def test_an_interrupted_copy_goes_on(tmp_path, source, reads, monkeypatch):
    monkeypatch.setattr(staging, "COPIERS", 1)
    original = staging.copy_file

    def copy_two(one, target):
        if one.name == "c.txt":
            raise KeyboardInterrupt
        return original(one, target)

    monkeypatch.setattr(staging, "copy_file", copy_two)
    with pytest.raises(KeyboardInterrupt):
        Stage(tmp_path / "disk").folder(str(source))
    monkeypatch.setattr(staging, "copy_file", original)
    assert contents(Stage(tmp_path / "disk").folder(str(source))) == TEXTS
    assert set(reads.values()) == {1}, "what was whole was not copied again"


def test_a_copy_that_reads_back_otherwise_is_refused(tmp_path, source, monkeypatch):
    original = os.fsync

    def damage(file):
        original(file)
        os.pwrite(file, b"?", 3)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(jaxdl.ConfigError, match="reads back otherwise than it was written"):
        Stage(tmp_path / "disk").folder(str(source))
    assert not list((tmp_path / "disk").rglob("*.txt"))


def test_a_disk_without_room_is_one_message_before_anything_is_copied(tmp_path, source, monkeypatch, reads):
    usage = collections.namedtuple("Usage", "total used free")(100_000, 98_000, 2_000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(jaxdl.ConfigError, match=r"books needs 2\.6 kB \(3 files\) there, and 1 kB are free"):
        Stage(tmp_path / "disk").folder(str(source))
    assert not reads


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(jaxdl.ConfigError, match="Not a directory"):
        Stage(tmp_path / "file").folder(str(source))
    with pytest.raises(jaxdl.ConfigError, match="empty"):
        Stage(" ")


def test_a_disk_without_locks_is_one_message(tmp_path, source, monkeypatch, reads):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(jaxdl.ConfigError, match="the disk has no locks, so two processes could copy at once"):
        Stage(tmp_path / "disk").folder(str(source))
    assert not reads


def test_processes_of_a_node_make_one_copy(tmp_path, source, reads):
    copies, threads = [], []
    for _ in range(4):  # A lock of a file is of its open file, so threads stand for processes.
        stage = Stage(tmp_path / "disk")
        threads.append(threading.Thread(target=lambda stage=stage: copies.append(stage.folder(str(source)))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(copies) == 4
    assert len(set(copies)) == 1
    assert set(reads.values()) == {1}


def test_kinds_of_data_say_what_they_read(tmp_path, source):
    stage = Stage(tmp_path / "disk")
    for split in ("train", "val"):
        (tmp_path / "images" / split / "cat").mkdir(parents=True)
        (tmp_path / "images" / split / "cat" / "1.jpg").write_bytes(b"jpg")
    (tmp_path / "images" / "unused").mkdir()
    copied = ImageFolder(folder=f"{tmp_path}/images").staged(stage).folder
    assert copied.endswith("/images")
    assert sorted(os.listdir(copied)) == ["train", "val"]
    for number in (0, 1):
        with tarfile.open(tmp_path / f"train-{number}.tar", "w"):
            pass
    tars = ImageTars(train=(f"{tmp_path}/train-{{0..1}}.tar",), test=(f"{tmp_path}/train-*.tar",)).staged(stage)
    assert [one.name for one in remote.expand(tars.train[0])] == ["train-0.tar", "train-1.tar"]
    assert [one.name for one in remote.expand(tars.test[0])] == ["train-0.tar", "train-1.tar"]
    assert MovieLens(folder=str(source)).staged(stage).folder.endswith("/books")
    (source / "notes.md").write_text("not asked for")
    texts = TextFiles(paths=(str(source), f"{source}/a.txt", "python:stdlib"), glob="**/*.txt").staged(stage).paths
    assert contents(texts[0]) == TEXTS
    assert [os.path.basename(path) for path in texts] == ["books", "a.txt", "python:stdlib"]
    for data in (Digits(), Clicks()):
        with pytest.raises(jaxdl.ConfigError, match="reads no files, so it has no effect"):
            data.staged(stage)


@pytest.mark.parametrize("pattern", ["*/x.csv", "*/*", "./b?[a]//x*.csv", "b{1..2}a/x.csv", "b1a/x.csv", "b1a/*"])
@pytest.mark.parametrize("root", ["", "{}/tables/", "~/tables/", "memory://{}/tables/"])
def test_a_pattern_may_leave_folders_open(tmp_path, monkeypatch, root, pattern):
    if "://" in root and "?" in pattern:
        pytest.skip("in an object store only * stands for any text")
    for number, folder in enumerate(("b1a", "b2a", "b-1", "b")):  # As text "b-1/" is before "b/", by parts behind it.
        path, text = tmp_path / "tables" / folder / "x.csv", f"a,label\n{number},0\n5,1\n"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        fsspec.filesystem("memory").pipe(str(path), text.encode())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "tables")
    given = root.format(tmp_path) + pattern
    copied = Stage(tmp_path / "disk").files(given)
    found, before = remote.expand(copied), remote.expand(given)
    assert all(one.address.startswith(str(tmp_path / "disk")) for one in found)
    assert len(found) == (1 if "b1a" in pattern else 4 if pattern.startswith("*") else 2)
    assert [one.address for one in before] == sorted(one.address for one in before)
    assert [remote.read(one.address) for one in found] == [remote.read(one.address) for one in before]
    if "://" not in root and "{" not in pattern:
        data = Tabular(train=(given,), test=(given,))
        assert data.staged(Stage(tmp_path / "disk")).build().content() == data.build().content()


def test_the_tokens_of_documents_are_what_is_copied(tmp_path, source, capsys):
    stage, shards = Stage(tmp_path / "disk"), str(tmp_path / "shards")
    data = Documents(paths=(str(source),), shards=shards, length=16)
    with pytest.raises(jaxdl.ConfigError, match="Prepare them first"):
        data.staged(stage)
    before = data.build().content()
    copied = data.staged(stage)
    assert copied.shards.startswith(str(tmp_path / "disk"))
    assert copied.build().content() == before
    for file in source.rglob("*"):
        os.utime(file, (1e9, 1e9))
    assert data.staged(stage).build().content() == before
    assert Mixture(sources={"x": data}).staged(stage).sources["x"].shards == copied.shards
    shutil.copytree(source, other := tmp_path / "more")
    (other / "d.txt").write_text("five " * 50)
    mixed = Mixture(paths={"x": str(source), "y": str(other)}, each=data.replaced({"paths": ()}))
    before = mixed.build().content()
    assert (copied := mixed.staged(stage)).each.shards.startswith(str(tmp_path / "disk"))
    assert copied.build().content() == before


def test_files_of_an_object_store(tmp_path):
    store = fsspec.filesystem("memory")
    for name, text in TEXTS.items():
        store.pipe(f"/staged/books/{name}", text.encode())
    assert contents(Stage(tmp_path / "disk").folder("memory://staged/books")) == TEXTS


@pytest.mark.slow
def test_a_run_reads_copies_and_resumes_from_the_originals(tmp_path, source):
    experiment = tiny_experiment(
        data=TextFiles(paths=(str(source),), glob="*.txt", length=16, test_fraction=0.4),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.01),
        mesh=ONE_DEVICE,
        steps=4,
    )
    options = {"quiet": True, "devices": jax.devices()[:1]}
    staged = jaxdl.train(experiment, tmp_path / "run", stage_data=tmp_path / "disk", max_steps=2, **options)
    copies = list((tmp_path / "disk").glob("*/books/*.txt"))
    assert sorted(path.name for path in copies) == sorted(TEXTS)
    assert str(tmp_path / "disk") not in (tmp_path / "run" / "config.json").read_text()
    whole = jaxdl.train(experiment, tmp_path / "run", **options)
    assert (staged.summary["steps"], whole.summary["steps"]) == (2, 4)
    with pytest.raises(jaxdl.ConfigError, match="reads no files"):
        jaxdl.train(experiment.replaced({"data": "digits"}), tmp_path / "other", stage_data=tmp_path, **options)
    status = read_record(tmp_path / "other")
    assert (status.state, status.reason.exit_code, status.next_action) == (State.REFUSED, 2, "fix")
