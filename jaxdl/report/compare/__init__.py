"""Runs beside each other: their curves in one figure, how their configs differ, last and best values."""

from jaxdl.report.compare.curves import Curves, config_differences, read_curves, short_names
from jaxdl.report.compare.figure import plot_runs

__all__ = ["Curves", "config_differences", "plot_runs", "read_curves", "short_names"]
