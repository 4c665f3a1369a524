"""The command line: `python -m jaxdl.evaluate --workdir runs/digits`.

The workdir and the checkpoint are checked before JAX is imported.
"""

from __future__ import annotations

import sys

from jaxdl.errors import ConfigError, command_line
from jaxdl.runs import check_checkpoint, check_run, given_option, parsed_which

PROG = "python -m jaxdl.evaluate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--step newest|best|STEP] [OPTIONS]

Evaluates a checkpoint of a run on its held-out data, each example counted once, and prints the metrics.

  {PROG} --workdir runs/digits
  {PROG} --workdir runs/digits --step best --data.test-fraction 0.5 --json

With --workdir FOLDER --help: every option, with its default in that run."""


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    line = sys.argv[1:] if args is None else args
    with command_line():
        begin(line)
        from jaxdl.evaluate.command import run

        run(line, prog)


def begin(args: list[str]) -> None:
    """Checks the workdir and the checkpoint of a command line; raises ConfigError. Exits after `--help` without one."""
    workdir = given_option(args, "--workdir", "the folder of a run")
    if workdir is None:
        if {"--help", "-h"} & set(args):
            print(ABOUT)
            raise SystemExit(0)
        raise ConfigError(f"no --workdir. Give --workdir FOLDER, the folder of a run. See {PROG} --help.")
    which = given_option(args, "--step", "newest, best or the number of a step") or "newest"
    check_checkpoint(check_run(workdir, "--workdir"), parsed_which(which, "--step"), "--workdir")


if __name__ == "__main__":
    main()
