"""Runs, searches and fleets are found in the folders that were given, and each has an address of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import SEARCH_FILE
from jaxdl.core.paths import find_paths
from jaxdl.platform.fleet.journal import JOURNAL_FILE
from jaxdl.platform.fleet.store import FLEET_FILE, RUNS
from jaxdl.report.status.rows import DEPTH, MARKS

MOST_RUNS = 20_000
"""Further workdirs are left out, and the page says so."""


@dataclass
class Found:
    """The folders that were found, each under its address."""

    workdirs: dict[str, Path] = field(default_factory=dict)
    searches: dict[str, Path] = field(default_factory=dict)
    fleets: dict[str, Path] = field(default_factory=dict)
    left_out: int = 0
    """Workdirs beyond `MOST_RUNS`."""


def address_of_folder(folder: Path) -> str:
    """The part of an address that stands for a folder: it is looked up, and never part of a path."""
    return hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:16]


def check_given(given: Sequence[str]) -> None:
    """Raises ConfigError for a name of no folder. A folder may still be empty: runs may begin later."""
    for name in given:
        paths = [Path(name)] if os.path.exists(name) else find_paths(name)
        if not name.strip() or not paths:
            raise ConfigError(f"{name or repr('')}: there is no such folder. Give workdirs, or folders of workdirs.")
        if not any(path.is_dir() for path in paths):
            raise ConfigError(f"{name}: it is a file. Give workdirs, or folders of workdirs.")


def scan(given: Sequence[str]) -> Found:
    """What is in folders and patterns, `DEPTH` folders deep. Raises nothing: a folder that is gone has no runs."""
    found, workdirs = Found(), dict[str, Path]()  # By text: the hash of a path is slow.
    for name in given:
        for path in sorted([Path(name)] if os.path.exists(name) else find_paths(name)):
            workdirs |= {os.fspath(one): one for one in _search(path, DEPTH, found)}
    kept = sorted(workdirs.values())[:MOST_RUNS]
    found.left_out = len(workdirs) - len(kept)
    found.workdirs = {address_of_folder(path): path for path in kept}
    return found


def _search(folder: Path, depth: int, found: Found) -> Iterator[Path]:
    """The workdirs in a folder, as `jaxdl.status` finds them; searches and fleets are noted."""
    try:
        with os.scandir(folder) as entries:
            inside = {entry.name: entry for entry in entries}
    except OSError:
        if os.path.isdir(folder):
            yield folder  # It may not be read: its row says so.
        return
    if not inside.keys().isdisjoint(MARKS):
        yield folder
        return
    if SEARCH_FILE in inside:
        found.searches[address_of_folder(folder)] = folder
        depth = max(depth, 2)  # Its trials are shown however deep it is.
    if FLEET_FILE in inside or {JOURNAL_FILE, RUNS} <= inside.keys():
        found.fleets[address_of_folder(folder)] = folder
        return
    if depth:
        for name in sorted(inside):
            if not name.startswith(".") and os.path.isdir(inside[name].path) and _may_follow(inside[name]):
                yield from _search(Path(inside[name].path), depth - 1, found)


def _may_follow(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is looked into. A link is, if it is our own, the system's, or of whom it leads to.

    Else anybody who may write into a folder of the page could show folders of ours that they themselves may not see.
    """
    if not entry.is_symlink():
        return True
    try:
        owner = entry.stat(follow_symlinks=False).st_uid
        return owner in (os.geteuid(), 0, entry.stat().st_uid)
    except OSError:
        return False
