"""The command line: `python -m jaxdl.evaluate --workdir runs/digits`."""

from __future__ import annotations

from jaxdl.inference.front import front

PROG = "python -m jaxdl.evaluate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--step newest|best|STEP] [OPTIONS]

Evaluates a checkpoint of a run on its held-out data, each example counted once, and prints the metrics.

  {PROG} --workdir runs/digits
  {PROG} --workdir runs/digits --step best --data.test-fraction 0.5 --json

With --workdir FOLDER --help: every option, with its default in that run."""
main = front("jaxdl.inference.evaluate.command", PROG, ABOUT)


if __name__ == "__main__":
    main()
