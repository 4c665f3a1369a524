"""The cache's stores: what is written is read by every process, whatever is killed, damaged or full."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxdl.data.images.damage import Damage
from jaxdl.data.images.store import ENCODED, PIXELS, Record, Store, num_records


def record(number, length=None):
    """Bytes that only this number has."""
    random = np.random.default_rng(number)
    return Record(random.integers(0, 256, length or 100 + number % 900, dtype=np.uint8), number % 7, 0, 0)


def open_store(folder, count=1000, budget=2**24, **options):
    return Store(Path(folder), count, budget, **{"form": ENCODED, "verify": True} | options)


def room(numbers):
    """Bytes that records take one after the other, the last one whole."""
    lengths = [len(record(number).data) for number in numbers]
    return sum(-(-length // 64) * 64 for length in lengths[:-1]) + lengths[-1]


def same(found, wanted):
    return found is not None and np.array_equal(found.data, wanted.data) and found[1:] == wanted[1:]


def test_what_is_put_is_got_by_another_store_and_after_reopening(tmp_path):
    first, second = open_store(tmp_path), open_store(tmp_path)
    for number in range(0, 1000, 3):
        assert (first if number % 2 else second).put(number, record(number))
    for store in (first, second):
        assert all(same(store.get(number), record(number)) for number in range(0, 1000, 3))
        assert store.get(1) is None
    first.close()
    second.close()
    assert len(list(tmp_path.glob("segment-*"))) == 2, "each writer has a segment of its own"
    size = room(range(0, 1000, 6)) + room(range(3, 1000, 6))
    taken = sum(path.stat().st_size for path in tmp_path.glob("segment-*"))
    assert size <= taken < size + 2 * 64, "what was not used is given back"
    third = open_store(tmp_path)
    assert third.put(1, record(1))
    assert all(same(third.get(number), record(number)) for number in (0, 1, 3, 999))
    assert len(list(tmp_path.glob("segment-*"))) == 2


def test_pixels_keep_their_shape_and_are_not_taken_for_files(tmp_path):
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8)
    open_store(tmp_path, form=PIXELS).put(4, Record(pixels, 9, 5, 7))
    assert same(open_store(tmp_path, form=PIXELS).get(4), Record(pixels, 9, 5, 7))
    assert open_store(tmp_path, form=ENCODED).get(4) is None


def test_the_budget_holds_for_all_writers_together(tmp_path):
    stores = [open_store(tmp_path, budget=50_000) for _ in range(3)]
    kept = [stores[number % 3].put(number, record(number, 1000)) for number in range(90)]
    assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) <= 50_000
    for store in stores:
        store.close()
    assert 40 <= sum(kept) <= 50
    assert all(store.problem is None for store in stores), "a full store is as it should be"
    fresh = open_store(tmp_path, budget=50_000)
    assert [same(fresh.get(number), record(number, 1000)) for number in range(90)] == kept


WRITERS = """
import os, sys
sys.path.insert(0, {tests!r})
from test_store import open_store, record

def write(folder, *numbers):
    store = open_store(folder)
    print(os.getpid(), flush=True)
    for number in range(*map(int, numbers)):
        store.put(number, record(number))
    store.close()

for line in sys.stdin:
    if os.fork() == 0:
        try:
            write(*line.split())
        except Exception as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
