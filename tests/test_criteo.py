"""Criteo's files: TSV and Parquet alike, in memory and prepared, missing values, and files that are wrong."""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.data import Criteo, copies
from jaxdl.data.tables import criteo
from jaxdl.data.tables.criteo import hash_of
from jaxdl.data.text_files import LineReader

NUM_EXAMPLES = 40
DRAW = np.random.default_rng(0)
LABELS = DRAW.integers(0, 2, NUM_EXAMPLES).tolist()
NUMBERS = [[None if DRAW.random() < 0.2 else int(DRAW.integers(-2, 500)) for _ in range(13)] for _ in LABELS]
VALUES = [[None if DRAW.random() < 0.2 else f"{DRAW.integers(0, 2**32):08x}" for _ in range(26)] for _ in LABELS]


def lines(examples=range(NUM_EXAMPLES)):
    rows = [[LABELS[i], *NUMBERS[i], *VALUES[i]] for i in examples]
    return "".join("\t".join("" if one is None else str(one) for one in row) + "\n" for row in rows)


@pytest.fixture
def tsv(tmp_path):
    (tmp_path / "day_0.tsv").write_text(lines())
    return tmp_path / "day_0.tsv"


def everything(data):
    splits = data.build()
    parts = [one.batch(np.arange(len(one))) for one in (splits.train, splits.test)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def kept_folders(folder):
    """Those of prepared examples, and of examples that are half-written."""
    return [one for one in folder.iterdir() if one.is_dir()]


def test_tsv_gzip_and_parquet_have_the_same_examples(tsv, tmp_path):
    with gzip.open(tmp_path / "day_0.gz", "wt") as file:
        file.write(lines())
    columns = zip(*[[LABELS[i], *NUMBERS[i], *VALUES[i]] for i in range(NUM_EXAMPLES)], strict=True)
    table = pyarrow.table({f"c{i}": pyarrow.array(column) for i, column in enumerate(columns)})
    pyarrow.parquet.write_table(table, tmp_path / "day_0.parquet")
    found = [
        everything(Criteo(train=(str(path),))) for path in (tsv, tmp_path / "day_0.gz", tmp_path / "day_0.parquet")
    ]
    found.append(everything(Criteo(train=(str(tsv),), folder=str(tmp_path / "kept"))))
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(values, other[name])


def test_values_are_those_of_the_files(tsv):
    rows = tuple(range(5, 31))
    found = everything(Criteo(train=(str(tsv),), rows=rows))
    np.testing.assert_array_equal(found["label"], LABELS)
    expected = [[np.log1p(max(one or 0, 0)) for one in row] for row in NUMBERS]
    np.testing.assert_allclose(found["numbers"], expected, rtol=1e-6)
    ids = np.array(VALUES, object)
    for feature, count in enumerate(rows):
        column = found["ids"][:, feature]
        missing = np.array([one is None for one in ids[:, feature]])
        np.testing.assert_array_equal(column == -1, missing)
        known = hash_of(np.array([one.encode() for one in ids[~missing, feature]]))
        np.testing.assert_array_equal(column[~missing], known % count)


def test_hashes_do_not_depend_on_the_longest_value():
    assert hash_of(np.array([b"ab", b"abcdefgh"]))[0] == hash_of(np.array([b"ab"]))[0]
    spread = np.bincount(hash_of(np.array([b"%08x" % one for one in range(20_000)])) % 10, minlength=10)
    assert abs(spread - 2000).max() < 5 * np.sqrt(2000)


def test_several_ids_are_drawn_from_the_value(tsv):
    data = Criteo(train=(str(tsv),), rows=(1000,) * 26)
    one, several = everything(data), everything(data.replaced({"num_ids": (3,) * 26}))
    ids = several["ids"].reshape(NUM_EXAMPLES, 26, 3)
    np.testing.assert_array_equal(ids[:, :, 0], one["ids"])
    assert ((ids == -1).any(axis=2) == (ids == -1).all(axis=2)).all()
    assert np.mean(ids[:, :, 1] == ids[:, :, 2]) < 0.3


def test_prepared_examples_are_read_again_only_when_files_change(tsv, tmp_path):
    data = Criteo(train=(str(tsv),), folder=str(tmp_path / "kept"))
    first = data.build().train
    [made] = kept_folders(tmp_path / "kept")
    before = (made / "examples.json").stat().st_mtime_ns
    assert data.build().train.content() == first.content()
    assert (made / "examples.json").stat().st_mtime_ns == before
    tsv.write_text(lines(range(20)))
    again = data.build()
    assert len(again.train) + len(again.test) == 20
    assert again.train.content() != first.content()


def not_read(*_):
    raise AssertionError("the files are read again")


def moved(file, to, tmp_path):
    """The same bytes as `file` at another time, and at another place for another node."""
    if to == "touched":
        os.utime(file, (1e9, 1e9))
        return file
    (tmp_path / "node").mkdir()
    return shutil.copy(file, tmp_path / "node" / "copy.tsv")


@pytest.mark.parametrize("to", ["touched", "copied"])
def test_the_same_bytes_are_the_same_examples(tsv, tmp_path, monkeypatch, to):
    """They are not read again, and there is one copy of them."""
    kept = tmp_path / "kept"
    first = Criteo(train=(str(tsv),), folder=str(kept)).build().train.content()
    other = Criteo(train=(str(moved(tsv, to, tmp_path)),), folder=str(kept))
    monkeypatch.setattr(criteo, "_write", not_read)
    assert other.build().train.content() == first
    monkeypatch.setattr(copies, "sha256_of", not_read)  # Known by time and size again.
    assert other.build().train.content() == first
    assert len(kept_folders(kept)) == 1


def test_copies_on_two_hosts_have_the_same_content(tsv, tmp_path):
    other = moved(tsv, "copied", tmp_path)
    contents = [
        [one.content() for one in (splits.train, splits.test)]
        for file, name in ((tsv, "a"), (other, "b"))
        for splits in [Criteo(train=(str(file),), folder=str(tmp_path / name)).build()]
    ]
    assert contents[0] == contents[1]
    assert contents[0][0] != contents[0][1]


@pytest.mark.parametrize("used", [True, False])
def test_the_copy_of_what_a_file_was_is_removed_unless_it_is_used(tsv, tmp_path, monkeypatch, used):
    """The file changes and keeps its size; its copy, in the cache of this user, has no other file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = tmp_path / ".cache" / "jaxdl" / "kept"
    data = Criteo(train=(str(tsv),), folder=str(kept))
    first = data.build()
    content, rows = first.train.content(), first.train.batch(np.arange(3))
    if not used:
        first = None
    tsv.write_text(lines(reversed(range(NUM_EXAMPLES))))
    assert data.build().train.content() != content
    assert len(kept_folders(kept)) == (2 if used else 1)
    if first is not None:
        np.testing.assert_array_equal(first.train.batch(np.arange(3))["ids"], rows["ids"])


def as_before(tsv, kept):
    """A copy as it was when paths, sizes and times named it; what `content` was then."""
    [made] = kept_folders(kept)
    state = [[str(tsv.resolve()), tsv.stat().st_size, tsv.stat().st_mtime_ns]]
    name = f"train-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}"
    (made / "examples.json").write_text(json.dumps({"examples": NUM_EXAMPLES}))
    made.rename(kept / name)
    return f"{name}:0"


@pytest.mark.parametrize("touched", [False, True])
def test_copies_and_contents_of_earlier_versions_are_taken_over(tsv, tmp_path, touched):
    data, kept = Criteo(train=(str(tsv),), folder=str(tmp_path / "kept")), tmp_path / "kept"
    content = data.build().train.content()
    before = as_before(tsv, kept)
    if touched:
        os.utime(tsv, (1e9, 1e9))
    for _ in range(2):
        train = data.build().train
        assert (train.content(), before in train.former_contents()) == (content, True)
    assert len(kept_folders(kept)) == 1


def test_blank_lines_are_counted_and_named(tsv, tmp_path):
    content = lines(range(3)) + "\n" + lines(range(3, NUM_EXAMPLES)).replace("\n", "\r\n") + "\r\n\n\n"
    (tmp_path / "blank.tsv").write_text(content, newline="")
    data = Criteo(train=(str(tmp_path / "blank.tsv"),))
    remarks = [one.build().train.remark() for one in (data, data.replaced({"folder": str(tmp_path / "kept")}))]
    file = tmp_path / "blank.tsv"
    expected = f"4 blank lines were left out ({file}: line 4, {file}: line 42, {file}: line 43, ...)"
    assert remarks == [expected, expected]
    assert not Criteo(train=(str(tsv),)).build().train.remark()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_blank_lines_across_reads(tmp_path, size):
    (tmp_path / "x.tsv").write_bytes(b"\xef\xbb\xbf\na\r\n\r\nb\n\n\nc\n\r\n")
    table = LineReader(tmp_path / "x.tsv", hashing=True)
    while table.read(size):
        pass
    assert table.count_blank()[1:] == (5, [1, 3, 5])
    assert table.sha256() == hashlib.sha256((tmp_path / "x.tsv").read_bytes()).hexdigest()
    table.close()


def test_what_a_killed_process_left_is_removed(tsv, tmp_path, monkeypatch):
    """The next process may have the same number, as in containers."""
    data, kept = Criteo(train=(str(tsv),), folder=str(tmp_path / "kept")), tmp_path / "kept"

    def dies(folder, *_):
        (folder / "labels.u8").write_bytes(b"1")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(criteo, "_write", dies)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            data.build()
    [left] = kept_folders(kept)
    assert left.name.startswith(".")
    splits = data.build()
    assert len(splits.train) + len(splits.test) == NUM_EXAMPLES
    assert [one.name[0] for one in kept_folders(kept)] == ["t"]


def at_once(data, count=3):
    """The contents of training examples that so many readers find which begin together."""
    with ThreadPoolExecutor(count) as threads:
        return [one.result() for one in [threads.submit(lambda: data.build().train.content()) for _ in range(count)]]


def test_one_of_several_processes_reads_the_files(tsv, tmp_path, monkeypatch, capfd):
    """Threads stand for the processes: a lock of a file is as much between them."""
    written, waits, write, flock = [], threading.Event(), criteo._write, fcntl.flock

    def watched(file, how):
        if not how & fcntl.LOCK_NB:
            waits.set()
        flock(file, how)

    def until_another_waits(folder, *rest):
        written.append(folder)
        write(folder, *rest)
        assert waits.wait(20)

    monkeypatch.setattr(fcntl, "flock", watched)
    monkeypatch.setattr(criteo, "_write", until_another_waits)
    assert len(set(at_once(Criteo(train=(str(tsv),), folder=str(tmp_path / "kept"))))) == 1
    assert len(written) == 1
    assert "waiting for another process that reads examples" in capfd.readouterr().err
    assert len(kept_folders(tmp_path / "kept")) == 1


def test_several_processes_on_a_disk_without_locks(tsv, tmp_path, monkeypatch):
    together, write = threading.Barrier(3), criteo._write

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def all_write(*arguments):
        write(*arguments)
        together.wait(20)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(criteo, "_write", all_write)
    assert len(set(at_once(Criteo(train=(str(tsv),), folder=str(tmp_path / "kept"))))) == 1
    assert len(kept_folders(tmp_path / "kept")) == 1


def test_a_folder_that_cannot_be_used(tsv, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data.folder .*file: the examples cannot be kept there.*Give a folder with"):
        Criteo(train=(str(tsv),), folder=str(tmp_path / "file")).build()
    data = Criteo(train=(str(tsv),), folder=str(tmp_path / "kept"))
    data.build()
    [made] = kept_folders(tmp_path / "kept")
    (made / "examples.json").unlink()
    with pytest.raises(ConfigError, match=rf"{made}: the examples cannot be read.*Remove that folder"):
        data.build()


def test_files_of_their_own_are_held_out(tsv, tmp_path):
    (tmp_path / "day_1.tsv").write_text(lines(range(7)))
    splits = Criteo(train=(str(tsv),), test=(str(tmp_path / "day_1.*"),)).build()
    assert (len(splits.train), len(splits.test)) == (NUM_EXAMPLES, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines(range(3)) + "1\t2\n", "Expected 40 columns, got 2"),
        (lines(range(3)) + lines([0]).replace("\t", "\tx", 1), "it cannot be read"),
        ("7" + lines(range(1))[1:], "example 1 has the label 7"),
        (lines(range(1))[1:], r"example 1 has the label -1 \(-1: none\)"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, message):
    (tmp_path / "bad.tsv").write_text(text)
    with pytest.raises(ConfigError, match=message) as found:
        Criteo(train=(str(tmp_path / "bad.tsv"),), folder=str(tmp_path / "kept")).build()
    assert "bad.tsv" in str(found.value)
    assert not kept_folders(tmp_path / "kept")


def test_one_example_cannot_be_held_out(tmp_path):
    (tmp_path / "one.tsv").write_text(lines([0]))
    with pytest.raises(ConfigError, match="the files have one example, so none can be held out"):
        Criteo(train=(str(tmp_path / "one.tsv"),)).build()


def test_files_that_are_not_there():
    with pytest.raises(ConfigError, match="no files are given"):
        Criteo().build()
    with pytest.raises(ConfigError, match="there is no such file"):
        Criteo(train=("nowhere/day_*",)).build()
    with pytest.raises(ConfigError, match="rows has 2 values"):
        Criteo(train=("x",), rows=(1, 2)).build()
    with pytest.raises(ConfigError, match=r"rows has the value 0\. Each is from 1"):
        Criteo(train=("x",), rows=(0,) * 26).build()
