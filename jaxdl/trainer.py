"""The training loop, in reading order: set up, restore, compile, train, evaluate, save, report."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from rich.console import Console

from jaxdl.checkpoint import Checkpoints, claim_workdir, read_choice, write_choice
from jaxdl.data import TrainLoader, eval_batches, spec_to_json
from jaxdl.evaluate import evaluate, max_in_flight
from jaxdl.experiment import Experiment, identity
from jaxdl.mesh import Axis, Device, batch_sharding
from jaxdl.plan import Plan, compile_steps, make_exchange_state, make_initial_state, make_plan
from jaxdl.report import Reporter, Stopwatch, last_evaluated_step, plot_history, replace_file
from jaxdl.signals import Stop, StopSignals
from jaxdl.state import TrainState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Run:
    """A run that has ended: its state, what it measured, and its summary (the content of summary.json)."""

    state: TrainState | None
    """The last state."""
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


def train(
    experiment: Experiment,
    workdir: str | Path | None = None,
    *,
    quiet: bool | None = None,
    devices: Sequence[Device] | None = None,
) -> Run:
    """Trains, and returns the run. With a `workdir`, everything is kept there, and the same call resumes.

    Args:
      experiment: what to train, from `jaxdl.load` or made in Python.
      workdir: the folder for checkpoints, metrics and curves; without one the run leaves nothing on disk.
      quiet: True for one line a report, False for a live display; by default that is for terminals only.
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
            chosen = None if workdir is None else read_choice(workdir)
            plan = stop.run(lambda: make_plan(experiment, devices, chosen=chosen))
        except Stop as signal:
            raise Interrupted(signal.signum, "stopped before the run began; there was nothing to save.") from None
        if jax.process_count() > 1:
            stop.share(every_polls=experiment.report.every_steps)
        console = Console(quiet=jax.process_index() > 0)
        return Session(plan, workdir, stop, watch, stack, console, quiet).run()


