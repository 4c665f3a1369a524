"""The folder of a run under another name: who renames a workdir while a run trains in it hears where it is."""

from __future__ import annotations

import os
from pathlib import Path

from jaxdl.parallel.lease.holder import Holder


def identity(folder: Path) -> tuple[int, int] | None:
    """What a folder keeps when it is renamed: (device, inode); None if there is none of this name. Raises OSError."""
    try:
        known = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return known.st_dev, known.st_ino


def beside(folder: Path, known: tuple[int, int] | None) -> Path | None:
    """The folder with this identity among those beside `folder`; None if there is none."""
    try:
        with os.scandir(folder.absolute().parent) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return next((at for name in names if identity(at := folder.parent / name) == known), None)
    except OSError:
        return None


def moved_message(workdir: Path, moved: Path | None, holder: Holder | None) -> str:
    """That the workdir of a run is no longer under its name; `holder` has the lease of what is there now."""
    text = f"--workdir {workdir}: while this run trained in it, the folder "
    text += "was removed, or moved to another place" if moved is None else f"was renamed to {moved}"
    if holder is not None:
        text += f"; {holder} trains in what has the old name now"
    text += ". The run ends: what it did since its last checkpoint is not saved. "
    if moved is None:
        return f"{text}Put the folder back, and the same command resumes from its newest checkpoint, if it has any."
    return (
        f"{text}Rename it back, and the same command resumes from its newest checkpoint, if it has any; or give "
        f"--workdir {moved}."
    )
