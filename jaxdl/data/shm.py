"""Folders in memory that the processes of a host share: the home of the cache's memory tier.

A folder is in /dev/shm, is this user's alone, and belongs to the processes that hold its lock. What a killed process
leaves is removed by the next start of any run (or taken over, if it is the same cache), and the last process to end in
good order removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxdl.config import ConfigError
from jaxdl.data.private import open_own, open_private, private_folder, why_not

_TRIES = 100
"""How often a folder is made again that other processes, which end, have removed in the meantime."""
_held: dict[Path, tuple[int, int]] = {}
"""The locks of this process: folder -> file descriptor, and how often it is held."""


def memory_folder() -> Path:
    """Where files are memory; without such a place, the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def shared_path(key: str) -> Path:
    """The folder of a cache."""
    return memory_folder() / f"jaxdl-{os.geteuid()}-{key}"


def check_shared(key: str) -> None:
    """Raises ConfigError if `shared_folder` would: its path is taken by a link, or by what others can write to."""
    path = shared_path(key)
    with _refused(path), contextlib.suppress(FileNotFoundError):
        os.close(open_private(path))


def shared_folder(key: str) -> Path:
    """The folder of a cache, held until `release` or the end; made if no process has it. Removes abandoned ones.

    Raises ConfigError when its path is taken by a link, by another user's folder, or by one that others can write to,
    and when it cannot be made: no space, too many open files.
    """
    folder = shared_path(key)
    if folder in _held:
        lock, times = _held[folder]
        _held[folder] = lock, times + 1
        return folder
    clear_abandoned(keep=folder)
    with _refused(folder):
        _held[folder] = _lock(folder), 1
    return folder


@contextlib.contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """Context of making or opening the folder: what prevents it is a ConfigError."""
    try:
        yield
    except OSError as error:
        why = why_not(folder, error).rstrip(".")
        raise ConfigError(
            f"the memory cache cannot use {why}. Or do without it: --data.photos.cache.memory-bytes 0."
        ) from None


def _lock(folder: Path) -> int:
    """Makes and locks the folder, again if another process has just removed it. Raises OSError when it cannot."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            opened = private_folder(folder)
            try:
                lock = open_own(opened, folder / "lock", os.O_RDWR | os.O_CREAT)
            finally:
                os.close(opened)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, folder / "lock"):
                return lock
            os.close(lock)
    raise FileNotFoundError(errno.ENOENT, f"it is removed again whenever it is made ({_TRIES} tries)", str(folder))


def clear_abandoned(keep: Path | None = None) -> None:
    """Removes what killed processes have left, but for the folder `keep`, which may be taken over."""
    for other in memory_folder().glob(shared_path("*").name):
        if other != keep and other not in _held:
            _remove_abandoned(other)


def release(folder: Path) -> None:
    """This process no longer needs the folder; the last one removes it."""
    lock, times = _held.pop(folder, (-1, 0))
    if times > 1:
        _held[folder] = lock, times - 1
    elif times:
        os.close(lock)
        _remove_abandoned(folder)


@atexit.register
def _release_all() -> None:
    for folder in list(_held):
        _held[folder] = _held[folder][0], 1
        release(folder)


def _remove_abandoned(folder: Path) -> None:
    """Removes a folder of this user's whose lock nobody holds; never a link, nor what it points to."""
    try:
        opened = open_private(folder)
    except OSError:  # Not ours to remove, or just removed.
        return
    try:
        lock = open_own(opened, folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        return
    finally:
        os.close(opened)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, folder / "lock"):
            shutil.rmtree(folder, ignore_errors=True)  # It refuses a link, also one that comes while it works.
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def available_bytes() -> int:
    """Memory of this host that is free or can be freed; where the system does not say, all of it."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
