"""The command line of programs that use a run: its workdir and checkpoint are checked before JAX is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from jaxdl.core.runs import command_of_run


def front(module: str, prog: str, about: str = "") -> Callable[..., None]:
    """The function `main` of a program whose options and work are `run(args, prog)` in a module, imported when it runs.

    `about` is for a program whose options depend on the run: the help without a workdir.
    """

    def main(args: list[str] | None = None, *, prog: str = prog) -> None:
        """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
        with command_of_run(args, prog, about) as line:
            importlib.import_module(module).run(line, prog)

    return main
