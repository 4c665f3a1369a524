"""The training loop, in reading order: set up, restore, compile, train, evaluate, save, report."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxdl.checkpoint import Restored
from jaxdl.cluster import Watchdog, heartbeat, wait_for_all
from jaxdl.config import Periodic
from jaxdl.data import TrainLoader, eval_batches
from jaxdl.evaluate import estimate_norms, evaluate, max_in_flight
from jaxdl.experiment import Experiment, as_experiment
from jaxdl.files import hang_file
from jaxdl.lease import Lease
from jaxdl.mesh import Axis, Device, batch_sharding
from jaxdl.phases import Segment
from jaxdl.report import Reporter, Start, Stopwatch
from jaxdl.run.build import Plan, make_initial_state, make_plan
from jaxdl.run.compile import CompiledSteps
from jaxdl.run.length import check_max_steps, check_not_past, early_end_note, end_step
from jaxdl.run.result import Interrupted, Run
from jaxdl.run.rollback import BadRow, Recovery, pass_over, restarted
from jaxdl.run.saver import Saver
from jaxdl.run.signals import Stop, StopSignals
from jaxdl.run.workdir import check_workdir, make_lease, read_choice, take_lease
from jaxdl.state import TrainState


def train(
    experiment: Experiment | str | Path,
    workdir: str | Path | None = None,
    *,
    quiet: bool | None = None,
    devices: Sequence[Device] | None = None,
    max_steps: int | None = None,
) -> Run:
    """Trains, and returns the run. With a `workdir`, everything is kept there, and the same call resumes.

    Args:
      experiment: what to train, from `jaxdl.load` or made in Python; or the config file.
      workdir: the folder for checkpoints, metrics and curves; without one the run leaves nothing on disk.
      quiet: True for one line a report, False for a live display; by default that is for terminals only.
      devices: the devices of the mesh; all by default.
      max_steps: stop after this many steps of the experiment, as a trial: schedules stay those of the whole run, the
        last step is evaluated and saved, and the same call without it resumes.

    Raises:
      ConfigError: for a config that cannot be run here, before anything is compiled.
      Interrupted: after SIGTERM or SIGINT, when the state has been saved; or when its end could not be saved.
      Diverged: when too many steps in a row are bad and there is no way back any more, see `GuardConfig`.
    """
    experiment = as_experiment(experiment)
    check_max_steps(max_steps)
    watch = Stopwatch(on_change=heartbeat.enter)
    workdir = check_workdir(workdir)
    start = Start(quiet=quiet)
    with StopSignals() as stop, contextlib.ExitStack() as stack:
        lease = make_lease(workdir) if workdir else None
        take = functools.partial(take_lease, lease) if lease else lambda: None
        stack.callback(lease.release if lease else lambda: None)  # After all that writes there is closed.
        stack.callback(start.close)
        try:
            chosen = functools.partial(read_choice, workdir)
            plan = stop.run(lambda: make_plan(experiment, devices, chosen=chosen, started=take, start=start))
        except Stop as signal:
            raise Interrupted(signal.signum, "stopped before the run began; there was nothing to save.") from None
        if jax.process_count() > 1:
            stop.share(every_polls=experiment.report.every_steps)
        log = functools.partial(open, workdir / hang_file(jax.process_index()), "a") if workdir else None
        stack.enter_context(Watchdog(experiment.cluster.hang_timeout_sec, log))
        end = end_step(plan.timeline, max_steps)
        return Session(plan, workdir, stop, watch, stack, start, end=end, lease=lease).run()


def _tell_of_another(text: str) -> None:
    """Prints what only this process knows: the others' reporters are silent, but each has its own disk and files."""
    print(f"process {jax.process_index()}: {text}", file=sys.stderr, flush=True)


