"""The names of all files and folders of a workdir, which are part of its format; and files written whole or not at all.

Only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

_MAX_NAME_BYTES = 255

CONFIG_FILE = "config.json"
"""The experiment as requested."""
DATA_FILE = "data.json"
"""The shape of the data, which `jaxdl.restore` needs."""
EXAMPLES_FILE = "examples.json"
"""Which examples the run sees: number and fingerprint of each split."""
CODEC_FILE = "codec.json"
"""Which tokenizer the run has, by its content, and what its texts begin with; none for what is not text."""
CHAT_FILE = "chat.json"
"""The chat template of the run, with the special tokens that it names; none where there is none."""
CHOICE_FILE = "exchange.json"
"""The exchange that `--exchange auto` chose, and why."""
STACKS_FILE = "stacks.json"
"""Which parameters of a user's network stack layers, and along how many dimensions, as when the run began."""
PLAN_FILE = "plan.json"
"""The layout that `--plan auto` chose, for which devices, and why."""

INIT_FILE = "init.json"
"""What the run took from another run's checkpoint when it began, with `--init-from`."""

METRICS_FILE = "metrics.jsonl"
"""The history: one JSON object a line."""
SUMMARY_FILE = "summary.json"
CURVES_FILE = "curves.png"
LOAD_FILE = "experts.jsonl"
"""Of a mixture of experts: how many choices each expert had, of each layer, over the steps of a report."""
LOAD_PLOT_FILE = "experts.png"
CONFUSION_FILE = "confusion.png"
"""Of a classifier of images: which classes are predicted for which, in the last evaluation."""
MISTAKES_FILE = "mistakes.png"
"""Its surest mistakes there."""
TENSORBOARD_FOLDER = "tensorboard"
PROFILE_FOLDER = "profile"
TRACKERS_FILE = "trackers.json"
"""The ids by which trackers know the run, and how its hosts have changed."""
TRACKERS_FOLDER = "trackers"
"""What trackers keep in the workdir."""

EXPORTED_FOLDER = "exported"
"""The network for other programs, written at the end of a run with `--export`."""

SPARK_FOLDER = "spark"
"""The rows of a DataFrame that a run is fitted on, and the experiment that is trained, see `jaxdl.spark`."""

CHECKPOINTS_FOLDER = "checkpoints"
DAMAGED_FOLDER = "damaged"
"""In the folder of checkpoints: those whose bytes differ from those written."""
LEFT_FOLDER = "left"
"""In the folder of checkpoints: those of a trajectory that a rollback abandoned."""
REFERENCE_FOLDER = "reference"
"""The trained parameters as they were when the run began, for tasks that compare the network with them."""
MANIFEST_FILE = "files.json"
"""In each checkpoint: its files and their hashes."""
MARK_FILE = "checkpoints.json"
"""Written beside `checkpoints/` when the first one is whole: from then on a workdir without one has lost it."""

SKIPPED_FILE = "skipped.json"
"""The rollbacks of the run, and the steps whose batches it skips."""
REPORT_FILE = "diverged.md"
"""Why a run that diverged gave up."""
LEASE_FILE = "lease.json"
"""Which process trains in the workdir."""

STATUS_FILE = "status.json"
"""What the run does, since when, and why it ended, see `jaxdl.status`."""
HALT_FILE = "halt"
"""Made by a user: the run saves and ends, as after SIGTERM. Its content, if any, is the reason."""
FAILURES_FOLDER = "failures"
"""What is left of each time that the run failed, in a folder with its number."""
FAILURE_FILE = "failure.json"
"""In the folder of a failure: reason, exit code, versions, last metrics."""

SEARCH_FILE = "search.json"
"""The settings of a search: its folder is not a workdir, but has those of its trials."""

TRIALS_FOLDER = "trials"
"""In the folder of a search: the workdirs of its trials, named by their numbers."""
LOGS_FOLDER = "logs"
"""There too: what the processes of each trial have printed."""
RESULT_FILE = "result.json"
"""There too: what the search has found."""


def step_folder(step: int | str) -> str:
    """The name of the checkpoint of a step; `*` makes a pattern of all."""
    return f"step_{step}"


def step_dir(workdir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return workdir / CHECKPOINTS_FOLDER / step_folder(step)


def hang_file(process: int) -> str:
    """Where the watchdog of a process writes all stacks."""
    return f"hang-{process}.txt"


def partial_path(path: Path) -> Path:
    """Where a file is written before it appears as `path`, in the same folder: `.NAME.HOST-PROCESS-RANDOM.tmp`.

    No two writers have the same: containers that share a disk can have equal process ids, and equal host names. NAME is
    cut where the whole would be longer than file systems take.
    """
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname()[:40])
    end = f".{host}-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    name = path.name.encode(errors="surrogateescape")[: _MAX_NAME_BYTES - len(end) - 1].decode(errors="ignore")
    return path.with_name(f".{name}{end}")


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: a reader, or a run killed here, sees the old content or the new one."""
    temporary = partial_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # The name that a user knows.
    finally:
        with contextlib.suppress(OSError):  # What has failed before it says more.
            temporary.unlink(missing_ok=True)
