"""What a command that reads a run is given: its folder, files. Only the standard library is imported here."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxdl.core.errors import ConfigError, command_line
from jaxdl.core.files import CHECKPOINTS_FOLDER, CONFIG_FILE, DATA_FILE, step_folder

Which = Literal["newest", "best"] | int
"""A checkpoint of a run: the newest, the one with the best evaluation, or the one of a step."""


def check_run(workdir: str | Path, option: str = "") -> Path:
    """The workdir as a path. Raises ConfigError when there is no run in it; `option` is what it was given by."""
    given = f"{option} {workdir}" if option else f"{workdir}"
    if not str(workdir).strip():
        raise ConfigError(f"{option or 'workdir'} '': empty. Give the --workdir of a run.")
    folder = Path(workdir)
    try:
        missing = [name for name in (CONFIG_FILE, DATA_FILE) if not (folder / name).is_file()]
        inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}")) if missing else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{given[:100]}: not accessible: {error}. Give the --workdir of a run.") from None
    if missing:
        advice = f"Did you mean {inside[0]}?" if inside else "Give the --workdir of a run."
        raise ConfigError(f"{given}: there is no run in this folder (no {missing[0]}). {advice}")
    return folder


def check_checkpoint(workdir: Path, which: Which = "newest", option: str = "", *, average: int = 1) -> list[int]:
    """The steps of the checkpoints, in order. Raises ConfigError when there is none yet, or none of the step.

    Also when there are fewer than `average`, see `steps_to_average`.
    """
    steps = _steps(workdir)
    given = f"{option} {workdir}" if option else f"{workdir}"
    if not steps:
        raise ConfigError(f"{given}: the run has no checkpoint yet.")
    if isinstance(which, int) and which not in steps:
        there = f"there are checkpoints of steps {', '.join(map(str, steps))}"
        raise ConfigError(f"{given}: there is no checkpoint of step {which}; {there}.")
    steps_to_average(steps, which, average)
    return steps


def steps_to_average(steps: Sequence[int], which: Which, average: int) -> list[int]:
    """The steps of the checkpoints whose mean is meant: the last `average` of `steps` up to `which`, in order.

    For 1 nothing is averaged, and the result does not matter. Raises ConfigError if there are fewer.
    """
    if not isinstance(average, int) or isinstance(average, bool) or average < 1:
        raise ConfigError(f"--average {average}: give a whole number, 1 or more: 1 takes one checkpoint as it is.")
    if average > 1 and which == "best":
        raise ConfigError(f"--average {average}: it takes the last checkpoints. Remove --step best.")
    kept = [step for step in sorted(steps) if not isinstance(which, int) or step <= which]
    if len(kept) < average:
        until = f" up to step {which}" if isinstance(which, int) else ""
        raise ConfigError(
            f"--average {average}: the workdir has {len(kept)} checkpoint{'s' * (len(kept) != 1)}{until} (of steps "
            f"{', '.join(map(str, kept))}). Average fewer, or train with --checkpoint.keep {average} so that more are "
            "kept."
        )
    return kept[-average:]


def has_checkpoint(workdir: Path) -> bool:
    """Whether there is a checkpoint in a workdir."""
    return bool(_steps(workdir))


def newest_step(workdir: Path) -> int | None:
    """The step of the newest checkpoint in a workdir; None without one."""
    return max(_steps(workdir), default=None)


def _steps(workdir: Path) -> list[int]:
    """The steps of the checkpoints, in order; a folder that is being written has another name."""
    names = [path.name for path in (workdir / CHECKPOINTS_FOLDER).glob(step_folder(0)[:-1] + "*")]
    return sorted(int(number) for name in names if (number := name.rpartition("_")[2]).isdecimal())


def check_which(which: Any, name: str = "step") -> Which:
    """The checkpoint that is asked for. Raises ConfigError for anything but "newest", "best" or a step."""
    if which == "newest" or which == "best":
        return which
    if isinstance(which, int) and not isinstance(which, bool) and which >= 0:
        return which
    raise ConfigError(f'{name} {which!r}: choose "newest", "best" or the number of a step.')


def parse_which(text: str, option: str) -> Which:
    """The checkpoint that an option's text names. Raises ConfigError when it names none."""
    return check_which(int(text) if text.isdecimal() and len(text) < 18 else text, option)


def find_option(args: Sequence[str], option: str, value: str) -> str | None:
    """The last value of an option on a command line, None without one.

    Raises ConfigError when there is no value; `value` says what it is.
    """
    given = None
    for word, following in zip(args, [*args[1:], "--"], strict=False):
        name, equals, text = word.partition("=")
        if name.replace("_", "-") != option:
            continue
        given = text if equals else following
        if not given.strip() or (not equals and given.startswith("--")):
            raise ConfigError(f"{option}: needs a value, {value}.")
    return given


@contextlib.contextmanager
def command_of_run(args: Sequence[str] | None, prog: str, about: str = "") -> Iterator[list[str]]:
    """Context of a program that reads a run: its command line, whose workdir and checkpoint have been checked.

    `about` is for a program whose options depend on the run: `--help` without a workdir prints it and exits. Any other
    shows its options without a run. Mistakes end the program as `command_line` says; warnings are lines on stderr.
    """
    line = list(sys.argv[1:] if args is None else args)
    with command_line(), _print_warnings():
        helped = asks_for_help(line)
        if helped and about and find_option(line, "--workdir", "the folder of a run") is None:
            print(about)
            raise SystemExit(0)
        if about or not helped:
            begin_command(line, prog)
        yield line


@contextlib.contextmanager
def _print_warnings() -> Iterator[None]:
    before = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        yield
    finally:
        warnings.showwarning = before


def begin_command(args: Sequence[str], prog: str) -> Path:
    """The workdir of a command line, which has a run with the checkpoint that is asked for. Raises ConfigError."""
    workdir = find_option(args, "--workdir", "the folder of a run")
    if workdir is None:
        raise ConfigError(f"no --workdir. Give --workdir FOLDER, the folder of a run. See {prog} --help.")
    which = find_option(args, "--step", "newest, best or the number of a step") or "newest"
    folder = check_run(workdir, "--workdir")
    check_checkpoint(folder, parse_which(which, "--step"), "--workdir")
    return folder


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError when the file that `option` names cannot be written: before hours of work for it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{option} {path}: {reason}. Choose another file.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {path}: it may not be written. Choose another file.")


def read_lines(path: Path, option: str) -> list[str]:
    """The lines of a file that `option` names, in UTF-8. Raises ConfigError for one that cannot be read."""
    try:
        content = path.read_bytes()
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # Of UTF-32 too.
            raise ConfigError(f"{option} {path}: UTF-16 by its byte order mark. Give a text file in UTF-8.")
        return split_lines(content.removeprefix(codecs.BOM_UTF8).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason})"
        raise ConfigError(f"{option} {path}: {reason}. Give a text file in UTF-8.") from None


def split_lines(text: str) -> list[str]:
    """The lines of a text without their ends. U+2028 and the like end none, unlike in `str.splitlines`."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def asks_for_help(args: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return bool({"--help", "-h"} & set(args))
