"""Locks between processes that would make the same files."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Context: no other process is in it; yields False where the disk has no locks, and then others may be.

    `path` is the lock's file, which stays; a lock ends with its process. `what` says on stderr what another process
    does that is waited for.
    """
    with path.open("wb") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that {what}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True
