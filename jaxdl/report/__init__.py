"""The reports of a run: history, progress, curves, wall time, and the summary at the end.

Each name is loaded when it is first used: `jaxdl.report.status` works with the standard library alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdl.core.writing import replace_file
    from jaxdl.report.events import Event, EventKind, event_of
    from jaxdl.report.explanation import explain, print_explanation
    from jaxdl.report.fetching import JOINED, OWN, joined, metric_here, metrics_of, reasons
    from jaxdl.report.history import History, ReportConfig, last_evaluated_step, last_step
    from jaxdl.report.lines import format_row
    from jaxdl.report.notebook import in_ipython
    from jaxdl.report.plots import plot_history
    from jaxdl.report.progress import Progress, StepCounter
    from jaxdl.report.reported_run import Report, Subject
    from jaxdl.report.reporter import Diverged, Reporter
    from jaxdl.report.start import Start
    from jaxdl.report.stopwatch import Stopwatch
    from jaxdl.report.summary import Status, Summary, make_summary, print_summary, read_summary, write_summary

_HOMES = {
    "Diverged": "jaxdl.report.reporter",
    "Event": "jaxdl.report.events",
    "EventKind": "jaxdl.report.events",
    "History": "jaxdl.report.history",
    "JOINED": "jaxdl.report.fetching",
    "OWN": "jaxdl.report.fetching",
    "Progress": "jaxdl.report.progress",
    "Report": "jaxdl.report.reported_run",
    "ReportConfig": "jaxdl.report.history",
    "Reporter": "jaxdl.report.reporter",
    "Start": "jaxdl.report.start",
    "Status": "jaxdl.report.summary",
    "StepCounter": "jaxdl.report.progress",
    "Stopwatch": "jaxdl.report.stopwatch",
    "Subject": "jaxdl.report.reported_run",
    "Summary": "jaxdl.report.summary",
    "event_of": "jaxdl.report.events",
    "explain": "jaxdl.report.explanation",
    "format_row": "jaxdl.report.lines",
    "in_ipython": "jaxdl.report.notebook",
    "joined": "jaxdl.report.fetching",
    "last_evaluated_step": "jaxdl.report.history",
    "last_step": "jaxdl.report.history",
    "make_summary": "jaxdl.report.summary",
    "metric_here": "jaxdl.report.fetching",
    "metrics_of": "jaxdl.report.fetching",
    "plot_history": "jaxdl.report.plots",
    "print_explanation": "jaxdl.report.explanation",
    "print_summary": "jaxdl.report.summary",
    "read_summary": "jaxdl.report.summary",
    "reasons": "jaxdl.report.fetching",
    "replace_file": "jaxdl.core.writing",
    "write_summary": "jaxdl.report.summary",
}

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
    "event_of",
    "explain",
    "format_row",
    "in_ipython",
    "joined",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxdl.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
