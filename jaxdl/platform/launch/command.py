"""Command lines `OPTIONS -- COMMAND`: the options of a launcher, and the command that it runs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TypeVar

from jaxdl.core.options import parse_options

PROG = "python -m jaxdl.launch"
OptionsT = TypeVar("OptionsT")


def split_command(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the words before `--`, the command after it)."""
    where = args.index("--") if "--" in args else len(args)
    return [*args[:where]], [*args[where + 1 :]]


def parse_command(
    kind: type[OptionsT], name: str, args: Sequence[str], default: OptionsT | None = None
) -> tuple[OptionsT, list[str]]:
    """(the options of `jaxdl.launch NAME`, the command after `--`). Raises ConfigError; exits after `--help`."""
    words, command = split_command(args)
    about = inspect.getdoc(kind)
    return parse_options(kind, words, default=default, prog=f"{PROG} {name}", description=about), command
