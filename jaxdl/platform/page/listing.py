"""The table of runs: which of them a request asks for, in which order, and what of each is shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from jaxdl.platform.page.runs import GROUPS, Run, as_shown, in_order, select
from jaxdl.report.status.table import metric_columns, note

SIZES = (25, 50, 100, 500)
_TEXT = 200
SPEEDS = ("tokens_per_sec", "examples_per_sec")


@dataclass(frozen=True)
class Query:
    """What a request asks of the table."""

    text: str = ""
    group: str = ""
    sort: str = "recent"
    reverse: bool = False
    page: int = 1
    size: int = 50

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Query:
        """The query of the parameters of an address; what is none counts as not given."""
        page, size = values.get("page", ""), values.get("size", "")
        return cls(
            text=values.get("q", "")[:_TEXT].strip(),
            group=values.get("state", "") if values.get("state") in GROUPS else "",
            sort=values.get("sort", "")[:_TEXT] or "recent",
            reverse=values.get("order") == "down",
            page=int(page) if page.isascii() and page.isdecimal() and 0 < len(page) < 8 and int(page) else 1,
            size=int(size) if size in map(str, SIZES) else 50,
        )

    def address(self, **changes: Any) -> str:
        """The parameters of this query with some changed, without those that are as by default."""
        values = {"q": self.text, "state": self.group, "sort": self.sort, "order": "down" if self.reverse else "",
                  "page": self.page, "size": self.size} | changes  # fmt: skip
        usual = {"q": "", "state": "", "sort": "recent", "order": "", "page": 1, "size": 50}
        return "?" + urlencode({name: value for name, value in values.items() if value != usual[name]})

    def by(self, key: str) -> str:
        """The parameters of this query in the order of a column; the other way round if it has that order."""
        return self.address(sort=key, order="down" if self.sort == key and not self.reverse else "", page=1)

    def direction(self, key: str) -> str:
        """How a column is sorted, as `aria-sort` says it."""
        return "none" if self.sort != key else "descending" if self.reverse else "ascending"


@dataclass(frozen=True)
class Listing:
    """One page of the table."""

    runs: Sequence[Run]
    """Those of the page."""
    metrics: Sequence[str]
    total: int
    """All that were found."""
    pages: int
    page: int
    counts: Mapping[str, int]
    """Of each group of the runs that have the text, how many there are."""


def list_runs(runs: Sequence[Run], query: Query, asked: Sequence[str] = ()) -> Listing:
    """The page of the runs that a query asks for; `asked` are metrics that get a column."""
    having_text = select(runs, query.text, "")
    chosen = in_order(select(having_text, "", query.group), query.sort, reverse=query.reverse)
    pages = max(1, -(-len(chosen) // query.size))
    page = min(query.page, pages)
    shown = chosen[(page - 1) * query.size : page * query.size]
    counts = Counter(run.group for run in having_text)
    metrics = metric_columns([run.row for run in runs], asked)
    return Listing(
        shown, metrics, len(chosen), pages, page, {group: counts[group] for group in GROUPS if counts[group]}
    )


def speed_of(run: Run) -> tuple[float, str] | None:
    """(speed, unit) of a run when it last reported."""
    for name in SPEEDS:
        if math.isfinite(run.row.metrics.get(name, math.nan)):
            return run.row.metrics[name], f"{name.partition('_')[0]}/s"
    return None


def as_data(run: Run) -> dict[str, Any]:
    """A run as JSON: ages are times in seconds since 1970."""
    row, since, seen = run.row, run.since(), run.seen()
    end = row.total_steps if run.group in ("finished", "stopped", "failed") else row.end_step or row.total_steps
    reasons = (note(row), f"stuck: {run.stuck}" if run.stuck else "")
    return {
        "id": run.id,
        "name": run.short or run.name,
        "workdir": run.name,
        "state": "LOST" if run.group == "lost" else as_shown(row.state),
        "group": run.group,
        "alive": row.alive,
        "doing": as_shown(row.doing),
        "step": row.step,
        "end_step": end,
        "progress": None if row.step is None or not end else min(1.0, max(0.0, row.step / end)),
        "since": None if since is None else round(since),
        "seen": None if seen is None else round(seen),
        "hosts": [as_shown(host) for host in row.hosts],
        "restart": row.restart,
        "metrics": {as_shown(name): v if math.isfinite(v) else str(v) for name, v in row.metrics.items()}
        | {as_shown(name): "nan" for name in row.not_finite},
        "speed": None if (speed := speed_of(run)) is None else list(speed),
        "reason": as_shown(row.reason),
        "exit_code": row.exit_code,
        "next_action": as_shown(row.next_action),
        "next_text": as_shown(row.next_text),
        "problem": as_shown(row.problem),
        "note": as_shown("; ".join(filter(None, reasons))),
    }
