"""The reports of a run: history, progress, curves, wall time, and the summary at the end.

Each name is loaded when it is first used: `jaxdl.report.status` works with the standard library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxdl.core.lazy import lazy_names

if TYPE_CHECKING:
    from jaxdl.core.files import replace_file
    from jaxdl.report.events import Event, EventKind, event_of
    from jaxdl.report.explanation import explain, print_explanation
    from jaxdl.report.fetching import JOINED, OWN, joint_totals, metric_here, metrics_of, reasons
    from jaxdl.report.history import History, ReportConfig, evaluations, last_evaluated_step, last_step
    from jaxdl.report.lines import format_row
    from jaxdl.report.notebook import in_ipython
    from jaxdl.report.plots import plot_history
    from jaxdl.report.progress import Progress, StepCounter
    from jaxdl.report.reported_run import Report, Subject
    from jaxdl.report.reporter import Diverged, Reporter
    from jaxdl.report.start import Start
    from jaxdl.report.stopwatch import Stopwatch
    from jaxdl.report.summary import Status, Summary, make_summary, print_summary, read_summary, write_summary

__all__ = [
    "JOINED",
    "OWN",
    "Diverged",
    "Event",
    "EventKind",
    "History",
    "Progress",
    "Report",
    "ReportConfig",
    "Reporter",
    "Start",
    "Status",
    "StepCounter",
    "Stopwatch",
    "Subject",
    "Summary",
    "evaluations",
    "event_of",
    "explain",
    "format_row",
    "in_ipython",
    "joint_totals",
    "last_evaluated_step",
    "last_step",
    "make_summary",
    "metric_here",
    "metrics_of",
    "plot_history",
    "print_explanation",
    "print_summary",
    "read_summary",
    "reasons",
    "replace_file",
    "write_summary",
]

__getattr__ = lazy_names("jaxdl.report")
