"""The image pipeline: the same batches with any workers, hosts and caches; damaged files; what is left behind."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from photographs import encoded, folder_of_photographs, photograph

from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, ImageFolder, ImageTars, Photos, remote
from jaxdl.data.images.cpus import num_cpus
from jaxdl.data.images.memfd import read_shared, write_shared
from jaxdl.data.images.shm import memory_folder, release, shared_folder
from jaxdl.data.source import TrainRows
from jaxdl.parallel.cluster import ClusterError

PLAIN = Photos(size=48, workers=0, min_scale=0.2, brightness=0.2, policy="trivial", erase=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of_photographs(tmp_path_factory.mktemp("photographs"))


@pytest.fixture
def opened():
    """Builds the sources of a folder, and ends their workers."""
    sources = []

    def build(data):
        splits = data.build()
        sources.append(splits.train)
        return splits

    yield build
    for source in sources:
        source.close()


def images_of(folder, photos=PLAIN, **changes):
    return ImageFolder(folder=str(folder), photos=photos.replaced(changes))


def requests(count=6, batch=10, num_examples=24, seed=3):
    for number in range(count):
        positions = np.arange(number * batch, (number + 1) * batch)
        yield TrainRows(positions * 7 % num_examples, positions // num_examples, seed)


def batches(source, **options):
    return [{name: value.copy() for name, value in one.items()} for one in source.train_batches(requests(**options))]


def equal(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in ("image", "label")
    )


@pytest.fixture(scope="module")
def expected(folder):
    source = images_of(folder).build().train
    return batches(source)


def test_batches_are_of_the_right_kind(expected, folder, opened):
    splits = opened(images_of(folder))
    assert (len(splits.train), len(splits.test)) == (24, 6)
    assert splits.train.spec.num_classes == 3
    one = expected[0]
    assert one["image"].shape == (10, 48, 48, 3)
    assert one["image"].dtype == np.uint8
    assert one["label"].tolist() == [index // 8 for index in next(requests()).indices]
    assert not np.array_equal(expected[0]["image"][0], expected[2]["image"][4]), "another epoch, another crop"


def test_a_worker_makes_the_same_batches(expected, folder, opened):
    assert equal(batches(opened(images_of(folder, workers=1)).train), expected)


def test_a_part_of_a_batch_is_the_same_on_another_host(expected, folder, opened):
    """Rows depend on nothing but (seed, epoch, index): hosts make parts of the batch."""
    source = opened(images_of(folder)).train
    rows = [next(requests()), *list(requests())[1:2]]
    parts = (TrainRows(one.indices[4:], one.epochs[4:], one.seed) for one in rows)
    for found, wanted in zip(source.train_batches(parts), expected, strict=False):
        assert np.array_equal(found["image"], wanted["image"][4:])


@pytest.mark.slow
def test_killing_workers_does_not_change_the_batches(expected, folder, opened):
    source = opened(images_of(folder, workers=2)).train
    random, found = np.random.default_rng(0), []
    for number, one in enumerate(source.train_batches(requests(count=24))):
        found.append({name: value.copy() for name, value in one.items()})
        if number % 10 == 3:  # Twice or more.
            os.kill(int(random.choice(source.pipeline.pool().worker_ids())), signal.SIGKILL)
    assert equal(found[:6], expected)
    assert equal(found, batches(opened(images_of(folder)).train, count=24))


CACHES = {
    "memory": Cache(short_side=64, memory_bytes=2**22),
    "disk": Cache(short_side=64, disk="DISK"),
    "both": Cache(short_side=64, memory_bytes=300_000, disk="DISK"),
    "encoded": Cache(form="encoded", memory_bytes=2**21, disk="DISK"),
}


@pytest.mark.parametrize(("name", "workers"), [*zip(CACHES, [0, 2, 0, 0], strict=True)])
def test_a_warm_cache_gives_what_a_cold_one_gives(name, workers, folder, tmp_path, opened):
    cache = CACHES[name]
    if cache.disk:
        cache = cache.replaced({"disk": str(tmp_path)})
    cold = opened(images_of(folder, workers=workers, cache=cache)).train
    first = batches(cold)
    assert cold.activity().tiers["origin"] >= 24
    before = cold.activity().tiers["origin"]
    assert equal(batches(cold), first), "warm"
    tiers = cold.activity().tiers
    assert tiers["origin"] == before, "nothing is read twice"
    if name == "both":
        assert tiers["memory"] > 0
        assert tiers["disk"] > 0
    cold.close()
    if cache.disk:
        again = opened(images_of(folder, workers=workers, cache=cache)).train
        assert equal(batches(again), first), "another run"
        assert again.activity().tiers["origin"] == 0
    uncached = opened(images_of(folder, workers=0)).train
    assert equal(batches(uncached), first) == (cache.form == "encoded"), "pixels are cut from what is cached"


def test_another_source_or_form_has_another_cache(folder, tmp_path, opened):
    keys = set()
    for cache in (Cache(short_side=64, disk="x"), Cache(short_side=80, disk="x"), Cache(form="encoded", disk="x")):
        keys.add(opened(images_of(folder, cache=cache)).train.pipeline.cache_key())
    other = folder_of_photographs(tmp_path / "other")
    before = opened(images_of(other, cache=cache)).train.pipeline.cache_key()
    keys.add(before)
    (other / "train" / "a" / "0.jpg").write_bytes(encoded(photograph(100, 100)))
    keys.add(opened(images_of(other, cache=cache)).train.pipeline.cache_key())
    assert len(keys) == 5


def test_a_cache_smaller_than_the_images_is_refused(folder):
    with pytest.raises(ConfigError, match=r"short_side = 40: smaller than the images of 48 pixels"):
        images_of(folder, cache=Cache(short_side=40, memory_bytes=1))


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_costs_one_warning(folder, tmp_path, opened, expected):
    blocked = tmp_path / "file"
    blocked.write_text("")
    source = opened(images_of(folder, workers=2, cache=Cache(form="encoded", disk=str(blocked)))).train
    told = []
    source.on_warning(told.append)
    assert equal(batches(source), expected)
    assert len(told) == 1
    assert "the disk cache takes nothing more" in told[0]


# Damaged files


@pytest.fixture
def damaged(folder, tmp_path):
    root = folder_of_photographs(tmp_path / "damaged")
    (root / "train" / "a" / "3.jpg").write_bytes(b"")
    whole = (root / "train" / "b" / "1.jpg").read_bytes()
    (root / "train" / "b" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "val" / "a" / "0.jpg").write_bytes(b"no image")
    return root


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_damaged_images_are_named_counted_and_passed_over(workers, damaged, opened):
    splits = opened(images_of(damaged, workers=workers))
    told = []
    splits.train.on_warning(told.append)
    found = batches(splits.train)
    evaluated = [
        {name: value.copy() for name, value in one.items()}
        for one in splits.test.eval_batches(iter([np.arange(4), np.arange(4, 8)]))
    ]
    assert [line.split(" is skipped: ")[0] for line in sorted(told)] == [
        "damaged: train/a/3.jpg", "damaged: train/b/1.jpg", "damaged: val/a/0.jpg",
    ]  # fmt: skip
    assert evaluated[0]["mask"].tolist() == [False, True, True, True]
    assert evaluated[1]["mask"].tolist() == [True, True, False, False], "two rows of padding"
    assert not evaluated[0]["image"][0].any()
    places = [np.flatnonzero(one.indices == 3) for one in requests()]
    assert any(len(rows) for rows in places)
    for batch, rows in zip(found, places, strict=True):
        assert (batch["label"][rows] == 0).all(), "example 4 takes the place of 3"


def test_too_many_damaged_images_are_an_error(damaged, opened):
    source = opened(images_of(damaged, max_bad=1)).train
    with pytest.raises(
        ConfigError, match=r"2 images are damaged, more than data\.photos\.max_bad=1; the last is train/[ab]/[13]\.jpg"
    ):
        batches(source)


# Where images come from


def test_a_folder_without_classes_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match="no such folder"):
        ImageFolder(folder=str(tmp_path / "none")).build()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "1.jpg").write_bytes(b"")
    with pytest.raises(ConfigError, match="none of its images is in a class folder"):
        ImageFolder(folder=str(tmp_path)).build()
    with pytest.raises(ConfigError, match=r"data\.folder is not set"):
        ImageFolder().build()


def write_tars(folder, root):
    """The folder's images in two tar files a split, as WebDataset has them."""
    for split in ("train", "val"):
        files = sorted((folder / split).glob("*/*.jpg"))
        for shard in range(2):
            with tarfile.open(root / f"{split}-{shard:03d}.tar", "w") as tar:
                for number, path in enumerate(files[shard::2]):
                    label = "abc".index(path.parent.name)
                    other = ("cls", str(label)) if number % 2 else ("json", json.dumps({"label": label}))
                    for suffix, content in (("jpg", path.read_bytes()), (other[0], other[1].encode())):
                        member = tarfile.TarInfo(f"{'long' * 5}/{path.parent.name}{path.stem}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    return root


def test_tar_files_hold_the_same_images(folder, tmp_path, opened):
    root = write_tars(folder, tmp_path)
    photos = PLAIN.replaced({"cache": Cache(short_side=64, disk=str(tmp_path / "cache"))})
    data = ImageTars(train=(f"{root}/train-{{000..001}}.tar",), test=(f"{root}/val-*.tar",), photos=photos)
    splits = opened(data)
    assert (len(splits.train), len(splits.test), splits.train.spec.num_classes) == (24, 6, 3)
    records = splits.train.pipeline.records[0]
    stored = {records.read(index) for index in range(24)}
    wanted = {(path.read_bytes(), "abc".index(path.parent.name)) for path in (folder / "train").glob("*/*.jpg")}
    assert stored == wanted
    assert records.name(0).endswith("/a0.jpg")
    assert len(list((tmp_path / "cache").glob("tars-*.table"))) == 2
    again = opened(data).train.pipeline.records[0]
    assert {again.read(index) for index in range(24)} == wanted, "from the kept table"
    assert pickle.loads(pickle.dumps(again)).read(5) == again.read(5)


def test_addresses_are_read_through_fsspec(folder, opened, expected):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/bucket", recursive=True)
    splits = opened(ImageFolder(folder="memory://bucket", photos=PLAIN))
    assert equal(batches(splits.train), expected)
    with pytest.raises(ConfigError, match=r"nowhere://x: it cannot be reached"):
        ImageFolder(folder="nowhere://x").build()


def test_a_bad_moment_of_the_network_is_waited_out(folder, opened, expected, monkeypatch):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(str(folder), "/moody", recursive=True)
    splits, calls, cat = opened(ImageFolder(folder="memory://moody", photos=PLAIN)), [], type(memory).cat_file

    def moody(self, path, **options):
        calls.append(path)
        if len(calls) % 3:
            raise RuntimeError("503 Slow Down")
        return cat(self, path, **options)

    pauses = []
    monkeypatch.setattr(type(memory), "cat_file", moody)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    assert equal(batches(splits.train), expected)
    assert set(pauses) == {0.2, 1.0}
    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, **options: 1 / 0)
    with pytest.raises(
        ClusterError, match=r"moody: images are out of reach: memory:/+moody/train/\S+: ZeroDivisionError"
    ):
        batches(splits.train)
    assert pauses[-4:] == [0.2, 1.0, 4.0, 16.0]
    monkeypatch.setattr(type(memory), "find", lambda self, path, **options: 1 / 0)
    with pytest.raises(ConfigError, match=r"memory://moody/train: it cannot be listed \(ZeroDivisionError"):
        ImageFolder(folder="memory://moody").build()


