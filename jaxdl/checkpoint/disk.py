"""What a disk refuses to write, and whether there is room on it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import jax

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""What a disk refuses to write with: full, over quota, read-only, not allowed, broken."""


def disk_reason(error: BaseException | None) -> str | None:
    """What the disk refused, in words, if that is what an error (or what caused it) is about; None otherwise.

    Libraries that write from other languages raise errors of other types, with the system's words in them.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno) if error.errno in DISK_ERRORS else None
        for number in DISK_ERRORS:
            if os.strerror(number) in str(error):
                return os.strerror(number)
        if "RESOURCE_EXHAUSTED: Error writing" in str(error):  # TensorStore, of a file that was cut short.
            return os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError when there is no room for what several processes are to write; one alone notices that in time."""
    disk = shutil.disk_usage(folder)
    if jax.process_count() > 1 and disk.total and disk.free < num_bytes:  # Some file systems say 0 of 0.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
