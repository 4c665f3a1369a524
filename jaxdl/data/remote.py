"""Files by path or address: local and mounted ones directly, `gs://`, `s3://` and others through fsspec."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home, find_paths

PAUSES_SEC = (0.2, 1.0, 4.0, 16.0)
"""Pauses before retries of a read: network errors are often short."""
_PASSING = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ECONNRESET, errno.ENOTCONN,
    errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN,
)  # fmt: skip
"""Errors of a mounted file system that may be transient."""
_PASSING_TEXTS = tuple(
    map(os.strerror, (errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EHOSTDOWN, errno.ENOTCONN))
)
"""The same in a library's error message: array_record raises RuntimeError for everything."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ConfigError, MemoryError)
"""Permanent errors."""

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")

_T = TypeVar("_T")


class Outage(OSError):
    """An existing file cannot be read after several tries: the network or its storage is down."""


class FileEntry(NamedTuple):
    """A file: its address, its path below the folder that was searched, its size, and a mark of its version."""

    address: str
    name: str
    num_bytes: int
    version: str


def is_remote(address: str) -> bool:
    """Whether an address has a scheme, such as gs://."""
    return re.match(r"[a-z][a-z0-9+.-]*://", address) is not None


def is_hidden(name: str) -> bool:
    """Whether a path below a folder is of a hidden file: one of its parts begins with a dot, or is `__MACOSX`.

    Such are `.ipynb_checkpoints`, and the `._1.jpg` and `__MACOSX` that macOS puts into archives. A file whose name
    begins with `_` is not hidden: cameras write `_MG_0001.JPG`.
    """
    return any(part == "__MACOSX" or (part.startswith(".") and part != ".") for part in name.split("/"))


def find(address: str, suffixes: tuple[str, ...], others: list[str] | None = None) -> list[FileEntry]:
    """The files below a folder with one of the suffixes (lower case), by name, without hidden ones.

    `others` receives the names of all other files that are not hidden. Raises ConfigError without a folder.
    """
    others = [] if others is None else others
    if is_remote(address):
        system, root = _filesystem(address)
        scheme = address.partition("://")[0]
        with _listing(address):
            every = system.find(root, detail=True).values()
        files = []
        for info in every:
            below = info["name"][len(root.rstrip("/")) + 1 :]
            if is_hidden(below) or below.endswith("/"):  # Some stores list a folder as an empty file.
                continue
            if below.lower().endswith(suffixes):
                files.append(FileEntry(_address(scheme, info["name"]), below, info["size"], _version(info)))
            else:
                others.append(below)
        return sorted(files, key=lambda file: file.name)
    with reading(address):
        return sorted(_find_local(expand_home(address), suffixes, others), key=lambda file: file.name)


def _find_local(folder: Path, suffixes: tuple[str, ...], others: list[str]) -> Iterator[FileEntry]:
    if not os.path.isdir(folder):
        os.stat(folder)  # Unlike isdir, it raises with the reason.
        raise ConfigError(f"{folder}: it is a file, not a folder.")
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
        folders[:] = sorted(name for name in folders if not is_hidden(name))  # .ipynb_checkpoints is not a class.
        for name in folders:
            path = os.path.join(parent, name)
            if os.path.islink(path) and Path(parent).resolve().is_relative_to(Path(path).resolve()):
                raise ConfigError(f"{path}: this link points to a folder that contains it. Remove it.")
        for name in names:
            if is_hidden(name):
                continue
            path = os.path.join(parent, name)
            below = os.path.relpath(path, folder).replace(os.sep, "/")
            if not name.lower().endswith(suffixes):
                others.append(below)
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError:
                raise ConfigError(f"{path}: this link points to a missing file. Remove it.") from None
            yield FileEntry(path, below, status.st_size, str(status.st_mtime_ns))


def list_folder(address: str) -> tuple[list[str], list[str]]:
    """(names of the folders in a folder, names of its files), each sorted, without hidden ones.

    Raises ConfigError without a folder.
    """
    if is_remote(address):
        system, root = _filesystem(address)
        with _listing(address):
            every = [(info["name"].rstrip("/"), info["type"]) for info in system.ls(root, detail=True)]
        entries = [(name.rsplit("/", 1)[-1], kind == "directory") for name, kind in every if name != root.rstrip("/")]
    else:
        folder = expand_home(address)
        with reading(address):
            if not os.path.isdir(folder):
                os.stat(folder)  # Unlike isdir, it raises with the reason.
                raise ConfigError(f"{folder}: it is a file, not a folder.")
            with os.scandir(folder) as there:
                entries = [(entry.name, entry.is_dir()) for entry in there]
    shown = sorted((name, is_folder) for name, is_folder in entries if not is_hidden(name))
    return [name for name, is_folder in shown if is_folder], [name for name, is_folder in shown if not is_folder]


