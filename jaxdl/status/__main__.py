"""The command `python -m jaxdl.status WORKDIR...`: a table of runs, of which only their small files are read."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from jaxdl.errors import ConfigError, command_line, print_out
from jaxdl.status.arguments import Parser
from jaxdl.status.rows import find_workdirs, read_row
from jaxdl.status.table import SORT_KEYS, as_json, plain, rich_table, shown_metrics, sorted_rows

PROG = "python -m jaxdl.status"


def parser() -> Parser:
    """The options of the command."""
    found = Parser(PROG, "Prints a table of runs: state, step, metrics, why they ended, what is next.")
    found.add_argument("workdirs", nargs="*", metavar="WORKDIR", help="workdirs, folders of workdirs, or patterns")
    found.add_argument("--sort", default="workdir", metavar="KEY", help=f"{', '.join(SORT_KEYS)}, or a metric")
    found.add_argument("--reverse", action="store_true", help="sort the other way round")
    found.add_argument("--metric", nargs="+", default=[], metavar="NAME",
                       help="metrics that get a column, such as eval/accuracy")  # fmt: skip
    found.add_argument("--json", action="store_true", help="print a JSON list with an object for each run")
    found.add_argument("--watch", action="store_true", help="show the table until Ctrl-C, and keep it up to date")
    found.add_argument("--every-sec", type=float, default=None, metavar="SEC",
                       help="with --watch: seconds between two looks at the runs, 2 by default")  # fmt: skip
    return found


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error, 130 after Ctrl-C."""
    with command_line():
        options = parser().parse_args(sys.argv[1:] if args is None else list(args))
        if not options.workdirs:
            raise ConfigError(f"no workdir. Give the folders of runs, such as {PROG} runs.")
        if options.watch and options.json:
            raise ConfigError("--watch and --json: give one of them.")
        if options.every_sec is not None and (not options.watch or not options.every_sec > 0):
            why = "it must be above 0" if options.watch else "it has no effect without --watch"
            raise ConfigError(f"--every-sec {options.every_sec:g}: {why}.")
        if options.watch:
            watch(options)
            return
        rows = _rows(options)
        if options.json:
            print_out(as_json(rows))
        elif sys.stdout.isatty():
            from rich.console import Console

            Console().print(rich_table(rows, shown_metrics(rows, options.metric)))
        else:
            print_out(plain(rows, shown_metrics(rows, options.metric)))


def _rows(options: argparse.Namespace) -> list:
    rows = [read_row(workdir) for workdir in find_workdirs(options.workdirs)]
    return sorted_rows(rows, options.sort, reverse=options.reverse)


def watch(options: argparse.Namespace) -> None:
    """Shows the table until Ctrl-C. Runs that begin meanwhile appear in it."""
    from rich.console import Console
    from rich.live import Live

    every_sec, console = options.every_sec or 2.0, Console()

    def table() -> object:
        rows = _rows(options)
        title = f"{len(rows)} run{'s' * (len(rows) != 1)}, {time.strftime('%H:%M:%S')}"
        return rich_table(rows, shown_metrics(rows, options.metric), title)

    with Live(table(), console=console, auto_refresh=False, screen=console.is_terminal) as live:  # pyright: ignore
        while True:
            time.sleep(every_sec)
            live.update(table(), refresh=True)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
