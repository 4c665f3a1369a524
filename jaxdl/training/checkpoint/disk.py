"""Errors of a disk that refuses to write, and a check for free space."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import jax

from jaxdl.core.config import ConfigError
from jaxdl.training.checkpoint.errors import Incomplete, read_refused, unreadable
from jaxdl.training.checkpoint.fingerprint import Stale

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
"""The errno of a refused write: full, over quota, read-only, no permission, I/O error."""


def disk_reason(error: BaseException | None) -> str | None:
    """The reason, in words, if an error or one of its causes is a refused, incomplete or stale write; else None.

    Libraries written in other languages raise other types of errors, with the system's message in their text.
    """
    while error is not None:
        if isinstance(error, Stale):
            return error.strerror
        if isinstance(error, Incomplete):
            return str(error)
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno) if error.errno in DISK_ERRORS else None
        for number in DISK_ERRORS:
            if os.strerror(number) in str(error):
                return os.strerror(number)
        if "RESOURCE_EXHAUSTED: Error writing" in str(error):  # TensorStore, for a file that was cut short.
            return os.strerror(errno.ENOSPC)
        error = error.__cause__ or error.__context__
    return None


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError if several processes lack the space for `num_bytes`; a single process fails in time by itself."""
    disk = shutil.disk_usage(folder)
    if jax.process_count() > 1 and disk.total and disk.free < num_bytes:  # Some file systems report 0 of 0.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def check_folder(folder: Path) -> None:
    """Raises ConfigError for a folder of checkpoints that is a file, Unreadable for one that cannot be read."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(
            f"{folder} is a file, but a run keeps its checkpoints in a folder of that name. Move it away, or "
            "choose another --workdir."
        ) from None
    except OSError as error:
        number = read_refused(error)
        raise error if number is None else unreadable(folder, number) from None
