"""`--stage-data`: copies of a data set's files on the disk of a node, made once and used by all later runs there.

In the folder, each folder of sources has one of its own, named by a hash of its address: `HASH/NAME/...`, with
`HASH/copied.jsonl`, a line for each whole file. A file is read from its source once; then the copy is read again from
the disk, and its SHA-256 compared. An interrupted copy goes on at the file at which it stopped, and a file whose source
has changed is copied again. Processes of one node wait for each other through a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.locks import locked

JOURNAL = "copied.jsonl"
LOCK = ".lock"
CHUNK_BYTES = 1 << 22
COPIERS = 8
"""Files that are copied at once: small ones wait for the network."""
SPARE = 0.01
"""The share of the disk that is left free."""
_EVERY_FILE = ("",)
_WILD = set("*?[{")
_NAMES = "utf-8", "surrogateescape"


class Stage:
    """Copies files into a folder; `say` is told how far it is, "copying NAME: 1.2 of 3.4 GB", and None by `close`.

    `given` is the folder, and `taken` says whether it has been asked for any file. Raises ConfigError, here and when it
    copies, for a folder that cannot be written, for one that is too small, and for a file that cannot be read or does
    not come out the same.
    """

    def __init__(self, folder: str | Path, say: Callable[[str | None], None] = lambda text: None) -> None:
        if not str(folder).strip():
            raise ConfigError("--stage-data '': empty. Give a folder on the disk of each node, or leave it out.")
        self._root, self._say = expand_home(folder).absolute(), say
        self.given, self.taken = folder, False

    def close(self) -> None:
        """Tells that nothing is copied any more."""
        self._say(None)

    def folder(
        self, address: str, below: Sequence[str] = ("",), only: tuple[str, Collection[str]] | None = None
    ) -> str:
        """The copy of a folder, or of the folders `below` it; its last name stays.

        `only` is a pattern, and the names of the files of a local folder that match it: no others are copied.
        """
        root, files = address.rstrip("/"), []
        if only is not None:
            with remote.reading(address):
                files = [_local(f"{root}/{name}", name) for name in only[1]]
            return self._copy(root, files, f"{root}\n{only[0]}")
        for inner in below:
            start, prefix = f"{root}/{inner}".rstrip("/"), f"{inner}/" if inner else ""
            files += [file._replace(name=prefix + file.name) for file in remote.find(start, _EVERY_FILE)]
        return self._copy(root, files, "\n".join([root, *sorted(below)]))

    def files(self, pattern: str) -> str:
        """The same pattern, or name of a file, for the copies of the files that it matches."""
        *folders, name = pattern.split("/")
        fixed = list(itertools.takewhile(lambda part: not _WILD & set(part), folders))
        below = [part for part in (*folders[len(fixed) :], name) if part not in ("", ".")]
        # Files of one name may be in several folders: their copies keep the folders that the pattern leaves open.
        files = [x._replace(name="/".join(x.address.split("/")[-len(below) :])) for x in remote.expand(pattern)]
        return "/".join([self._copy("/".join(fixed) or ".", files, pattern), *below])

    def _copy(self, root: str, files: Sequence[remote.FileEntry], what: str) -> str:
        """The folder with copies of these files below `root`; `what` names them, if they are taken together."""
        self.taken = True
        if not remote.is_remote(what):
            what = os.path.abspath(expand_home(what))
        home = self._root / hashlib.sha256(what.encode(*_NAMES)).hexdigest()[:16]
        target = home / (root.rsplit("/", 1)[-1].strip(".") or "data")
        try:
            home.mkdir(parents=True, exist_ok=True)
            waiting = f"waiting for another process to copy {target.name}"
            with locked(home / LOCK, lambda: self._say(waiting)) as alone:
                if not alone:
                    raise ConfigError(
                        f"--stage-data {self._root}: the disk has no locks, so two processes could copy at once. "
                        "Choose a folder on a disk of this machine."
                    )
                self._bring(home, target, files)
        except remote.Outage as error:
            raise ConfigError(f"--stage-data: {error}. The same command continues the copy.") from None
        except OSError as error:
            where, why = error.filename or self._root, error.strerror or error
            raise ConfigError(
                f"--stage-data {self._root}: {where}: {why}. Choose a folder on a disk of this machine with room for "
                "the data; the same command continues the copy."
            ) from None
        return str(target)

    def _bring(self, home: Path, target: Path, files: Sequence[remote.FileEntry]) -> None:
        """Copies what is missing, and removes copies of files that are gone."""
        copied = read_journal(home)
        missing = [file for file in files if not _is_there(target / file.name, file, copied.get(file.name))]
        names = {file.name for file in files}
        for path in _all_files(target):
            if path.relative_to(target).as_posix() not in names:
                path.unlink()
        if not missing:
            return
        total = sum(file.num_bytes for file in missing)
        self._check_room(home, target.name, total, len(missing))
        done, lock, failed = 0, threading.Lock(), threading.Event()
        self._say(f"copying {target.name}: 0 of {_size(total)}")
        with (home / JOURNAL).open("ab") as journal:

            def bring(file: remote.FileEntry) -> None:
                nonlocal done
                if failed.is_set():
                    return
                try:
                    checksum = copy_file(file, target / file.name)
                except BaseException:
                    failed.set()
                    raise
                with lock:
                    write_line(journal, file, checksum)
                    done += file.num_bytes
                    self._say(f"copying {target.name}: {_size(done)} of {_size(total)}")

            with ThreadPoolExecutor(COPIERS, thread_name_prefix="jaxdl-stage") as threads:
                for _ in threads.map(bring, missing):
                    pass

    def _check_room(self, home: Path, name: str, num_bytes: int, num_files: int) -> None:
        usage = shutil.disk_usage(home)
        free = int(usage.free - SPARE * usage.total)
        if num_bytes > free:
            raise ConfigError(
                f"--stage-data {self._root}: {name} needs {_size(num_bytes)} ({num_files:,} files) there, and "
                f"{_size(max(0, free))} are free. Remove what no run needs, choose another disk, or leave it out."
            )


def copy_file(source: remote.FileEntry, target: Path) -> str:
    """Copies a file, and returns its SHA-256. The target is whole, on the disk, and equal to the source, or unchanged.

    Raises ConfigError when the copy reads back otherwise or the source has changed meanwhile, and OSError.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    checksum, size = hashlib.sha256(), 0
    try:
        with part.open("wb") as file:
            for start in range(0, max(source.num_bytes, 1), CHUNK_BYTES):
                content = remote.read(source.address, start, min(CHUNK_BYTES, source.num_bytes - start))
                checksum.update(content)
                file.write(content)
                size += len(content)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(OSError, AttributeError):  # So that it is read from the disk, not from memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if size != source.num_bytes:
            sizes = f"{size:,} bytes, not {source.num_bytes:,}"
            raise ConfigError(f"{source.address}: it has {sizes}: it is being changed.")
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").digest() != checksum.digest():
                raise ConfigError(f"{part}: it reads back otherwise than it was written. Choose another disk.")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return checksum.hexdigest()