class Session:
    """One run, from its plan to its end. What it opens is closed by `stack`."""

    def __init__(
        self,
        plan: Plan,
        workdir: Path | None,
        stop: StopSignals,
        watch: Stopwatch,
        stack: contextlib.ExitStack,
        console: Console,
        quiet: bool | None = None,
    ) -> None:
        self.plan, self.parts, self.stop, self.watch, self.stack = plan, plan.parts, stop, watch, stack
        self.experiment, self.workdir = plan.experiment, workdir
        self.first = jax.process_index() == 0
        self.run_ahead = max_in_flight() > 1
        self.state: TrainState | None = None
        self.step, self.saved_step, self.evaluated_step = 0, -1, -1
        self.metrics: dict[str, float] | None = None
        self.checkpoints: Checkpoints | None = None
        self.reporter = Reporter(
            self.experiment.report,
            workdir if self.first else None,
            watch,
            console=console,
            quiet=quiet,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            batch_size=self.experiment.batch_size,
            task_metrics=lambda sums: self.parts.task.metrics(sums, self.parts.data_spec),
            lowest_scale=self.experiment.precision.lowest_scale,
        )
        stack.callback(self.reporter.close)

    def run(self) -> Run:
        """The whole run."""
        try:
            self.prepare()
            if self.step == self.plan.total_steps and self.evaluated_step == self.step:
                return self.finish("finished", anew=False)
            self.compile()
            self.start_loop()
            while self.step < self.plan.total_steps:
                self.advance()
        except Stop as signal:
            if self.state is None:
                raise Interrupted(signal.signum, f"{signal}: stopped before the run began; nothing changed.") from None
            saved = self.save_for_resume()
            self.finish("interrupted")
            raise Interrupted(signal.signum, f"{signal}: stopped at step {self.step}; {saved}") from None
        if self.checkpoints is not None:
            with self.watch("checkpoint"):
                self.checkpoints.wait()
        return self.finish("finished")

    def prepare(self) -> None:
        """Makes or restores the state, and opens the reports."""
        restored = None
        if self.workdir is not None:
            claim_workdir(self.workdir, self.plan.asked, identity)
            if self.first:
                replace_file(self.workdir / "data.json", spec_to_json(self.parts.data_spec).encode())
                if self.plan.asked != self.experiment and self.parts.layout.mesh.shape[Axis.REPLICA] > 1:
                    write_choice(self.workdir, self.experiment.exchange, self.plan.reasons)
            task = self.parts.task
            self.checkpoints = Checkpoints(
                self.workdir, self.experiment.checkpoint, best_metric=task.best_metric, best_mode=task.best_mode
            )
            self.stack.callback(self.checkpoints.close)
            with self.watch("checkpoint"):
                restored = self.stop.run(
                    functools.partial(
                        self.checkpoints.restore,
                        self.parts.state_spec.abstract(),
                        fresh_exchange_state=functools.partial(make_exchange_state, self.plan),
                    )
                )
        if restored is not None:
            self.state, self.step, self.evaluated_step = restored.state, restored.step, restored.evaluated_step
            self.saved_step = self.step
            if self.workdir is not None:  # An evaluation that was made up for came after its checkpoint.
                self.evaluated_step = max(self.evaluated_step, last_evaluated_step(self.workdir, self.step))
        else:
            with self.watch("compile"):
                self.state = self.stop.run(lambda: make_initial_state(self.plan))
        self.reporter.open(self.step, self.evaluated_step)
        for reason in self.plan.reasons:
            self.reporter.note(reason)
        if restored is not None:
            for note in (*restored.damaged, *restored.notes, f"resumed from the checkpoint at step {self.step}"):
                self.reporter.note(note)

    def compile(self) -> None:
        """Compiles the train step and the evaluation, once, for these shapes; a signal is noticed meanwhile."""
        self.reporter.status("compiling")
        with self.watch("compile"):
            self.train_step, self.eval_step = self.stop.run(lambda: compile_steps(self.plan))

    def start_loop(self) -> None:
        """Makes up for an evaluation that was stopped, and starts to read data."""
        experiment, plan = self.experiment, self.plan
        self.eval_period = experiment.evaluation.period_steps(plan.steps_per_epoch)
        self.save_period = experiment.checkpoint.period_steps(plan.steps_per_epoch)
        if self.step > self.evaluated_step and self.due(self.eval_period):
            self.evaluate()
        self.loader = TrainLoader(
            plan.splits.train,
            batch_size=experiment.batch_size,
            seed=experiment.seed,
            sharding=batch_sharding(self.parts.layout.mesh),
            start_step=self.step,
            num_steps=plan.total_steps - self.step,
        )
        self.stack.enter_context(self.loader)
        self.reporter.status("training")

    def advance(self) -> None:
        """One step, and the evaluation and the checkpoint when they are due after it."""
        with self.watch("data"):
            batch = next(self.loader)
        with self.watch("train"):
            if not self.run_ahead:
                self.reporter.wait()
        self.stop.poll()
        self.reporter.profile(self.step, self.state)
        with self.watch("train"):
            self.state, metrics = self.train_step(self.state, batch)
            self.step += 1
            self.reporter.add(self.step, metrics)
        evaluate_now, save_now = self.due(self.eval_period), self.due(self.save_period)
        if evaluate_now or save_now:
            with self.watch("train"):
                self.reporter.flush()
            if evaluate_now:
                self.evaluate()
            if save_now:
                self.save()
            self.reporter.status("training")

    def due(self, period: float) -> bool:
        """Whether the step just completed crosses a multiple of the period, or is the last."""
        return self.step > 0 and (self.step == self.plan.total_steps or self.step // period > (self.step - 1) // period)

    def evaluate(self) -> None:
        """Evaluates the state on all of the held-out data."""
        assert self.state is not None
        self.reporter.status("evaluating")
        sharding = batch_sharding(self.parts.layout.mesh)
        source, size = self.plan.splits.test, self.plan.eval_batch_size
        with self.watch("eval"), eval_batches(source, batch_size=size, sharding=sharding) as batches:
            self.metrics = evaluate(
                self.parts, self.eval_step, self.state.eval_params, self.state.model_state, batches, poll=self.stop.poll
            )
        self.evaluated_step = self.step
        self.reporter.evaluated(self.step, self.metrics)

    def save(self) -> None:
        """Starts writing a checkpoint of this step, unless there is one."""
        if self.checkpoints is None or self.saved_step == self.step:
            return
        assert self.state is not None
        self.reporter.status("saving")
        metrics = self.metrics if self.evaluated_step == self.step else None
        with self.watch("checkpoint"):
            self.checkpoints.save(self.state, self.step, evaluated_step=self.evaluated_step, metrics=metrics)
        self.saved_step = self.step

    def save_for_resume(self) -> str:
        """Saves the step that a signal stopped at, whatever the run was doing; says what was done."""
        if self.checkpoints is None:
            return "nothing was saved: the run has no --workdir."
        self.reporter.flush()  # What was measured up to here would not be measured again.
        self.save()
        self.checkpoints.wait()
        return f"saved in {self.workdir}. The same command goes on from there."

    def finish(self, status: Literal["finished", "interrupted"], *, anew: bool = True) -> Run:
        """Writes the curves and the summary (unless nothing was done `anew`); returns the run."""
        mesh = {axis.value: self.parts.layout.mesh.shape[axis.value] for axis in Axis}
        summary = self.reporter.finish(status, step=self.step, mesh=mesh, anew=anew)
        return Run(self.state, self.reporter.history.columns(), summary, self.plan, self.workdir)
