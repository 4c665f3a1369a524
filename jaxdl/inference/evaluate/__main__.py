"""The command line: `python -m jaxdl.evaluate --workdir runs/digits`.

The workdir and the checkpoint are checked before JAX is imported.
"""

from __future__ import annotations

from jaxdl.core.runs import command_of_run

PROG = "python -m jaxdl.evaluate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--step newest|best|STEP] [OPTIONS]

Evaluates a checkpoint of a run on its held-out data, each example counted once, and prints the metrics.

  {PROG} --workdir runs/digits
  {PROG} --workdir runs/digits --step best --data.test-fraction 0.5 --json

With --workdir FOLDER --help: every option, with its default in that run."""


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with command_of_run(args, prog, ABOUT) as line:
        from jaxdl.inference.evaluate.command import run

        run(line, prog)


if __name__ == "__main__":
    main()
