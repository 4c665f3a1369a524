"""The options of bench planner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxdl.performance.bench.shared import ExperimentBench


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
