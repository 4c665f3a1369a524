"""The planner's predictions beside the truth.

The layouts of 8 devices of this machine (mesh, micro-batches, sharding, exchange) are predicted, and one is chosen, as
by `--plan auto`, for several numbers of nodes; then all of them are timed in turns.

With --memory: the memory of a device for several layouts of 8 x H100 beside what XLA plans for the compiled step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdl.bench.planner_layouts import NUM_DEVICES, compare_times
from jaxdl.bench.planner_memory import compare_memory
from jaxdl.bench.shared import ExperimentBench, check_options
from jaxdl.errors import OptionError
from jaxdl.experiment import parse_command_line

PROG = "python -m jaxdl.bench planner"


@dataclass(frozen=True)
class PlannerBench(ExperimentBench):
    """Compares the planner with what is compiled or run."""

    memory: bool = False
    """Compare the memory of layouts, compiled for 8 x H100, and run nothing."""
    layouts: int = 0
    """The most layouts, to save time; 0: all."""
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of nodes that the devices are taken for."""
    microbatches: tuple[int, ...] = (1, 2)
    """Those of the layouts that are timed."""
    num_rounds: int = 15
    """How often each step is timed; medians are shown."""
    json: Path | None = None
    """File for the figures."""


def main(args: list[str]) -> None:
    """Prints and writes the tables."""
    command, _ = parse_command_line(PlannerBench, args, about=str(__doc__), prog=PROG)
    check_options(command, num_rounds=3, layouts=0)
    if wrong := [one for one in command.microbatches if one < 1]:
        raise OptionError(f"--microbatches {wrong[0]}: give 1 or more.")
    if wrong := [one for one in command.nodes if one < 1 or NUM_DEVICES % one]:
        raise OptionError(f"--nodes {wrong[0]}: {NUM_DEVICES} devices are not divided by it. Give 1, 2, 4 or 8.")
    compare = compare_memory if command.memory else compare_times
    compare(command, Console(width=150))
