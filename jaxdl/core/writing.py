"""Writes files whole or not at all. Only the standard library is imported here."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

_MAX_NAME_BYTES = 255


def partial_path(path: Path) -> Path:
    """Where a file is written before it appears as `path`, in the same folder: `.NAME.HOST-PROCESS-RANDOM.tmp`.

    No two writers have the same: containers that share a disk can have equal process ids, and equal host names. NAME is
    cut where the whole would be longer than file systems take.
    """
    host = "".join(one if one.isascii() and one.isalnum() else "-" for one in socket.gethostname()[:40])
    end = f".{host}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    name = path.name.encode(errors="surrogateescape")[: _MAX_NAME_BYTES - len(end) - 1].decode(errors="ignore")
    return path.with_name(f".{name}{end}")


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: a reader, or a run killed here, sees the old content or the new one."""
    temporary = partial_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # The name that a user knows.
    finally:
        with contextlib.suppress(OSError):  # What has failed before it says more.
            temporary.unlink(missing_ok=True)
