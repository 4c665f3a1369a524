"""What a run says while it runs: a live bar on a terminal, one plain line per report everywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

WINDOW_SEC = 10.0
"""The rate is taken over this much of the recent past, or more when a step is longer than SAMPLE_SEC."""
SAMPLE_SEC = 0.2
REFRESHES_PER_SEC = 8
TRAINING = "training"


class Progress:
    """Shows how far a run has come; a context manager, or `start()` and `stop()`.

    On a terminal: a live bar with step, epoch, rate, time left, the latest metrics and what the run is doing; rows with
    evaluation metrics and notes stay above it. Elsewhere (a file, a pipe, a notebook, a dumb terminal): one plain line
    per report, see `format_row`. `quiet=True` asks for the plain lines on a terminal too, False forces the bar.
    For a process that should say nothing, pass `Console(quiet=True)`.

    `total_steps` and `start_step` (0, or where the run was resumed) count steps of the whole run; `examples_per_step`
    is the global batch in `unit`s, see `pace`; `epoch_at` says how many epochs a number of steps is. The rate counts
    time in the state "training" only; the time left goes by it, so evaluations to come are not in it.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        examples_per_step: float,
        unit: str = "examples",
        epoch_at: Callable[[int], float] | None = None,
        console: Console | None = None,
        quiet: bool | None = None,
    ) -> None:
        self.total_steps = total_steps
        self._step = start_step
        self._examples_per_step = examples_per_step
        self._unit = unit
        self._epoch_at = epoch_at
        self._console = console or Console()
        self._live: Live | None = None
        self._use_live = not self._console.quiet and (is_live(self._console) if quiet is None else not quiet)
        self._status = "starting"
        self._metrics: dict[str, Any] = {}
        self._spinner = Spinner("dots", style="cyan")
        self._samples = _samples()
        self._next_sample = -math.inf
        self._steps_per_sec: float | None = None

    def start(self) -> None:
        """Shows the bar; on anything but a terminal it does nothing."""
        if self._use_live and self._live is None:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SEC,
                transient=False,
            )
            self._live.start()

    def stop(self) -> None:
        """Leaves the bar as it stands and gives the terminal back. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def advance(self, step: int) -> None:
        """`step` steps of the run are now completed. Costs well under a microsecond mostly: call it on every step."""
        self._step = step
        now = time.perf_counter()
        if now >= self._next_sample and self._status == TRAINING:
            self._sample(now)

    def pace(self, examples_per_step: float) -> None:
        """From here on a step has so many examples."""
        self._examples_per_step = examples_per_step

    def back(self, step: int) -> None:
        """The run went back to an earlier step."""
        self._step = step
        self._samples = _samples()

    def report(self, row: Mapping[str, Any]) -> None:
        """Shows the metrics of a row of the history; its "step" also advances the progress.

        Plain lines get the rate and the time left from here where a training row does not bring them.
        """
        row = dict(row)
        self._step = max(self._step, int(row.get("step", self._step)))
        self._metrics |= {
            name: value for name, value in row.items() if name not in ("step", "epoch", "examples_per_sec")
        }
        evaluated = any(name.startswith("eval/") for name in row)
        if not evaluated:
            rate, eta_sec = self.steps_per_sec(), self.eta_sec()
            if rate is not None:
                row.setdefault("examples_per_sec", rate * self._examples_per_step)
            if eta_sec is not None:
                row.setdefault("eta_sec", eta_sec)
        if self._live is None or evaluated:
            self._say(format_row(row, self.total_steps, unit=self._unit), "bold" if evaluated else "")

    def status(self, word: str) -> None:
        """What the run does now: "compiling", "training", "evaluating", "saving"; the rate counts "training" only."""
        if word == self._status:
            return
        if self._status == TRAINING:
            self._sample(time.perf_counter())
        self._status = word
        if word == TRAINING:
            # The pause must not look like slow steps: the window starts anew, and the old rate holds until then.
            self._samples = _samples()
            self._sample(time.perf_counter())

    def note(self, text: str) -> None:
        """Prints a message that stays, such as "resumed from step 300"."""
        self._say(text, "cyan")

    def warn(self, text: str) -> None:
        """Prints a warning that stays."""
        self._say(f"warning: {text}", "yellow")

    def steps_per_sec(self) -> float | None:
        """Steps per second of training over the last ten seconds, or the last 50 steps where that is longer.

        None before there is anything to measure.
        """
        samples = self._samples  # rich's thread reads while the run goes on: it must see one window only
        if len(samples) >= 2:
            (begin, first), (end, last) = samples[0], samples[-1]
            if end > begin and last > first:
                self._steps_per_sec = (last - first) / (end - begin)
        return self._steps_per_sec

    def eta_sec(self) -> float | None:
        """Seconds of training that are left at the present rate, or None while no rate is known."""
        rate = self.steps_per_sec()
        return None if rate is None else max(self.total_steps - self._step, 0) / rate

    def _sample(self, now: float) -> None:
        self._samples.append((now, self._step))
        self._next_sample = now + SAMPLE_SEC

    def _say(self, text: str, style: str) -> None:
        if self._use_live:
            self._console.print(Text(text, style=style), soft_wrap=True)
        elif not self._console.quiet:
            print(text, file=self._console.file, flush=True)

    def _render(self) -> RenderableType:
        """The bar, two lines; called by rich's own thread."""
        step, rate, eta_sec, metrics = self._step, self.steps_per_sec(), self.eta_sec(), dict(self._metrics)
        self._spinner.text = Text(f"{self._status:<10}", style="cyan")
        cells: list[RenderableType] = [
            self._spinner,
            ProgressBar(total=max(self.total_steps, 1), completed=step, complete_style="cyan", finished_style="green"),
            Text(f"{step:,}/{self.total_steps:,}"),
        ]
        if self._epoch_at is not None:
            cells.append(Text(f"epoch {self._epoch_at(step):.1f}", style="magenta"))
        if rate is not None:
            cells.append(Text(f"{rate * self._examples_per_step:,.0f} {self._unit}/s", style="green"))
        if eta_sec is not None:
            cells.append(Text(f"eta {format_duration(eta_sec)}", style="dim"))
        line = Table.grid(padding=(0, 2), expand=True)
        for index in range(len(cells)):
            line.add_column(ratio=1 if index == 1 else None, no_wrap=True)
        line.add_row(*cells)
        if not metrics:
            return line
        values = Text("  ".join(f"{_label(name)} {format_number(value)}" for name, value in metrics.items()))
        values.no_wrap, values.overflow = True, "ellipsis"
        return Group(line, values)


