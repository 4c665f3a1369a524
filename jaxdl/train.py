"""The command line: `python -m jaxdl.train --config configs/digits.py --workdir runs/digits`.

The command line is checked and the first line printed before JAX is imported.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from jaxdl import __version__
from jaxdl.core.errors import command_line
from jaxdl.core.overview import first_line, overview
from jaxdl.core.startup import PROG, check_names, check_source, first_look, is_first_process


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. For exit codes see `jaxdl.training.run.result.exit_codes`."""
    line = sys.argv[1:] if args is None else args
    with command_line():
        begin(line, prog)
        from jaxdl.training.command import run

        run(line, prog)


def begin(args: list[str], prog: str) -> None:
    """Checks the command line and prints the config and workdir of the run. Raises ConfigError.

    Exits after `--version`, and after `--help` without a config; with one, `jaxdl.training.command` prints the help.
    """
    helped = "--help" in args or "-h" in args
    if helped and not any(arg.partition("=")[0] == "--config" for arg in args):
        print(overview(prog))
        raise SystemExit(0)
    if args in (["--version"], ["-V"]):
        print(f"jaxdl {__version__}")
        raise SystemExit(0)
    values = first_look([arg for arg in args if arg not in ("--help", "-h")], prog)
    check_source(values["config"])
    check_names([arg for arg in args if arg not in ("--help", "-h")], values["config"])
    if not helped and "--print-config" not in args and is_first_process():
        print(first_line(values), flush=True)


class _CallableModule(types.ModuleType):
    """`jaxdl.train` is this module and also the function of that name, so calling the module calls the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jaxdl.training.run.train import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    main()
