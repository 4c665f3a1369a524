"""The reporter of a run: writes what the loop measures to the history, the display, the curves and the summary."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxdl.core.errors import as_typed
from jaxdl.core.files import CONFUSION_FILE, CURVES_FILE, LOAD_PLOT_FILE, PROFILE_FOLDER, SUMMARY_FILE
from jaxdl.parallel.compiler.times import CompileTimes
from jaxdl.report.consumed import Consumption
from jaxdl.report.events import WARNINGS, Event, EventKind
from jaxdl.report.expert_loads import ExpertLoads
from jaxdl.report.fetching import OWN, fetch, joint_totals, step_metrics, total_metrics
from jaxdl.report.history import History, ReportConfig
from jaxdl.report.inputs import InputWatch
from jaxdl.report.judged import Judged
from jaxdl.report.notebook import LivePlot
from jaxdl.report.plots import plot_history
from jaxdl.report.progress import Progress
from jaxdl.report.reported_run import Report, Subject, is_displayed
from jaxdl.report.start import Start
from jaxdl.report.stopwatch import Stopwatch
from jaxdl.report.summary import (
    Status,
    Summary,
    make_summary,
    print_summary,
    read_summary,
    what_next,
    write_summary,
)
from jaxdl.report.trackers import TrackedModel
from jaxdl.report.tracking import Trackers


class Diverged(ArithmeticError):
    """The numbers of the training are bad, and everything that could be done about it has been."""

    def __str__(self) -> str:
        return as_typed(super().__str__())


class Reporter:
    """Everything that a run reports while it runs. Metrics of steps are fetched one step late, many at a time.

    Args:
      config: what to report, and how often.
      folder: where files go; None on all processes but the first, and for a run without a workdir.
      watch: the run's stopwatch; its "train", "data" and "hooks" phases make the rate.
      start: the lines before the first step; the reporter prints where and as they do.
      subject: the run.
    """

    def __init__(
        self, config: ReportConfig, folder: Path | None, watch: Stopwatch, start: Start, subject: Subject
    ) -> None:
        self._config, self._folder, self._watch, self._start, self._subject = config, folder, watch, start, subject
        self._compile_times = CompileTimes()
        self._timeline, self._counter, self._task = subject.timeline, subject.counter, subject.task
        self._units = self._task.units_per_example(subject.source.spec)
        self._consumption = Consumption(self._task.unit, self._units, subject.source, subject.seed, subject.timeline)
        self._stack = ExitStack()
        self._window: list[tuple[int, Mapping[str, jax.Array]]] = []
        self._own_alone = False
        self._since_sec, self._since_data_sec = 0.0, 0.0
        self._input = InputWatch(subject.source.activity, self.note)
        self._profile_end: int | None = None
        self._step_before: int | None = None
        self._earlier: Summary | None = None
        self.history, self._loads = History(None), ExpertLoads(None)
        trackers = config.trackers if jax.process_index() == 0 else ()
        self._trackers = Trackers(trackers, folder, subject.config, self.warn)
        self._progress: Progress | None = None
        self._early: list[str] = []
        self._live_plot: LivePlot | None = None
        self._judged: Judged | None = None

    def open(self, evaluated_step: int) -> None:
        """Opens the history and the display of a run at its present step, the last evaluation as given."""
        self._progress = Progress(
            self._timeline.total_steps,
            self._counter,
            examples_per_step=self._examples_per_step,
            unit=self._task.unit,
            epoch_at=self._timeline.epoch,
            console=self._start.console,
        )
        self._stack.enter_context(self._progress)
        while self._early:
            self.note(self._early.pop(0))
        self._open_history(evaluated_step)  # After the display, which shows what the disk refuses.
        self._stack.callback(lambda: self.history.close())
        self._trackers.start(self.history.rows, self._counter.step)
        console = self._start.console
        if console.is_jupyter and not console.quiet and self._config.curves:
            columns = lambda: self.history.columns()  # noqa: E731  A rollback makes another history.
            self._live_plot = LivePlot(columns, **self._plot_options, note=self.note)
        if self._counter.step > 0 and self._folder is not None:
            self._earlier = read_summary(self._folder / SUMMARY_FILE)

    def keep_judged(self, evaluated: Judged | None) -> None:
        """Keeps what the last evaluation showed of each example, for the end of the run."""
        self._judged = evaluated

    @property
    def every_steps(self) -> int:
        """Steps from one report of training metrics to the next."""
        return self._config.every_steps

    @property
    def _examples_per_step(self) -> float:
        """Of the next step, in units of the task."""
        return self._timeline.segment(self._counter.step).batch_size * self._units

    def _open_history(self, evaluated_step: int) -> None:
        self._window = []
        self.history = History(
            self._folder,
            resume_step=self._counter.step,
            evaluated_step=evaluated_step,
            tensorboard=self._config.tensorboard,
            warn=self.warn,
            before_cut=self._trackers.before_cut,
        )
        self._loads = ExpertLoads(self._folder, self._counter.step, self.warn)

    def roll_back(self, evaluated_step: int) -> None:
        """Drops what was measured after the present step, as at the start of a run that resumes."""
        rows = self.history.rows
        self.history.close()
        self._open_history(evaluated_step)
        if self._folder is None:
            self.history.rows = [row for row in rows if "event" in row or row["step"] <= self._counter.step]
        self._trackers.restart(self.history.rows)

    def event(self, kind: EventKind, text: str, step: int | None = None, *, recorded: bool = True) -> None:
        """Shows a message and records it in the history, where the curves show it; at the present step by default."""
        if kind not in WARNINGS:
            self.note(text)
        elif jax.process_index() == 0:  # All processes have the event.
            self.warn(text)
        if recorded:
            self.history.event(Event(kind, self._counter.step if step is None else step, text))

    def close(self) -> None:
        """Ends a profile under way, closes the files and gives the terminal back. A run that is not finished failed."""
        if self._profile_end is not None:
            self._profile_end = None
            jax.profiler.stop_trace()
        self._trackers.close("failed")
        self._stack.close()

    def status(self, word: str) -> None:
        """Shows what the run does now: "compiling", "training", "evaluating", "saving", "rolling back".

        "training" also begins a new window of the rate.
        """
        if word == "training":
            self._begin_window()
            if self._progress is not None:
                self._progress.pace(self._examples_per_step)
        self.show_status(word)

    def show_status(self, word: str) -> None:
        """Shows what the run does now, without a new window of the rate."""
        if self._progress is not None:
            self._progress.status(word)

    def count_batches(self, poll: Callable[[], None], total: int) -> Callable[[], None]:
        """`poll`, which is called before each of `total` batches, and shows how many of them are done."""
        done = itertools.count()

        def counting() -> None:
            poll()
            if self._progress is not None:
                self._progress.part(next(done), total)

        return counting

    def note(self, *texts: str) -> None:
        """Messages that stay on the display; before that is open, they wait for it."""
        for text in texts:
            if self._progress is not None:
                self._progress.note(text)
            else:
                self._early.append(text)

    def warn(self, text: str) -> None:
        """A message that also a quiet run shows, on stderr; of any process, which has its own disk and files."""
        process = jax.process_index()
        if process == 0 and not self._start.quiet:
            self.note(text)
        else:
            print(f"process {process}: " * (process > 0) + as_typed(text), file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Returns when the steps dispatched so far have been computed."""
        if self._window:
            jax.block_until_ready(self._window[-1][1])

    def add(self, metrics: Mapping[str, jax.Array]) -> Report | None:
        """Takes the metrics of the step that was just dispatched, and waits for the one before it.

        So the host is one step ahead and the devices never wait for it. A full window is reported first.
        """
        self.wait()
        report = self.flush() if len(self._window) >= self._config.every_steps else None
        self._window.append((self._counter.step, metrics))
        self._advance()
        return report

    def skip_step(self) -> None:
        """The present step was not computed: nothing is measured of it. What was measured before has been flushed."""
        self._begin_window()
        self._advance()

    def _advance(self) -> None:
        assert self._progress is not None
        self._progress.advance()

    def flush(self) -> Report | None:
        """Fetches and reports the steps since the last report; None when there are none."""
        if not self._window:
            return None
        first_step, last_step = self._window[0][0], self._window[-1][0]
        fetched, self._window = fetch([metrics for _, metrics in self._window]), []
        self._own_alone = any(name.startswith(OWN) for name in fetched[-1])
        together = step_metrics(fetched, self._task, self._subject.source.spec)
        row: dict[str, Any] = {f"train/{name}": value for name, value in together.items()}
        spent = max(self._training_sec() - self._since_sec, 1e-9)
        waited = self._watch.seconds().get("data", 0.0) - self._since_data_sec
        rate = len(fetched) * self._timeline.segment(first_step - 1).batch_size / spent
        row |= {"examples_per_sec": rate, f"{self._task.unit}_per_sec": rate * self._units}
        row |= self._consumption.report(fetched, last_step, spent, self.history.rows)
        row |= self._consumption.empty_steps(fetched, self.history.rows)
        row |= self._input.report(min(1.0, waited / spent))
        self._begin_window()
        self._write(last_step, row)
        self._loads.add(first_step, last_step, fetched)
        return Report(first_step, fetched, together)

    def read_metrics(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """The metrics of one step as reports name them. Waits for the step."""
        return step_metrics(fetch([metrics]), self._task, self._subject.source.spec)

    def report_merge(self, metrics: Mapping[str, jax.Array]) -> None:
        """Reports what replicas have joined for an evaluation or a checkpoint, if this process sees its own alone."""
        fetched = fetch([metrics])
        totals = total_metrics(joint_totals(fetched), self._task, self._subject.source.spec) if self._own_alone else {}
        if totals:
            row = {f"train/{name}": value for name, value in totals.items()}
            self._write(
                self._counter.step, row | self._consumption.report(fetched, self._counter.step, 1.0, self.history.rows)
            )

    def report_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Reports an evaluation, and what the run took up to its end: `seconds/train`, `seconds/compile`..."""
        row = {f"eval/{name}": value for name, value in metrics.items()}
        row |= {f"seconds/{phase}": round(spent, 3) for phase, spent in self._seconds().items()}
        self._write(self._counter.step, row)

    def profile(self, state: Any) -> None:
        """Starts or ends the profile, if it starts or ends before the next step."""
        step, before, start = self._counter.step, self._step_before, self._config.profile_start_step
        self._step_before = step
        if start is None or self._folder is None:
            return
        if self._profile_end is not None:
            if step >= self._profile_end:
                jax.block_until_ready(state)
                jax.profiler.stop_trace()
                self._profile_end = None
                self.note(f"profile written to {self._folder / PROFILE_FOLDER}")
        elif step == start or (before is not None and before < start < step):  # One program may run several steps.
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._folder / PROFILE_FOLDER)
            self._profile_end = step + self._config.profile_steps

    def finish(
        self,
        status: Status,
        *,
        mesh: Mapping[str, int],
        changed: bool = True,
        models: Callable[[], Mapping[str, TrackedModel]] = dict,
    ) -> Summary:
        """Draws the curves, writes and prints the summary, and returns it.

        `models` writes the network in the forms that are asked for, and gives those that trackers may want.

        Its seconds are those of this process and of the ones before it in this workdir that came to their own summary.
        When nothing has `changed` since the summary of this status was written, that one stays.
        """
        if changed:
            self._note_empty_steps()
        summary = self._earlier
        if changed or summary is None or summary["status"] != status:
            summary = make_summary(
                status=status,
                steps=self._counter.step,
                total_steps=self._timeline.total_steps,
                metrics=self.history.last("eval/"),
                seconds=self._seconds(),
                mesh=mesh,
                extra=self._consumption.total(self.history.rows),
                num_restarts=self.history.num_events("restart"),
                num_rollbacks=self.history.num_events("rollback"),
                num_params=self._subject.num_params,
                compiling=self._compile_times.figures(),
                classes=self._judged and self._judged.classes(),
            )
            if self._folder is not None:
                folder, columns = self._folder, self.history.columns()
                if self._config.curves:
                    self.show_status("drawing curves")
                    self._try(CURVES_FILE, lambda: self._plot(columns, folder / CURVES_FILE))
                    self._try(LOAD_PLOT_FILE, lambda: self._loads.plot(folder / LOAD_PLOT_FILE))
                    if (judged := self._judged) is not None and status != "interrupted":
                        self._try(CONFUSION_FILE, lambda: judged.draw(folder))
                self._try(SUMMARY_FILE, functools.partial(write_summary, folder / SUMMARY_FILE, summary))
        written = models()
        if self._trackers:
            self.show_status("writing to trackers")
            self._trackers.close(status, written)
        self.show_status(status)
        self._show_curves(last=True)
        if self._progress is not None:
            self._progress.stop()
        spec = self._subject.source.spec
        further = what_next(self._folder, status, spec.modality, self._task.reads(spec), self._subject.source.of_files)
        weakest = self._judged.weakest() if self._judged is not None else ""
        print_summary(summary, self._start.console, [*([("weakest", weakest)] if weakest else []), *further])
        return summary

    def _note_empty_steps(self) -> None:
        """Says how many steps of the run made no update because nothing in their batches counted."""
        number, steps = (
            int(self._consumption.empty_steps((), self.history.rows).get("train/empty_steps", 0)),
            self._counter.step,
        )
        if 0 < number < steps:
            self.note(f"{number} of {steps} steps made no update: nothing in their batches counted")
        elif number:
            self.warn(f"nothing was trained: in none of the {steps} steps did anything in the batch count")

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
            self.warn(f"{name} could not be written: {error.strerror}")

    @property
    def _plot_options(self) -> dict[str, Any]:
        """How `plot_history` names the loss and knows the best value."""
        task = self._task
        return {"objective": task.objective, "best": (task.best_metric, task.resolved_mode)}

    def _plot(self, columns: Mapping[str, Sequence[Any]], path: Path) -> None:
        plot_history(columns, path, **self._plot_options)

    def _begin_window(self) -> None:
        self._since_sec, self._since_data_sec = self._training_sec(), self._watch.seconds().get("data", 0.0)

    def _training_sec(self) -> float:
        seconds = self._watch.seconds()
        return sum(seconds.get(phase, 0.0) for phase in ("train", "data", "hooks"))

    def _write(self, step: int, row: Mapping[str, Any]) -> None:
        whole = {"step": step, "epoch": self._timeline.epoch(step), **row}
        self.history.write(whole)
        self._trackers.look()
        if self._progress is not None:
            shown = {name: value for name, value in whole.items() if is_displayed(name, value)}
            if self._task.objective:  # Beside "eval/loss" its name would make it look like the same quantity.
                shown = {"train/objective" if name == "train/loss" else name: shown[name] for name in shown}
            self._progress.report(shown)
        self._show_curves()

    def _show_curves(self, *, last: bool = False) -> None:
        if self._live_plot is not None:
            with self._watch("plot"):
                self._live_plot.update(last=last)
