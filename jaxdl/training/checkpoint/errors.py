"""Errors of checkpoints: damaged, unreadable at the moment, unusable by this run, or none left.

Only `Damaged` is about the files themselves. A disk that does not respond, or a lack of permission, proves nothing
about them.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from jaxdl.core.errors import ConfigError, as_typed

LASTING = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
"""The errno of a refused read that lasts until the user changes something; any other may be temporary."""
_KNOWN = (
    *LASTING, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOMEM, errno.EINTR,
    errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV,
    errno.ENXIO, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENETDOWN, errno.ENETUNREACH,
)  # fmt: skip

# The statuses of TensorStore and XLA that no content of a file can cause.
_STATUS = {
    "PERMISSION_DENIED": errno.EACCES,
    "RESOURCE_EXHAUSTED": errno.ENOMEM,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "UNAVAILABLE": errno.EAGAIN,
}


class Damaged(Exception):
    """The bytes of a checkpoint were read and differ from those written; the message has the file or array."""


class Incomplete(Exception):
    """A checkpoint that was written lacks something that a restore needs; the message says what."""


class Unusable(ConfigError):
    """This run cannot use the existing checkpoints."""


class Removed(Unusable):
    """The checkpoint to which a run returns is not in the folder."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(
            f"{folder}: the checkpoint of step {step}, to which the run returns, has been removed. Restore it from a "
            "backup, or choose another --workdir."
        )


class NoneLeft(Unusable):
    """Every checkpoint is damaged."""


class Unreadable(OSError):
    """A checkpoint cannot be read at the moment; its files may be intact and are not moved.

    The same command resumes from it once it is readable. `lasting` is True for causes that only the user can remove,
    such as permissions; otherwise a launcher may retry.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting

    def __str__(self) -> str:
        return as_typed(super().__str__())


def read_refused(error: BaseException) -> int | None:
    """The errno if an error or one of its causes is a read that the system refused; None otherwise.

    TensorStore raises other types of errors, with the system's errno and message, or only its own status, in the text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError):
            return errno.ENOMEM
        if isinstance(seen, OSError) and seen.errno is not None:
            return None if seen.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) else seen.errno
        text = str(seen)
        if match := re.search(r"OS error (\d+)", text):
            number = int(match[1])
            return None if number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) else number
        for number in _KNOWN:
            if os.strerror(number) in text:
                return number
        for status, number in _STATUS.items():
            if status in text:
                return number
        seen = seen.__cause__ or seen.__context__
    return None


def unreadable(path: object, number: int) -> Unreadable:
    """The error for a read of `path` that the system refused with errno `number`."""
    lasting = number in LASTING
    advice = (
        "Make it readable for this user; the same command then resumes from it."
        if lasting
        else "Nothing was moved; the same command resumes from it when the disk responds again."
    )
    return Unreadable(f"{path}: not readable: {os.strerror(number)}. {advice}", lasting=lasting)
