"""Local copies of the shards of a stream, as many as a folder may hold."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.locks import locked
from jaxdl.parallel.cluster import ClusterError

_FETCHED_AT_ONCE = 4
"""Files that are copied at once."""
_LOCK = ".lock"
Unpack = Callable[[Path, Path], None]


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Copies of remote files in a folder, which other runs and processes may share. It can be pickled."""

    folder: str
    most_bytes: int

    def path(self, file: remote.FileEntry, unpack: Unpack | None = None) -> Path:
        """Where the file is on this machine: local ones in their place, of others a copy, made now if there is none.

        With `unpack`, a function that writes a file's content decompressed, the copy is of that, also of local ones.
        Raises ConfigError for a file that cannot be read or kept, `remote.Outage` while its storage is out of reach.
        """
        if not remote.is_remote(file.address) and unpack is None:
            return Path(file.address)
        path = self._place(file)
        with contextlib.suppress(OSError):
            os.utime(path)  # The copies that were used last are kept.
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(f"{path.name}{_LOCK}"), lambda: None):
                if not path.exists():
                    self._copy(file, path, unpack)
            return path
        except remote.Outage:
            raise
        except OSError as error:
            raise ConfigError(
                f"{path}: the copy of {file.address} cannot be written ({error.strerror or error}). Set --data.keep to "
                "a folder with room that this user may write."
            ) from None

    def remove(self, file: remote.FileEntry, *, unpacked: bool = False) -> None:
        """Removes the copy of a file that is not needed any more; of a local one there is none unless `unpacked`."""
        if unpacked or remote.is_remote(file.address):
            path = self._place(file)
            for name in (path.name, f"{path.name}{_LOCK}"):
                path.with_name(name).unlink(missing_ok=True)

    def _place(self, file: remote.FileEntry) -> Path:
        mark = hashlib.sha256(f"{file.address} {file.num_bytes} {file.version}".encode("utf-8", "surrogateescape"))
        name = file.name.rsplit("/", 1)[-1]
        return expand_home(self.folder) / f"{mark.hexdigest()[:16]}-{name}"

    def _copy(self, file: remote.FileEntry, path: Path, unpack: Unpack | None) -> None:
        is_remote, partial = remote.is_remote(file.address), path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        unpacked = partial.with_name(f"{partial.name}.unpacked")
        stored = partial if is_remote else Path(file.address)
        try:
            if is_remote:
                remote.copy(file.address, partial)
            size = stored.stat().st_size
            if file.num_bytes is not None and size != file.num_bytes:
                wrong = f"{file.address}: {size:,} bytes came of {file.num_bytes:,}"
                raise remote.Outage(wrong) if is_remote else ConfigError(f"{wrong}. Copy or write it again.")
            if unpack is not None:
                unpack(stored, unpacked)
                stored = unpacked
            self._make_room(stored.stat().st_size)
            os.replace(stored, path)
        finally:
            for left in (partial, unpacked):
                left.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Removes the copies that have not been used for longest. A process that still reads one copies it again."""
        copies = []
        for entry in os.scandir(expand_home(self.folder)):
            with contextlib.suppress(FileNotFoundError):
                if not entry.name.startswith(".") and not entry.name.endswith(_LOCK) and entry.is_file():
                    state = entry.stat()
                    copies.append((state.st_mtime_ns, state.st_size, Path(entry.path)))
        used = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if used + num_bytes <= self.most_bytes:
                return
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}{_LOCK}").unlink(missing_ok=True)
            used -= size


class Ahead:
    """Threads that read shards before they are needed. What fails here is tried again by whoever needs it.

    They are daemons, so that the end of a run does not wait for a network that hangs.
    """

    def __init__(self, read: Callable[[int], object]) -> None:
        """`read(shard)` reads one; it may be called by several threads."""
        self._read, self._lock = read, threading.Lock()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._begun: set[int] = set()

    def soon(self, shards: Sequence[int]) -> None:
        """Begins to read those of the shards that were not among the last ones."""
        with self._lock:
            fresh = [shard for shard in dict.fromkeys(shards) if shard not in self._begun]
            self._begun = set(shards)
            for shard in fresh:
                self._wanted.put(shard)
            while self._num_threads < min(_FETCHED_AT_ONCE, len(fresh)):
                threading.Thread(target=self._work, args=(self._wanted,), name="jaxdl-stream", daemon=True).start()
                self._num_threads += 1

    def close(self) -> None:
        """Ends the threads, after what they are reading."""
        with self._lock:
            for _ in range(self._num_threads):
                self._wanted.put(None)
            self._wanted, self._num_threads, self._begun = queue.SimpleQueue(), 0, set()

    def _work(self, wanted: queue.SimpleQueue[int | None]) -> None:
        while (shard := wanted.get()) is not None:
            with contextlib.suppress(Exception):
                self._read(shard)


@contextlib.contextmanager
def in_reach(name: str) -> Iterator[None]:
    """Context: raises ClusterError for storage that is out of reach: the run ends, and can be resumed."""
    try:
        yield
    except remote.Outage as error:
        raise ClusterError(f"{name} is out of reach: {error}") from None


def check_shards(addresses: Sequence[str], option: str) -> None:
    """Raises ConfigError for shards that are named twice, and where there are none."""
    twice = [address for address, count in Counter(addresses).items() if count > 1]
    if twice:
        raise ConfigError(f"{option}: {twice[0]} is named twice. Name each file once.")
    if not addresses:
        raise ConfigError(f"{option}: there is no shard with samples.")
