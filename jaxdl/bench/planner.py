"""The planner's predictions beside the truth.

With --memory: the memory of a device for several layouts of 8 x H100 beside what XLA plans for the compiled step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.bench.shared import ExperimentBench
from jaxdl.experiment import parse_command_line

PROG = "python -m jaxdl.bench planner"


@dataclass(frozen=True)
class PlannerBench(ExperimentBench):
    """Compares the planner with what is compiled or run."""

    memory: bool = False
    """Compare the memory of layouts, compiled for 8 x H100, and run nothing."""
    layouts: int = 0
    """The most layouts, to save time; 0: all."""
    json: Path | None = None
    """File for the figures."""


def main(args: list[str]) -> None:
    """Prints and writes the tables."""
    command, _ = parse_command_line(PlannerBench, args, about=str(__doc__), prog=PROG)
    from jaxdl.bench.planner_memory import compare_memory

    compare_memory(command, Console(width=150))
