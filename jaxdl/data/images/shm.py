"""Folders in /dev/shm that the processes of a host share: the memory tier of the cache.

A folder is private to this user and belongs to the processes that hold its lock. The last of them to exit normally
removes it. What killed processes leave is removed by the next start of any run, or reused if it is the same cache.
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

from jaxdl.core.config import ConfigError
from jaxdl.data.images.private import open_own, open_private, private_folder, why_not

_TRIES = 100
"""Attempts to make a folder that exiting processes keep removing."""
_held: dict[Path, tuple[int, int]] = {}
"""The locks of this process: folder -> (file descriptor, number of holders). Global, so that `atexit` releases them."""


def memory_folder() -> Path:
    """/dev/shm, whose files are in memory; if there is none, the folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def shared_path(key: str) -> Path:
    """The path of a cache's folder."""
    return memory_folder() / f"jaxdl-{os.geteuid()}-{key}"


def check_shared(key: str) -> None:
    """Raises ConfigError if `shared_folder` would: its path is a link, or something that others can write to."""
    path = shared_path(key)
    with _config_errors(path), contextlib.suppress(FileNotFoundError):
        os.close(open_private(path))


def shared_folder(key: str) -> Path:
    """The folder of a cache, locked until `release` or exit; made if it does not exist. Removes abandoned folders.

    Raises ConfigError if its path is a link, another user's folder, or a folder that others can write to, and if it
    cannot be made: no space, too many open files.
    """
    folder = shared_path(key)
    if folder in _held:
        lock, times = _held[folder]
        _held[folder] = lock, times + 1
        return folder
    clear_abandoned(keep=folder)
    with _config_errors(folder):
        _held[folder] = _lock(folder), 1
    return folder


@contextlib.contextmanager
def _config_errors(folder: Path) -> Iterator[None]:
    """Context that turns errors in making or opening the folder into ConfigErrors."""
    try:
        yield
    except OSError as error:
        why = why_not(folder, error).rstrip(".")
        raise ConfigError(
            f"the memory cache cannot use {why}. Or turn it off: --data.photos.cache.memory-bytes 0."
        ) from None


def _lock(folder: Path) -> int:
    """Makes and locks the folder; retries if another process has just removed it. Raises OSError."""
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
    raise FileNotFoundError(errno.ENOENT, f"other processes keep removing it ({_TRIES} tries)", str(folder))


def clear_abandoned(keep: Path | None = None) -> None:
    """Removes the folders of killed processes, except `keep`, which may be reused."""
    for other in memory_folder().glob(shared_path("*").name):
        if other != keep and other not in _held:
            _remove_abandoned(other)


def release(folder: Path) -> None:
    """Releases a folder; the last process to do so removes it."""
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
    """Removes a folder of this user whose lock is not held; never a link or its target."""
    try:
        opened = open_private(folder)
    except OSError:  # Not private to this user, or just removed.
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
            shutil.rmtree(folder, ignore_errors=True)  # rmtree refuses a link, even one made meanwhile.
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _is_at(file: int, path: Path) -> bool:
    """Whether `path` is still the open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def available_bytes() -> int:
    """Free and reclaimable memory of this host; all of its memory if the system does not report that."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
