"""The start-up cost of a command line: CPU seconds (user and system) of a fresh process, in turns.

A valid command is measured until its first line of output, and again until the first line after JAX is loaded; an
invalid one until it exits.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.performance.bench.shared import make_table, parse_bench, run_module, write_json

COMMANDS: dict[str, tuple[list[str], bool]] = {
    "no options": ([], False),
    "--help": (["--help"], False),
    "--config of no file": (["--config", "configs/digit.py"], False),
    "--lr 3": (["--config", "digits", "--lr", "3"], False),
    "--optimzer.x 3": (["--config", "digits", "--optimzer.x", "3"], False),
    "--batch-size x": (["--config", "digits", "--batch-size", "x"], False),
    "a good command, first words": (["--config", "digits"], True),
}
"""Name -> (the arguments of `python -m jaxdl.train`, whether it is stopped after its first line)."""


@dataclass(frozen=True)
class StartupBench:
    """Options of the measurement."""

    num_repeats: int = 5
    """How often each command is started; medians are reported."""
    json: Path | None = None
    """A file for the results."""


def main(args: list[str]) -> None:
    """Starts the commands in turns and prints the medians."""
    command = parse_bench(StartupBench, args, __name__, num_repeats=1)
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(command.num_repeats):
        for name, (line, until_first) in COMMANDS.items():
            seconds[name].append(cpu_sec(line, until_first=until_first))
    table = make_table("python -m jaxdl.train: CPU seconds", ("", "median", "min", "max"))
    for name, times in seconds.items():
        table.add_row(name, *(f"{value:.2f}" for value in (statistics.median(times), min(times), max(times))))
    Console().print(table)
    write_json(command.json, seconds)


def cpu_sec(line: list[str], *, until_first: bool) -> float:
    """CPU seconds of a process of `python -m jaxdl.train`, until it ends or, with `until_first`, prints a line."""
    command = [sys.executable, "-m", "jaxdl.train", *line]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    ticks = (
        Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[11:13]
        if until_first
        else []
    )
    if until_first:
        process.kill()
    process.communicate()
    if until_first:
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    run_module(main)
