"""The command line: `python -m jaxdl.serve --workdir runs/python_lm`."""

from __future__ import annotations

from jaxdl.inference.front import front

PROG = "python -m jaxdl.serve"
main = front("jaxdl.inference.serve.command", PROG)


if __name__ == "__main__":
    main()
