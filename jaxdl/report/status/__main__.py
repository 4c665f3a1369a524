"""The command `python -m jaxdl.status WORKDIR...`: a table of runs, of which only their small files are read."""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdl.core.errors import ConfigError, command_line, print_out
from jaxdl.report.status.parsing import Parser, no_workdir
from jaxdl.report.status.rows import find_workdirs, read_row
from jaxdl.report.status.table import SORT_KEYS, as_json, for_terminal, metric_columns, plain, sort_rows

if TYPE_CHECKING:
    from rich.console import Console, Group

PROG = "python -m jaxdl.status"
PAGE = "jaxdl.platform.page.command"
"""What serves the page. It stands above this room, since it shows fleets and searches too: it is named here and not
imported, as `planner` in `jaxdl/training/plans.py`."""
PORT = 8070
MOST_SEC = 86_400
"""A table that is kept up to date is so at least once a day."""


def parser() -> Parser:
    """The options of the command."""
    options = Parser(PROG, "Prints a table of runs: state, step, metrics, why they ended, what is next.")
    options.add_argument("workdirs", nargs="*", metavar="WORKDIR", help="workdirs, folders of workdirs, or patterns")
    options.add_argument("--sort", default="workdir", metavar="KEY", help=f"{', '.join(SORT_KEYS)}, or a metric")
    options.add_argument("--reverse", action="store_true", help="sort the other way round")
    options.add_argument("--metric", nargs="+", default=[], metavar="NAME",
                       help="metrics that get a column, such as eval/accuracy")  # fmt: skip
    options.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    options.add_argument("--watch", action="store_true", help="show the table until Ctrl-C, and keep it up to date")
    options.add_argument("--every-sec", type=float, default=None, metavar="SEC",
                       help="with --watch: seconds between two looks at the runs, 2 by default")  # fmt: skip
    serve = options.add_argument_group("a page in a browser")
    serve.add_argument("--serve", action="store_true",
                       help="serve a page with runs, curves, logs, failures; needs jaxdl[serve]")  # fmt: skip
    serve.add_argument("--host", help="the address to listen on, 127.0.0.1 by default: this machine alone")
    serve.add_argument("--port", type=int, help="the port, 8070 by default; 0 takes a free one")
    serve.add_argument("--token", action="store_true",
                       help="make a token: who has it may halt runs, and look from other machines")  # fmt: skip
    serve.add_argument("--token-file", type=Path, metavar="FILE",
                       help="a file with such tokens, one on each line; or set JAXDL_STATUS_TOKEN")  # fmt: skip
    serve.add_argument("--without-token", action="store_true",
                       help="let everyone look who reaches a --host that is not of this machine alone")  # fmt: skip
    return options


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error, 130 after Ctrl-C."""
    with command_line():
        options = parser().parse(sys.argv[1:] if args is None else args)
        if not options.workdirs:
            raise ConfigError(no_workdir(options, f"Give the folders of runs, such as {PROG} runs."))
        if options.serve:
            _serve(options)
            return
        for name in ("host", "port", "token", "token_file", "without_token"):
            if getattr(options, name) is not None and getattr(options, name) is not False:
                raise ConfigError(f"--{name.replace('_', '-')}: it has no effect without --serve.")
        if options.watch and options.json:
            raise ConfigError("--watch and --json: give one of them.")
        if options.every_sec is not None and (not options.watch or not 0 < options.every_sec <= MOST_SEC):
            among = f"it must be above 0, and at most {MOST_SEC:,}"
            raise ConfigError(
                f"--every-sec {options.every_sec:g}: {among if options.watch else 'it has no effect without --watch'}."
            )
        if options.watch and not sys.stdout.isatty():
            raise ConfigError("--watch: the output is no terminal. Leave it out, or ask for --json as often as needed.")
        if options.watch:
            watch(options)
            return
        rows = _rows(options)
        if options.json:
            print_out(as_json(rows))
        elif sys.stdout.isatty():
            from rich.console import Console

            console = Console()
            for lines in for_terminal(rows, metric_columns(rows, options.metric), console.width):
                console.print(*lines, sep="\n")
        else:
            print_out(plain(rows, metric_columns(rows, options.metric)))


def _serve(options: argparse.Namespace) -> None:
    """Serves the page."""
    for name in ("json", "watch", "reverse", "every_sec"):
        if getattr(options, name):
            raise ConfigError(f"--serve and --{name.replace('_', '-')}: give one of them.")
    if options.sort != "workdir":
        raise ConfigError("--sort: with --serve the table is sorted on the page. Leave it out.")
    options.host, options.port = options.host or "127.0.0.1", PORT if options.port is None else options.port
    importlib.import_module(PAGE).serve(options)


def _rows(options: argparse.Namespace) -> list:
    rows = [read_row(workdir) for workdir in find_workdirs(options.workdirs)]
    return sort_rows(rows, options.sort, reverse=options.reverse)


def watch(options: argparse.Namespace) -> None:
    """Shows the table until Ctrl-C. Runs that begin meanwhile appear in it."""
    from rich.console import Console
    from rich.live import Live

    every_sec, console = options.every_sec or 2.0, Console(force_terminal=True)
    with Live(_screen(options, console), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_sec)
            live.update(_screen(options, console), refresh=True)


def _screen(options: argparse.Namespace, console: Console) -> Group:
    """The table with a title: as many runs as have room, each line cut at the edge."""
    from rich.console import Group
    from rich.text import Text

    rows = _rows(options)
    head, *runs = for_terminal(rows, metric_columns(rows, options.metric), console.width)
    room = console.height - 2  # Below the title and the head.
    shown = [run for run, end in zip(runs, itertools.accumulate(map(len, runs)), strict=True) if end <= room]
    cut = f", the first {len(shown)}" if len(shown) < len(rows) else ""
    title = Text(f"{len(rows)} run{'s' * (len(rows) != 1)}{cut}, {time.strftime('%H:%M:%S')}", style="italic")
    lines = [title, *head, *(line for run in shown for line in run)]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


if __name__ == "__main__":
    main()