class Session:
    """One run, from its plan to its end. What it opens is closed by `stack`."""

    def __init__(
        self,
        plan: Plan,
        workdir: Path | None,
        stop: StopSignals,
        watch: Stopwatch,
        stack: contextlib.ExitStack,
        start: Start,
        *,
        end: int | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.check_lease = lease.check if lease else lambda: None
        self.end = plan.total_steps if end is None else end
        self.plan, self.parts, self.stop, self.watch, self.stack = plan, plan.parts, stop, watch, stack
        self.start = start
        self.experiment, self.workdir = plan.experiment, workdir
        self.first = jax.process_index() == 0
        self.run_ahead = max_in_flight() > 1
        self.state: TrainState | None = None
        self.step, self.evaluated_step = 0, -1
        self.metrics: dict[str, float] | None = None
        self.saver: Saver | None = None
        lowest_scale = self.experiment.precision.lowest_scale
        self.recovery = Recovery(self.experiment.guard, workdir, lowest_scale, lambda text: self.reporter.note(text))
        self.reporter = Reporter(
            self.experiment.report,
            workdir if self.first else None,
            watch,
            console=start.console,
            quiet=start.quiet,
            total_steps=plan.total_steps,
            epoch_at=plan.timeline.epoch,
            batch_size_at=lambda step: plan.timeline.segment(step - 1).batch_size,
            task=self.parts.task,
            spec=self.parts.data_spec,
            observe=self.recovery.observe,
            input_activity=plan.splits.train.activity,
        )
        stack.callback(self.reporter.close)
        for source in (plan.splits.train, plan.splits.test):
            source.on_warning(self.reporter.note if self.first else _tell_of_another)
            stack.callback(source.close)

    def run(self) -> Run:
        """The whole run."""
        try:
            self.prepare()
            anew = self.step < self.end or self.evaluated_step < self.step
            self.tell_of_the_start(anew)
            if not anew:
                return self.finish_at_end(anew=False)
            self.compile()
            self.start_loop()
            while self.step < self.end:
                try:
                    self.advance()
                except BadRow as row:
                    self.go_back(row)
        except Stop as signal:
            if self.state is None:
                raise Interrupted(signal.signum, f"{signal}: stopped before the run began; nothing changed.") from None
            saved, lost = self.save_for_resume()
            self.finish("interrupted")
            signum = None if lost else signal.signum
            raise Interrupted(signum, f"{signal}: stopped at step {self.step}; {saved}") from None
        self.reporter.doing("saving")
        with self.watch("checkpoint"):
            lost = self.saver.lost(self.step) if self.saver and not self.is_not_saved else None
        if lost:
            self.finish("interrupted")
            raise Interrupted(None, f"error: {lost}")
        return self.finish_at_end()

    @property
    def is_not_saved(self) -> bool:
        """Whether this step ends a streak of bad ones, of which no checkpoint is written before the end of the run."""
        return self.recovery.in_row and self.step < self.plan.total_steps

    def finish_at_end(self, *, anew: bool = True) -> Run:
        """`finish` at the full length of the run, or at the earlier end that `max_steps` asks for."""
        if self.step == self.plan.total_steps:
            return self.finish("finished", anew=anew)
        kept = self.saver is not None and not self.is_not_saved
        self.reporter.note(early_end_note(self.step, self.plan.timeline, kept=kept))
        return self.finish("stopped", anew=anew)

    def prepare(self) -> None:
        """Makes or restores the state, and opens the reports."""
        self.start.plan(self.plan, self.end)
        if self.workdir is not None:
            self.saver = Saver(self.plan, self.workdir, self.reporter)
            self.stack.callback(lambda: self.saver and self.saver.checkpoints.close())
            self.recovery.load(self.saver.checkpoints)
        self.begin(self.stop.run)
        check_not_past(self.step, self.end, self.plan.timeline)
        self.start.workdir(self.workdir, self.step if self.restored else None)
        self.start.close()
        self.reporter.open(self.step, self.evaluated_step)
        if self.saver is not None:
            self.saver.keep_length(self.step)
        for reason in self.plan.reasons:
            self.reporter.note(reason)

    def begin(self, call: Callable[[Callable[[], Any]], Any]) -> None:
        """Goes on from the newest checkpoint, or from the start if there is none. `call` calls what takes long."""
        self.state, self.step, self.evaluated_step = None, 0, -1  # Its memory is needed for what comes.
        with self.watch("checkpoint"), self.start.doing("looking for a checkpoint" if self.saver else ""):
            restore = functools.partial(self.saver.restore, from_start=self.recovery.from_start) if self.saver else None
            self.restored: Restored | None = call(restore) if restore else None
        if self.saver and self.restored:
            self.state, self.step = self.restored.state, self.restored.step
            self.evaluated_step = self.saver.evaluated_step(self.restored)
        else:
            if self.saver and self.saver.started_over:
                self.recovery.forget()
            with self.watch("compile"), self.start.doing("making the initial parameters"):
                self.state = call(lambda: make_initial_state(self.plan))

    def tell_of_the_start(self, anew: bool) -> None:
        """How this process came to go on with the run; in the history too, if anything is done `anew`."""
        tell = functools.partial(self.reporter.event, self.step) if anew else self.reporter.note
        for rollback in self.recovery.rollbacks if anew else ():
            self.reporter.history.event(rollback.to_step, rollback.text)
        if again := restarted():
            tell(again)
        if self.saver and self.saver.started_over:
            tell(self.saver.started_over)
        if self.restored is not None:
            for text in (*self.restored.damaged, *self.restored.notes):
                tell(text)
            tell(f"resumed from the checkpoint at step {self.step}")

    def go_back(self, row: BadRow) -> None:
        """Goes back to a checkpoint from before a row of bad steps, or to the start, and goes on from there."""
        with self.watch("checkpoint"):
            jax.block_until_ready(self.state)  # A step may still be under way: see `max_in_flight`.
            rollback = self.recovery.go_back(row, self.saver.checkpoints if self.saver else None)
        self.begin(lambda function: function())
        self.loader.close()
        self.reporter.go_back(self.step, self.evaluated_step)
        for text in (rollback.text, *(self.restored.damaged if self.restored else ())):
            self.reporter.event(rollback.to_step, text)
        self.read_data()

    def compile(self) -> None:
        """Compiles the train step and the evaluation of the last step done; a signal is noticed meanwhile."""
        self.compiled = CompiledSteps(self.plan, self.end)
        self.enter(self.plan.timeline.segment(max(0, self.step - 1)))

    def enter(self, segment: Segment) -> None:
        """From here on the steps are those of the segment; what it needs has been compiled meanwhile, or is now."""
        self.segment = segment
        if not self.compiled.ready(segment):
            self.reporter.status("compiling")
        with self.watch("compile"):
            self.steps = self.stop.run(lambda: self.compiled.of(segment))

    def start_loop(self) -> None:
        """Makes up for an evaluation that was stopped, and starts to read data."""
        heartbeat.beat(self.step)  # From here on something must come on, the first batch too.
        if self.step > self.evaluated_step and self.due(self.experiment.evaluation):
            self.evaluate()
            if self.steps.norm is not None and self.saver is not None:
                with self.watch("checkpoint"):  # The state has changed.
                    self.saver.save_again(self.state, self.step, self.metrics)
        self.read_data()

    def read_data(self) -> None:
        """Starts to read the batches of the steps to come, up to the end of the segment."""
        if self.step < self.end and self.plan.timeline.segment(self.step) != self.segment:
            self.enter(self.plan.timeline.segment(self.step))
        left = min(self.segment.first + self.segment.num_steps, self.end) - self.step
        self.loader = self.batches(self.plan.timeline.position(self.step), left)
        self.stack.callback(self.loader.close)
        self.first_batch = True
        self.reporter.status("training")

    def batches(self, start: int, num_steps: int) -> TrainLoader:
        """The training batches of the segment from a position of the examples on."""
        return TrainLoader(
            self.plan.sources(self.segment)[0],
            batch_size=self.segment.batch_size,
            seed=self.experiment.seed,
            sharding=batch_sharding(self.parts.layout.mesh),
            start=start,
            num_steps=num_steps,
        )

    def advance(self) -> None:
        """One step, and the evaluation and the checkpoint when they are due after it."""
        self.check_lease()
        assert self.state is not None
        if self.step == self.segment.first + self.segment.num_steps:
            self.reporter.flush()
            self.loader.close()
            self.read_data()
        with self.watch("data"):
            if self.first_batch:
                self.reporter.doing("reading data")
            batch = next(self.loader)
            if self.first_batch:
                wait_for_all()  # One host's first batch may take minutes, and Gloo gives up after 30 s.
                self.reporter.doing("training")
            self.first_batch = False
        with self.watch("train"):
            if not self.run_ahead:
                self.reporter.wait()
        self.stop.poll(self.step)
        self.reporter.profile(self.step, self.state)
        with self.watch("train"):
            if self.recovery.passes_over(self.step + 1):
                self.reporter.pass_over(self.step + 1)
                self.state = pass_over(self.state)
                self.step += 1
            else:
                self.state, metrics = self.steps.train(self.state, batch)
                self.step += 1
                self.reporter.add(self.step, metrics)
        evaluate_now, save_now = self.due(self.experiment.evaluation), self.due(self.experiment.checkpoint)
        if evaluate_now or save_now:
            with self.watch("train"):
                self.reporter.flush()
            if evaluate_now:
                self.evaluate()
            if save_now:
                self.save()
            self.reporter.status("training")

    def due(self, period: Periodic) -> bool:
        """Whether the step just completed crosses a multiple of the period, or is the last."""
        return self.step == self.end or self.plan.timeline.due(self.step, period)

    def evaluate(self) -> None:
        """Evaluates the state on all of the held-out data."""
        assert self.state is not None
        self.reporter.status("evaluating")
        sharding = batch_sharding(self.parts.layout.mesh)
        source, size = self.plan.sources(self.segment)[1], self.plan.eval_batch_size
        if self.steps.norm is not None:
            with self.watch("norms"):
                self.estimate_norms()
        with self.watch("eval"), eval_batches(source, batch_size=size, sharding=sharding) as batches:
            params, model_state = self.state.eval_params, self.state.model_state
            step = self.steps.evaluate
            poll = self.reporter.counted(self.stop.poll, math.ceil(len(source) / size))
            self.metrics = evaluate(self.parts, step, params, model_state, batches, poll=poll)
        self.evaluated_step = self.step
        self.reporter.evaluated(self.step, self.metrics)
        if self.step == self.plan.total_steps:
            self.recovery.check_end(self.metrics["loss"])

    def estimate_norms(self) -> None:
        """Replaces batch norm's running statistics by those of the last batches, at the parameters to evaluate."""
        assert self.state is not None
        segment, num = self.segment, self.experiment.evaluation.norm_batches or 0
        start = max(0, self.plan.timeline.position(self.step) - num * segment.batch_size)
        with self.batches(start, num) as batches:
            self.state = estimate_norms(self.steps.norm, self.state, batches, poll=self.stop.poll)

    def save(self) -> None:
        """Starts writing a checkpoint of this step, unless there is one, or the last steps were bad."""
        if self.saver is None:
            return
        if self.is_not_saved:
            return self.reporter.event(self.step, f"no checkpoint of step {self.step}: the last steps are bad")
        assert self.state is not None
        self.check_lease()
        with self.watch("checkpoint"):
            self.saver.save(self.state, self.step, self.evaluated_step, self.metrics)

    def save_for_resume(self) -> tuple[str, bool]:
        """Saves the step that a signal stopped at, whatever the run was doing: `(what was done, whether it failed)`."""
        if self.saver is None:
            return "nothing was saved: the run has no --workdir.", False
        with contextlib.suppress(BadRow):  # It will be met again.
            self.reporter.flush()  # What was measured up to here would not be measured again.
        if self.recovery.in_row:
            return self.saver.not_saved_for_resume(self.step), False
        self.save()
        return self.saver.saved_for_resume(self.step)

    def finish(self, status: Literal["finished", "stopped", "interrupted"], *, anew: bool = True) -> Run:
        """Writes the curves and the summary (unless nothing was done `anew`); returns the run."""
        mesh = {axis.value: self.parts.layout.mesh.shape[axis.value] for axis in Axis}
        summary = self.reporter.finish(status, step=self.step, mesh=mesh, anew=anew)
        return Run(self.state, self.reporter.history.columns(), summary, self.plan, self.workdir)
