"""What a run says before its first step: the facts of it as soon as each is known, and what is being done."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxdl.config import Config
from jaxdl.report.facts import data_fact, devices_fact, plan_facts
from jaxdl.report.lines import format_duration, format_seconds, is_live
from jaxdl.startup import is_first_process

NAME_WIDTH = 11
WORTH_SAYING_SEC = 1.0


class Start:
    """The first lines of a run: facts, and what is being done while nothing else is to be seen.

    On a terminal: a spinner with the time that it takes, above which the facts stay. Elsewhere: a plain line when
    something begins and, if it took a second or more, one when it ends. Only the first process of a run prints.
    `quiet` is that of `Progress`. After `close` it says nothing more.
    """

    def __init__(self, console: Console | None = None, quiet: bool | None = None) -> None:
        self._guessed = console is None
        self.console, self.quiet = console or Console(quiet=not is_first_process()), quiet
        self._live: Live | None = None
        self._closed = False

    @property
    def _use_live(self) -> bool:
        return not self.console.quiet and (is_live(self.console) if self.quiet is None else not self.quiet)

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Context: says `text`, such as "reading the data", while the block runs; nothing where it is empty."""
        if self._closed or self.console.quiet or not text:
            yield
            return
        since = time.perf_counter()
        if self._use_live:
            self._live = self._spin(text, since)
            self._live.start()
        else:
            self._say(f"{text} ...")
        try:
            yield
        finally:
            self._stop()
        spent = time.perf_counter() - since
        if spent >= WORTH_SAYING_SEC and not self._use_live:
            self._say(f"{text}: {format_seconds(spent)}")

    def fact(self, name: str, value: str) -> None:
        """Prints one line, `name` before `value`; on a terminal that is too narrow, more lines, divided at words."""
        if self._closed or self.console.quiet:
            return
        width = self.console.width if self.console.is_terminal else None
        room = max(20, width - NAME_WIDTH) if width else len(value)
        lines = textwrap.wrap(value, max(1, room), break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            label = f"{name if number == 0 else '':<{NAME_WIDTH}}"
            if self._use_live:
                self.console.print(Text.assemble((label, "dim"), line), soft_wrap=True)
            else:
                self._say(label + line)

    def devices(self, mesh: Mesh) -> None:
        """Prints the devices; from here on it is known which process is the first: the only one to print."""
        if self._guessed:
            self.console.quiet = jax.process_index() > 0
        self.fact("devices", devices_fact(mesh))

    def data(self, config: Config, splits: Any) -> None:
        """Prints the number of examples and their kind; `splits` are the data as they were read."""
        self.fact("data", data_fact(config, splits))

    def plan(self, plan: Any, end: int) -> None:
        """Prints what a `Plan` decides: model, length, optimizer, exchange. The run ends at step `end`."""
        for name, value in plan_facts(plan, end):
            self.fact(name, value)

    def workdir(self, folder: Path | None, step: int | None) -> None:
        """Prints where the run is kept, and the step that it resumes from; None for a new run."""
        if folder is None:
            self.fact("workdir", "none: nothing is kept. Give --workdir FOLDER to keep checkpoints and curves.")
        else:
            self.fact("workdir", f"{folder}, {'new' if step is None else f'resumes from step {step:,}'}")

    def close(self) -> None:
        """Gives the terminal back. May be called twice, and while another thread is still in `doing`."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _spin(self, text: str, since: float) -> Live:
        spinner = Spinner("dots", style="cyan")

        def render() -> Spinner:
            spent = time.perf_counter() - since
            elapsed = f" {format_duration(spent)}" if spent >= WORTH_SAYING_SEC else ""
            spinner.text = Text(f"{text}{elapsed}", style="cyan")
            return spinner

        return Live(get_renderable=render, console=self.console, refresh_per_second=8, transient=True)

    def _say(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)
