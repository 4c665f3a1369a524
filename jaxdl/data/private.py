"""Folders of this user alone, in places where others may write: /dev/shm, /tmp, a disk that a group shares.

Names there can be guessed, so another user can make the folder first, or put a symbolic link in its place. What is
stored in it would be read as this run's own data, and what is written through the link would overwrite another file.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(OSError):
    """What has the name of a private folder is none; the message says what it is, whose, and what to do."""


def private_folder(path: Path) -> int:
    """Opens a folder that only this user can write to, and makes it (mode 0700) if it is not there.

    The check is of the open folder, which nobody can exchange afterwards: use the descriptor, or the path while the
    folder above it does not let others rename entries (as /dev/shm and /tmp do not).

    Returns:
      The folder's file descriptor, for the caller to close.

    Raises:
      NotPrivate: when the name is a link or a file, or the folder belongs to another user or can be written by others.
      OSError: when it cannot be made or opened.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return open_private(path)


def open_private(path: Path) -> int:
    """As `private_folder`, for a folder that is there. Raises FileNotFoundError when it is not."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # Then the first error says more.
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise _not_private(path, found, "folder") from error
        raise
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        os.close(folder)
        raise _not_private(path, found, "folder")
    return folder


def open_own(folder: int, path: Path, flags: int) -> int:
    """Opens a file of a private folder, given by its descriptor too; with O_CREAT it is made with mode 0600.

    Never follows a link. Raises NotPrivate for a link and for what is no regular file, and the system's OSError for
    what cannot be opened or made: FileNotFoundError only if the file, or with O_CREAT the folder, is gone.
    """
    try:
        # A pipe must not block here.
        file = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # A file that could not be made is not there: say why it was not.
            found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise _not_private(path, found, "regular file") from error
        raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise _not_private(path, found, "regular file")
    return file


def _not_private(path: Path, found: os.stat_result, wanted: str) -> NotPrivate:
    owner = _user(found.st_uid)
    remedy = "Remove it, or ask its owner to."
    if stat.S_ISLNK(found.st_mode):
        what = f"it is a symbolic link that {owner} made"
    elif not (stat.S_ISDIR if wanted == "folder" else stat.S_ISREG)(found.st_mode):
        what = f"it is no {wanted}, and belongs to {owner}"
    elif found.st_uid != os.geteuid():
        what = f"the {wanted} belongs to {owner}"
    else:
        what = f"other users can write to the {wanted} (mode {stat.S_IMODE(found.st_mode):04o})"
        remedy = "Remove it; or, if you know that nobody has changed it, take their permission away (chmod 700)."
    return NotPrivate(f"{path}: {what}, so what is in it cannot be trusted by {_user(os.geteuid())}. {remedy}")


def why_not(folder: Path, error: OSError) -> str:
    """For a message: why a folder or a file in it cannot be used."""
    return str(error) if isinstance(error, NotPrivate) else f"{folder}: {error.strerror or error}"


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"