def read_journal(home: Path) -> dict[str, Mapping[str, object]]:
    """Name of a copied file -> its line in the journal; lines that are cut off are left out."""
    lines: dict[str, Mapping[str, object]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (home / JOURNAL).read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                values = json.loads(line)
                lines[values["name"]] = values
    return lines


def write_line(journal: IO[bytes], file: remote.FileEntry, checksum: str) -> None:
    """Writes down that a file is copied."""
    values = {"name": file.name, "bytes": file.num_bytes, "version": file.version, "sha256": checksum}
    journal.write((json.dumps(values) + "\n").encode())
    journal.flush()


def _local(path: str, name: str) -> remote.FileEntry:
    """A file of this machine."""
    file = expand_home(path)
    status = file.stat()
    return remote.FileEntry(str(file), name, status.st_size, str(status.st_mtime_ns))


def _is_there(path: Path, source: remote.FileEntry, line: Mapping[str, object] | None) -> bool:
    """Whether there is a whole copy of this version of a file."""
    if line is None or (line.get("bytes"), line.get("version")) != (source.num_bytes, source.version):
        return False
    try:
        return path.stat().st_size == source.num_bytes
    except OSError:
        return False


def _all_files(folder: Path) -> list[Path]:
    return [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]


def _size(num_bytes: int) -> str:
    """`12.3 MB`, `4.56 GB`."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
