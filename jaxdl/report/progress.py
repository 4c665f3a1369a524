"""The progress display of a run: a live bar on a terminal, one plain line per report everywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxdl.core.errors import as_typed
from jaxdl.report.lines import (
    format_duration,
    format_number,
    format_row,
    format_seconds,
    is_live,
    is_throughput,
    label,
    wrap_parts,
)

WINDOW_SEC = 10.0
"""The rate is averaged over this much of the recent past, or more if steps take longer than SAMPLE_SEC."""
SAMPLE_SEC = 0.2
REFRESHES_PER_SEC = 8
TRAINING = "training"
SAID_ALWAYS, SAID_ONCE = ("compiling",), ("reading data", "evaluating")
"""Statuses whose begin and duration plain lines show: each time, and the first time only."""
WORTH_SAYING_SEC = 1.0
HEARTBEAT_SEC = 10.0
"""Period of plain lines about a status that lasts longer; in a notebook, also of those about training."""
MIN_BAR_WIDTH = 10


@dataclass
class StepCounter:
    """The steps of a run that are completed (or, where the host runs ahead, handed to the devices).

    There is one for a run. Its loop sets it; whatever shows or reports the step reads it here.
    """

    step: int = 0


class Progress:
    """Shows the progress of a run; a context manager; `stop()` may end it earlier.

    On a terminal: a live bar with step, epoch, rate, time left, the latest metrics and the status of the run; notes and
    rows with evaluation metrics stay above it. Elsewhere (a file, a pipe, a notebook, a dumb terminal): one plain line
    per report, see `format_row`; in a notebook at most one every `HEARTBEAT_SEC` seconds, and all evaluations.
    `Console(quiet=True)` prints nothing.

    `total_steps` and the run's `counter` count steps of the whole run; `examples_per_step` is the global batch in
    `unit`s ("examples", "tokens"), see `pace`; `epoch_at` converts a number of steps to epochs. The rate counts only
    time in the status "training"; the time left follows from it, without evaluations.
    """

    def __init__(
        self,
        total_steps: int,
        counter: StepCounter,
        *,
        examples_per_step: float,
        unit: str = "examples",
        epoch_at: Callable[[int], float] | None = None,
        console: Console | None = None,
    ) -> None:
        self.total_steps = total_steps
        self._counter = counter
        self._examples_per_step = examples_per_step
        self._unit = unit
        self._epoch_at = epoch_at
        self._console = console or Console()
        self._live: Live | None = None
        self._use_live = is_live(self._console)
        self._status, self._since = "starting", time.perf_counter()
        self._said: set[str] = set()
        self._part: tuple[int, int] | None = None
        self._last_line = -math.inf
        self._metrics: dict[str, Any] = {}
        self._spinner = Spinner("dots", style="cyan")
        self._samples = _samples()
        self._next_sample = -math.inf
        self._steps_per_sec: float | None = None

    def stop(self) -> None:
        """Leaves the bar in its last state and releases the terminal. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        if self._use_live:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=REFRESHES_PER_SEC)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def advance(self) -> None:
        """The counter has advanced. Usually takes well under a microsecond: call it on every step."""
        now = time.perf_counter()
        if now >= self._next_sample and self._status == TRAINING:
            self._sample(now)

    def pace(self, examples_per_step: float) -> None:
        """Sets the number of examples per step from now on."""
        self._examples_per_step = examples_per_step

    def report(self, row: Mapping[str, Any]) -> None:
        """Shows the metrics of a row of the history.

        A training row without a rate and the time left gets them here.
        """
        row = dict(row)
        self._metrics |= {
            name: value for name, value in row.items() if name not in ("step", "epoch") and not is_throughput(name)
        }
        evaluated = any(name.startswith("eval/") for name in row)
        if not evaluated:
            rate, eta_sec = self.steps_per_sec(), self.eta_sec()
            if rate is not None:
                row.setdefault(f"{self._unit}_per_sec", rate * self._examples_per_step)
            if eta_sec is not None:
                row.setdefault("eta_sec", eta_sec)
        if evaluated or (self._live is None and not self._too_soon(row)):
            width = self._console.width if self._console.is_terminal else None
            self._say(format_row(row, self.total_steps, unit=self._unit, width=width), "bold" if evaluated else "")

    def _too_soon(self, row: Mapping[str, Any]) -> bool:
        """Whether a notebook, which keeps every line, has shown a line of training less than `HEARTBEAT_SEC` ago."""
        now = time.perf_counter()
        if self._console.is_jupyter and now - self._last_line < HEARTBEAT_SEC and row["step"] < self.total_steps:
            return True
        self._last_line = now
        return False

    def status(self, word: str) -> None:
        """Sets the status: "compiling", "training", "evaluating", "saving". The rate counts "training" only."""
        if word == self._status:
            return
        now = time.perf_counter()
        if self._status == TRAINING:
            self._sample(now)
        elif self._is_said(self._status) and now - self._since >= WORTH_SAYING_SEC:
            self._say(f"{self._status}: {format_seconds(now - self._since)}", "dim")
        self._said.add(self._status)
        self._status, self._since, self._last_line, self._part = word, now, now, None
        if self._is_said(word) and not self._use_live:
            self._say(f"{word} ...", "")
        if word == TRAINING:
            # Empty the window, or the pause would look like slow steps; until it fills, the old rate is shown.
            self._samples = _samples()
            self._sample(time.perf_counter())

    def _is_said(self, word: str) -> bool:
        return word in SAID_ALWAYS or (word in SAID_ONCE and word not in self._said)

    def part(self, done: int, total: int) -> None:
        """Shows the progress within the current status, such as the batches of an evaluation."""
        self._part, now = (done, total), time.perf_counter()
        if not self._use_live and now - self._last_line >= HEARTBEAT_SEC:
            self._last_line = now
            self._say(f"{self._status} {done:,}/{total:,}", "")

    def note(self, text: str) -> None:
        """Prints a message that stays, such as "resumed from step 300"."""
        self._say(text, "cyan")

    def steps_per_sec(self) -> float | None:
        """Steps per second of training over the last ten seconds, or the last 50 steps if they take longer.

        None until there are two samples.
        """
        samples = self._samples  # rich's thread reads while the run adds samples: it must see a single window.
        if len(samples) >= 2:
            (begin, first), (end, last) = samples[0], samples[-1]
            if end > begin and last > first:
                self._steps_per_sec = (last - first) / (end - begin)
        return self._steps_per_sec

    def eta_sec(self) -> float | None:
        """Seconds of training left at the current rate; None while the rate is unknown."""
        rate = self.steps_per_sec()
        return None if rate is None else max(self.total_steps - self._counter.step, 0) / rate

    def _sample(self, now: float) -> None:
        self._samples.append((now, self._counter.step))
        self._next_sample = now + SAMPLE_SEC

    def _say(self, text: str, style: str) -> None:
        text = as_typed(text)
        if self._console.is_terminal:
            self._console.print(Text(text, style=style if self._use_live else ""))
        elif not self._console.quiet:
            print(text, file=self._console.file, flush=True)

    def _render(self) -> RenderableType:
        """The bar with the metrics below it, no line wider than the terminal. Called by rich's thread."""
        metrics, width = dict(self._metrics), self._console.width
        line = self._bar(width)
        if not metrics:
            return line
        values = wrap_parts((f"{label(name)} {format_number(value)}" for name, value in metrics.items()), width)
        return Group(line, Text("\n".join(values)))

    def _bar(self, width: int) -> RenderableType:
        """One line with status, progress and rate; a narrow terminal gets fewer of them."""
        step, rate, eta_sec, part = self._counter.step, self.steps_per_sec(), self.eta_sec(), self._part
        doing = self._status
        if part is not None:
            doing += f" {part[0]:,}/{part[1]:,}"
        elif doing != TRAINING and time.perf_counter() - self._since >= WORTH_SAYING_SEC:
            doing += f" {format_duration(time.perf_counter() - self._since)}"
        cells = {"steps": Text(f"{step:,}/{self.total_steps:,}")}
        if self._epoch_at is not None:
            cells["epoch"] = Text(f"epoch {self._epoch_at(step):.1f}", style="magenta")
        if rate is not None:
            cells["rate"] = Text(f"{rate * self._examples_per_step:,.0f} {self._unit}/s", style="green")
        if eta_sec is not None:
            cells["eta"] = Text(f"eta {format_duration(eta_sec)}", style="dim")
        self._spinner.text = Text(f"{doing:<10}", style="cyan")
        first = 2 + max(10, len(doing))
        for name in ("epoch", "rate", "eta"):
            if first + sum(2 + cell.cell_len for cell in cells.values()) + 2 + MIN_BAR_WIDTH > width:
                cells.pop(name, None)
        line = Table.grid(padding=(0, 2), expand=True)
        shown: list[RenderableType] = [self._spinner, *cells.values()]
        if first + sum(2 + cell.cell_len for cell in cells.values()) + 2 + MIN_BAR_WIDTH <= width:
            total = max(self.total_steps, 1)
            shown.insert(1, ProgressBar(total=total, completed=step, complete_style="cyan", finished_style="green"))
        for cell in shown:
            line.add_column(ratio=1 if isinstance(cell, ProgressBar) else None, no_wrap=True)
        line.add_row(*shown)
        return line


def _samples() -> deque[tuple[float, int]]:
    """An empty window of (time, step) pairs."""
    return deque(maxlen=round(WINDOW_SEC / SAMPLE_SEC) + 1)
