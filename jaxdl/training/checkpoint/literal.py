"""Paths that Orbax and TensorStore take by the letter.

Orbax lists the databases of its processes by a pattern below the folder of a checkpoint, through etils, so `[1]` in a
path is a set of characters: the merged database is not written, and nothing says so; and `*` finds those of other
folders. A path in `/s3/` or with `gs:/` is an address to it. TensorStore refuses a backslash, and bytes that are not
UTF-8. The same folder has another name on Linux, by the number of an open file, which has none of these.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from jaxdl.core.errors import ConfigError

_PLAIN = re.compile(r"[\w ./+=,@~#%()-]*")
"""Paths that cannot mean anything else: letters and digits of all scripts, and what file names often have."""
_ADDRESSES = ("gs", "s3", "az", "hf")
"""Folders of the root that etils takes for `gs://` and so on."""
_lock = threading.Lock()
_open: dict[str, int] = {}


def literal(folder: Path) -> Path:
    """A path of `folder`, whose parent exists, that Orbax and TensorStore take by the letter; mostly its own.

    Raises ConfigError if there is none on this system. The name is good in this process alone, and as long as it lives:
    threads of a save that failed may write later, and a number of a closed file would be that of another.
    """
    path = Path(os.path.abspath(folder))
    odd = _odd(path)
    if odd is None:
        return path
    try:
        number = _number(str(path.parent))
    except FileNotFoundError:
        return path
    link = Path(f"/proc/self/fd/{number}")
    if not link.is_dir():
        raise ConfigError(
            f"{path}: checkpoints cannot be written to a path with {odd!r} on this system: Orbax takes it for a "
            "pattern or an address. Choose another folder."
        )
    return link / path.name


def with_names(text: str) -> str:
    """The text of an error with the names of folders in place of their numbers."""
    return re.sub(r"/proc/self/fd/(\d+)", lambda match: _names().get(int(match[1]), match[0]), text)


def _odd(path: Path) -> str | None:
    """The first character, or folder, of a path that is not taken by the letter."""
    if path.parts[1:2] and path.parts[1] in _ADDRESSES:
        return f"/{path.parts[1]}/"
    end = _PLAIN.match(str(path))
    return None if end is None or end.end() == len(str(path)) else str(path)[end.end()]


def _number(folder: str) -> int:
    """The number of an open file that is this folder. Raises OSError."""
    with _lock:
        number = _open.get(folder)
        # A folder that was removed and made again is another one.
        if number is None or not os.path.samestat(os.fstat(number), os.stat(folder)):
            number = _open[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return number


def _names() -> dict[int, str]:
    with _lock:
        return {number: folder for folder, number in _open.items()}
