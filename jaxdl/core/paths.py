"""From a path or pattern as a user gives it to paths on disk. Only the standard library is imported here.

A path is no pattern: what exists by the letter is taken, whatever characters it has, in the name and in its folders.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of a leading `~` or `~user`, unless it exists as it is."""
    return Path(path) if os.path.lexists(path) else Path(os.path.expanduser(path))


def is_text(path: str) -> bool:
    """Whether a path is UTF-8: Python keeps other bytes as halves of surrogate pairs, which few libraries take."""
    return not any("\ud800" <= letter <= "\udfff" for letter in path)


def matching(pattern: str | Path) -> list[Path]:
    """The path itself if it exists, otherwise those that match it as a pattern of `glob`, sorted.

    Of its folders the leading ones that exist are taken by the letter.
    """
    path = expanded(pattern)
    if os.path.lexists(path):
        return [path]
    folder = path.parent
    while glob.has_magic(str(folder)) and not folder.is_dir():
        folder = folder.parent
    rest = str(path.relative_to(folder))
    return sorted((folder / name for name in glob.glob(rest, root_dir=folder)), key=str)
