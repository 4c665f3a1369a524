"""What may be wrong with a checkpoint: it is damaged, it cannot be read now, or it is not there any more.

Only damage says something against the files. A disk that does not answer, or that this user may not read, says nothing.
"""

from __future__ import annotations

import errno
import os
import re

from jaxdl.errors import ConfigError

LASTING = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
"""What refuses a read again and again until the user has changed something; any other refusal may pass."""
_KNOWN = (
    *LASTING, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ENOMEM, errno.EINTR,
    errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV,
    errno.ENXIO, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENETDOWN, errno.ENETUNREACH,
)  # fmt: skip

# Of TensorStore's and XLA's statuses those that no content of a file can lead to.
_STATUS = {
    "PERMISSION_DENIED": errno.EACCES,
    "RESOURCE_EXHAUSTED": errno.ENOMEM,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "UNAVAILABLE": errno.EAGAIN,
}


class Damaged(Exception):
    """The bytes of a checkpoint could be read, and are not those that were written; the message says which."""


class Unusable(ConfigError):
    """The checkpoints that are there cannot be used by this run."""


class NoneLeft(Unusable):
    """Every checkpoint is damaged."""


class Unreadable(OSError):
    """A checkpoint cannot be read now, and nothing is known against its files: they stay where they are.

    The same command resumes from it when the fault is gone. `lasting` is True for what only the user can change, such
    as permissions; otherwise a launcher may try again.
    """

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


def read_refused(error: BaseException) -> int | None:
    """The errno of a read that the system refused, if that is what an error is about; None otherwise.

    TensorStore raises errors of other types, with the system's number and words, or only its own status, in the text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError):
            return errno.ENOMEM
        if isinstance(seen, OSError) and seen.errno is not None:
            return None if seen.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) else seen.errno
        text = str(seen)
        if found := re.search(r"OS error (\d+)", text):
            number = int(found[1])
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
    """The error of a read of `path` that the system refused with errno `number`."""
    lasting = number in LASTING
    advice = (
        "Make it readable for this user; the same command then resumes from it."
        if lasting
        else "Nothing was moved; the same command resumes from it when the disk answers again."
    )
    return Unreadable(f"{path}: not readable: {os.strerror(number)}. {advice}", lasting=lasting)
