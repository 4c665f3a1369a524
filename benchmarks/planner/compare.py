"""The planner's predictions beside the truth.

The layouts of 8 devices of this machine (mesh, micro-batches, sharding, exchange) are predicted, and one is chosen, as
by `--plan auto`, for several numbers of nodes; then all of them are timed in turns.

With --memory: the memory of a device for several layouts of 8 x H100 beside what XLA plans for the compiled step.
"""

from __future__ import annotations

from rich.console import Console

from benchmarks.planner.layouts import NUM_DEVICES, compare_times
from benchmarks.planner.memory import compare_memory
from benchmarks.planner.options import PlannerBench
from jaxdl.core.errors import OptionError
from jaxdl.performance.bench.shared import parse_experiment_bench, run_module


def main(args: list[str]) -> None:
    """Prints and writes the tables."""
    command, _ = parse_experiment_bench(PlannerBench, args, __name__, num_rounds=3, layouts=0)
    if wrong := [microbatch for microbatch in command.microbatches if microbatch < 1]:
        raise OptionError(f"--microbatches {wrong[0]}: give 1 or more.")
    if wrong := [node for node in command.nodes if node < 1 or NUM_DEVICES % node]:
        raise OptionError(f"--nodes {wrong[0]}: {NUM_DEVICES} devices are not divided by it. Give 1, 2, 4 or 8.")
    compare = compare_memory if command.memory else compare_times
    compare(command, Console(width=150))


if __name__ == "__main__":
    run_module(main)
