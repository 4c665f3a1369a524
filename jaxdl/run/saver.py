"""What the loop does with checkpoints: claims the workdir, saves and restores, and says what could not be saved."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxdl.checkpoint import Checkpoints, Earlier, Restored, Unreadable, Unusable
from jaxdl.cluster.agree import from_first_process
from jaxdl.data import spec_to_json
from jaxdl.experiment import LENGTH, identity
from jaxdl.files import DATA_FILE
from jaxdl.mesh import Axis
from jaxdl.report import Reporter
from jaxdl.run.build import Plan, make_exchange_state
from jaxdl.run.length import change_of_length
from jaxdl.run.workdir import choice_file, claim_workdir, keep_examples, write_config
from jaxdl.state import TrainState


class Saver:
    """The checkpoints of a run in its workdir; what could not be written is told to the reporter."""

    def __init__(self, plan: Plan, workdir: Path, reporter: Reporter) -> None:
        """Makes the workdir the run's own. Raises ConfigError when it belongs to another, or cannot be written."""
        self._plan, self._workdir, self._reporter = plan, workdir, reporter
        files = {DATA_FILE: spec_to_json(plan.parts.data_spec).encode()}
        if plan.asked != plan.experiment and plan.parts.layout.mesh.shape[Axis.REPLICA] > 1:
            files |= choice_file(workdir, plan.experiment.exchange, plan.reasons)
        self._earlier = Earlier(workdir)
        self._earlier.check_kinds()
        # To start over is an order of one command, not a property of the run.
        self._config = plan.asked.replaced({"checkpoint.start_over": False})
        earlier_length = claim_workdir(workdir, self._config, identity, files, LENGTH)
        keep_examples(workdir, plan.splits.content())
        self.started_over: str | None = None
        """What to say of a run that was ordered to start over and did."""
        self._saved_step, self._has_begun = -1, False
        if reason := self._earlier.folder_lost():  # Before it is made again.
            self._start_over(reason)
        self.checkpoints = self._open()
        self._new_length: str | None = None
        self._rewrite = earlier_length is not None
        if earlier_length is not None:
            done = int(from_first_process(lambda: str(max(self.checkpoints.steps, default=0)).encode()))
            self._new_length = change_of_length(earlier_length, plan.asked, plan.timeline, done)

    def keep_length(self, step: int) -> None:
        """Writes a length that changed to the history, as an event of the step that is resumed, and to `config.json`.

        In this order: a run that is killed in between does the same again.
        """
        if self._new_length is not None:
            self._reporter.event(step, self._new_length)
        if self._rewrite:
            write_config(self._workdir, self._config)

    def _open(self) -> Checkpoints:
        task = self._plan.parts.task
        config = self._plan.experiment.checkpoint
        return Checkpoints(self._workdir, config, best_metric=task.best_metric, best_mode=task.best_mode)

    def restore(self, *, from_start: bool = False) -> Restored | None:
        """Reads the newest checkpoint; None when the run begins at step 0.

        It does so in a new workdir, where no checkpoint had been written yet, where `from_start` says that the run went
        back to its start, and where `--checkpoint.start-over` is given and nothing can be used. Otherwise a workdir
        whose checkpoints cannot be used raises Unusable or Unreadable.
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
        self._has_begun = True
        if restored is not None:
            self._earlier.mark(restored.step)
        self._saved_step = -1 if restored is None else restored.step
        return restored

    def _start_over(self, reason: str) -> None:
        """Sets aside what cannot be used, if that was ordered. Raises Unusable if not."""
        if self._has_begun or not self._plan.experiment.checkpoint.start_over:
            raise self._earlier.refuse(reason) from None
        folder = self._earlier.archive()
        self.started_over = f"started over from step 0; what was there is in {folder} ({reason.splitlines()[0]})"

    def evaluated_step(self, restored: Restored) -> int:
        """The last evaluation up to a checkpoint; one that was missing when it was written came after it."""
        return max(restored.evaluated_step, self._earlier.evaluated_step(restored.step))

    def save(self, state: TrainState, step: int, evaluated_step: int, metrics: dict[str, float] | None) -> None:
        """Starts writing a checkpoint of this step, unless that was done; `metrics` are those of the evaluation."""
        if self._saved_step == step:
            return
        self._reporter.status("saving")
        self.checkpoints.wait()
        if steps := self.checkpoints.steps:
            self._earlier.mark(steps[-1])
        self.checkpoints.save(
            state, step, evaluated_step=evaluated_step, metrics=metrics if evaluated_step == step else None
        )
        self._saved_step = step
        self._tell(step)

    def save_again(self, state: TrainState | None, step: int, metrics: dict[str, float] | None) -> None:
        """Puts the checkpoint of this step aside for one with what an evaluation, made up for, has changed."""
        assert state is not None
        self.checkpoints.quarantine_after(step - 1)
        self._saved_step = -1
        self.save(state, step, step, metrics)

    def lost(self, step: int) -> str | None:
        """Waits for what is being written; says what is lost if the state of this step is not in the workdir then."""
        self.checkpoints.wait()
        self._tell(step)
        if step in self.checkpoints.steps:
            self._earlier.mark(step)
            return None
        return (
            f"the state of step {step} could not be saved in {self._workdir} and is lost; {self._newest()}. Make room "
            "there (or make it writable); the same command goes on from what there is."
        )

    def saved_for_resume(self, step: int) -> tuple[str, bool]:
        """What to say to a user whose signal ended the run at a step that was to be saved, and whether it is not."""
        lost = self.lost(step)
        return lost or f"saved in {self._workdir}. The same command goes on from there.", lost is not None

    def not_saved_for_resume(self, step: int) -> str:
        """The same for a step that was not to be saved, because the last steps are bad."""
        self.checkpoints.wait()
        self._tell(step)
        return f"the last steps are bad and not saved; {self._newest()}. The same command goes on from there."

    def _newest(self) -> str:
        steps = self.checkpoints.steps
        return f"the newest checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint, but the start"

    def _tell(self, step: int) -> None:
        for text in self.checkpoints.take_notes():
            self._reporter.event(step, text)
