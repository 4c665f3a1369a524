"""Detects work of earlier runs in a workdir without usable checkpoints, so that no run silently restarts at step 0."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import (
    CHECKPOINTS_FOLDER,
    CURVES_FILE,
    DAMAGED_FOLDER,
    INIT_FILE,
    LOAD_FILE,
    LOAD_PLOT_FILE,
    MARK_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SKIPPED_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
)
from jaxdl.report import evaluations, last_evaluated_step, last_step, read_summary, replace_file
from jaxdl.training.checkpoint.agree import on_first
from jaxdl.training.checkpoint.errors import Unusable, read_refused, unreadable

FOLDERS, FILES = (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER), (METRICS_FILE, SUMMARY_FILE, MARK_FILE)
_ARCHIVED = (
    METRICS_FILE, SUMMARY_FILE, CURVES_FILE, LOAD_FILE, LOAD_PLOT_FILE, TENSORBOARD_FOLDER, SKIPPED_FILE, REPORT_FILE,
    CHECKPOINTS_FOLDER,
)  # fmt: skip
FoundT = TypeVar("FoundT")


class Earlier:
    """The files of earlier runs in a workdir. All processes call the methods; the first process accesses the disk."""

    def __init__(self, workdir: Path) -> None:
        self._workdir, self._marked = workdir, False

    def check_kinds(self) -> None:
        """Raises ConfigError if one of the run's files is a folder, or the reverse, before anything is written."""

        def check() -> str:
            for names, right, what in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
                for path in (self._workdir / name for name in names):
                    if path.exists() and not right(path):
                        raise ConfigError(
                            f"{path} is not a {what}, but a run keeps a {what} of that name in its --workdir. Move it "
                            "away, or choose another --workdir."
                        )
            return ""

        on_first(check)

    def mark(self, step: int) -> None:
        """Records on disk that this workdir has a complete checkpoint."""
        if self._marked or jax.process_index() != 0:
            return
        path = self._workdir / MARK_FILE
        with contextlib.suppress(OSError):  # After a full disk, the next checkpoint records it.
            if not path.exists():
                replace_file(path, (json.dumps({"first_whole_checkpoint_step": step}) + "\n").encode())
            self._marked = True

    def evaluated_step(self, step: int) -> int:
        """The step of the last evaluation up to `step` in the history, -1 if none. Raises Unreadable."""
        path = self._workdir / METRICS_FILE
        return int(on_first(lambda: str(_read(path, lambda: last_evaluated_step(self._workdir, step)))))

    def evaluations(self, name: str, step: int) -> list[tuple[int, float | None]]:
        """(step, value) of a metric in all evaluations of the history up to `step`, in order. Raises Unreadable."""
        path = self._workdir / METRICS_FILE
        return json.loads(on_first(lambda: json.dumps(_read(path, lambda: evaluations(self._workdir, name, step)))))

    def folder_lost(self) -> str:
        """A sentence if the folder `checkpoints` existed and was removed; empty otherwise. Raises Unreadable."""

        def look() -> str:
            folder = self._workdir / CHECKPOINTS_FOLDER
            if folder.exists() or not (self._steps() or (self._workdir / MARK_FILE).exists()):
                return ""
            return f"{self._workdir}: {self._history()}the folder {folder} is missing."

        return on_first(look)

    def lost(self) -> str:
        """The reason why starting at step 0 without a checkpoint would lose work; empty if it would not.

        A run that was killed before its first checkpoint has nothing to lose. Raises Unreadable.
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
                return f"{self._workdir}: {self._history()}there were checkpoints, but there is none in {folder}."
            return ""

        return on_first(look)

    def _history(self) -> str:
        steps = self._steps()
        return f"its history has {steps:,} steps; " if steps else ""

    def _steps(self) -> int:
        """The number of completed steps according to the history and the summary."""
        done = _read(self._workdir / METRICS_FILE, lambda: last_step(self._workdir))
        summary = read_summary(self._workdir / SUMMARY_FILE) or {}
        return max(done, int(summary.get("steps") or 0))

    def refuse(self, reason: str) -> Unusable:
        """The error for a workdir whose checkpoints cannot be used, with the possible remedies."""
        return Unusable(
            f"{reason.rstrip()}\nA run in this --workdir does not start at step 0 unless asked to. Restore "
            f"{self._workdir}/checkpoints from a backup; or choose another --workdir; or give --checkpoint.start-over, "
            f"which moves the checkpoints and the history to {self._archive()}, deletes nothing, and starts at step 0."
        )

    def archive(self) -> Path:
        """Moves the history and the checkpoints to a new folder in the workdir, returned. Raises ConfigError.

        The parameters that the run began with are recorded there too, and still in the workdir.
        """

        def move() -> str:
            target = self._archive()
            try:
                target.mkdir()
                if (self._workdir / INIT_FILE).exists():
                    shutil.copy2(self._workdir / INIT_FILE, target)
                for name in (
                    *_ARCHIVED,
                    MARK_FILE,
                ):  # The mark last: a run killed here still does not restart at step 0.
                    if (self._workdir / name).exists():
                        os.replace(self._workdir / name, target / name)
            except OSError as error:
                raise ConfigError(
                    f"{target}: the history and the checkpoints cannot be moved there: {error.strerror}. "
                    "Free some space, or make it writable."
                ) from None
            return str(target)

        self._marked = False
        return Path(on_first(move))

    def _archive(self) -> Path:
        number = 1
        while (self._workdir / f"earlier-{number}").exists():
            number += 1
        return self._workdir / f"earlier-{number}"


def _read(path: Path, read: Callable[[], FoundT]) -> FoundT:
    try:
        return read()
    except OSError as error:
        raise unreadable(path, read_refused(error) or errno.EIO) from None
