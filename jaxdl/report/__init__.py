"""The reports of a run: history, progress, curves, wall time, and the summary at the end."""

from jaxdl.report.explanation import print_explanation
from jaxdl.report.history import History, ReportConfig, last_evaluated_step, last_step, replace_file
from jaxdl.report.lines import format_row
from jaxdl.report.plots import plot_history
from jaxdl.report.progress import Progress
from jaxdl.report.reporter import RESTARTED, WENT_BACK, Diverged, Reporter
from jaxdl.report.start import Start
from jaxdl.report.stopwatch import Stopwatch
from jaxdl.report.summary import make_summary, print_summary, read_summary, write_summary

__all__ = [
    "RESTARTED",
    "WENT_BACK",
    "Diverged",
    "History",
    "Progress",
    "ReportConfig",
    "Reporter",
    "Start",
    "Stopwatch",
    "format_row",
    "last_evaluated_step",
    "last_step",
    "make_summary",
    "plot_history",
    "print_explanation",
    "print_summary",
    "read_summary",
    "replace_file",
    "write_summary",
]