def empty_folders(address: str, filled: Collection[str]) -> list[str]:
    """The folders directly in a local folder that are not among `filled`; hidden ones do not count."""
    if is_remote(address):
        return []  # In object stores a folder is part of a file's name.
    with reading(address), os.scandir(expand_home(address)) as entries:
        folders = [entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name)]
    return sorted(set(folders) - set(filled))


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Turns the system's errors on a local folder into messages for the user."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{address}: no such folder.") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or address}: it cannot be read ({error.strerror}).") from None


def expand(pattern: str) -> list[FileEntry]:
    """The files of a pattern: `train-{000..146}.tar`, `train-*.tar`, or one name. Raises ConfigError for none.

    A name that exists is not a pattern.
    """
    braces = None if (whole := _exists(pattern)) else _RANGE.search(pattern, _folder_end(pattern))
    if braces is not None:
        first, last = braces.groups()
        if int(last) < int(first):
            raise ConfigError(f"{pattern}: {{{first}..{last}}} is an empty range. Write the smaller number first.")
        names = [
            pattern[: braces.start()] + str(number).zfill(len(first)) + pattern[braces.end() :]
            for number in range(int(first), int(last) + 1)
        ]
        return [file for name in names for file in expand(name)]
    if is_remote(pattern):
        system, path = _filesystem(pattern)
        scheme = pattern.partition("://")[0]
        with _listing(pattern):
            several = "*" in path and not whole
            shown = filter(_shown_by(path), system.glob(_literal_folders(system, path)) if several else [path])
            names = sorted(shown)
            rows = [system.info(name) for name in names]
        files = [
            FileEntry(_address(scheme, info["name"]), os.path.basename(info["name"]), info["size"], _version(info))
            for info in rows
        ]
    else:
        path = expand_home(pattern)
        with reading(str(path.parent)):
            if not glob.has_magic(str(path.parent)):
                os.listdir(path.parent)  # It raises with the reason.
            rows = [(match, _status(match)) for match in find_paths(path)]
        files = [FileEntry(str(match), match.name, status.st_size, str(status.st_mtime_ns)) for match, status in rows]
    if not files:
        raise ConfigError(f"{pattern}: no such file.")
    return files


def _shown_by(pattern: str) -> Callable[[str], bool]:
    """Whether a pattern is for a file: `*` is for no hidden one, such as `._train-0.tar` of macOS."""
    name = pattern.rsplit("/", 1)[-1]
    return lambda path: is_hidden(name) or not is_hidden(path.rsplit("/", 1)[-1])


def _exists(address: str) -> bool:
    if not is_remote(address):
        return os.path.lexists(expand_home(address))
    if not _RANGE.search(address) and "*" not in address:
        return False  # It has no pattern.
    system, path = _filesystem(address)
    try:
        return system.exists(path)
    except Exception:  # Each cloud library raises its own; who may not list may still read what a range names.
        return False


def _folder_end(pattern: str) -> int:
    """Where the leading folders of a pattern end that have a range in their name, and exist."""
    folder, *_ = pattern.rpartition("/")
    while _RANGE.search(folder) and not _exists(folder):
        folder, *_ = folder.rpartition("/")
    return len(folder)


def _literal_folders(system: Any, path: str) -> str:
    """The pattern, with its leading folders escaped that exist."""
    folder, *_ = path.rpartition("/")
    while glob.has_magic(folder) and not system.isdir(folder):
        folder, *_ = folder.rpartition("/")
    return glob.escape(folder) + path[len(folder) :]


def _status(path: Path) -> os.stat_result:
    if not path.exists():
        raise ConfigError(f"{path}: this link points to a missing file. Remove it.")
    return path.stat()


