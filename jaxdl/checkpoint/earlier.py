"""What earlier runs left in a workdir whose checkpoints cannot be used, so that no run starts at step 0 beside it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from jaxdl.checkpoint.agree import on_first
from jaxdl.checkpoint.errors import Unusable, read_refused, unreadable
from jaxdl.errors import ConfigError
from jaxdl.files import (
    CHECKPOINTS_FOLDER,
    CURVES_FILE,
    DAMAGED_FOLDER,
    MARK_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SKIPPED_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
)
from jaxdl.report import last_evaluated_step, last_step, read_summary, replace_file

FOLDERS, FILES = (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER), (METRICS_FILE, SUMMARY_FILE, MARK_FILE)
_SET_ASIDE = (
    METRICS_FILE, SUMMARY_FILE, CURVES_FILE, TENSORBOARD_FOLDER, SKIPPED_FILE, REPORT_FILE, CHECKPOINTS_FOLDER,
)  # fmt: skip
FoundT = TypeVar("FoundT")


class Earlier:
    """What earlier runs left in a workdir. Its methods are called by all processes; the first one looks."""

    def __init__(self, workdir: Path) -> None:
        self._workdir, self._marked = workdir, False

    def check_kinds(self) -> None:
        """Raises ConfigError where a file of the run is a folder, or a folder a file: before anything is written."""

        def check() -> str:
            for names, right, what in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
                for path in (self._workdir / name for name in names):
                    if path.exists() and not right(path):
                        raise ConfigError(
                            f"{path} is no {what}, and a run keeps a {what} of that name in its --workdir. Move it "
                            "away, or choose another --workdir."
                        )
            return ""

        on_first(check)

    def mark(self, step: int) -> None:
        """Notes on disk that this workdir has a whole checkpoint."""
        if self._marked or jax.process_index() != 0:
            return
        path = self._workdir / MARK_FILE
        with contextlib.suppress(OSError):  # On a full disk there will be another time.
            if not path.exists():
                replace_file(path, (json.dumps({"first_whole_checkpoint_step": step}) + "\n").encode())
            self._marked = True

    def evaluated_step(self, step: int) -> int:
        """The last evaluation up to `step` in the history, -1 if none. Raises Unreadable."""
        path = self._workdir / METRICS_FILE
        return int(on_first(lambda: str(_read(path, lambda: last_evaluated_step(self._workdir, step)))))

    def folder_lost(self) -> str:
        """Why the folder `checkpoints` was removed under a run, in words; empty if it is there or never was.

        Raises Unreadable.
        """

        def look() -> str:
            folder = self._workdir / CHECKPOINTS_FOLDER
            if folder.exists() or not (self._steps() or (self._workdir / MARK_FILE).exists()):
                return ""
            return f"{self._workdir}: {self._history()}the folder {folder} is not there."

        return on_first(look)

    def lost(self) -> str:
        """Why a run that finds no checkpoint would lose work if it began at step 0, in words; empty if it would not.

        A run that was killed before its first checkpoint loses none: it begins again. Raises Unreadable.
        """

        def look() -> str:
            folder = self._workdir / CHECKPOINTS_FOLDER
            damaged = sorted(path.name for path in folder.glob(f"{DAMAGED_FOLDER}/*"))
            if damaged:
                names = ", ".join(damaged)
                where = f"{names} in {folder / DAMAGED_FOLDER}"
                return f"{self._workdir}: {self._history()}its checkpoints are damaged: {where}."
            summary = read_summary(self._workdir / SUMMARY_FILE) or {}
            if (self._workdir / MARK_FILE).exists() or summary.get("status") == "finished":
                return f"{self._workdir}: {self._history()}there were checkpoints, but none is left in {folder}."
            return ""

        return on_first(look)

    def _history(self) -> str:
        steps = self._steps()
        return f"its history says that {steps:,} steps were done, and " if steps else ""

    def _steps(self) -> int:
        """How many steps the history and the summary say were done."""
        done = _read(self._workdir / METRICS_FILE, lambda: last_step(self._workdir))
        summary = read_summary(self._workdir / SUMMARY_FILE) or {}
        return max(done, int(summary.get("steps") or 0))

    def refuse(self, reason: str) -> Unusable:
        """The error of a workdir whose checkpoints cannot be used, with the ways out of it."""
        return Unusable(
            f"{reason.rstrip()}\nNo run starts at step 0 beside them by itself. Restore {self._workdir}/checkpoints "
            "from a backup; or choose another --workdir; or give --checkpoint.start-over, which sets the checkpoints "
            f"and the history aside in {self._aside()}, deletes nothing, and starts at step 0."
        )

    def set_aside(self) -> Path:
        """Moves the history and the checkpoints to a folder in the workdir; the folder. Raises ConfigError."""

        def move() -> str:
            target = self._aside()
            try:
                target.mkdir()
                for name in (*_SET_ASIDE, MARK_FILE):  # The mark last: a run killed here does not start at 0 either.
                    if (self._workdir / name).exists():
                        os.replace(self._workdir / name, target / name)
            except OSError as error:
                raise ConfigError(
                    f"{target}: the history and the checkpoints cannot be set aside there: {error.strerror}. "
                    "Make room, or make it writable."
                ) from None
            return str(target)

        self._marked = False
        return Path(on_first(move))

    def _aside(self) -> Path:
        number = 1
        while (self._workdir / f"earlier-{number}").exists():
            number += 1
        return self._workdir / f"earlier-{number}"


def _read(path: Path, read: Callable[[], FoundT]) -> FoundT:
    try:
        return read()
    except OSError as error:
        raise unreadable(path, read_refused(error) or errno.EIO) from None
