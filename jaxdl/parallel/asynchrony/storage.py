"""What the syncer keeps on disk: the tape of its events, and its state to go on from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.parallel.asynchrony.centre import Record, Saved
from jaxdl.parallel.asynchrony.outer import Slow, Vector, as_bytes

TAPE_FILE = "tape.jsonl"
FORMAT = 1
"""Version of both files."""
MAX_TAPE_BYTES = 2**28
"""Where a tape ends; a merge of four learners takes some 2 KB."""
KEPT = 2
"""Saved states that are kept: the newest, and one in case it is damaged."""
_MAX_LINE_BYTES = 2**20
_LINES_BEFORE_STATE = 2


class Tape:
    """An append-only file of events, one JSON object per line. A line that was cut off at its end is removed.

    What is written is on disk after `flush`. A full disk, or a tape of `limit_bytes`, ends the tape and not the run:
    then `problem` says so. Raises ConfigError for a file that cannot be written, or that another syncer writes.
    """

    def __init__(self, path: Path, *, limit_bytes: int = MAX_TAPE_BYTES) -> None:
        self.path = path
        self.problem: str | None = None
        self.count = 0
        """Lines of the tape."""
        self.last_us = 0
        """The time of its last event."""
        self._left = limit_bytes
        self._lines: list[bytes] = []
        self._file = _locked(path)
        whole = 0
        for record, size in _lines(path):
            whole += size
            self.count += 1
            self.last_us = max(self.last_us, record.get("at_us", 0))
        self._file.truncate(whole)
        self._left -= whole

    def begin(self, record: Record) -> None:
        """Begins the tape of a new run, and returns when its first line is on disk.

        A run that ended before its first state was saved left at most the two lines before that. Raises ConfigError for
        a longer tape: then the states of a run are lost.
        """
        if self.count > _LINES_BEFORE_STATE:
            self.close()
            raise ConfigError(
                f"{self.path.parent}: there is the tape of a run, and no state to go on from. Restore it, or give "
                "another folder."
            )
        self._file.truncate(0)
        self.count = 0
        self.write(record)
        self.flush()

    def write(self, record: Record) -> None:
        """Adds a line."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self.problem is None and len(line) > self._left:
            self.problem = f"{self.path}: the tape ends here, at its largest size"
        if self.problem is None:
            self._left -= len(line)
            self._lines.append(line)
            self.count += 1

    def flush(self) -> None:
        """Returns when all lines are on disk."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.problem = f"{self.path}: the tape ends here: {error.strerror or error}"

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self.flush()
        with contextlib.suppress(OSError):
            self._file.close()


def _locked(path: Path) -> BinaryIO:
    """The file, to append to; locked until it is closed or its process ends, where the disk has locks."""
    try:
        file = open(path, "ab")  # noqa: SIM115 (closed by `Tape.close`)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}. Name a folder that can be written.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"{path.parent}: another syncer works in it. End that one, or give another folder.") from None
    except OSError:
        pass
    return file


def make_folder(folder: Path) -> None:
    """Makes the syncer's folder if there is none. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}. Name a folder that can be written.") from None


def read_tape(path: Path) -> list[Record]:
    """All lines of a tape but one that was cut off at its end. Raises ConfigError for a file that is not a tape."""
    try:
        return [record for record, _ in _lines(path)]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}. Name the {TAPE_FILE} of a syncer.") from None


def _lines(path: Path) -> Iterator[tuple[Record, int]]:
    """(record, bytes of its line) of every whole line."""
    with open(path, "rb") as file:
        number = 0
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
            number += 1
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or "kind" not in record:
                raise ConfigError(f"{path}: line {number} is not an event. Restore the tape, or move it away.")
            yield record, len(line)
        if len(line) == _MAX_LINE_BYTES:
            raise ConfigError(f"{path}: line {number + 1} is not an event. Restore the tape, or move it away.")


def write_state(folder: Path, saved: Saved, position: int) -> Path:
    """Writes a state, which counts once it is whole; removes the oldest. `position` is the line of the tape after it.

    Raises OSError.
    """
    version = saved.fields["standing"]["version"]
    path = folder / f"anchor-{version:08d}-{position:010d}"
    vectors = (saved.anchor, saved.slow.momentum, saved.slow.sum)
    header = {
        "format": FORMAT,
        "position": position,
        "sizes": [vector.size for vector in vectors],
        "fields": saved.fields,
    }
    unfinished = folder / f".{path.name}.tmp"
    checksum = hashlib.sha256()
    with open(unfinished, "wb") as file:
        for part in (json.dumps(header).encode() + b"\n", *(vector.astype("<f4", copy=False) for vector in vectors)):
            checksum.update(as_bytes(part))
            file.write(as_bytes(part))
        file.write(checksum.digest())
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    for old in _saved_files(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def newest_state(folder: Path) -> tuple[Saved | None, int, list[str]]:
    """(the newest state that is whole, the line of the tape after it, what is wrong with newer ones)."""
    problems: list[str] = []
    for path in _saved_files(folder):
        try:
            saved, position = _read_state(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: damaged ({error}); an older one is used")
        else:
            return saved, position, problems
    return None, 0, problems


def _saved_files(folder: Path) -> list[Path]:
    """The newest first: the one with the most events."""
    return sorted(folder.glob("anchor-*-*"), key=lambda path: path.name.rpartition("-")[2], reverse=True)


def _read_state(path: Path) -> tuple[Saved, int]:
    with open(path, "rb") as file:
        line = file.readline()
        header: dict[str, Any] = json.loads(line)
        checksum = hashlib.sha256(line)
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}")
        vectors: list[Vector] = []
        for size in header["sizes"]:
            if not 4 * size <= path.stat().st_size:
                raise ValueError("it is cut off")
            vector = np.empty(size, "<f4")
            if size and file.readinto(as_bytes(vector)) != vector.nbytes:
                raise ValueError("it is cut off")
            checksum.update(as_bytes(vector))
            vectors.append(vector.astype(np.float32, copy=False))
        if file.read() != checksum.digest():
            raise ValueError("its checksum is wrong")
    anchor, momentum, total = vectors
    return Saved(header["fields"], anchor, Slow(momentum, total, header["fields"]["count"])), header["position"]


class StateWriter:
    """Writes states in a thread of its own."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._folder, self._say = folder, say
        self._thread: threading.Thread | None = None
        self._written: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.any = False
        """Whether a state has been written, or tried."""

    @property
    def busy(self) -> bool:
        """Whether it still writes the last state."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, saved: Saved, position: int) -> None:
        """Starts to write a state; the last one must be written."""
        assert not self.busy
        self.any = True
        thread = threading.Thread(target=self._write, args=(saved, position), name="jaxdl-saver")
        thread.start()
        self._thread = thread  # Now: another thread may wait for it, and can join it once it runs.

    def wait(self) -> None:
        """Returns when the last state is written."""
        if self._thread is not None:
            self._thread.join()

    def written(self) -> list[int]:
        """The positions of the states that were written since the last call."""
        positions: list[int] = []
        with contextlib.suppress(queue.Empty):
            while True:
                positions.append(self._written.get_nowait())
        return positions

    def _write(self, saved: Saved, position: int) -> None:
        try:
            write_state(self._folder, saved, position)
        except OSError as error:
            self._say(f"{self._folder}: the state could not be saved: {error.strerror or error}; the run goes on")
        else:
            self._written.put(position)
