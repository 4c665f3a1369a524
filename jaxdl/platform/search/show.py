"""What a search shows while it runs: a table on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxdl.platform.search.driver import Request
from jaxdl.platform.search.schedulers import Course, Scheduler
from jaxdl.platform.search.space import short
from jaxdl.platform.search.trial import Trial, best, rank
from jaxdl.platform.search.workdirs import last_step

REFRESH_SEC = 1.0
RESUMABLE = "to be resumed"
"""In place of the state of a trial that has to train on and does not train."""
_MOST_ROWS = 30
_MOST_CHARACTERS = 60


@dataclass(frozen=True)
class SearchView:
    """What tables and plots need besides the trials."""

    request: Request
    course: Course
    scheduler: Scheduler

    @property
    def stops(self) -> list[int]:
        """The steps at which trials are compared."""
        policy = self.scheduler.policy(self.course)
        return list(getattr(policy, "rungs", None) or getattr(policy, "steps", None) or [])


def state_of(trial: Trial, running: Sequence[int]) -> str:
    """The state of a trial in a word or two."""
    if trial.number in running:
        return "training"
    if trial.state == "open":
        return RESUMABLE if trial.busy else "waits"
    return trial.state


def _with_reason(trial: Trial, running: Sequence[int]) -> str:
    """The state, and why a trial that could train does not."""
    state = state_of(trial, running)
    return f"{state}: {trial.reason[:_MOST_CHARACTERS]}" if trial.busy and trial.reason else state


def table(shown: SearchView, trials: Sequence[Trial], running: Sequence[int]) -> Table:
    """The trials: those that train, then the best. Reads the histories of those that train."""
    request = shown.request
    names, metrics = [setting.name for setting in request.settings], [one.metric for one in request.objectives]
    title = (
        f"{sum(not trial.busy for trial in trials)} of {len(trials)} trials at rest, {shown.course.trials} asked for"
    )
    grid = Table(title=title, title_justify="left", border_style="dim")
    for name in ("trial", *map(short, names), "state", "step", "to", *metrics):
        grid.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    top = best(trials, *request.directions)
    order = sorted(trials, key=lambda trial: (trial.number not in running, rank(trial, request.direction)))
    for trial in order[:_MOST_ROWS]:
        values = [trial.settings.get(name, "") for name in names]
        step = last_step(request.workdir(trial.number)) if trial.number in running else trial.step
        point = [f"{value:.5g}" for value in trial.point or ()] or [""] * len(metrics)
        grid.add_row(
            str(trial.number),
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values),
            _with_reason(trial, running), str(step), str(trial.target), *point,
            style="bold green" if top is not None and trial.number == top.number else None,
        )  # fmt: skip
    if len(order) > _MOST_ROWS:
        grid.caption = f"and {len(order) - _MOST_ROWS} more"
    return grid


class Lines(contextlib.AbstractContextManager):
    """A line for each event: on stdout, or on stderr when the result there is JSON."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._file = sys.stderr if as_json else sys.stdout

    def event(self, text: str) -> None:
        """Prints something that happened."""
        print(text, file=self._file, flush=True)

    def refresh(self, trials: Sequence[Trial], running: Sequence[int]) -> None:
        """Nothing: the events say it."""

    def __exit__(self, *error: object) -> None:
        del error


class Silent(Lines):
    """Shows nothing."""

    def event(self, text: str) -> None:
        """Nothing."""


class Display(contextlib.AbstractContextManager):
    """A live table, with the last events below it."""

    def __init__(self, shown: SearchView) -> None:
        self._shown, self._at = shown, 0.0
        self._live = Live(console=Console(), auto_refresh=False, transient=False)

    def event(self, text: str) -> None:
        """Prints something that happened, above the table."""
        self._live.console.print(text, style="dim", highlight=False)

    def refresh(self, trials: Sequence[Trial], running: Sequence[int]) -> None:
        """Draws the trials as they are now, once a second."""
        if not running or time.monotonic() - self._at > REFRESH_SEC:
            self._at = time.monotonic()
            self._live.update(table(self._shown, trials, running), refresh=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)