def read(address: str, start: int = 0, length: int | None = None) -> bytes:
    """The bytes of a file, or `length` of them from `start`.

    Raises OSError for an unreadable file, and Outage when the network or a disk fails for half a minute.
    """
    for pause_sec in (*PAUSES_SEC, None):
        try:
            return _read_remote(address, start, length) if is_remote(address) else _read_local(address, start, length)
        except _FINAL:
            raise
        except Exception as error:  # Each cloud library raises its own types.
            if not is_remote(address) and getattr(error, "errno", None) not in _PASSING:
                raise
            if pause_sec is None and not is_remote(address) and getattr(error, "errno", None) == errno.EIO:
                raise  # A bad sector of a disk stays bad.
            if pause_sec is None:
                raise Outage(f"{address}: {type(error).__name__}: {error}") from None
            time.sleep(pause_sec)
    raise AssertionError("the last try returns or raises")


def _read_remote(address: str, start: int, length: int | None) -> bytes:
    system, path = _filesystem(address)
    return system.cat_file(path, start=start or None, end=None if length is None else start + length)


def _read_local(address: str, start: int, length: int | None) -> bytes:
    file = os.open(address, os.O_RDONLY)
    try:
        parts, left = [], os.fstat(file).st_size - start if length is None else length
        while left > 0 and (part := os.pread(file, left, start)):  # Once, for all but very large files.
            parts.append(part)
            start, left = start + len(part), left - len(part)
        return b"".join(parts)
    finally:
        os.close(file)


def patiently(place: Callable[[], str], read: Callable[[], _T]) -> _T:
    """What `read` returns; it is retried, after pauses, while it raises transient errors of a network disk.

    Raises Outage, whose message begins with the place, when they last for 20 seconds; PermissionError also where a
    library raises another error from it; all other errors unchanged.
    """
    for pause_sec in (*PAUSES_SEC, None):
        try:
            return read()
        except Exception as error:
            causes = list(_causes(error))
            if denied := [cause for cause in causes if isinstance(cause, PermissionError) and cause.filename]:
                raise denied[0] from None
            passing = [cause for cause in causes if any(text in str(cause) for text in _PASSING_TEXTS)]
            if not passing:
                raise
            if pause_sec is None:
                raise Outage(f"{place()}: {first_line(passing[-1])}") from None
            time.sleep(pause_sec)
    raise AssertionError("the last try returns or raises")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of a library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def copy(address: str, path: Path) -> None:
    """Copies a remote file to a local path. Raises ConfigError for one that cannot be read, Outage as `read` does."""
    system, place = _filesystem(address)
    for pause_sec in (*PAUSES_SEC, None):
        try:
            system.get_file(place, str(path))
            return
        except _FINAL as error:
            if getattr(error, "filename", None) == str(path):
                raise
            raise ConfigError(f"{address}: it cannot be read ({type(error).__name__}: {first_line(error)}).") from None
        except Exception as error:  # Each cloud library raises its own types.
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if pause_sec is None:
                raise Outage(f"{address}: {type(error).__name__}: {first_line(error)}") from None
            time.sleep(pause_sec)


def open_stream(address: str) -> Any:
    """The file, open for reading in binary."""
    if is_remote(address):
        system, path = _filesystem(address)
        return system.open(path, "rb")
    return open(address, "rb")


def _filesystem(address: str) -> tuple[Any, str]:
    try:
        import fsspec

        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{address}: it cannot be reached ({error}). Install fsspec with the package of its scheme: gcsfs for "
            "gs://, s3fs for s3://."
        ) from None


@contextlib.contextmanager
def _listing(address: str) -> Iterator[None]:
    """Turns the errors of cloud libraries, of many types, into messages for the user."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError):
            # That of HTTP is also raised for a server that does not answer.
            if not isinstance(error.__cause__, OSError) or isinstance(error.__cause__, FileNotFoundError):
                raise ConfigError(f"{address}: no such file.") from None
            error = error.__cause__
        raise ConfigError(
            f"{address}: it cannot be listed ({type(error).__name__}: {error}). Check the address, the credentials and "
            "the network."
        ) from None


def _address(scheme: str, name: str) -> str:
    """The address of what a file system lists: that of HTTP lists whole addresses, others leave out the scheme."""
    return name if is_remote(name) else f"{scheme}://{name}"


def _version(info: dict[str, Any]) -> str:
    for name in ("etag", "ETag", "md5Hash", "generation", "mtime", "LastModified", "updated", "created"):
        if name in info:
            return str(info[name])
    return ""