def format_row(row: Mapping[str, Any], total_steps: int, *, unit: str = "examples") -> str:
    """One plain line for a row of the history, easy to grep; fields that the row lacks are left out.

    `step 120/840  epoch 5.3  loss 0.1234  lr 0.05  12,345 examples/s  eta 0:00:31`. "train/" is not written, "eval/"
    is. The time left comes from "eta_sec".
    """
    parts = [f"step {row['step']}/{total_steps}"]
    if row.get("epoch") is not None:
        parts.append(f"epoch {row['epoch']:.1f}")
    last = ("examples_per_sec", "eta_sec")
    shown = [name for name in row if name not in ("step", "epoch", *last) and row[name] is not None]
    shown.sort(key=lambda name: name != "train/loss")
    parts += [f"{_label(name)} {format_number(row[name])}" for name in shown]
    if row.get("examples_per_sec") is not None:
        parts.append(f"{float(row['examples_per_sec']):,.0f} {unit}/s")
    if row.get("eta_sec") is not None:
        parts.append(f"eta {format_duration(row['eta_sec'])}")
    return "  ".join(parts)


def format_number(value: Any) -> str:
    """A number in about four digits: 0.1234, 0.05, 1e-05, 12,345. Anything else as it is."""
    if isinstance(value, str | bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    value = float(value)
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, with days in front from a day on; "?" when not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, whole_sec = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{whole_sec:02d}"


def is_live(console: Console) -> bool:
    """Whether the console is a terminal that can redraw. A notebook is not: there the bar would need widgets."""
    return console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal and not console.quiet


def _samples() -> deque[tuple[float, int]]:
    """An empty window of (time, step) pairs."""
    return deque(maxlen=round(WINDOW_SEC / SAMPLE_SEC) + 1)


def _label(name: str) -> str:
    name = name.removeprefix("train/").removeprefix("exchange/")
    names = {"learning_rate": "lr", "input/wait": "data_wait"}
    names |= {f"input/hits/{tier}": f"from_{tier}" for tier in ("memory", "disk")}
    return names.get(name, name)
