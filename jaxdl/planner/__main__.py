"""The command line: `python -m jaxdl.planner --config configs/x.py --gpus-per-node 8 --nodes 4 --network 25gbit`."""

from __future__ import annotations

import os
import sys

from jaxdl.errors import command_line

PROG = "python -m jaxdl.planner"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 130 after Ctrl-C."""
    with command_line():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # The devices are described: no GPU is taken.
        from jaxdl.planner.command import run

        run(list(sys.argv[1:] if args is None else args), prog)


if __name__ == "__main__":
    main()
