"""The training loop, in reading order: set up, restore, compile, train, evaluate, save, report."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from jaxdl.core.config import Periodic
from jaxdl.core.errors import as_typed
from jaxdl.data import TrainLoader
from jaxdl.data.phases import Segment
from jaxdl.parallel.cluster import heartbeat, wait_for_all
from jaxdl.report import Report, Reporter, Status, StepCounter
from jaxdl.training.checkpoint import Removed, Restored
from jaxdl.training.evaluation import max_in_flight
from jaxdl.training.run.compile import StepFunctions, programs
from jaxdl.training.run.evaluation import Evaluation
from jaxdl.training.run.exporting import models_of
from jaxdl.training.run.hooks import Callbacks, Hooks
from jaxdl.training.run.plan.build import make_exchange_state
from jaxdl.training.run.plan.length import check_not_past, checked_report, early_end_note
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.plateau import Plateau
from jaxdl.training.run.result import Interrupted, Run
from jaxdl.training.run.rollback import BadStep, Rollbacks, skip
from jaxdl.training.run.saver import Saver, report_start_events
from jaxdl.training.run.session import Session
from jaxdl.training.run.signals import Stop
from jaxdl.training.state import TrainState
from jaxdl.training.step import Batch


class Trainer:
    """One run, from its plan to its end. What it opens is closed by the session."""

    def __init__(self, plan: Plan, session: Session, callbacks: Callbacks, *, end: int) -> None:
        """The run ends at step `end`, after `plan.total_steps` at most; the hooks are the `callbacks`."""
        self.plan, self.parts, self.experiment = plan, plan.parts, plan.experiment
        self.session = session
        self.workdir = session.workdir.path
        self.stop = session.stop
        self.watch, self.stack, self.start = session.watch, session.stack, session.start
        self.programs = programs()  # Compiles the steps of segments.
        self.run_ahead = max_in_flight() > 1  # A step may be started before the one before it has ended.

        # What changes while the run trains.
        self.end = end
        self.end_asked_by = "--max-steps"
        self.over = False  # Whether the hook that ended the run says that there is nothing to resume.
        self.counter = StepCounter()
        self.segment = plan.timeline.segment(0)
        self.state: TrainState | None = None
        self.steps: StepFunctions | None = None  # The compiled steps of the segment.
        self.loader: TrainLoader | None = None
        self.metrics: dict[str, float] | None = None  # Of the last evaluation.
        self.evaluated_step = -1  # Its step; -1 before the first one.
        self.num_taken = 1  # Steps of the last call; a merge that overlaps local steps is one call.
        self.first_batch = True  # Whether the loader's next batch is its first.

        folder, subject = self.workdir if jax.process_index() == 0 else None, plan.subject(self.counter)
        self.reporter = Reporter(self.experiment.report, folder, self.watch, self.start, subject)
        self.stack.callback(self.reporter.close)
        self.plateau = Plateau.of(self.experiment.evaluation, self.parts.task, plan.timeline, self._stop_here)
        self.evaluation = Evaluation(plan, self.reporter, self.watch, self.stop.poll)
        plan.open(self.reporter.warn, self.stack)
        self.start.plan(plan, end)
        self.rollbacks = Rollbacks.of(plan, self.workdir, self.reporter)
        self.saver = Saver(plan, self.workdir, self.reporter) if self.workdir is not None else None
        if self.saver is not None:
            self.stack.callback(self.saver.close)
            self.rollbacks.load(self.saver.checkpoints)
        self.hooks = Hooks(callbacks, self.watch, self.reporter, self.saver, self._stop_here)

    @property
    def step(self) -> int:
        """Steps completed; the one counter of the run."""
        return self.counter.step

    def run(self) -> Run:
        """Runs to the end, or to a signal; what a signal or a hook ends early is saved."""
        try:
            return self._run_to_end()
        except Stop as signal:
            if self.state is None:
                raise Interrupted(signal.signum, f"{signal}: stopped before the run began; nothing changed.") from None
            saved, lost = self._save_for_resume()
            run, signum = self._finish("interrupted"), None if lost else signal.signum
            self.hooks.saved()
            raise Interrupted(signum, f"{signal}: stopped at step {self.step}; {saved}", run) from None
        except Exception as error:
            if error is self.hooks.raised:
                error.add_note(as_typed(f"jaxdl: a hook raised this at step {self.step}; {self._save_for_resume()[0]}"))
                self._finish("interrupted")
            raise

    def _run_to_end(self) -> Run:
        """The run, if nothing ends it early."""
        restored = self._restore_or_init()
        changed = self.step < self.end or self.evaluated_step < self.step
        self._report_start(restored, changed)
        if not changed:
            return self._finish_at_end(changed=False)
        self._enter(self.plan.timeline.segment(max(0, self.step - 1)))
        heartbeat.beat(self.step)  # From here on the watchdog expects progress, of the first batch too.
        self._evaluate_late()
        self._read_data()
        while self.step < self.end:
            self._advance()
        self.reporter.show_status("saving")
        with self.watch("checkpoint"):
            lost = self.saver.lost(self.step) if self.saver and self._saves_this_step else None
        if lost:
            raise Interrupted(None, f"error: {lost}", self._finish("interrupted"))
        self.hooks.saved()
        return self._finish_at_end()

    def _restore_or_init(self) -> Restored | None:
        """Restores the newest checkpoint, or makes the initial state; a signal is noticed meanwhile."""
        restored = None
        if self.saver is not None:
            with self.watch("checkpoint"), self.start.doing("looking for a checkpoint"):
                restored = self.stop.run(functools.partial(self.saver.restore, from_start=self.rollbacks.from_start))
            if self.saver.started_over:
                self.rollbacks.clear()
        if restored is not None:
            self._resume_from(restored)
        else:
            with self.watch("compile"), self.start.doing("making the initial parameters"):
                self.state = self.stop.run(lambda: self.programs.initial_state(self.plan))
        check_not_past(self.step, self.end, self.plan.timeline)
        return restored

    def _resume_from(self, restored: Restored) -> None:
        assert self.saver is not None
        self.state, self.counter.step = restored.state, restored.step
        self.evaluated_step = self.saver.evaluated_step(restored)
        self.plateau.begin(self.saver.evaluations(self.evaluated_step))

    def _report_start(self, restored: Restored | None, changed: bool) -> None:
        """Opens the reports; how the run got here, also as events of the history unless nothing will be `changed`."""
        self.start.workdir(self.workdir, self.step if restored else None)
        self.start.close()
        self.reporter.open(self.evaluated_step)
        for reason in self.plan.reasons:
            self.reporter.note(reason)
        report_start_events(self.reporter, self.saver, self.rollbacks, restored, recorded=changed)

    def _enter(self, segment: Segment) -> None:
        """Switches to the steps of a segment (of one batch and image size); starts to compile the next one's."""
        self.segment = segment
        if not self.programs.ready(self.plan, segment):
            self.reporter.status("compiling")
        with self.watch("compile"):
            self.steps = self.stop.run(lambda: self.programs.of(self.plan, segment, self.end))
        self.reporter.note(*self.steps.notes)

    def _evaluate_late(self) -> None:
        """Makes the evaluation of this step if it was due and did not end; it may change the state, which is saved."""
        if self.step > self.evaluated_step and self._due(self.experiment.evaluation):
            self._evaluate()
            if self.saver is not None and (self.evaluation.changes_state or self.plateau.saves(self.step)):
                with self.watch("checkpoint"):
                    self.saver.save_again(self.state, self.step, self.metrics)

    def _read_data(self) -> None:
        """Starts to read the batches of the next steps, up to the end of the segment."""
        if self.step < self.end and self.plan.timeline.segment(self.step) != self.segment:
            self._enter(self.plan.timeline.segment(self.step))
        left = min(self.segment.first + self.segment.num_steps, self.end) - self.step
        self.loader = self.plan.batches(self.segment, self.plan.timeline.position(self.step), left, self.state)
        self.stack.callback(self.loader.close)
        assert self.steps is not None
        self.steps, self.first_batch = self.steps.restart(), True  # Without a memory of earlier batches.
        self.reporter.status("training")

    def _advance(self) -> None:
        """One step, with the evaluation and the checkpoint that are due after it; or a rollback."""
        self.session.check_lease()
        assert self.loader is not None
        if self.step == self.segment.first + self.segment.num_steps:
            if self._roll_back_if_bad(self.reporter.flush()):
                return
            self.loader.close()
            self._read_data()
        batches = self._next_batches()
        if not self.run_ahead:
            with self.watch("train"):
                self.reporter.wait()  # For the steps dispatched so far.
        self.stop.poll(self.step)
        self.reporter.profile(self.state)
        with self.watch("train"):
            if not self._take_steps(batches):
                return
        if self._due(self.experiment.evaluation) or self._due(self.experiment.checkpoint):
            with self.watch("train"):
                report = self.reporter.flush()
            if self._roll_back_if_bad(report):
                return
            if self._due(self.experiment.evaluation):
                self._evaluate()
            if self._due(self.experiment.checkpoint) or self.plateau.saves(self.step):  # Now: a hook may end the run.
                self._save()
            self.reporter.status("training")

    def _next_batches(self) -> Sequence[Batch]:
        assert self.loader is not None
        assert self.steps is not None
        with self.watch("data"):
            if self.first_batch:
                self.reporter.show_status("reading data")
            batches = [next(self.loader) for _ in range(self.steps.train.num_batches(self.step))]
            if self.first_batch:
                wait_for_all()  # One host's first batch may take minutes, and Gloo gives up after 30 s.
                self.reporter.show_status("training")
                self.first_batch = False
            return batches

    def _take_steps(self, batches: Sequence[Batch]) -> bool:
        """Trains on the batches, or skips them, and calls the hooks; False if the run was rolled back instead."""
        assert self.state is not None
        assert self.steps is not None
        self.num_taken, metrics = len(batches), [{} for _ in batches]
        self.state = self.plan.swap_rows(self.state, len(batches))
        skipped = self.rollbacks.skips(self.step + 1)
        if skipped:
            if self._roll_back_if_bad(self.reporter.flush()):
                return False
            self.state = skip(self.state)
        else:
            self.state, metrics = self.steps.train(self.state, batches, self.step)
        for values in metrics:
            self.counter.step += 1
            if skipped:
                self.reporter.skip_step()
            elif self._roll_back_if_bad(self.reporter.add(values)):
                return False
        for step, values in enumerate(metrics, self.step - len(metrics) + 1):
            self.hooks.stepped(step, self.state, values, skipped=skipped)
        return True

    def _stop_here(self, by: str = "a hook", over: bool = False) -> None:
        self.end, self.end_asked_by, self.over = self.step, by, over

    def _roll_back_if_bad(self, report: Report | None) -> bool:
        """Rolls the run back if the steps of a report end a streak of bad ones that is too long: whether it has."""
        if streak := self.rollbacks.judge(checked_report(self.plan, report, kept=self.saver is not None)):
            self._roll_back(streak)
        return bool(streak)

    def _roll_back(self, streak: Sequence[BadStep]) -> None:
        """Returns to a checkpoint from before a streak of bad steps, or to the start; their batches are skipped now."""
        assert self.loader is not None
        self.reporter.status("rolling back")
        checkpoints = self.saver and self.saver.checkpoints
        with self.watch("checkpoint"):
            jax.block_until_ready(self.state)  # A step may still be under way: see `max_in_flight`.
            rollback = self.rollbacks.roll_back(streak, checkpoints)
            assert checkpoints is not None
            self.state, self.counter.step, self.evaluated_step = None, 0, -1  # The restored state needs its memory.
            self.plateau.begin(())
            fresh = functools.partial(make_exchange_state, self.plan)
            restored = checkpoints.restore(self.parts.state_spec.abstract(), fresh_exchange_state=fresh)
        if restored is not None:
            self._resume_from(restored)
        elif rollback.to_step == 0:
            with self.watch("compile"):
                self.state = self.programs.initial_state(self.plan)
        else:
            raise Removed(checkpoints.folder, rollback.to_step)
        self.loader.close()
        self.reporter.roll_back(self.evaluated_step)
        self.reporter.event("rollback", rollback.text, rollback.to_step)
        for text in restored.damaged if restored else ():
            self.reporter.event("damaged", text)
        self._read_data()

    def _due(self, period: Periodic) -> bool:
        """Whether the steps just completed cross a multiple of the period, or are the last."""
        return self.step >= self.end or self.plan.timeline.due(self.step, period, self.num_taken)

    def _evaluate(self) -> None:
        """Evaluates the state; with `norm_batches`, after batch norm's statistics have been estimated again."""
        assert self.state is not None
        assert self.steps is not None
        self.reporter.status("evaluating")
        self.state = self.evaluation.prepare(self.state, self.step, self.segment, self.steps)
        self.metrics = self.evaluation.metrics(self.state, self.step, self.segment, self.steps)
        self.evaluated_step = self.step
        self.reporter.report_evaluation(self.metrics)
        if self.step == self.plan.total_steps and not self.evaluation.is_empty:
            self.rollbacks.check_end(self.metrics["loss"])
        self.plateau.add(self.step, self.metrics.get(self.parts.task.best_metric))
        self.hooks.evaluated(self.step, self.state, self.metrics)

    @property
    def _saves_this_step(self) -> bool:
        """No checkpoint is written in a streak of bad steps, except at the end of the run."""
        return not self.rollbacks.in_streak or self.step == self.plan.total_steps

    def _save(self) -> None:
        """Starts writing a checkpoint of this step, unless there is one, or the last steps were bad."""
        if self.saver is None:
            return
        if not self._saves_this_step:
            self.reporter.event("checkpoint", f"no checkpoint of step {self.step}: the last steps are bad")
            return
        assert self.state is not None
        self.session.check_lease()
        if self.steps is not None and self.evaluated_step < self.step:
            self.state = self.evaluation.agree(self.state, self.steps)  # Replicas may differ between merges.
        with self.watch("checkpoint"):
            self.saver.save(self.state, self.step, self.evaluated_step, self.metrics)

    def _save_for_resume(self) -> tuple[str, bool]:
        """Saves the step that a signal stopped at, whatever the run was doing: `(what was done, whether it failed)`."""
        if self.saver is None:
            return "nothing was saved: the run has no --workdir.", False
        if self.hooks.raised and jax.process_count() > 1:  # The others would wait for this one to save.
            return f"of several processes none saves its state then; {self.saver.newest()}.", False
        # What was measured up to here would not be measured again. A streak will be met again when the run resumes.
        self.rollbacks.judge(self.reporter.flush())
        if not self.rollbacks.in_streak:
            self._save()
        return self.saver.after_signal(self.step, bad=self.rollbacks.in_streak)

    def _finish_at_end(self, *, changed: bool = True) -> Run:
        """`_finish` at the full length of the run, or at the earlier end that was asked for."""
        if early := self.step < self.plan.total_steps:
            kept = self.saver is not None and self._saves_this_step
            by, over = self.end_asked_by, self.over
            self.reporter.note(early_end_note(self.step, self.plan.timeline, by, kept=kept, over=over))
        return self._finish("stopped" if early and not self.plateau.is_over else "finished", changed=changed)

    def _finish(self, status: Status, *, changed: bool = True) -> Run:
        """Writes the curves and the summary (unless nothing has `changed`); returns the run."""
        models = models_of(self, ended=status == "finished" or (status == "stopped" and self.over), changed=changed)
        summary = self.reporter.finish(status, mesh=self.plan.mesh_sizes, changed=changed, models=models)
        return Run(self.state, self.reporter.history.columns(), summary, self.plan, self.workdir)
