"""Locks between processes that would make the same files."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Context: no other process is in it; yields False where the disk has no locks, and then others may be.

    `path` is the lock's file, which stays; a lock ends with its process. `waiting` is called if another process has it.
    Another user's file that this one may only read will do.
    """
    try:
        file = path.open("ab")
    except PermissionError:
        file = path.open("rb")
    with file:
        yield _lock(file, waiting)


def say_waiting(what: str) -> Callable[[], None]:
    """A function that says on stderr what another process does that is waited for."""
    return lambda: print(f"waiting for another process that {what}", file=sys.stderr, flush=True)


def _lock(file: IO[bytes], waiting: Callable[[], None]) -> bool:
    """Waits for the lock of a file; False where there are none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
    except OSError:
        return False
    else:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
