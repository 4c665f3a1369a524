"""The training loop, in reading order: set up, restore, compile, train, evaluate, save, report."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from jaxdl.checkpoint import Checkpoints, claim_workdir, write_atomically
from jaxdl.data import TrainLoader, eval_batches, spec_to_json
from jaxdl.evaluate import evaluate, make_eval_step
from jaxdl.experiment import Experiment, Plan, identity, make_plan
from jaxdl.mesh import Axis, batch_sharding
from jaxdl.report import History, Progress, Stopwatch, plot_history, print_summary, write_summary
from jaxdl.signals import Stop, StopSignals
from jaxdl.state import TrainState, init_state
from jaxdl.step import make_train_step


@dataclass(frozen=True)
class Run:
    """A run that has ended: its state, what it measured, and its summary (the content of summary.json)."""

    state: TrainState
    history: dict[str, list[Any]]
    """Columns, `pandas.DataFrame(run.history)`: step, epoch, train/loss, eval/accuracy, examples_per_sec..."""
    summary: dict[str, Any]
    plan: Plan = field(repr=False)
    workdir: Path | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation."""
        return self.summary["metrics"]

    def plot(self) -> Figure:
        """The run's curves as a matplotlib figure."""
        return plot_history(self.history)


class Interrupted(SystemExit):
    """A signal ended the run after its state was saved; `code` is 128 + the signal's number, as a shell has it."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(128 + signum)
        self.message = message


class Diverged(ArithmeticError):
    """The training loss is not a finite number any more."""


def train(
    experiment: Experiment,
    workdir: str | Path | None = None,
    *,
    quiet: bool | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Run:
    """Trains, and returns the run. With a `workdir`, everything is kept there, and the same call resumes.

    Args:
      experiment: what to train, from `jaxdl.load` or made in Python.
      workdir: the folder for checkpoints, metrics and curves; without one the run leaves nothing on disk.
      quiet: True for one line a report, False for a live display; by default it depends on the terminal.
      devices: the devices of the mesh; all by default.

    Raises:
      ConfigError: for a config that cannot be run here, before anything is compiled.
      Interrupted: after SIGTERM or SIGINT, when the state has been saved.
      Diverged: when the loss is not finite (with float16, when the scale cannot fall any more).
    """
    watch = Stopwatch()
    workdir = None if workdir is None else Path(workdir)
    with StopSignals() as stop, contextlib.ExitStack() as stack:
        try:
            plan = stop.run(lambda: make_plan(experiment, devices))
        except Stop as signal:
            raise Interrupted(signal.signum, "stopped before the run began; there was nothing to save.") from None
        return Session(plan, workdir, stop, watch, stack, quiet).run()


class Session:
    """One run, from its plan to its end."""

    def __init__(
        self,
        plan: Plan,
        workdir: Path | None,
        stop: StopSignals,
        watch: Stopwatch,
        stack: contextlib.ExitStack,
        quiet: bool | None,
    ) -> None:
        self.plan, self.parts, self.stop, self.watch, self.stack = plan, plan.parts, stop, watch, stack
        self.experiment, self.workdir = plan.experiment, workdir
        self.first = jax.process_index() == 0
        self.console = Console(quiet=not self.first)
        self.quiet = quiet
        self.state: TrainState | None = None
        self.step, self.saved_step, self.evaluated_step = 0, -1, -1
        self.metrics: dict[str, float] = {}
        self.window: list[Any] = []
        self.window_start = (0, 0.0)
        self.checkpoints: Checkpoints | None = None

    def run(self) -> Run:
        try:
            notes = self.prepare()
            self.open_reports(notes)
            if self.step < self.plan.total_steps or self.evaluated_step < self.step:
                self.compile()
                self.loop()
        except Stop as signal:
            saved = self.save_for_resume()
            self.finish("interrupted")
            raise Interrupted(signal.signum, f"{signal}: stopped at step {self.step}; {saved}") from None
        return self.finish("finished")

    def prepare(self) -> list[str]:
        """Initial or restored state; returns what is to be told about it."""
        notes: list[str] = []
        if self.workdir is not None:
            claim_workdir(self.workdir, self.experiment, identity)
            if self.first:
                write_atomically(self.workdir / "data.json", spec_to_json(self.parts.data_spec))
            task = self.parts.task
            self.checkpoints = Checkpoints(
                self.workdir, self.experiment.checkpoint, best_metric=task.best_metric, best_mode=task.best_mode
            )
            self.stack.callback(self.checkpoints.close)
            with self.watch("checkpoint"):
                restored = self.stop.run(self.restore)
            if restored is not None:
                self.state, self.step, self.evaluated_step = restored.state, restored.step, restored.evaluated_step
                self.saved_step = self.step
                notes = [*restored.damaged, f"resumed from the checkpoint at step {self.step}"]
        if self.state is None:
            with self.watch("compile"):
                self.state = self.stop.run(lambda: make_initial_state(self.plan))
        return notes

    def restore(self) -> Any:
        assert self.checkpoints is not None
        return self.checkpoints.restore(self.parts.state_spec.abstract())

    def open_reports(self, notes: list[str]) -> None:
        experiment, folder = self.experiment, self.workdir if self.first else None
        self.history = History(folder, resume_step=self.step, tensorboard=experiment.report.tensorboard)
        self.stack.callback(self.history.close)
        self.progress = Progress(
            self.plan.total_steps,
            self.step,
            examples_per_step=experiment.batch_size,
            steps_per_epoch=self.plan.steps_per_epoch,
            console=self.console,
            quiet=self.quiet,
        )
        self.stack.enter_context(self.progress)
        for note in notes:
            self.progress.note(note)

    def compile(self) -> None:
        """Compiles the train step and the evaluation, once, for these shapes; a signal is noticed meanwhile."""
        self.progress.status("compiling")
        with self.watch("compile"):
            self.train_step, self.eval_step = self.stop.run(lambda: compile_steps(self.plan))

    def loop(self) -> None:
        """All steps that are left, with the evaluations and checkpoints that are due between them."""
        self.start_loop()
        while self.step < self.plan.total_steps:
            self.advance()

    def start_loop(self) -> None:
        experiment, plan = self.experiment, self.plan
        self.eval_period = experiment.evaluation.period_steps(plan.steps_per_epoch)
        self.save_period = experiment.checkpoint.period_steps(plan.steps_per_epoch)
        if self.step > self.evaluated_step and self.due(self.eval_period):
            self.evaluate()  # The run was stopped after this step, before or while it was evaluated.
        self.loader = TrainLoader(
            plan.splits.train,
            batch_size=experiment.batch_size,
            seed=experiment.seed,
            sharding=batch_sharding(self.parts.layout.mesh),
            start_step=self.step,
            num_steps=plan.total_steps - self.step,
        )
        self.stack.enter_context(self.loader)
        self.progress.status("training")
        self.window_start = (self.step, self.train_seconds())

    def advance(self) -> None:
        """One step, and the evaluation and the checkpoint when they are due after it."""
        self.stop.poll()
        self.profile()
        with self.watch("data"):
            batch = next(self.loader)
        with self.watch("train"):
            self.one_step(batch)
        evaluate_now, save_now = self.due(self.eval_period), self.due(self.save_period)
        if evaluate_now or save_now:
            self.report()
            if evaluate_now:
                self.evaluate()
            if save_now:
                self.save()
            self.progress.status("training")

    def due(self, period: float) -> bool:
        """Whether the step just completed crosses a multiple of the period."""
        return self.step > 0 and (self.step == self.plan.total_steps or self.step // period > (self.step - 1) // period)

    def one_step(self, batch: Any) -> None:
        """Dispatches a step, then waits for and reports on the one before it: the devices never wait for the host."""
        assert self.state is not None
        self.state, metrics = self.train_step(self.state, batch)
        if self.window:
            jax.block_until_ready(self.window[-1])
        if len(self.window) >= self.experiment.report.every_steps:
            self.report()
        self.window.append(metrics)
        self.step += 1
        self.progress.advance(self.step)

    def train_seconds(self) -> float:
        seconds = self.watch.seconds()
        return seconds.get("train", 0.0) + seconds.get("data", 0.0)

    def report(self) -> None:
        """Fetches and reports the metrics of the steps since the last report."""
        if not self.window:
            return
        fetched, self.window = jax.device_get(self.window), []
        totals = {name: float(np.sum([one[name] for one in fetched], dtype=np.float64)) for name in fetched[0]}
        sums = {name.removeprefix("sums/"): total for name, total in totals.items() if name.startswith("sums/")}
        row = {f"train/{name}": value for name, value in self.parts.task.metrics(sums, self.parts.data_spec).items()}
        row |= {f"train/{name}": float(value) for name, value in fetched[-1].items() if not name.startswith("sums/")}
        start, since = self.window_start
        step = start + len(fetched)
        now = self.train_seconds()
        rate = len(fetched) * self.experiment.batch_size / max(now - since, 1e-9)
        self.window_start = (step, now)
        self.check_finite(row, fetched, step)
        self.write(step, row | {"examples_per_sec": rate})

    def check_finite(self, row: dict[str, float], fetched: list[Any], step: int) -> None:
        """Raises Diverged if a loss is not finite; with a loss scale, only once it cannot fall any further."""
        bad = sum(not math.isfinite(one["sums/loss"]) for one in fetched)
        scale = row.get("train/loss_scale")
        if bad and (scale is None or (bad == len(fetched) and scale <= self.experiment.precision.min_scale)):
            self.write(step, row)
            raise Diverged(
                f"the training loss is not finite at step {step} (learning rate {row['train/learning_rate']:.3g}). "
                "A lower --optimizer.learning-rate, a longer warm-up or --step.clip-norm 1 usually help."
                + (f" The newest checkpoint is of step {self.saved_step}." if self.saved_step >= 0 else "")
            )

    def write(self, step: int, row: dict[str, Any]) -> None:
        row = {"step": step, "epoch": step / self.plan.steps_per_epoch} | row
        self.history.write(row)
        self.progress.report(row)

    def evaluate(self) -> None:
        assert self.state is not None
        self.progress.status("evaluating")
        mesh = self.parts.layout.mesh
        with (
            self.watch("eval"),
            eval_batches(
                self.plan.splits.test, batch_size=self.plan.eval_batch_size, sharding=batch_sharding(mesh)
            ) as batches,
        ):
            self.metrics = evaluate(
                self.parts, self.eval_step, self.state.eval_params, self.state.model_state, batches, poll=self.stop.poll
            )
        self.evaluated_step = self.step
        self.write(self.step, {f"eval/{name}": value for name, value in self.metrics.items()})

    def save(self) -> None:
        """Starts writing a checkpoint of this step, unless there is one."""
        if self.checkpoints is None or self.saved_step == self.step:
            return
        assert self.state is not None
        self.progress.status("saving")
        metrics = self.metrics if self.evaluated_step == self.step else None
        with self.watch("checkpoint"):
            self.checkpoints.save(self.state, self.step, evaluated_step=self.evaluated_step, metrics=metrics)
        self.saved_step = self.step

    def save_for_resume(self) -> str:
        """Saves the step that a signal stopped at, whatever the run was doing; says what was done."""
        if self.state is None:
            return "nothing was trained yet, so there was nothing to save."
        if self.checkpoints is None:
            return "nothing was saved: the run has no --workdir."
        self.report()  # What was measured up to here would not be measured again.
        self.save()
        self.checkpoints.wait()
        return f"saved in {self.workdir}. The same command goes on from there."

    def profile(self) -> None:
        """Starts or stops the profiler when its steps have come."""
        config = self.experiment.report
        if config.profile_start_step is None or self.workdir is None:
            return
        if self.step == config.profile_start_step:
            jax.block_until_ready(self.state)
            jax.profiler.start_trace(self.workdir / "profile")
        elif self.step == config.profile_start_step + config.profile_steps:
            jax.block_until_ready(self.state)
            jax.profiler.stop_trace()
            self.progress.note(f"profile written to {self.workdir / 'profile'}")

    def finish(self, status: Any) -> Run:
        """Writes what is left, the curves and the summary; returns the run."""
        assert status == "interrupted" or self.state is not None
        if self.checkpoints is not None and status == "finished":
            with self.watch("checkpoint"):
                self.checkpoints.wait()
        if not hasattr(self, "history"):
            self.history = History(None)
        folder = self.workdir if self.first else None
        columns = self.history.columns()
        if folder is not None:
            plot_history(columns, folder / "curves.png")
        summary = write_summary(
            folder / "summary.json" if folder else None,
            status=status,
            steps=self.step,
            total_steps=self.plan.total_steps,
            metrics=self.metrics or last_evaluation(columns),
            seconds=self.watch.seconds(),
            mesh={str(axis.value): self.parts.layout.mesh.shape[axis.value] for axis in Axis},
        )
        if hasattr(self, "progress"):
            self.progress.stop()
        print_summary(summary, self.console)
        return Run(self.state, columns, summary, self.plan, self.workdir)  # pyright: ignore[reportArgumentType]


def last_evaluation(columns: dict[str, list[Any]]) -> dict[str, float]:
    """The last evaluation in a history's columns; a finished run that is started again has no other."""
    last = {}
    for name, values in columns.items():
        known = [value for value in values if value is not None and not (isinstance(value, float) and math.isnan(value))]
        if name.startswith("eval/") and known:
            last[name.removeprefix("eval/")] = known[-1]
    return last


