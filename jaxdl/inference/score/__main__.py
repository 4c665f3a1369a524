"""The command line: `python -m jaxdl.score --workdir runs/lm --text book.txt --choices hellaswag.jsonl`.

The workdir and the checkpoint are checked before JAX is imported.
"""

from __future__ import annotations

from jaxdl.core.runs import command_of_run

PROG = "python -m jaxdl.score"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with command_of_run(args, prog) as line:
        from jaxdl.inference.score.command import run

        run(line, prog)


if __name__ == "__main__":
    main()
