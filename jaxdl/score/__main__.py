"""The command line: `python -m jaxdl.score --workdir runs/lm --text book.txt --choices hellaswag.jsonl`.

The workdir and the checkpoint are checked before JAX is imported.
"""

from __future__ import annotations

import sys

from jaxdl.errors import command_line
from jaxdl.runs import asks_for_help, begin_command

PROG = "python -m jaxdl.score"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    line = sys.argv[1:] if args is None else args
    with command_line():
        if not asks_for_help(line):
            begin_command(line, prog)
        from jaxdl.score.command import run

        run(line, prog)


if __name__ == "__main__":
    main()
