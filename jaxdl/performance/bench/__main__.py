"""The command line of the measurements."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from jaxdl.core.errors import command_line, fail
from jaxdl.performance import bench
from jaxdl.performance.bench.shared import BENCHES

for _module in pkgutil.walk_packages(bench.__path__, f"{bench.__name__}."):
    if not _module.name.endswith("__main__"):
        importlib.import_module(_module.name)  # It registers its measurement.

MOVED = {
    "cache": "embedding.cache",
    "embedding": "embedding.schemes",
    "optim": "optim",
    "placement": "embedding.placement",
    "planner": "planner.compare",
    "rows": "embedding.rows",
    "schedule": "schedule",
    "scheme": "collectives",
    "startup": "startup",
    "tokenize": "prepare_text",
    "traffic": "traffic",
}
"""Measurements of earlier versions that only a checkout has -> their modules in `benchmarks`."""


def main(args: list[str]) -> None:
    """Runs one measurement; exits with 2 for user errors, 130 after Ctrl-C."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: python -m jaxdl.bench NAME [OPTIONS]\n")
        for name, (what, _) in sorted(BENCHES.items()):
            print(f"  {name:10} {what}")
        raise SystemExit(0)
    if args[0] in MOVED:
        fail(f"{args[0]}: only a checkout of jaxdl has this now: python -m benchmarks.{MOVED[args[0]]}.")
    if args[0] not in BENCHES:
        fail(f"{args[0]}: there is no such measurement; choose one of {', '.join(sorted(BENCHES))}.")
    with command_line():
        BENCHES[args[0]][1](args[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
