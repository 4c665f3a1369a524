"""The planner's predictions beside the truth.

The layouts of 8 devices of this machine (mesh, micro-batches, sharding, exchange) are predicted, and one is chosen, as
by `--plan auto`, for several numbers of nodes; then all of them are timed in turns.

With --memory: the memory of a device for several layouts of 8 x H100 beside what XLA plans for the compiled step.
"""

from __future__ import annotations

from rich.console import Console

from jaxdl.core.errors import OptionError
from jaxdl.performance.bench.planner.options import PROG, PlannerBench
from jaxdl.performance.bench.planner.planner_layouts import NUM_DEVICES, compare_times
from jaxdl.performance.bench.planner.planner_memory import compare_memory
from jaxdl.performance.bench.shared import check_options
from jaxdl.training.experiment import parse_command_line


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
