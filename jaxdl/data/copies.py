"""Prepared copies of the examples of files, in a folder, each known by what is in it.

A copy is a folder `SPLIT-CONTENT` with arrays and a note, `examples.json`: how many examples there are, their content,
the SHA-256 of each file, and under which paths, sizes and times the files have been seen. Files that are as they were
seen are not read again. Those of other times or places, with the same sizes, are hashed; if they are equal, the copy is
theirs too. So a file that was touched, or copied to another node, has the copy that it had.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdl.data.locks import locked, saying
from jaxdl.writing import replace_file

NOTE = "examples.json"
_USED = "used.lock"
"""Whoever reads a copy has a shared lock of this file in it, so that nobody removes the copy."""
MOST_SEEN = 256
"""So many places and times of the same files are kept: hosts may share the folder and have files of their own."""


class Copies:
    """The copies of the files `paths` of a split in a folder."""

    def __init__(self, folder: Path, split: str, paths: Sequence[Path], arrays: Sequence[str]) -> None:
        """`arrays` are the names of a copy's files, which make its content. Raises OSError for paths that are gone."""
        self._folder, self._split, self._paths, self._arrays = folder, split, list(paths), arrays
        # Of before they are read: a file that changes meanwhile is seen to have changed the next time.
        self._seen = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
        self._hashes: list[str] | None = None

    @property
    def former_name(self) -> str:
        """What a copy of these files was named when it was known by their paths, sizes and times."""
        return f"{self._split}-{hashlib.sha256(json.dumps(self._seen).encode()).hexdigest()[:16]}"

    def content(self, made: Path) -> str:
        """The content of a copy whose note does not say it. Raises OSError."""
        return content_of(made, self._arrays)

    def made(self, write: Callable[[Path], None]) -> Path:
        """The copy. If there is none, `write` makes one in an empty folder, with its note. Raises OSError.

        Another process that does the same is waited for.
        """
        if (known := self._as_seen()) is not None:
            return known
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._split}-{hashlib.sha256(json.dumps([one[0] for one in self._seen]).encode()).hexdigest()[:16]}"
        with locked(self._folder / f"{name}.lock", saying(f"reads examples into {self._folder}")) as alone:
            if (known := self._as_seen() or self._equal()) is not None:
                return known
            if alone:  # What a killed process left half-written.
                for left in self._folder.glob(f".{name}.*"):
                    shutil.rmtree(left, ignore_errors=True)
            partial = self._folder / f".{name}.{uuid.uuid4().hex}"
            partial.mkdir()
            try:
                write(partial)
                made = self._placed(partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            self._remove_former(made)
        return made

    def _as_seen(self) -> Path | None:
        """The copy of files of these paths, sizes and times."""
        for made, note in self._notes():
            if self._seen in note.get("files", []):
                return made
            if made.name == self.former_name and "content" not in note:
                _change(made, {"content": content_of(made, self._arrays), "files": [self._seen]})
                return made
        return None

    def _equal(self) -> Path | None:
        """The copy of equal files that were seen elsewhere, or at another time."""
        sizes = [size for _, size, _ in self._seen]
        for made, note in self._notes():
            seen, hashes = note.get("files", []), note.get("sha256")
            if hashes and any([size for _, size, _ in one] == sizes for one in seen) and hashes == self._own_hashes():
                _change(made, {"files": [*seen, self._seen][-MOST_SEEN:]})
                return made
        return None

    def _own_hashes(self) -> list[str]:
        if self._hashes is None:
            self._hashes = [sha256_of(path) for path in self._paths]
        return self._hashes

    def _placed(self, partial: Path) -> Path:
        """Where a copy that is whole is then: where an equal one was, if there is one."""
        new = read_note(partial)
        made = self._folder / f"{self._split}-{new['content']}"
        for other, note in self._notes():
            content = note.get("content")
            if content is None and note.get("examples") == new["examples"]:  # Made when its files' times were its name.
                with contextlib.suppress(OSError):
                    content = content_of(other, self._arrays)
            if content == new["content"]:
                made = other
                break
        else:
            _change(partial, {"files": [self._seen]})
            try:
                partial.rename(made)
            except OSError:  # Without locks, another process may have been faster.
                if not made.exists():
                    raise
            return made
        _change(made, {**new, "files": [*read_note(made).get("files", []), self._seen][-MOST_SEEN:]})
        return made

    def _remove_former(self, made: Path) -> None:
        """Removes copies of what these files were before, which nothing leads to any more; not those that are read."""
        paths = [path for path, _, _ in self._seen]
        for other, note in self._notes():
            seen = note.get("files", [])
            left = [one for one in seen if [path for path, _, _ in one] != paths]
            if other == made or len(left) == len(seen):
                continue
            if left:
                _change(other, {"files": left})
            else:
                _remove(other)

    def _notes(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Each copy, and its note; those without one are damaged."""
        for made in sorted(self._folder.glob(f"{self._split}-*")):
            if made.is_dir():
                with contextlib.suppress(OSError, ValueError):
                    yield made, read_note(made)


def read_note(made: Path) -> dict[str, Any]:
    """The note of a copy. Raises OSError and ValueError."""
    note = json.loads((made / NOTE).read_bytes())
    if not isinstance(note, dict):
        raise ValueError(f"{NOTE} is no JSON object")
    return note


def content_of(made: Path, arrays: Sequence[str]) -> str:
    """A hash of the arrays of a copy."""
    return content_from([bytes.fromhex(sha256_of(made / name)) for name in arrays])


def content_from(digests: Sequence[bytes]) -> str:
    """The content of a copy whose arrays have these SHA-256."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Held:
    """While this object is there, nobody removes the copy, on a disk that has locks."""

    def __init__(self, made: Path) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # Of a folder that this user may not write, and of a disk without locks.
            self._file = os.open(made / _USED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _change(made: Path, values: dict[str, Any]) -> None:
    """Changes a note, if this user may: otherwise the same is found out again the next time."""
    with contextlib.suppress(OSError, ValueError):
        replace_file(made / NOTE, json.dumps(read_note(made) | values).encode())


def _remove(made: Path) -> None:
    with contextlib.suppress(OSError), (made / _USED).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails when it is read, and on a disk without locks.
        gone = made.with_name(f".{made.name}.{uuid.uuid4().hex}")
        os.rename(made, gone)
        shutil.rmtree(gone, ignore_errors=True)
