"""Prepared data sets of TensorFlow Datasets with damaged files: every file, damaged in every way."""

import errno
import json
import os
import resource
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow_datasets
from mistakes import refusal
from photographs import encoded, photograph
from runs import TinyResNet, tiny_experiment, write_config
from test_tfds import LABEL, TEXT, encode, image_feature, write_dataset

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import TFDS, Photos, prepared, remote
from jaxdl.data.order import EpochShuffle
from jaxdl.data.source import TrainRows, channel_statistics
from jaxdl.parallel.cluster import ClusterError
from jaxdl.parallel.mesh import MeshConfig

RECORDS = "tiny-train.array_record-00000-of-00001"
HELD_OUT = "tiny-test.array_record-00000-of-00001"
KINDS = ("photos", "images", "decoded", "text")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The data sets in which the tests damage copies: 12 training and 4 held-out examples."""
    root = tmp_path_factory.mktemp("prepared")
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (28, 28, 3), dtype=np.uint8) for _ in range(16)]
    made = {
        "photos": [{"image": encoded(photograph(40, 50, seed=i)), "label": i % 3} for i in range(16)],
        "images": [{"image": encode(noise[i]), "label": i % 3} for i in range(16)],
        "text": [{"text": random.bytes(100).hex().encode()} for _ in range(16)],
    }
    for kind, examples in made.items():
        shape = (-1, -1, 3) if kind == "photos" else (28, 28, 3)
        features = {"text": TEXT} if kind == "text" else {"image": image_feature(*shape), "label": LABEL}
        write_dataset(root / kind, features, {"train": examples[:12], "test": examples[12:]})
    return root


@pytest.fixture
def copied(whole, tmp_path):
    """A function that copies a data set, and returns its config and the folder of its files."""

    def copy(kind):
        shutil.copytree(whole / ("images" if kind == "decoded" else kind), tmp_path, dirs_exist_ok=True)
        config = TFDS(name="tiny", data_dir=str(tmp_path))
        changes = {
            "photos": {"photos": Photos(size=16, workers=0)},
            "images": {},
            "decoded": {"memory_limit_bytes": 0},
            "text": {"text_key": "text", "length": 16},
        }[kind]
        return config.replaced(changes), tmp_path / "tiny" / "1.0.0"

    return copy


def read_all(data):
    """Reads every example once, as a run does; returns the warnings."""
    splits, told = data.build(), []
    splits.train.on_warning(told.append)
    count = len(splits.train)
    for _ in splits.train.train_batches(iter([TrainRows(np.arange(count), np.zeros(count, np.int64), 0)])):
        pass
    for _ in splits.test.eval_batches(iter([np.arange(len(splits.test))])):
        pass
    splits.train.close()
    return told


def read_record(data, index):
    """An encoded image of the training split."""
    return prepared.open_split(prepared.open_builder("tiny", data.data_dir), "train", ["image"])[index]["image"]


def cut(length):
    return lambda path: os.truncate(path, length if length >= 0 else path.stat().st_size + length)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def flip(offset):
    def change(path):
        content = bytearray(path.read_bytes())
        content[offset] ^= 0x10
        path.write_bytes(content)

    return change


def edit(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def lengths(*values):
    def change(path):
        info = json.loads(path.read_text())
        info["splits"][0]["shardLengths"] = list(values)
        path.write_text(json.dumps(info))

    return change


AT_START = [
    *(
        (name, how, reason)
        for name in (RECORDS, HELD_OUT)
        for how, reason in (
            (lambda path: path.unlink(), "the file is missing"),
            (cut(0), "it is empty"),
            (cut(100), "it is cut off or damaged"),
            (cut(-1), "it is cut off or damaged"),
            (cut(2**16), "it is cut off or damaged"),
            (lambda path: path.write_bytes(bytes(path.stat().st_size)), "it is cut off or damaged"),
            (folder_instead, "it is not a regular file"),
            (lambda path: (path.unlink(), path.symlink_to("nowhere")), "the file is missing"),
        )
    ),
    *(
        (name, how, reason)
        for name in ("dataset_info.json", "features.json")
        for how, reason in (
            (cut(0), "it is empty"),
            (cut(150), "it is not JSON"),
            (lambda path: path.write_bytes(b"\xff\xfe{{"), "it is not JSON"),
            (lambda path: path.write_text("[]"), "it has no "),
            (lambda path: path.write_text("null"), "it has no "),
            (lambda path: path.unlink(), "the file is missing"),
            (folder_instead, "it cannot be read"),
        )
    ),
    ("dataset_info.json", edit(splits="x"), "its splits are not a list"),
    ("dataset_info.json", edit(splits=[]), "it has no splits"),
    ("dataset_info.json", edit(splits=[{"shardLengths": ["1"]}]), "one of its splits has no name"),
    ("dataset_info.json", edit(bogus=1), 'no field named "bogus"'),
    ("dataset_info.json", edit(fileFormat="nonsense"), "'nonsense' is not a valid FileFormat"),
    ("dataset_info.json", lengths("abc"), "the shardLengths of split 'train' are [\"abc\"], not a list of counts"),
    ("dataset_info.json", lengths("-3"), "not a list of counts"),
    ("dataset_info.json", lengths("20"), f"{RECORDS}: it has 12 records, and dataset_info.json says 20"),
    ("dataset_info.json", lengths("7"), f"{RECORDS}: it has 12 records, and dataset_info.json says 7"),
    ("dataset_info.json", lengths("6", "6"), "-00000-of-00002: the file is missing (2 of its files are"),
    ("features.json", edit(pythonClassName="no.such.Class"), "Unrecognized FeatureConnector type: no.such.Class"),
]


@pytest.mark.parametrize("number", range(len(AT_START)))
def test_a_damaged_data_set_is_refused_at_the_start(number, copied):
    name, damage, reason = AT_START[number]
    data, folder = copied(KINDS[number % len(KINDS)])
    damage(folder / name)
    with pytest.raises(ConfigError) as refused:
        data.build()
    message = str(refused.value)
    assert reason in message
    assert str(folder) in message
    assert f"Copy {folder} again from where it was prepared, or remove it" in message
    assert f"tfds build tiny --file_format=array_record --data_dir={folder.parents[1]}" in message
    if "json" not in reason and "JSON" not in reason and name in (RECORDS, HELD_OUT):
        assert str(folder / name) in message


def test_a_data_set_that_the_library_knows_is_checked_too(copied):
    """The library takes its description from the code, and one without dataset_info.json for one that is not there."""
    data, folder = copied("images")
    known = folder.parents[1] / "mnist" / "3.0.1"
    known.parent.mkdir()
    folder.rename(known)
    (known / "dataset_info.json").unlink()
    with pytest.raises(ConfigError, match=rf"tfds mnist: {known}/dataset_info.json: the file is missing\. Copy"):
        data.replaced({"name": "mnist"}).build()


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_reported_with_its_record(kind, copied):
    """Photographs tolerate some damaged images; what is kept in memory or is text cannot be used without one."""
    data, folder = copied(kind)
    assert read_all(data) == []
    flip(150)(folder / RECORDS)
    found = f"record 0 of {folder / RECORDS} cannot be read (Corrupted"
    if kind == "photos":
        (told,) = read_all(data)
        assert f"example 0 of split 'train' is skipped: {found}" in told
        return
    with pytest.raises(ConfigError) as refused:
        read_all(data)
    assert f"tfds tiny, split 'train', example 0: {found}" in str(refused.value)
    assert "Copy or prepare the data set again" in str(refused.value)


def test_a_record_of_a_slice_is_the_one_of_the_file(copied):
    data, folder = copied("decoded")
    stored = prepared.open_split(prepared.open_builder("tiny", data.data_dir), "train[8:]", ["image", "label"])
    flip(150)(folder / RECORDS)
    assert stored[0]["label"] == 8 % 3
    with pytest.raises(prepared.Unreadable, match=r"record 11 of .*00001 has no 'other'"):
        prepared.open_split(prepared.open_builder("tiny", data.data_dir), "train[8:]", ["other"])[3]


@pytest.mark.parametrize("kind", ["photos", "images"])
def test_a_label_beyond_the_classes_is_refused(kind, whole, tmp_path):
    examples = [{"image": encode(np.zeros((28, 28, 3), np.uint8)), "label": 3}] * 2
    features = {"image": image_feature(28, 28, 3), "label": LABEL}
    data_dir = write_dataset(tmp_path, features, {"train": examples, "test": examples})
    photos = Photos(size=16, workers=0) if kind == "photos" else None
    with pytest.raises(ConfigError, match="its label is 3, but there are 3 classes"):
        read_all(TFDS(name="tiny", data_dir=data_dir, photos=photos))


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("train[:0]", r"it has no examples\. The splits are train \(12 examples\), test \(4 examples\)"),
        ("train[50%:50%]", "it has no examples"),
        ("nowhere", "The splits are train"),
        ("train[", "The splits are train"),
        ("train[:-20]", "The splits are train"),
        ("", "The splits are train"),
    ],
)
def test_a_split_without_examples_is_refused(split, reason, copied):
    data, _ = copied("images")
    with pytest.raises(ConfigError, match=reason):
        data.replaced({"train_split": split}).build()


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=rf"tfds mnist: {tmp_path}/nowhere: no such folder\. Set data_dir \(or TFDS"):
        TFDS().build()


@pytest.mark.parametrize("hard", [4096, 512, resource.RLIM_INFINITY])
def test_the_limit_of_open_files_is_raised(hard, copied, monkeypatch):
    data, _ = copied("images")
    limits = [(32, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.append(values))
    data.build()
    assert limits[1:] == [(512 if hard == 512 else 1026, hard)]


def test_more_record_files_than_may_be_open_are_refused(copied, monkeypatch):
    data, _ = copied("images")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (32, 32))
    with pytest.raises(
        ConfigError, match=r"1 record files .* may open only 32 files and cannot raise .*ulimit -n 1026"
    ):
        data.build()


@pytest.mark.parametrize("name", [RECORDS, "dataset_info.json", "features.json"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_what_cannot_be_read_now_is_not_called_damaged(number, name, copied, monkeypatch):
    """Root may read all and no disk here is a network's, so the system's answer is made here."""
    data, folder = copied("images")
    opened, pauses = os.open, []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)

    def fails(path, *args, **options):
        if str(path) == str(folder / name):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **options)

    def builder(*_, **__):
        try:
            fails(folder / name)
        except OSError as error:
            raise OSError(f"Could not read dataset info\nfrom {name}") from error

    monkeypatch.setattr(os, "open", fails)
    if name != RECORDS:
        monkeypatch.setattr(tensorflow_datasets, "builder", builder)
    denied = number == errno.EACCES
    with pytest.raises(ConfigError if denied else ClusterError) as refused:
        data.build()
    message = str(refused.value)
    assert str(folder / name) in message
    assert "remove" not in message
    assert ("Permission denied). Ask its owner" if denied else "tfds tiny: out of reach: ") in message
    assert denied or "Stale file handle" in message
    assert pauses == ([] if denied else list(remote.PAUSES_SEC))


def test_messages_on_data_in_the_cloud_are_not_those_of_a_local_folder(copied):
    data, folder = copied("images")
    found = prepared.open_builder("tiny", data.data_dir)
    cloud = SimpleNamespace(info=found.info, name="tiny", data_dir="gs://bucket/tiny/1.0.0")
    with pytest.raises(ConfigError, match=r"split 'trian': .*The splits are train \(12 examples\)"):
        prepared.open_split(cloud, "trian", ["image"])
    (folder / RECORDS).unlink()
    with pytest.raises(ConfigError, match=r"or copy gs://bucket/tiny/1\.0\.0 again") as refused:
        prepared.open_split(cloud, "train", ["image"])
    assert "remove" not in str(refused.value)


@pytest.mark.slow
def test_a_record_that_is_damaged_during_training_ends_the_run(capsys, copied, tmp_path, monkeypatch):
    """It is found by the loader's thread, in the second batch."""
    data, folder = copied("decoded")
    bad = int(EpochShuffle(12, 0).indices(11, 1)[0])

    def then_damaged(read, count, **options):
        found = channel_statistics(read, count, **options)
        encoded = read_record(data, bad)
        flip((folder / RECORDS).read_bytes().index(encoded[500:600]))(folder / RECORDS)
        return found

    monkeypatch.setattr(jaxdl.data.tfds, "channel_statistics", then_damaged)
    tiny = tiny_experiment(data=data, batch_size=8, mesh=MeshConfig(), model=TinyResNet(depth=8, width=4))
    message = refusal(capsys, "--config", write_config(tmp_path, tiny), "--workdir", tmp_path / "run")
    found = f"example {bad}: record {bad} of {folder / RECORDS} cannot be read (Corrupted"
    assert message.startswith(f"error: tfds tiny, split 'train', {found}")


def test_a_network_disk_is_waited_for(copied, monkeypatch):
    """Other than damage: nothing is skipped, and the run ends as one that may be started again."""
    pauses = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    for kind in ("photos", "decoded", "text"):
        data, _ = copied(kind)

        class Stale(prepared.StoredSplit):
            def __init__(self, source, *args):
                super().__init__(_Failing(source), *args)

        monkeypatch.setattr(prepared, "StoredSplit", Stale)
        with pytest.raises(ClusterError, match=r"out of reach: record \d+ of .*Stale file handle"):
            read_all(data)
    assert pauses[:4] == list(remote.PAUSES_SEC)


class _Failing:
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        raise RuntimeError(f"read() failed: {os.strerror(116)}; reading x")

    __getitems__ = __getitem__
