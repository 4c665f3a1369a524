"""The workdirs of trials: how far they are, copies of them, and why one failed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from jaxdl.core.files import (
    CHAT_FILE,
    CHECKPOINTS_FOLDER,
    CHOICE_FILE,
    CODEC_FILE,
    CONFIG_FILE,
    DATA_FILE,
    EXAMPLES_FILE,
    INIT_FILE,
    LEASE_FILE,
    MARK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    REFERENCE_FOLDER,
    SKIPPED_FILE,
    STACKS_FILE,
    step_dir,
)
from jaxdl.parallel.lease import Holder, is_alive
from jaxdl.report.status import State, read_record, tail_rows

_COPIED = (
    CONFIG_FILE, DATA_FILE, EXAMPLES_FILE, CODEC_FILE, CHAT_FILE, CHOICE_FILE, PLAN_FILE, INIT_FILE, METRICS_FILE,
    SKIPPED_FILE, MARK_FILE, STACKS_FILE,
)  # fmt: skip
_TAIL_BYTES = 64 * 1024


def last_step(workdir: Path) -> int:
    """The last step that the history has; 0 while it has none."""
    with contextlib.suppress(OSError, ValueError):
        return max((row["step"] for row in tail_rows(workdir / METRICS_FILE)), default=0)
    return 0


def copy_workdir(source: Path, target: Path, step: int) -> bool:
    """Makes a workdir of the checkpoint of a step of another one, whole or not at all; False without that checkpoint.

    The history comes with it; what is later than the step is dropped when the copy resumes.
    """
    if target.exists():
        return True
    checkpoint = step_dir(source, step)
    if not checkpoint.is_dir():
        return False
    unfinished = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    (unfinished / CHECKPOINTS_FOLDER).mkdir(parents=True)
    shutil.copytree(checkpoint, unfinished / CHECKPOINTS_FOLDER / checkpoint.name)
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy2(source / name, unfinished / name)
    if (source / REFERENCE_FOLDER).is_dir():
        shutil.copytree(source / REFERENCE_FOLDER, unfinished / REFERENCE_FOLDER)
    os.replace(unfinished, target)
    return True


def is_free(workdir: Path) -> bool:
    """Whether no process of this machine trains in a workdir: one of a killed search may be about to end."""
    try:
        holder = Holder.from_bytes((workdir / LEASE_FILE).read_bytes())
    except OSError:
        return True
    return holder.released or not is_alive(holder) or holder.pid == os.getpid()


def why_halted(workdir: Path) -> str:
    """The reason of a run that was halted, as its status has it."""
    with contextlib.suppress(OSError, ValueError):
        record = read_record(workdir)
        if record is not None and record.state == State.HALTED and record.reason is not None:
            return record.reason.text
    return "halted by a user"


def why_failed(log: Path) -> str:
    """The last error that a log has, or its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log"
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if re.match(r"(error|\w*Error): ", line)]
    return (errors or lines or ["nothing was printed"])[-1][:300].removeprefix("error: ")
