"""The command lines of programs that take workdirs. Only the standard library is imported here."""

from __future__ import annotations

import argparse
from typing import NoReturn

from jaxdl.errors import OptionError


class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are `OptionError`. tyro would take longer to import than such a command takes.

    Options are not abbreviated.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises OptionError."""
        raise OptionError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")