print(*(os.waitstatus_to_exitcode(os.wait()[1]) for line in range({count})))
"""
"""Each line of its input starts a process that writes; it prints their numbers, and at last how they have ended."""


class Writers:
    """Processes that write: forked by one that has no threads, because to import takes longer than to write."""

    def __init__(self, count):
        code = WRITERS.format(tests=str(Path(__file__).parent), count=count)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self._parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def start(self, *words):
        """Starts one, which has opened the store when its number is returned."""
        print(*words, file=self._parent.stdin, flush=True)
        return int(self._parent.stdout.readline())

    def end(self):
        """The exit codes of all."""
        return [int(code) for code in self._parent.communicate()[0].split()]


@pytest.mark.slow
def test_killed_at_any_moment_it_is_whole(tmp_path):
    """Two writers at a time, killed after 0 to 40 ms of writing; nothing that can be read is wrong."""
    seen, writers = 0, Writers(10)
    for attempt in range(5):
        pids = [writers.start(tmp_path, first, 1000, 2) for first in (0, 1)]
        time.sleep(0.01 * attempt)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        store = open_store(tmp_path, verify=bool(attempt % 2))
        found = [(one := store.get(number)) is None or same(one, record(number)) for number in range(1000)]
        assert all(found)
        count = sum(store.get(number) is not None for number in range(1000))
        assert count >= seen, "what was there is not lost"
        seen = count
        store.close()
    assert -signal.SIGKILL in writers.end()
    assert len(list(tmp_path.glob("segment-*"))) <= 3
    assert seen > 0


@pytest.mark.parametrize("damage", ["entry", "content", "cut", "gone"])
def test_damage_is_read_as_absence(damage, tmp_path):
    store = open_store(tmp_path)
    for number in range(10):
        store.put(number, record(number))
    store.close()
    segment = tmp_path / "segment-00000"
    if damage == "entry":
        with open(tmp_path / "index", "r+b") as file:
            file.seek(48 * 5 + 8)
            file.write(b"\xff\xff\xff\xff\xff\xff\xff\x7f")
    elif damage == "content":
        with open(segment, "r+b") as file:
            file.seek(room(range(6)) - 3)
            file.write(b"\x00\x01\x02")
    elif damage == "cut":
        os.truncate(segment, room(range(6)) - 3)
    else:
        segment.unlink()
    again = open_store(tmp_path)
    lost = {"cut": range(5, 10), "gone": range(10)}.get(damage, [5])
    assert [number for number in range(10) if again.get(number) is None] == list(lost)
    assert again.put(5, record(5))
    assert same(again.get(5), record(5))
    assert all(same(again.get(number), record(number)) for number in range(10) if number not in lost)


def test_a_full_disk_is_a_problem_and_no_error(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = open_store(tmp_path)
    assert store.put(1, record(1))
    monkeypatch.setattr(os, "pwrite", full)
    assert not store.put(2, record(2))
    monkeypatch.undo()
    assert store.problem == f"{tmp_path}: No space left on device"
    assert not store.put(3, record(3)), "it stays off"
    assert same(store.get(1), record(1)), "what it has is still read"


@pytest.mark.slow
def test_many_processes_write_at_once(tmp_path):
    writers = Writers(4)
    for number in range(4):
        writers.start(tmp_path, 100 * number, 100 * number + 150, 1)
    assert writers.end() == [0] * 4
    store = open_store(tmp_path)
    assert all(same(store.get(number), record(number)) for number in range(450))


def test_a_full_store_says_that_it_keeps_what_images_were(tmp_path):
    store = open_store(tmp_path, budget=5_000)
    kept = [store.put(number, record(number, 1000)._replace(mark=1, source=number)) for number in range(9)]
    assert (sum(kept), store.problem) == (4, None), "a full store is as it should be"
    assert not store.put(8, record(8, 1000)._replace(mark=2, source=8))
    assert store.problem is None
    assert not store.put(0, record(99, 1000)._replace(mark=2, source=99))
    assert store.problem == f"{tmp_path} is full, also of images that have changed; remove it, and it is made again"
    index = tmp_path / "index"
    assert (num_records(index), num_records(index, lambda number: 1 + (number == 0))) == (4, 3)


def test_changed_images_are_counted_once_some_have_been_named():
    damage = Damage("data", [1000, 10], 100)
    said = [damage.tell_changed({(0, number): f"{number}.jpg"}) for number in [*range(120), *range(50)]]
    told = {number: "".join(one) for number, one in enumerate(said) if one}
    assert list(told) == [0, 1, 2, 3, 4, 9, 99]
    assert told[4].endswith("it is read again. More of them are counted, and not named.")
    assert told[99] == "data: 100 images have changed since they were cached, lastly 99.jpg."
