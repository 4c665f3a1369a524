"""The command line: `python -m jaxdl.score --workdir runs/lm --text book.txt --choices hellaswag.jsonl`."""

from __future__ import annotations

from jaxdl.inference.front import front

PROG = "python -m jaxdl.score"
main = front("jaxdl.inference.score.command", PROG)


if __name__ == "__main__":
    main()
