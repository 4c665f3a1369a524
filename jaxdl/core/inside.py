"""Files in folders that others may write to: none that leads out of its folder is read, and no pipe is waited for."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class Unreadable(Exception):
    """A file is not read; the text says why, without the path."""


@contextmanager
def opened(path: Path, inside: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Context of a file that is open for reading, and its size.

    Raises Unreadable if it leads out of the folder `inside`, or is no ordinary file, and FileNotFoundError.
    """
    real = real_inside(path, inside)
    try:
        # A pipe is not waited for; and between the check and here the file may have become a link.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("it is no ordinary file, and is not shown")
        yield file, found.st_size


def real_inside(path: Path, inside: Path) -> str:
    """Where a path leads, whether something is there or not. Raises Unreadable if that is not inside of a folder."""
    real, folder = os.path.realpath(path), os.path.realpath(inside)
    if os.path.commonpath([real, folder]) != folder:
        raise Unreadable("it leads out of its folder, and is not shown")
    return real


def read_whole(path: Path, inside: Path, most: int) -> bytes:
    """The bytes of a file. Raises as `opened`, and Unreadable for more than `most` bytes."""
    with opened(path, inside) as (file, size):
        if size > most:
            raise Unreadable(too_large(size, most))
        return file.read(most + 1)[:most]


def too_large(size: int, most: int) -> str:
    """Why a file is not read."""
    return f"it has {size:,} bytes; at most {most:,} are shown"
