"""The command `python -m jaxdl.compare WORKDIR...`: curves over each other, how configs differ, values."""

from __future__ import annotations

import argparse
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError, command_line, print_out
from jaxdl.core.files import replace_file
from jaxdl.core.runs import check_writable
from jaxdl.report.compare.curves import By, Curves, config_differences, metrics_of, read_curves, short_names
from jaxdl.report.compare.figure import plot_runs
from jaxdl.report.status import find_workdirs
from jaxdl.report.status.parsing import Parser, no_workdir
from jaxdl.report.status.table import align
from jaxdl.report.style import png

PROG = "python -m jaxdl.compare"
DEFAULT_OUT = Path("compare.png")


def parser() -> Parser:
    """The options of the command."""
    options = Parser(
        PROG, "Compares runs: a figure of their curves, last and best values, and how their configs differ."
    )
    add = options.add_argument
    add("workdirs", nargs="*", metavar="WORKDIR", help="workdirs, folders of workdirs, or patterns; two runs or more")
    add("--metric", nargs="+", default=[], metavar="NAME",
        help="metrics, such as eval/accuracy; by default train/loss and those of evaluations")  # fmt: skip
    add("--by", choices=typing.get_args(By), default="step",
        help="draw curves over steps, training examples, or seconds of training alone")  # fmt: skip
    add("--out", type=Path, metavar="FILE",
        help=f"file for the figure, a PNG; by default {DEFAULT_OUT}, and none with --json")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    return options


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error."""
    with command_line():
        run(parser().parse(sys.argv[1:] if args is None else args))


def run(options: argparse.Namespace) -> None:
    """Compares the runs. Raises ConfigError."""
    if not options.workdirs:
        raise ConfigError(no_workdir(options, f"Give the folders of two runs or more, such as {PROG} runs/a runs/b."))
    workdirs = find_workdirs(options.workdirs, closed=False)
    if len(workdirs) < 2:
        raise ConfigError(f"{' '.join(options.workdirs)}: this is one run, {workdirs[0]}. Give two or more.")
    out = options.out or (None if options.json else DEFAULT_OUT)
    if out is not None:
        check_writable(out, "--out")
    runs = [read_curves(workdir) for workdir in workdirs]
    names, metrics = short_names(workdirs), metrics_of(runs, options.metric)
    if out is not None:
        replace_file(out, png(plot_runs(runs, names, metrics, options.by)))
    if options.json:
        print_out(json.dumps(as_json(runs, names, metrics), indent=2))
        return
    print_out(_table(_values(runs, names, metrics)))
    for name, run in zip(names, runs, strict=True):
        if (diverged := run.divergence) is not None:
            print_out(f"{name} diverged at step {diverged.step:,}: {diverged.why}; its best values are those before")
    differences = config_differences(runs)
    print_out("")
    lines = [[name, *map(_text, values)] for name, values in differences.items()]
    print_out(_table([["config", *names], *lines]) if lines else "the configs are equal")
    if out is not None:
        print_out(f"\ncurves: {out}")


def as_json(runs: Sequence[Curves], names: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """What is compared: of each run the last and the best value of each metric, and the fields that differ.

    The best value is None where it is not known whether higher is better.
    """
    return {
        "runs": {
            name: {
                "workdir": str(run.workdir),
                "last_step": run.rows[-1]["step"],
                "diverged": None if run.divergence is None else run.divergence.why,
                "metrics": {
                    metric: {"last": last, "best": best[0], "best_step": best[1]}
                    for metric in metrics
                    if (last := run.last(metric)) is not None
                    for best in [run.best(metric) or (None, None)]
                },
            }
            for name, run in zip(names, runs, strict=True)
        },
        "config": {field: dict(zip(names, values, strict=True)) for field, values in config_differences(runs).items()},
    }


def _values(runs: Sequence[Curves], names: Sequence[str], metrics: Sequence[str]) -> list[list[str]]:
    head = ["run", "step", *(text for metric in metrics for text in (metric, "best"))]
    lines = [head]
    for name, run in zip(names, runs, strict=True):
        line = [name, f"{run.rows[-1]['step']:,}"]
        for metric in metrics:
            best, last = run.best(metric), run.last(metric)
            line += ["" if last is None else f"{last:.4g}", "" if best is None else f"{best[0]:.4g} at {best[1]:,}"]
        lines.append(line)
    return lines


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(align(lines, left=lines[0]))


if __name__ == "__main__":
    main()
