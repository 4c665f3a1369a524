"""Files of workdirs are read as strangers' files: none outside of the given folder, only as much as is shown."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdl.core.files import STATUS_FILE
from jaxdl.core.inside import Unreadable, opened, read_whole, too_large
from jaxdl.report.status.parsing import parse_json
from jaxdl.report.status.record import Record

Signature = tuple[int, int, int]
"""(nanoseconds of the last change, bytes, inode): another one means that a file was written."""
JSON_BYTES = 4 << 20
"""The largest JSON file that is read."""


@dataclass(frozen=True)
class Tail:
    """The end of a file."""

    text: str
    size: int
    """Bytes of the whole file."""
    start: int
    """Where the text begins in it: at a line, unless that line is longer than what is read."""


def signature(path: Path) -> Signature | None:
    """What changes with each write of a file; None without one, or if it cannot be known."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def why_not_read(path: Path, inside: Path, most: int | None = None) -> str:
    """Why `opened` or `read_whole` would refuse a file that another reader is about to read; empty if they would not.

    Empty too without the file, or the right to read it: who reads it says so.
    """
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return ""
    if stat.S_ISREG(found.st_mode) and os.path.dirname(path) == os.fspath(inside):  # No link, so it leads nowhere else.
        return "" if most is None or found.st_size <= most else too_large(found.st_size, most)
    if not os.access(path, os.R_OK):
        return ""
    try:
        with opened(path, inside) as (_, size):
            return "" if most is None or size <= most else too_large(size, most)
    except FileNotFoundError:
        return ""
    except Unreadable as error:
        return str(error)


def read_json(path: Path, inside: Path) -> Any:
    """The value of a JSON file. Raises as `read_whole`, and Unreadable for what is no JSON."""
    try:
        return parse_json(read_whole(path, inside, JSON_BYTES))
    except ValueError as error:
        raise Unreadable(f"it is damaged: {' '.join(str(error).split())}") from None


def json_or_problem(folder: Path, name: str, problems: list[str]) -> Any:
    """The value of a JSON file of a folder; None without one, and one more of the `problems` if it cannot be read."""
    try:
        return read_json(folder / name, folder)
    except FileNotFoundError:
        return None
    except Unreadable as error:
        problems.append(f"{name}: {error}")
        return None


def read_status(workdir: Path) -> Record | None:
    """The record of a run; None without one that can be read: the run's row says why."""
    try:
        return Record.from_bytes(read_whole(workdir / STATUS_FILE, workdir, JSON_BYTES))
    except (FileNotFoundError, Unreadable, ValueError):
        return None


def read_tail(path: Path, inside: Path, most: int) -> Tail:
    """The last bytes of a file, at most `most`, as text. Raises as `opened`."""
    with opened(path, inside) as (file, size):
        start = max(0, size - most)
        file.seek(start)
        content = file.read(most)
    if start and (end := content.find(b"\n")) >= 0:
        start, content = start + end + 1, content[end + 1 :]
    return Tail(content.decode(errors="replace"), size, start)


def names_in(folder: Path, most: int = 10_000) -> list[str]:
    """The names in a folder, sorted; none if it cannot be listed. At most `most`."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for _, entry in zip(range(most), entries, strict=False)]
    except OSError:
        return []
    return sorted(names)
