"""The command line: `python -m jaxdl.translate --workdir runs/translation --split test`.

The workdir and the checkpoint are checked before JAX is imported.
"""

from __future__ import annotations

from jaxdl.core.runs import command_of_run

PROG = "python -m jaxdl.translate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--split test | --input FILE] [OPTIONS]

Translates texts, a line each, by beam search with a trained encoder-decoder. Where there are references, BLEU and chrF
are printed with the signatures of sacrebleu.

  {PROG} --workdir runs/translation --split test --output test.de
  echo "File not found" | {PROG} --workdir runs/translation

With --workdir FOLDER --help: every option, with its default in that run."""


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with command_of_run(args, prog, ABOUT) as line:
        from jaxdl.inference.translate.command import run

        run(line, prog)


if __name__ == "__main__":
    main()
