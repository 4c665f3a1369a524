"""The command line: `python -m jaxdl.translate --workdir runs/translation --split test`."""

from __future__ import annotations

from jaxdl.inference.front import front

PROG = "python -m jaxdl.translate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--split test | --input FILE] [OPTIONS]

Translates texts, a line each, by beam search with a trained encoder-decoder. Where there are references, BLEU and chrF
are printed with the signatures of sacrebleu.

  {PROG} --workdir runs/translation --split test --output test.de
  echo "File not found" | {PROG} --workdir runs/translation

With --workdir FOLDER --help: every option, with its default in that run."""
main = front("jaxdl.inference.translate.command", PROG, ABOUT)


if __name__ == "__main__":
    main()
