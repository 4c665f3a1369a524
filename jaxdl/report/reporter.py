"""The reporter of a run: takes what the loop measures to the history, the display, the curves and the summary."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import jax
import numpy as np
from rich.console import Console

from jaxdl.files import CURVES_FILE, PROFILE_FOLDER, SUMMARY_FILE
from jaxdl.report.history import History, ReportConfig
from jaxdl.report.inputs import Activity, InputWatch
from jaxdl.report.plots import plot_history
from jaxdl.report.progress import Progress
from jaxdl.report.stopwatch import Stopwatch
from jaxdl.report.summary import make_summary, print_summary, read_summary, what_next, write_summary

RESTARTED, WENT_BACK = "restarted", "went back"
"""How the events of a restart and of going back to a checkpoint begin."""


class Diverged(ArithmeticError):
    """The numbers of the training are bad, and all that was to be done about it has been."""


Observe = Callable[[int, Sequence[Mapping[str, Any]]], None]
"""Is told the first of some steps that have been reported, and the metrics of each; may raise."""


class Scored(Protocol):
    """What is read of a task, see `jaxdl.tasks.Task`."""

    unit: ClassVar[str]
    modality: ClassVar[str]

    @property
    def objective(self) -> str:
        """How the training loss differs from that of the evaluation."""
        ...

    def units_per_example(self, spec: Any) -> int:
        """How many of `unit` one training example has."""
        ...

    def metrics(self, sums: Mapping[str, float], spec: Any) -> dict[str, float]:
        """From sums over examples to metrics."""
        ...


class Reporter:
    """Everything that a run tells while it runs. Metrics of steps are fetched one step late, many at a time.

    Args:
      config: what to report, and how often.
      folder: where files go; None on all processes but the first, and for a run without a workdir.
      watch: the run's stopwatch; its "train" and "data" phases make the rate.
      console: where to print; a quiet one on all processes but the first.
      quiet: see `Progress`.
      total_steps: the length of the run.
      epoch_at: how many epochs a number of steps is.
      batch_size_at: examples in a step, by its number (1 is the first).
      task: from sums over examples to metrics; the unit of the throughput.
      spec: describes the data to the task.
      input_activity: what the source of the training data has done so far, see `InputWatch`.
      observe: receives the metrics of steps when they are reported; what it raises is raised by `add` and `flush`.
    """

    def __init__(
        self,
        config: ReportConfig,
        folder: Path | None,
        watch: Stopwatch,
        *,
        console: Console,
        quiet: bool | None,
        total_steps: int,
        epoch_at: Callable[[int], float],
        batch_size_at: Callable[[int], int],
        task: Scored,
        spec: Any,
        observe: Observe,
        input_activity: Callable[[], Activity | None] = lambda: None,
    ) -> None:
        self._config, self._folder, self._watch, self._console, self._quiet = config, folder, watch, console, quiet
        self._total_steps, self._epoch_at, self._batch_size_at = total_steps, epoch_at, batch_size_at
        self._task, self._spec, self._observe = task, spec, observe
        self._units = task.units_per_example(spec)
        self._stack = ExitStack()
        self._window: list[Any] = []
        self._window_end, self._since_sec, self._since_data_sec = 0, 0.0, 0.0
        self._input = InputWatch(input_activity, self.note)
        self._profiling = False
        self._earlier: dict[str, Any] | None = None
        self.history = History(None)
        self._progress: Progress | None = None

    def open(self, step: int, evaluated_step: int) -> None:
        """Opens the history and the display of a run that starts from `step`, the last evaluation as given."""
        self._progress = Progress(
            self._total_steps,
            step,
            examples_per_step=self._batch_size_at(step + 1) * self._units,
            unit=self._task.unit,
            epoch_at=self._epoch_at,
            console=self._console,
            quiet=self._quiet,
        )
        self._stack.enter_context(self._progress)
        self._open_history(step, evaluated_step)  # After the display, which tells what the disk refuses.
        self._stack.callback(lambda: self.history.close())
        if step > 0 and self._folder is not None:
            self._earlier = read_summary(self._folder / SUMMARY_FILE)

    def _open_history(self, step: int, evaluated_step: int) -> None:
        self._window_end, self._window = step, []
        self.history = History(
            self._folder,
            resume_step=step,
            evaluated_step=evaluated_step,
            tensorboard=self._config.tensorboard,
            warn=self.note,
        )

    def go_back(self, step: int, evaluated_step: int) -> None:
        """The run goes on from an earlier step: what was measured after it is dropped, as at the start of a run."""
        rows = self.history.rows
        self.history.close()
        self._open_history(step, evaluated_step)
        if self._folder is None:
            self.history.rows = [row for row in rows if "event" in row or row["step"] <= step]
        if self._progress is not None:
            self._progress.back(step)

    def event(self, step: int, text: str) -> None:
        """A message that stays on the display and in the history, where the curves show it."""
        self.note(text)
        self.history.event(step, text)

    def close(self) -> None:
        """Ends a profile under way, closes the files and gives the terminal back."""
        if self._profiling:
            self._profiling = False
            jax.profiler.stop_trace()
        self._stack.close()

    def status(self, word: str) -> None:
        """What the run does now: "compiling", "training", "evaluating", "saving"."""
        if word == "training":
            self._begin_window()
            if self._progress is not None:
                self._progress.pace(self._batch_size_at(self._window_end + 1) * self._units)
        self.doing(word)

    def doing(self, word: str) -> None:
        """The same for the display alone: the rate in the history counts on."""
        if self._progress is not None:
            self._progress.status(word)

    def counted(self, poll: Callable[[], None], total: int) -> Callable[[], None]:
        """`poll`, which is called before each of `total` batches, and shows how many of them are done."""
        done = itertools.count()

        def counting() -> None:
            poll()
            if self._progress is not None:
                self._progress.part(next(done), total)

        return counting

    def note(self, text: str) -> None:
        """A message that stays on the display."""
        if self._progress is not None:
            self._progress.note(text)

    def wait(self) -> None:
        """Returns when the steps dispatched so far have been computed."""
        if self._window:
            jax.block_until_ready(self._window[-1])

    def add(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of the step that was just dispatched, and waits for the one before it.

        So the host is one step ahead and the devices never wait for it. A full window is reported first.
        """
        self.wait()
        if len(self._window) >= self._config.every_steps:
            self.flush()
        self._window.append(metrics)
        assert self._progress is not None
        self._progress.advance(step)

    def pass_over(self, step: int) -> None:
        """A step that was not computed: nothing is measured of it."""
        self.flush()
        self._window_end = step
        self._begin_window()
        assert self._progress is not None
        self._progress.advance(step)

    def flush(self) -> None:
        """Fetches and reports the steps since the last report. Raises what `observe` raises."""
        if not self._window:
            return
        fetched, self._window = jax.device_get(self._window), []
        # A bad step has no part in the means, unless there is nothing else.
        good = [one for one in fetched if not one.get("bad_in_row")] or fetched
        sums = {
            name.removeprefix("sums/"): float(np.sum([one[name] for one in good], dtype=np.float64))
            for name in fetched[0]
            if name.startswith("sums/")
        }
        row = {f"train/{name}": value for name, value in self._task.metrics(sums, self._spec).items()}
        others = {name: value for name, value in fetched[-1].items() if not name.startswith("sums/")}
        others.pop("bad_in_row", None)
        row |= {f"train/{name}": float(value) for name, value in others.items()}
        spent = max(self._training_sec() - self._since_sec, 1e-9)
        waited = self._watch.seconds().get("data", 0.0) - self._since_data_sec
        rate = len(fetched) * self._batch_size_at(self._window_end + 1) / spent
        row |= {"examples_per_sec": rate, f"{self._task.unit}_per_sec": rate * self._units}
        row |= self._input.report(min(1.0, waited / spent))
        self._window_end += len(fetched)
        self._begin_window()
        self._write(self._window_end, row)
        self._observe(self._window_end - len(fetched) + 1, fetched)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation, and what the run took up to its end: `seconds/train`, `seconds/compile`..."""
        row = {f"eval/{name}": value for name, value in metrics.items()}
        self._write(step, row | {f"seconds/{phase}": round(spent, 3) for phase, spent in self._seconds().items()})

    def profile(self, step: int, state: Any) -> None:
        """Starts or ends the profile, if it starts or ends before the step that follows `step` steps."""
        start = self._config.profile_start_step
        if start is None or self._folder is None or step not in (start, start + self._config.profile_steps):
            return
        jax.block_until_ready(state)
        if step == start and not self._profiling:  # After going back the step comes again.
            jax.profiler.start_trace(self._folder / PROFILE_FOLDER)
            self._profiling = True
        elif self._profiling:
            jax.profiler.stop_trace()
            self._profiling = False
            self.note(f"profile written to {self._folder / 'profile'}")

    def finish(
        self,
        status: Literal["finished", "stopped", "interrupted"],
        *,
        step: int,
        mesh: Mapping[str, int],
        anew: bool = True,
    ) -> dict[str, Any]:
        """Draws the curves, writes and prints the summary, and returns it.

        Its seconds are those of this process and of the ones before it in this workdir that came to their own summary.
        When nothing was done `anew` and there is a summary, that one stays.
        """
        summary = self._earlier
        if anew or summary is None or summary["status"] != status:
            summary = make_summary(
                status=status,
                steps=step,
                total_steps=self._total_steps,
                metrics=self.history.last("eval/"),
                seconds=self._seconds(),
                mesh=mesh,
                num_restarts=self.history.num_events(RESTARTED),
                num_rollbacks=self.history.num_events(WENT_BACK),
            )
            self.doing("drawing curves")
            if self._folder is not None:
                folder, columns = self._folder, self.history.columns()
                self._try(CURVES_FILE, lambda: self._plot(columns, folder / CURVES_FILE))
                self._try(SUMMARY_FILE, functools.partial(write_summary, folder / SUMMARY_FILE, summary))
        self.doing(status)
        if self._progress is not None:
            self._progress.stop()
        print_summary(summary, self._console, what_next(self._folder, status, self._task.modality))
        return summary

    def _seconds(self) -> Counter[str]:
        """Wall seconds by phase so far, those of earlier processes included that came to their own summary."""
        seconds = Counter(self._watch.seconds())
        seconds.update(self._earlier["seconds"] if self._earlier else {})
        return seconds

    def _try(self, name: str, write: Callable[[], Any]) -> None:
        """Writes a file; one that cannot be written ends no run."""
        try:
            write()
        except OSError as error:
            self.note(f"{name} could not be written: {error.strerror}")

    def _plot(self, columns: Mapping[str, Sequence[Any]], path: Path) -> None:
        plot_history(columns, path, objective=self._task.objective)

    def _begin_window(self) -> None:
        self._since_sec, self._since_data_sec = self._training_sec(), self._watch.seconds().get("data", 0.0)

    def _training_sec(self) -> float:
        seconds = self._watch.seconds()
        return seconds.get("train", 0.0) + seconds.get("data", 0.0)

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        whole = {"step": step, "epoch": self._epoch_at(step), **row}
        self.history.write(whole)
        if self._progress is not None:
            shown = {name: value for name, value in whole.items() if _worth_a_look(name, value)}
            if self._task.objective:  # Beside "eval/loss" its name would make it look like the same quantity.
                shown = {"train/objective" if name == "train/loss" else name: shown[name] for name in shown}
            self._progress.report(shown)


def _worth_a_look(name: str, value: Any) -> bool:
    """Whether a metric is for the display too. Of an exchange only what it saves and what it owes are, if anything.

    And of the input the share of the time that the step waited for it, when that is worth a look, and of the images
    that came from the cache.
    """
    if name.startswith("input/"):
        return (name == "input/wait" and value >= 0.05) or (
            name.startswith("input/hits/") and name != "input/hits/origin" and value > 0
        )
    neutral = {"train/exchange/compression": 1.0, "train/exchange/residual_ratio": 0.0, "train/bad_steps": 0.0}
    if name in neutral:
        return not math.isclose(value, neutral[name], rel_tol=1e-5)
    return not name.startswith(("train/exchange/", "seconds/"))