def make_initial_state(plan: Plan) -> TrainState:
    """The fresh train state of a plan, allocated already sharded; equal on every mesh."""
    parts, experiment = plan.parts, plan.experiment

    def make() -> TrainState:
        return init_state(
            jax.random.key(experiment.seed),
            parts.network,
            parts.optimizer,
            parts.exchange,
            parts.precision,
            num_replicas=parts.layout.mesh.shape[Axis.REPLICA],
            use_ema=experiment.step.ema_decay is not None,
        )

    # It runs once: on a CPU, compiling it with all optimizations takes many times longer than running it without.
    options = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(make, out_shardings=parts.state_spec.shardings, compiler_options=options)()


def compile_steps(plan: Plan) -> tuple[Any, Any]:
    """The compiled train step and evaluation step of a plan; later calls with other shapes are errors."""
    state = plan.parts.state_spec.abstract()
    return compile_train_step(plan), make_eval_step(plan.parts).lower(
        state.eval_params, state.model_state, _batch_shapes(plan.splits.test.eval_batch, plan.eval_batch_size)
    ).compile()


def compile_train_step(plan: Plan) -> Any:
    """The compiled train step of a plan."""
    batch = _batch_shapes(plan.splits.train.batch, plan.experiment.batch_size)
    return make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch).compile()


def _batch_shapes(read: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    rows = read(np.zeros(1, np.int64))
    return {name: jax.ShapeDtypeStruct((batch_size, *value.shape[1:]), value.dtype) for name, value in rows.items()}
