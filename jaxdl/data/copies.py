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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.paths import expand_home
from jaxdl.data.locks import locked, say_waiting

NOTE = "examples.json"
_USED = "used.lock"
"""A reader of a copy has a shared lock of this file in it, so that the copy is not removed."""
_OWN = "~/.cache/jaxdl"
"""Copies without readers are removed only here."""
_NOTE_LOCK = ".note.lock"
TRIES = 10
"""A copy that another process removes is looked for again so often."""
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

    def hold(self, write: Callable[[Path], None]) -> tuple[Path, Hold]:
        """The copy, as `make` gives it, and what keeps it from being removed. Raises OSError."""
        for _ in range(TRIES):
            made = self.make(write)
            held = Hold(made)
            if held.is_there:  # Else another process removed it between the two.
                break
        return made, held

    def make(self, write: Callable[[Path], None]) -> Path:
        """The copy. If there is none, `write` makes one in an empty folder, with its note. Raises OSError.

        Another process that does the same is waited for.
        """
        if (known := self._find_seen()) is not None:
            return known
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = json.dumps([path for path, _, _ in self._seen])
        name = f"{self._split}-{hashlib.sha256(paths.encode()).hexdigest()[:16]}"
        with locked(self._folder / f"{name}.lock", say_waiting(f"reads examples into {self._folder}")) as alone:
            if (known := self._find_seen() or self._find_equal()) is not None:
                return known
            if alone:  # What a killed process left half-written.
                for left in self._folder.glob(f".{name}.*"):
                    shutil.rmtree(left, ignore_errors=True)
            partial = self._folder / f".{name}.{uuid.uuid4().hex}"
            partial.mkdir()
            try:
                write(partial)
                made = self._place(partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            self._remove_former(made)
        return made

    def _find_seen(self) -> Path | None:
        """The copy of files of these paths, sizes and times."""
        for made, note in self._notes():
            if self._seen in note.get("files", []):
                return made
            if made.name == self.former_name and "content" not in note:
                content = content_of(made, self._arrays)
                change_note(made / NOTE, lambda _, content=content: {"content": content, "files": [self._seen]})
                return made
        return None

    def _find_equal(self) -> Path | None:
        """The copy of equal files that were seen elsewhere, or at another time."""
        notes = ((made / NOTE, note) for made, note in self._notes())
        note = find_equal(notes, "files", self._seen, self._hash_files)
        return note.parent if note is not None else None

    def _hash_files(self) -> list[str]:
        if self._hashes is None:
            self._hashes = [sha256_of(path) for path in self._paths]
        return self._hashes

    def _place(self, partial: Path) -> Path:
        """Where a copy that is whole is then: where an equal one was, if there is one."""
        new = read_note(partial / NOTE)
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
            change_note(partial / NOTE, lambda _: {"files": [self._seen]})
            allow_readers(partial)
            try:
                partial.rename(made)
            except OSError:  # Without locks, another process may have been faster.
                if not made.exists():
                    raise
            return made
        change_note(made / NOTE, lambda now: {**new, "files": [*now.get("files", []), self._seen][-MOST_SEEN:]})
        return made

    def _remove_former(self, made: Path) -> None:
        """Removes copies of what these files were before, which nothing leads to any more; not those that are read."""
        paths = [path for path, _, _ in self._seen]
        for other, note in self._notes():

            def without(now: dict[str, Any]) -> dict[str, Any]:
                seen = now.get("files", [])
                return {"files": [states for states in seen if [path for path, _, _ in states] != paths]}

            with contextlib.suppress(ValueError, TypeError):  # A damaged note is left as it is.
                left = without(note)["files"]
                if other == made or left == note.get("files", []):
                    continue
                if left:
                    change_note(other / NOTE, without)
                else:
                    remove_unused(other)

    def _notes(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Each copy, and its note; those without one are damaged."""
        for made in sorted(self._folder.glob(f"{self._split}-*")):
            if made.is_dir():
                with contextlib.suppress(OSError, ValueError):
                    yield made, read_note(made / NOTE)


def read_note(path: Path) -> dict[str, Any]:
    """A note of what was prepared. Raises OSError and ValueError."""
    note = json.loads(path.read_bytes())
    if not isinstance(note, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return note


def find_equal(
    notes: Iterable[tuple[Path, dict[str, Any]]], seen: str, state: list[Any], hashes: Callable[[], list[str]]
) -> Path | None:
    """The note of what was prepared from files in this state, or from equal ones: that state is then known there, too.

    Args:
      notes: each with its path. The value `seen` of a note has states, and "sha256" the hashes of the files.
      seen: the name of that value.
      state: (name, size, time) of each file, as JSON has it.
      hashes: gives the SHA-256 of each file; it is called only where all sizes are equal. What it raises is raised.
    """
    sizes, others = [size for _, size, _ in state], []
    for path, note in notes:
        with contextlib.suppress(ValueError, TypeError):  # Of damaged notes the files are read again.
            if state in note.get(seen, []):
                return path
            if note.get("sha256") and any([size for _, size, _ in states] == sizes for states in note.get(seen, [])):
                others.append((path, note))
    for path, note in others:
        if note["sha256"] == hashes():
            change_note(path, lambda now: {seen: [*now.get(seen, []), state][-MOST_SEEN:]})
            return path
    return None


def content_of(made: Path, arrays: Sequence[str]) -> str:
    """A hash of the arrays of a copy."""
    return content_from([bytes.fromhex(sha256_of(made / name)) for name in arrays])


def content_from(digests: Sequence[bytes]) -> str:
    """The content of a copy whose arrays have these SHA-256."""
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file; of a folder, that of the names and SHA-256 of its files."""
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        parts = [f"{file.relative_to(path)} {sha256_of(file)}" for file in files]
        return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Removed(ConfigError):
    """A copy is gone, since another process has removed it."""


class Hold:
    """While this object exists, the copy is not removed, on a disk that has locks."""

    def __init__(self, made: Path) -> None:
        self._file = -1
        self.is_there = True
        """False if it was removed before."""
        try:
            self._file = _open_lock(made / _USED)
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # Somebody removes it.
            self.is_there = False
            return
        except OSError:  # Of a disk without locks, where nobody removes it.
            pass
        try:
            self.is_there = self._file < 0 or os.path.samestat(os.fstat(self._file), (made / _USED).stat())
            self.is_there = self.is_there and made.is_dir()
        except OSError:
            self.is_there = False

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def _open_lock(lock: Path) -> int:
    """The file of a lock, made if it is not there; -1 where this user may not. A shared lock needs no more than read.

    Raises BlockingIOError if its folder is gone.
    """
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        try:
            return os.open(lock, flags | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            if not lock.parent.is_dir():
                raise BlockingIOError from None
        except OSError:
            continue
    return -1


def allow_readers(made: Path) -> None:
    """Makes the file that readers of a copy lock, since some may read the folder and not write to it."""
    with contextlib.suppress(OSError):
        (made / _USED).touch(0o666)


def change_note(path: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Changes values of a note, if this user may: otherwise the same is found out again the next time.

    `changed` gives them for the note as it is then: another process may change it as well, and is waited for.
    """
    with contextlib.suppress(OSError, ValueError, TypeError), locked(path.with_name(_NOTE_LOCK), lambda: None):
        now = read_note(path)
        replace_file(path, json.dumps(now | changed(now)).encode())


def remove_unused(made: Path, within: str = _OWN) -> None:
    """Removes a copy in this user's own cache, unless somebody has it `Hold`, and on disks without locks.

    Elsewhere it stays, since other users may read it, and computers that do not know of each other's locks; unless it
    is `within` a folder that was named for copies that come and go.
    """
    if not made.resolve().is_relative_to(expand_home(within).resolve()):
        return
    # Without the file it is of an earlier version, whose readers may hold nothing.
    with contextlib.suppress(OSError), (made / _USED).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails when it is read, and on a disk without locks.
        if not os.path.samestat(os.fstat(file.fileno()), (made / _USED).stat()):
            return  # Another process has removed it, and a third has made it again.
        gone = made.with_name(f".{made.name}.{uuid.uuid4().hex}")
        os.rename(made, gone)
        shutil.rmtree(gone, ignore_errors=True)
