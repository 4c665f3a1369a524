"""Which runs a fleet has: its folder is read when something in it has changed, not the same files in each turn."""

from __future__ import annotations

import os
from typing import NamedTuple

from jaxdl.platform.fleet.store import RUNS, DamagedFile, Store, Submission


class News(NamedTuple):
    """What is otherwise than at the last look."""

    submitted: list[Submission]
    """New runs, in their order, and those whose damaged file was restored."""
    gone: set[str]
    """Runs whose folder somebody has removed."""
    asked: set[str]
    """Runs of which something may have been asked."""


class Roll:
    """The runs of a store. A look that finds nothing new takes as long for any number of runs."""

    def __init__(self, store: Store, *, read_only: bool) -> None:
        self._store, self._read_only = store, read_only
        self._known: set[str] = set()
        self._unfinished: set[str] = set()
        """Folders without a submission: one is being written, or its command was killed."""
        self._changed_ns = -1
        self.problems: dict[str, str] = {}
        """Run -> what is wrong with its submission."""

    def read(self) -> News:
        """What is new. A run whose file is damaged has no command, and is in `problems`."""
        asked = self._store.news(take=not self._read_only)
        names, gone = self._unfinished | (asked - self._known), set[str]()
        try:
            changed_ns = os.stat(self._store.folder / RUNS).st_mtime_ns
        except FileNotFoundError:
            changed_ns = 0
        if changed_ns != self._changed_ns:
            there = set(os.listdir(self._store.folder / RUNS)) if changed_ns else set[str]()
            names, gone = there - self._known, self._known - there
            self._changed_ns = changed_ns
        self._known -= gone
        self._unfinished = set()
        for name in gone:
            self.problems.pop(name, None)
        names |= self.problems.keys()
        submitted = [
            submission for name in sorted(names, key=in_order) if (submission := self._submission(name)) is not None
        ]
        return News(submitted, gone, asked)

    def _submission(self, name: str) -> Submission | None:
        try:
            made = self._store.submission(name)
        except (FileNotFoundError, NotADirectoryError):
            if name not in self._known:
                self._unfinished.add(name)
            return None
        except DamagedFile as error:
            self.problems[name] = str(error)
            first = name not in self._known
            self._known.add(name)
            return Submission(name, (), (1,), "") if first else None
        self._known.add(name)
        self.problems.pop(name, None)
        return made


def in_order(name: str) -> tuple[int, str]:
    """What sorts names of runs by the order of submission."""
    return len(name), name
