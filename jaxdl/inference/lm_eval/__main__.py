"""The command line of lm-evaluation-harness, which also knows the model `jaxdl`: `python -m jaxdl.lm_eval run ...`."""

from __future__ import annotations

import sys

from jaxdl.core.errors import command_line
from jaxdl.inference.lm_eval import register

PROG = "python -m jaxdl.lm_eval"


def main(args: list[str] | None = None, *, prog: str = PROG) -> None:
    """Runs the harness's command line. Exits with 2 after a user error."""
    with command_line():
        from jaxdl.inference.lm_eval.package import import_harness

        harness = import_harness("lm_eval.__main__")
        register()
        before, sys.argv = sys.argv, [prog, *(sys.argv[1:] if args is None else args)]
        try:
            harness.cli_evaluate()
        finally:
            sys.argv = before


if __name__ == "__main__":
    main()
