"""The command line: `python -m jaxdl.generate --workdir runs/python_lm --prompt "def "`."""

from __future__ import annotations

from jaxdl.inference.front import front

PROG = "python -m jaxdl.generate"
main = front("jaxdl.inference.generate.command", PROG)


if __name__ == "__main__":
    main()
