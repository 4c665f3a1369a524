"""Which runs of a fleet have which workdir, known from names of files: submissions need not be read to find it."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


class Workdirs:
    """A folder with an empty file for each run, such as 0007-3f0a..., the latter a hash of its workdir.

    Nothing fails where the folder cannot be written or read, as that of another user: runs that are not noted are read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, name: str, workdir: Path | None) -> None:
        """Keeps which workdir, if any, a run has."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            self._path(name, workdir).touch()

    def forget(self, name: str, workdir: Path | None) -> None:
        """Undoes `note`, of a run that is removed."""
        with contextlib.suppress(OSError):
            self._path(name, workdir).unlink(missing_ok=True)

    def forget_any(self, name: str) -> None:
        """Undoes `note` of a run that is removed, whatever workdir it had."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    def read_notes(self) -> dict[str, str]:
        """Run -> hash of its workdir, empty without one; runs that an earlier version accepted are not there."""
        with contextlib.suppress(OSError):
            parts = [name.partition("-") for name in os.listdir(self._folder)]
            return {run: workdir for run, _, workdir in parts}
        return {}

    def candidates(self, names: Iterable[str], workdir: Path) -> list[tuple[str, bool]]:
        """(run, whether it is noted) of those that may have this workdir."""
        noted, wanted = self.read_notes(), _hash_of(workdir)
        return [(name, name in noted) for name in names if noted.get(name, wanted) == wanted]

    def _path(self, name: str, workdir: Path | None) -> Path:
        return self._folder / f"{name}-{_hash_of(workdir)}"


def _hash_of(workdir: Path | None) -> str:
    return "" if workdir is None else hashlib.sha256(os.fsencode(workdir)).hexdigest()[:32]
