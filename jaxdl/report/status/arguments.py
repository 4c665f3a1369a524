"""The command lines of programs that take workdirs. Only the standard library is imported here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from jaxdl.core.errors import OptionError


class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are `OptionError`. tyro would take longer to import than such a command takes.

    Options are not abbreviated.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises OptionError."""
        raise OptionError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """`parse_args`, for commands with WORKDIR... and `--metric NAME...`, which would take workdirs after it too.

        Of its words but the first, folders and patterns are workdirs.
        """
        options = self.parse_args(list(args))
        words = options.metric[1:]
        meant = [word for word in words if os.path.isdir(word) or not {*word}.isdisjoint("*?[")]
        options.metric = options.metric[:1] + [word for word in words if word not in meant]
        options.workdirs += meant
        return options


def no_workdir(options: argparse.Namespace, advice: str) -> str:
    """The message for a command line without one."""
    took = f": --metric took {' '.join(options.metric)}. Put workdirs first" if len(options.metric) > 1 else ""
    return f"no workdir{took}. {advice}"