SHARES = [
    ({}, 64, 8, 8),
    ({"JAXDL_PROCESSES_OF_HOST": "4"}, 64, 64, 16),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 64, 8, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 64, 64, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "1,8"}, 64, 16, 16),
    ({"JAXDL_PROCESSES_OF_HOST": "100"}, 64, 64, 1),
]


@pytest.mark.parametrize(("variables", "every", "allowed", "share"), SHARES)
def test_processes_of_a_host_share_its_cpus(variables, every, allowed, share, monkeypatch):
    for name in ("JAXDL_PROCESSES_OF_HOST", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: every)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(allowed))
    assert num_cpus() == share


def test_lists_of_files_are_shared_by_the_workers():
    names = np.arange(10_000)
    value = {"names": names, "more": [b"x" * 100, np.ones((3, 5), np.int8)]}
    file = write_shared(value)
    found = read_shared(file)
    os.close(file)
    assert np.array_equal(found["names"], names)
    assert np.array_equal(found["more"][1], value["more"][1])
    assert found["more"][0] == b"x" * 100
    with pytest.raises(ValueError, match="read-only"):
        found["names"][0] = 1


# What is left behind

TRAINER = """
import sys
import numpy as np
from jaxdl.data import Cache, ImageFolder, Photos
from jaxdl.data.source import TrainRows
cache = Cache(short_side=64, memory_bytes=2**22, disk=sys.argv[2])
source = ImageFolder(folder=sys.argv[1], photos=Photos(size=48, workers=2, cache=cache)).build().train
rows = (TrainRows(np.arange(8) + step % 16, np.full(8, step), 0) for step in range(10**9))
for step, batch in enumerate(source.train_batches(rows)):
    if step == 3:
        print(*source.pipeline.pool().worker_ids(), flush=True)
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def ours():
    return {path.name for path in memory_folder().glob(f"jaxdl-{os.getuid()}-*")}


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_trainer_after_the_next_start(folder, tmp_path):
    before = ours()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, folder, tmp_path / "cache"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert trainer.stdout is not None
    with trainer.stdout as lines:
        workers = [int(word) for word in lines.readline().split()]
    assert len(workers) == 2
    assert len(ours() - before) == 1
    trainer.kill()
    trainer.wait()
    end = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers)), "workers end with their parent"
    release(shared_folder("another-cache"))
    assert ours() <= before, "abandoned memory is given back by any next start"


def test_memory_is_given_back_at_the_end(folder, opened):
    before = ours()
    source = opened(images_of(folder, cache=Cache(short_side=64, memory_bytes=2**22))).train
    batches(source, count=1)
    (name,) = ours() - before
    assert name.startswith(f"jaxdl-{os.getuid()}-photographs")
    source.close()
    assert ours() <= before
