"""The checkpoints of a run: claims the workdir, restores at the start, saves, and reports what could not be saved."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from jaxdl.core.files import PLAN_FILE
from jaxdl.models.stacks import named_stacks
from jaxdl.parallel.cluster.agree import from_first_process
from jaxdl.parallel.mesh import Axis
from jaxdl.report import EventKind, Reporter, in_ipython
from jaxdl.training.checkpoint import Checkpoints, Earlier, KeptReference, Restored, Unreadable, Unusable
from jaxdl.training.experiment import LENGTH, identity
from jaxdl.training.run.plan.build import make_exchange_state
from jaxdl.training.run.plan.changed_settings import change_of_settings, parts_of, without
from jaxdl.training.run.plan.init_from import keep_initial, no_effect, read_initial
from jaxdl.training.run.plan.length import change_of_length
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.rollback import Rollbacks
from jaxdl.training.run.workdir.records import choice_file, keep_examples, keep_spec, stacks_file
from jaxdl.training.run.workdir.tokenizer import check_kept_codec, keep_codec
from jaxdl.training.run.workdir.workdir import claim_workdir, write_config
from jaxdl.training.state import TrainState


class Saver:
    """The checkpoints of a run in its workdir; what could not be written is reported as an event."""

    def __init__(self, plan: Plan, workdir: Path, reporter: Reporter) -> None:
        """Claims the workdir for the run. Raises ConfigError when it belongs to another, or cannot be written."""
        self._plan, self._workdir, self._reporter = plan, workdir, reporter
        files = {} if plan.kept is None else {PLAN_FILE: plan.kept.to_json().encode()}
        if plan.asked.exchange != plan.experiment.exchange and plan.parts.layout.mesh.shape[Axis.REPLICA] > 1:
            files |= choice_file(workdir, plan.experiment.exchange, plan.reasons)
        files |= stacks_file(named_stacks(plan.parts.network.axes))
        self._earlier = Earlier(workdir)
        self._earlier.check_kinds()
        # start_over belongs to one command, not to the run.
        self._config = plan.asked.replaced({"checkpoint.start_over": False})
        fields = plan.may_change
        later = (*LENGTH, *parts_of(fields))
        earlier = claim_workdir(workdir, self._config, lambda config: without(identity(config), fields), files, later)
        check_kept_codec(workdir, plan.asked.data)  # Before what it decides: this says why the examples differ.
        keep_examples(workdir, plan.splits.content(), plan.splits.former_contents())
        keep_spec(workdir, plan.parts.data_spec)
        keep_codec(workdir, plan.asked.data)
        self.started_over: str | None = None
        """Why the run starts over, in words, if that was asked for and necessary."""
        self.initial: str | None = None
        """What the run took from another run, in words, if it begins now or was asked to."""
        if reason := self._earlier.folder_lost():  # Before it is made again.
            self._start_over(reason)
        self.checkpoints = self._open()
        self._new_length: str | None = None
        self._new_settings: str | None = None
        self._rewrite = earlier is not None
        if earlier is not None:
            done = int(from_first_process(lambda: str(max(self.checkpoints.steps, default=0)).encode()))
            self._new_length = change_of_length(earlier, plan.asked, plan.timeline, done, plan.parts.data_spec)
            self._new_settings = change_of_settings(earlier, json.loads(self._config.to_json()), fields)

    def keep_changes(self) -> None:
        """Writes a length or settings that changed to the history, as events of the step that is resumed.

        Then to `config.json`.

        In this order: a run that is killed in between does the same again.
        """
        if self._new_length is not None:
            self._reporter.event("length", self._new_length)
        if self._new_settings is not None:
            self._reporter.event("settings", self._new_settings)
        if self._rewrite:
            write_config(self._workdir, self._config)

    def close(self) -> None:
        """Waits for what is being written."""
        self.checkpoints.close()

    def _open(self) -> Checkpoints:
        task = self._plan.parts.task
        config = self._plan.experiment.checkpoint
        tables, caches = self._plan.parts.tables, self._plan.caches
        layout = () if tables is None else tables.layout
        return Checkpoints(
            self._workdir,
            config,
            best_metric=task.best_metric,
            best_mode=task.resolved_mode,
            table_layout=layout if caches is None else caches.store.layout,
            form=KeptReference(self._workdir) if self._plan.parts.task.needs_reference else caches,
            filled_shapes=self._plan.parts.state_spec.filled_shapes,
        )

    def restore(self, *, from_start: bool = False) -> Restored | None:
        """Reads the newest checkpoint; None when the run begins at step 0.

        It does so in a new workdir, where no checkpoint had been written yet, where `from_start` says that the run was
        rolled back to its start, and where `--checkpoint.start-over` is given and nothing can be used. Otherwise a
        workdir whose checkpoints cannot be used raises Unusable or Unreadable.
        """
        try:
            restored = self.checkpoints.restore(
                self._plan.parts.state_spec.abstract(),
                fresh_exchange_state=functools.partial(make_exchange_state, self._plan),
            )
            reason = self._earlier.lost() if restored is None and not from_start else ""
        except (Unusable, Unreadable) as error:
            if isinstance(error, Unreadable) and not error.lasting:
                raise
            restored, reason = None, str(error)
        if reason:
            self.checkpoints.close()
            self._start_over(reason)
            self.checkpoints = self._open()
        initial = self._plan.initial
        if restored is not None:
            self._earlier.mark(restored.step)
            if initial is not None and initial != read_initial(self._workdir):
                self._reporter.note(no_effect(initial.workdir))
        elif initial is not None:
            keep_initial(self._workdir, initial)
            self.initial = initial.text
        return restored

    def _start_over(self, reason: str) -> None:
        """Moves aside what cannot be used, if that was asked for. Raises Unusable if not."""
        if not self._plan.experiment.checkpoint.start_over:
            raise self._earlier.refuse(reason) from None
        folder = self._earlier.archive()
        self.started_over = f"started over from step 0; the earlier files are in {folder} ({reason.splitlines()[0]})"

    def evaluated_step(self, restored: Restored) -> int:
        """The step of the last evaluation up to a checkpoint, also one that was made after it was written."""
        return max(restored.evaluated_step, self._earlier.evaluated_step(restored.step))

    def evaluations(self, step: int) -> list[tuple[int, float | None]]:
        """(step, the metric that checkpoints are compared by) of all evaluations up to a step, in their order."""
        return self._earlier.evaluations(f"eval/{self._plan.parts.task.best_metric}", step)

    def save(self, state: TrainState, step: int, evaluated_step: int, metrics: dict[str, float] | None) -> None:
        """Starts writing a checkpoint of this step, unless there is one; `metrics` are those of the evaluation."""
        self.checkpoints.wait()
        if step in self.checkpoints.steps:
            return
        self._reporter.status("saving")
        if steps := self.checkpoints.steps:
            self._earlier.mark(steps[-1])
        self.checkpoints.save(
            state, step, evaluated_step=evaluated_step, metrics=metrics if evaluated_step == step else None
        )
        if (tables := self.checkpoints.written_tables) is not None:
            self._reporter.note(f"checkpoint of step {step}: {tables.text}")
            sizes = {"table_bytes": tables.num_bytes, "table_bytes_whole": tables.whole_bytes}
            self._reporter.history.write(
                {"step": step} | {f"checkpoint/{name}": value for name, value in sizes.items()}
            )
        self._report_notes()

    def save_again(self, state: TrainState | None, step: int, metrics: dict[str, float] | None) -> None:
        """Replaces the checkpoint of this step: a late evaluation has changed the state."""
        assert state is not None
        self.checkpoints.quarantine_after(step - 1)
        self.save(state, step, step, metrics)

    def completed(self) -> list[tuple[int, Path]]:
        """The checkpoints that became complete since the last call: their steps and folders."""
        return self.checkpoints.completed()

    def lost(self, step: int) -> str | None:
        """Waits for what is being written; what is lost, in words, if there is no checkpoint of this step then."""
        self.checkpoints.wait()
        self._report_notes()
        if step in self.checkpoints.steps:
            self._earlier.mark(step)
            return None
        return (
            f"the state of step {step} could not be saved in {self._workdir} and is lost; {self.newest()}. Make room "
            "there (or make it writable); the same command resumes from the newest checkpoint."
        )

    def after_signal(self, step: int, *, bad: bool) -> tuple[str, bool]:
        """`(message for the user, whether saving failed)` after a signal stopped the run at this step.

        `bad` says that it was not to be saved, because it is in a streak of bad steps.
        """
        lost, saved = self.lost(step), f"saved in {self._workdir}"
        if bad:
            lost, saved = None, f"the last steps are bad and not saved; {self.newest()}"
        again = "Running the cell again" if in_ipython() else "The same command"
        return lost or f"{saved}. {again} resumes from there.", lost is not None

    def newest(self) -> str:
        """The newest checkpoint, in words."""
        steps = self.checkpoints.steps
        return f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint, only the start"

    def _report_notes(self) -> None:
        for text in self.checkpoints.take_notes():
            self._reporter.event("checkpoint", text)


def report_start_events(
    reporter: Reporter, saver: Saver | None, rollbacks: Rollbacks, restored: Restored | None, *, recorded: bool
) -> None:
    """Shows how this process got to the state that it starts from, `recorded` in the history or not."""
    if saver is not None:
        saver.keep_changes()
    if recorded:
        rollbacks.record(reporter.history)
    for kind, text in _start_events(saver, restored):
        reporter.event(kind, text, recorded=recorded)


def _start_events(saver: Saver | None, restored: Restored | None) -> Iterator[tuple[EventKind, str]]:
    """How this process got to the state that it starts from: was it restarted, and what did it restore."""
    number = os.environ.get("JAXDL_RESTART", "0")
    if number not in ("", "0"):
        reason = os.environ.get("JAXDL_RESTART_REASON")
        yield "restart", f"restarted{f' after {reason}' if reason else ''} (restart {number})"
    if saver is not None and saver.started_over:
        yield "start_over", saver.started_over
    if saver is not None and saver.initial:
        yield "init", saver.initial
    if restored is not None:
        for text in restored.damaged:
            yield "damaged", text
        for text in restored.notes:
            yield "exchange", text
        yield "resume", f"resumed from the checkpoint at step {restored.step}"
