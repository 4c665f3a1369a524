"""The output of a run before its first step: facts as soon as each is known, and the current activity."""

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

from jaxdl.core.config import Config
from jaxdl.core.errors import as_typed
from jaxdl.core.startup import is_first_process
from jaxdl.report.facts import data_fact, devices_fact, plan_facts
from jaxdl.report.lines import format_duration, format_seconds, is_live

NAME_WIDTH = 11
WORTH_SAYING_SEC = 1.0


class Start:
    """Prints the first lines of a run: facts, and the current activity.

    On a terminal: a spinner with the elapsed time, below the facts. Elsewhere: a plain line when an activity begins,
    and one when it ends if it took a second or more. Only the first process of a run prints, and with `quiet` none.
    After `close` it prints nothing.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._guessed = console is None and not quiet
        self.console, self.quiet = console or Console(quiet=quiet or not is_first_process()), quiet
        self._live: Live | None = None
        self._closed = False

    @property
    def _use_live(self) -> bool:
        return is_live(self.console)

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Context: shows `text`, such as "reading the data", while the block runs; nothing if it is empty."""
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
        """Prints `name` and `value` on one line; on a narrow terminal on several, broken between words."""
        if self._closed or self.console.quiet:
            return
        width = self.console.width if self.console.is_terminal else None
        room = max(20, width - NAME_WIDTH) if width else len(value)
        lines = textwrap.wrap(as_typed(value), max(1, room), break_on_hyphens=False) or [""]
        for number, line in enumerate(lines):
            label = f"{name if number == 0 else '':<{NAME_WIDTH}}"
            if self._use_live:
                self.console.print(Text.assemble((label, "dim"), line), soft_wrap=True)
            else:
                self._say(label + line)

    def devices(self, mesh: Mesh) -> None:
        """Prints the devices. From now on only JAX's process 0 prints."""
        if self._guessed:
            self.console.quiet = jax.process_index() > 0
        self.fact("devices", devices_fact(mesh))

    def data(self, config: Config, splits: Any) -> None:
        """Prints the number and kind of examples; `splits` is the data."""
        self.fact("data", data_fact(config, splits))
        if splits.facts is not None and not self._closed and not self.console.quiet:
            for name, value in splits.facts():
                self.fact(name, value)

    def plan(self, plan: Any, end: int) -> None:
        """Prints the facts of a `Plan`: model, length, optimizer, exchange. The run ends at step `end`."""
        for name, value in plan_facts(plan, end):
            self.fact(name, value)

    def workdir(self, folder: Path | None, step: int | None) -> None:
        """Prints the workdir and the step from which the run resumes; None for a new run."""
        if folder is None:
            self.fact("workdir", "none: nothing is saved. Give --workdir FOLDER to save checkpoints and curves.")
        else:
            self.fact("workdir", f"{folder}, {'new' if step is None else f'resumes from step {step:,}'}")

    def close(self) -> None:
        """Releases the terminal. May be called twice, and while another thread is in `doing`."""
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
