"""The reports of a run: history, progress, curves, wall time, and the summary at the end.

Each name is loaded when it is first used: `jaxdl.report.status` works with the standard library alone.
"""

# ruff: noqa: F401  (what type checkers import is loaded by `__getattr__`)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdl.core.writing import replace_file
    from jaxdl.report.events import Event, EventKind, event_of
    from jaxdl.report.explanation import explain, print_explanation
    from jaxdl.report.fetching import JOINED, OWN, joint_totals, metric_here, metrics_of, reasons
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

_NAMES = {  # Module -> its names.
    "jaxdl.core.writing": ("replace_file",),
    "jaxdl.report.events": ("Event", "EventKind", "event_of"),
    "jaxdl.report.explanation": ("explain", "print_explanation"),
    "jaxdl.report.fetching": ("JOINED", "OWN", "joint_totals", "metric_here", "metrics_of", "reasons"),
    "jaxdl.report.history": ("History", "ReportConfig", "last_evaluated_step", "last_step"),
    "jaxdl.report.lines": ("format_row",),
    "jaxdl.report.notebook": ("in_ipython",),
    "jaxdl.report.plots": ("plot_history",),
    "jaxdl.report.progress": ("Progress", "StepCounter"),
    "jaxdl.report.reported_run": ("Report", "Subject"),
    "jaxdl.report.reporter": ("Diverged", "Reporter"),
    "jaxdl.report.start": ("Start",),
    "jaxdl.report.stopwatch": ("Stopwatch",),
    "jaxdl.report.summary": ("Status", "Summary", "make_summary", "print_summary", "read_summary", "write_summary"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxdl.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
