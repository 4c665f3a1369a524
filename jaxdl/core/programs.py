"""The folder in which compiled programs of this user and machine are kept from run to run.

JAX writes each program into a file, and not at once: a process that is killed meanwhile leaves a part, which JAX would
find in every later run and never replace. JAX's own limit of the folder writes second files and locks it, with the same
fault. So the folder is put in order here, before a run: parts are removed, and the oldest programs over the limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import zlib
from pathlib import Path

from jaxdl.core.paths import is_text

_MOST_BYTES = 2 * 2**30
_LEAST_FREE_BYTES = 4 * 2**30
"""No folder is made on a disk with less room."""
_STAMP = "looked-through"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def programs_folder() -> str | None:
    """The folder, made and in order; None where it cannot be written, or the disk is nearly full."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        root = root if root.is_absolute() else Path("~/.cache").expanduser()
        folder = root / "jaxdl" / "programs" / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK) or not is_text(str(folder)):
            return None
        if shutil.disk_usage(folder).free < _LEAST_FREE_BYTES:
            return None
        _put_in_order(folder)
    except (OSError, RuntimeError):
        return None
    return str(folder)


def _machine() -> str:
    """A name for machines with this CPU: XLA's programs use all that it can do, and several may share a home folder."""
    about = [os.uname().machine]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        # On x86 and on ARM, of the first core.
        found = {name: line for line in reversed(lines) if (name := line.partition(":")[0].strip()) in _TELLING}
        about += [found[name] for name in _TELLING if name in found]
    except OSError:
        about += [os.uname().nodename]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]


_TELLING = ("flags", "Features", "CPU implementer", "CPU part")


def _put_in_order(folder: Path) -> None:
    """Removes what was written in part since the last look, and the oldest programs over the limit."""
    stamp = folder / _STAMP
    since = stamp.stat().st_mtime_ns if stamp.exists() else 0
    files = []
    for file in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # Another process may have removed it.
            about = file.stat()
            if about.st_mtime_ns >= since and not _is_whole(file):
                file.unlink()
            else:
                files.append((about.st_mtime_ns, about.st_size, file))
    stamp.touch()
    left = _MOST_BYTES
    for _, size, file in sorted(files, reverse=True):
        left -= size
        if left < 0:
            file.unlink(missing_ok=True)


def _is_whole(file: Path) -> bool:
    """Whether a program can be read; JAX compresses it with zstandard where it finds that, else with zlib."""
    content = file.read_bytes()
    if not content.startswith(_ZSTANDARD):
        reader = zlib.decompressobj()
        try:
            reader.decompress(content)
        except zlib.error:
            return False
        return reader.eof
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:  # What this process cannot read it cannot judge.
        return True
    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        reader.decompress(content)
    except zstandard.ZstdError:
        return False
    return reader.eof
