"""The curves of several runs over each other, a panel for each metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxdl.report.compare.curves import By, Curves
from jaxdl.report.style import dress, legend, legend_inches, line_entry, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#2b2d33", "#7b4fc9")
"""Those of Okabe and Ito (2008), and violet; more runs have them again, dashed."""
LINES = ("-", "--", ":", "-.")
FEW_POINTS = 30
X_LABELS = {"step": "step", "examples": "training examples seen", "time": "seconds of training"}
PER_ROW = 3
"""Names of runs in a line of the legend."""


def plot_runs(runs: Sequence[Curves], names: Sequence[str], metrics: Sequence[str], by: By = "step") -> Figure:
    """A figure with a panel for each of `metrics`, in it a line for each run that has it.

    Raises ConfigError when a run does not say what `by` needs.
    """
    num_columns = 1 if len(metrics) == 1 else 2
    num_rows = math.ceil(len(metrics) / num_columns)
    height = 3.2 * num_rows + legend_inches(len(runs), PER_ROW)
    figure = new_figure(11.5 if num_columns == 2 else 8.0, height)
    grid = figure.add_gridspec(num_rows, num_columns)
    looks = [(COLORS[number % len(COLORS)], LINES[number // len(COLORS) % len(LINES)]) for number in range(len(runs))]
    for place, metric in enumerate(metrics):
        axes = figure.add_subplot(grid[place // num_columns, place % num_columns])
        for run, (color, line) in zip(runs, looks, strict=True):
            where, values = run.points(metric, by)
            mark = {"marker": "o", "ms": 3.5} if len(values) <= FEW_POINTS else {}
            axes.plot(where, values, color=color, ls=line, lw=1.6, **mark)
        _limit(axes, [run.points(metric)[1] for run in runs])
        dress(axes, metric, x=X_LABELS[by])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    legend(figure, [line_entry(name, color, ls=line) for name, (color, line) in zip(names, looks, strict=True)])
    return figure


def _limit(axes: Axes, curves: Sequence[np.ndarray]) -> None:
    """Limits the vertical axis to nearly all values, so that one spike does not flatten the curves."""
    values = np.concatenate(curves)
    if len(values) < 50:
        return
    low, high = np.percentile(values, [0.2, 99.5])
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
