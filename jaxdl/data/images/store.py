"""Records by number in a few large files, written and read by all processes of a host at once: a tier of the cache.

A store is a folder: `index`, an entry of 48 bytes for each record, and segments, files of consecutive records. Every
writing process appends to its own locked segment; an entry is written after its record, with checksums of both. So a
process that is killed at any byte leaves at most a record without an entry, or an entry with a wrong checksum; both
read as "not there".

An entry says of which file its record was made: a mark of the place, size and time of that file, and a hash of what was
in it. A record is there for its mark alone. For another mark `renew` gives it, if what is in the file is the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdl.data.images.photo import Scratch
from jaxdl.data.images.private import open_own, private_folder, why_not

_ENTRY = np.dtype(
    [
        ("check", "<u4"),  # of the rest of the entry; 0 is an empty entry
        ("content", "<u4"),  # of the record
        ("offset", "<u8"),
        ("mark", "<u8"),
        ("source", "<u8"),
        ("length", "<u4"),
        ("label", "<i4"),
        ("segment", "<u2"),
        ("height", "<u2"),
        ("width", "<u2"),
        ("form", "<u2"),
    ]
)
_ALIGNMENT = 64
"""Records begin at multiples of this in a segment, which makes reading faster."""
_CHUNK_BYTES = 2**24
"""Growth of a segment: space is allocated in large pieces, so a full disk is found before a record is written."""
ENCODED, PIXELS = 0, 1
"""Forms of a record: the encoded file, or uint8 [height, width, 3]."""


class Record(NamedTuple):
    """A record, uint8 [bytes], its label, and height and width of pixels (0 for a file).

    `mark` is that of the file that it was made of (`Records.mark`), `source` a hash of what was in it.
    """

    data: np.ndarray
    label: int
    height: int
    width: int
    mark: int = 0
    source: int = 0


class Store:
    """Records 0 .. count-1 in a folder, up to `budget` bytes in all; first come, first kept.

    Args:
      folder: created if missing; only this user may write to it.
      count: number of records.
      budget: bytes that the segments may take.
      form: of every record, `ENCODED` or `PIXELS`.
      verify: for disks, which can lose writes: the content is read and checked, not mapped.

    Raises:
      OSError: when the folder cannot be created or opened.
      NotPrivate: an OSError, when the folder or a file in it is a link, or the folder is another user's.
    """

    def __init__(self, folder: Path, count: int, budget: int, *, form: int, verify: bool) -> None:
        self.folder, self._count, self._budget, self._form, self._verify = folder, count, budget, form, verify
        self.problem: str | None = None
        """Why nothing more is written; None while there is nothing. That a store is full is no problem, unless it has
        records of files in which is something else now."""
        self._full = False
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._files: dict[int, int] = {}
        """Segments for reading: file descriptors; the mapped ones are in `_maps`."""
        self._scratch = Scratch()
        self._last: tuple[mmap.mmap, int, int] | None = None
        self._own: tuple[int, int] | None = None
        """File descriptor and number of this process's own segment."""
        self._end = self._room = 0
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as failed:
            self._opened = private_folder(folder)
            failed.callback(os.close, self._opened)
            self._index_file = open_own(self._opened, folder / "index", os.O_RDWR | os.O_CREAT)
            failed.callback(os.close, self._index_file)
            if os.fstat(self._index_file).st_size < count * _ENTRY.itemsize:
                # Reading a hole of a file in memory allocates it, and kills the process if there is no room.
                os.posix_fallocate(self._index_file, 0, count * _ENTRY.itemsize)
            failed.pop_all()
        self._index = np.frombuffer(mmap.mmap(self._index_file, count * _ENTRY.itemsize, prot=mmap.PROT_READ), _ENTRY)

    def num_bytes(self) -> int:
        """Size of the segments."""
        return sum(path.stat().st_size for path in self.folder.glob("segment-*"))

    def get(self, index: int, mark: int = 0) -> Record | None:
        """The record of a file with this mark, or None. Its data are valid until the next call.

        Call `release` after use.
        """
        entry = self._entry(index)
        return None if entry is None or entry["mark"] != mark else self._of(entry)

    def renew(self, index: int, mark: int, source: int) -> Record | None:
        """The record of a file in which is the same as in the one that it was made of; it then has this mark."""
        entry = self._entry(index)
        if entry is None or entry["source"] != source or (record := self._of(entry)) is None:
            return None
        entry["mark"] = mark
        with self._lock, contextlib.suppress(OSError):  # Without the new mark, the file is read again the next time.
            self._write_entry(index, entry)
        return record._replace(mark=mark)

    def has_other(self, index: int, source: int) -> bool:
        """Whether there is a record that was made of a file in which was something else."""
        entry = self._entry(index)
        return entry is not None and entry["source"] != source

    def _of(self, entry: np.ndarray) -> Record | None:
        """The record of an entry; None when it is damaged."""
        if entry["form"] != self._form:
            return None
        offset, length = int(entry["offset"]), int(entry["length"])
        segment = int(entry["segment"])
        try:
            # With the file mapped, a disk error would kill the process.
            data = (self._read if self._verify else self._map)(segment, offset, length)
        except (OSError, ValueError):  # The segment was deleted or truncated.
            return None
        if self._verify and zlib.crc32(data.data) != entry["content"]:
            return None
        about = (int(entry[name]) for name in ("label", "height", "width", "mark", "source"))
        return Record(data, *about)

    def wants(self, index: int, mark: int = 0) -> bool:
        """Whether `put` of this record, with this mark, would add one that is not there."""
        if self._full or self.problem is not None:
            return False
        entry = self._entry(index)
        return entry is None or entry["mark"] != mark

    def release(self) -> None:
        """Removes the pages of the last record from this process's memory; the system may keep them cached."""
        if self._last is not None:
            memory, offset, length = self._last
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_DONTNEED, first, offset + length - first)
            self._last = None

    def put(self, index: int, record: Record) -> bool:
        """Keeps a record, if there is room; returns whether it did. Never raises: an error goes to `problem`."""
        if self._full or self.problem is not None:
            self._note_stale(index, record)
            return False
        length = record.data.nbytes
        content = zlib.crc32(record.data.data) if self._verify else 0
        with self._lock:
            try:
                if not self._make_room(length):
                    self._note_stale(index, record)
                    return False
                assert self._own is not None
                file, segment = self._own
                _write(file, record.data, self._end)
                entry = np.zeros((), _ENTRY)
                entry["content"] = content
                entry["offset"], entry["length"], entry["segment"] = self._end, length, segment
                entry["label"], entry["height"], entry["width"] = record.label, record.height, record.width
                entry["mark"], entry["source"], entry["form"] = record.mark, record.source, self._form
                self._end = _align(self._end + length)
                self._write_entry(index, entry)
            except OSError as error:
                self.problem = why_not(self.folder, error)
                return False
        return True

    def _note_stale(self, index: int, record: Record) -> None:
        if self.problem is None and self.has_other(index, record.source):
            self.problem = f"{self.folder} is full, also of images that have changed; remove it, and it is made again"

    def close(self) -> None:
        """Releases the allocated space that is unused, and unlocks the segment."""
        with self._lock:
            if self._own is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._own[0], min(self._end, self._room))
                os.close(self._own[0])
                self._own = None
            if self._index_file >= 0:
                os.close(self._index_file)
                os.close(self._opened)
                self._index_file = self._opened = -1
                for file in self._files.values():
                    os.close(file)
                self._files.clear()
                self._full = True

    def _write_entry(self, index: int, entry: np.ndarray) -> None:
        entry["check"] = _check(entry)
        _write(self._index_file, entry.tobytes(), index * _ENTRY.itemsize)

    def _entry(self, index: int) -> np.ndarray | None:
        entry = self._index[index].copy()
        return entry if entry["check"] and entry["check"] == _check(entry) else None

    def _read(self, segment: int, offset: int, length: int) -> np.ndarray:
        """Bytes of a segment."""
        if segment not in self._files:
            self._files[segment] = self._open_segment(segment, os.O_RDONLY)
        data, read = self._scratch.take("record", (length,)), 0
        while read < length:
            count = os.preadv(self._files[segment], [data[read:].data], offset + read)
            if not count:
                raise ValueError(f"segment {segment} ends before {offset + length}")
            read += count
        return data

    def _map(self, segment: int, offset: int, length: int) -> np.ndarray:
        """Bytes of a segment, mapped into memory."""
        memory = self._maps.get(segment)
        if memory is None or len(memory) < offset + length:
            file = self._open_segment(segment, os.O_RDONLY)
            try:
                memory = self._maps[segment] = mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
            if len(memory) < offset + length:
                raise ValueError(f"segment {segment} ends before {offset + length}")
        self._last = memory, offset, length
        return np.frombuffer(memory, np.uint8, length, offset)

    def _open_segment(self, number: int, flags: int) -> int:
        return open_own(self._opened, self.folder / f"segment-{number:05d}", flags)

    def _make_room(self, length: int) -> bool:
        """Makes room for `length` bytes in this process's segment; False when the store is full."""
        if self._own is None:
            self._own = self._take_segment()
        if self._end + length <= self._room:
            return True
        file, _ = self._own
        wanted = max(length - (self._room - self._end), 1)
        fcntl.flock(self._index_file, fcntl.LOCK_EX)  # The sum below is over all processes.
        try:
            left = self._budget - self.num_bytes()
            if wanted > left:
                self._full = True
                return False
            # No writer takes all of a small budget at once.
            taken = min(max(wanted, min(_CHUNK_BYTES, self._budget // 32)), left)
            os.posix_fallocate(file, self._room, taken)
            self._room += taken
        finally:
            fcntl.flock(self._index_file, fcntl.LOCK_UN)
        return True

    def _take_segment(self) -> tuple[int, int]:
        """Locks the first segment that no process writes; appends after its last whole record."""
        for number in range(2**16):
            file = self._open_segment(number, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            self._room = os.fstat(file).st_size
            entries = self._index[(self._index["check"] != 0) & (self._index["segment"] == number)]
            ends = entries["offset"] + entries["length"]
            ends = ends[ends <= self._room]  # Beyond it: not a whole entry.
            self._end = _align(int(ends.max())) if len(ends) else 0
            return file, number
        raise OSError("all segments are in use")


def num_records(index: Path, mark: Callable[[int], int] | None = None) -> int:
    """How many records the store with this index has; with `mark` of each, of the files as they are."""
    entries = np.fromfile(index, _ENTRY)
    there = np.flatnonzero(entries["check"])
    return sum(mark is None or int(entries["mark"][number]) == mark(int(number)) for number in there)


def _check(entry: np.ndarray) -> int:
    return zlib.crc32(entry.tobytes()[4:]) or 1


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write(file: int, data: bytes | np.ndarray, offset: int) -> None:
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
