"""The command line: `python -m jaxdl.search --config FILE --workdir FOLDER --vary NAME=VALUES --trials N`."""

from __future__ import annotations

import signal
import sys

from jaxdl.core.errors import command_line

PROG = "python -m jaxdl.search"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 128 + N after signal N, when the trials have saved."""
    with command_line():
        from jaxdl.parallel.cluster.exits import stop_code
        from jaxdl.platform.search.command import run

        signum = run(list(sys.argv[1:] if args is None else args), prog)
        if signum is not None:
            print(f"{signal.Signals(signum).name}: stopped; the same command goes on", file=sys.stderr)
            raise SystemExit(stop_code(signum))


if __name__ == "__main__":
    main()
