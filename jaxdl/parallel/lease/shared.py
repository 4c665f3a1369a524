"""Checks that a workdir is the same folder on all hosts of a run."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

import jax

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.agree import of_first_process, processes_without
from jaxdl.parallel.lease.lease import FULL

SHARED_SEC = 60.0
"""How long a process waits for a file of another one: NFS clients may cache a missing file for this long."""


def check_shared(folder: Path) -> None:
    """Creates the folder. Raises ConfigError on all processes if it is not writable or not the same on all hosts.

    The first process creates a file and the others look for it. Its name is new, so no host has cached its absence.
    """
    token = folder / f".claim.{secrets.token_hex(8)}.tmp"

    def make() -> bytes:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".claim.*.tmp"):  # Left by a killed process.
                left.unlink(missing_ok=True)
            token.touch()
        except OSError as error:
            if error.errno in FULL and folder.is_dir():
                return b""
            raise ConfigError(f"--workdir {folder}: {error.strerror}. Choose a writable folder.") from None
        return token.name.encode()

    try:
        name = of_first_process(make).decode()
        if jax.process_count() == 1 or not name:
            return
        is_visible = appears(folder / name, SHARED_SEC)
        wait_for_all()  # Gloo does not wait this long.
        if missing := processes_without(is_visible):
            raise ConfigError(
                f"the hosts do not see the same --workdir: {folder} on {missing} is not the folder of the first "
                "process. Use a folder on a shared file system."
            )
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                token.unlink(missing_ok=True)


def appears(path: Path, within_sec: float) -> bool:
    """Whether the file exists now or within the given time."""
    end = time.monotonic() + within_sec
    while not os.path.exists(path):
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
