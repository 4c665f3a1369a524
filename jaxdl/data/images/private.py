"""Private folders of this user in places where others may write: /dev/shm, /tmp, a disk that a group shares.

Their names can be guessed, so another user can make the folder first, or put a symbolic link in its place. The run
would then read that user's data as its own, or overwrite a file through the link.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(OSError):
    """A path is not a private folder or file; the message says what it is, whose, and what to do."""


def private_folder(path: Path) -> int:
    """Opens a folder that only this user can write to; makes it (mode 0700) if it does not exist.

    Checks the open folder, which nobody can exchange afterwards. So use the descriptor; or the path, if the parent
    folder does not let others rename entries (/dev/shm and /tmp do not).

    Returns:
      The folder's file descriptor, for the caller to close.

    Raises:
      NotPrivate: the path is a link or a file, or the folder belongs to another user or can be written by others.
      OSError: the folder cannot be made or opened.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return open_private(path)


def open_private(path: Path) -> int:
    """Like `private_folder`, for an existing folder. Raises FileNotFoundError if there is none."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # Then the first error is the better one.
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise _not_private(path, status, "folder") from error
        raise
    status = os.fstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & _WRITABLE_BY_OTHERS:
        os.close(folder)
        raise _not_private(path, status, "folder")
    return folder


def open_own(folder: int, path: Path, flags: int) -> int:
    """Opens the file `path` of a private folder with the descriptor `folder`; O_CREAT makes it with mode 0600.

    Never follows a link. Raises NotPrivate for a link or anything but a regular file, and OSError if the file cannot be
    opened or made: FileNotFoundError only if the file, or with O_CREAT the folder, does not exist.
    """
    try:
        # O_NONBLOCK, so that a pipe does not block.
        file = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # The file could not be made: the first error says why.
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise _not_private(path, status, "regular file") from error
        raise
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise _not_private(path, status, "regular file")
    return file


def _not_private(path: Path, status: os.stat_result, wanted: str) -> NotPrivate:
    owner = _user(status.st_uid)
    remedy = "Remove it, or ask its owner to."
    if stat.S_ISLNK(status.st_mode):
        what = f"it is a symbolic link made by {owner}"
    elif not (stat.S_ISDIR if wanted == "folder" else stat.S_ISREG)(status.st_mode):
        what = f"it is not a {wanted}, and belongs to {owner}"
    elif status.st_uid != os.geteuid():
        what = f"the {wanted} belongs to {owner}"
    else:
        what = f"other users can write to the {wanted} (mode {stat.S_IMODE(status.st_mode):04o})"
        remedy = "Remove it; or, if you know that nobody has changed it, revoke their permission (chmod 700)."
    return NotPrivate(f"{path}: {what}, so {_user(os.geteuid())} cannot trust its contents. {remedy}")


def why_not(folder: Path, error: OSError) -> str:
    """The reason why a folder, or a file in it, cannot be used, for a message."""
    return str(error) if isinstance(error, NotPrivate) else f"{folder}: {error.strerror or error}"


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"
