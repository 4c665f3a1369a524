"""The command line: `python -m jaxdl.planner --config configs/x.py --gpus-per-node 8 --nodes 4 --network 25gbit`."""

from __future__ import annotations

import os
import sys

import jax

from jaxdl.core.errors import command_line

PROG = "python -m jaxdl.planner"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 130 after Ctrl-C."""
    with command_line():
        if not os.environ.get("JAX_PLATFORMS"):  # The devices are described: no GPU is taken.
            jax.config.update("jax_platforms", "cpu")
        from jaxdl.performance.planner.command import run

        run(list(sys.argv[1:] if args is None else args), prog)


if __name__ == "__main__":
    main()
