"""From a path or pattern as a user gives it to paths on disk. Only the standard library is imported here.

A path that exists is taken as it is, whatever characters it has; only one that does not exist is a pattern.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path


def expand_home(path: str | Path) -> Path:
    """The path with the home folder in place of a leading `~` or `~user`, unless it exists as it is."""
    return Path(path) if os.path.lexists(path) else Path(os.path.expanduser(path))


def is_text(path: str) -> bool:
    """Whether a path is UTF-8: Python keeps other bytes as halves of surrogate pairs, which few libraries take."""
    return not any("\ud800" <= letter <= "\udfff" for letter in path)


def find_paths(pattern: str | Path) -> list[Path]:
    """The path itself if it exists, otherwise those that match it as a pattern of `glob`, sorted.

    Its leading folders that exist are not patterns.
    """
    path = expand_home(pattern)
    if os.path.lexists(path):
        return [path]
    folder = path.parent
    while glob.has_magic(str(folder)) and not folder.is_dir():
        folder = folder.parent
    rest = str(path.relative_to(folder))
    return sorted((folder / name for name in glob.glob(rest, root_dir=folder)), key=str)
