"""`jaxdl.train`: a run, from the call to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.data import Stage
from jaxdl.parallel.mesh import Device
from jaxdl.training.experiment import Experiment, as_experiment
from jaxdl.training.run.exporting import check_export
from jaxdl.training.run.hooks import Callbacks, OnCheckpoint, OnEvaluation, OnStep
from jaxdl.training.run.learners.learning import as_learner
from jaxdl.training.run.plan.build import add_initial, join, open_data, open_mesh
from jaxdl.training.run.plan.changed_settings import check_changes
from jaxdl.training.run.plan.init_from import InitFrom, as_init
from jaxdl.training.run.plan.length import check_max_steps, end_step
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.result import Interrupted, Run
from jaxdl.training.run.session import Session, open_session
from jaxdl.training.run.signals import Stop
from jaxdl.training.run.trainer import Trainer
from jaxdl.training.run.workdir.workdir import check_workdir


@without_frames
def train(
    experiment: Experiment | str | Path,
    workdir: str | Path | None = None,
    *,
    quiet: bool = False,
    devices: Sequence[Device] | None = None,
    max_steps: int | None = None,
    stage_data: str | Path | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] = (),
    on_checkpoint: OnCheckpoint | Sequence[OnCheckpoint] = (),
    init_from: InitFrom | str | Path | None = None,
    may_change: Sequence[str] = (),
) -> Run:
    """Trains, and returns the run. With a `workdir`, everything is kept there, and the same call resumes.

    Args:
      experiment: what to train, from `jaxdl.load` or made in Python; or the config file.
      workdir: the folder for checkpoints, metrics and curves; without one the run leaves nothing on disk.
      quiet: print nothing but warnings and errors, these on stderr. Otherwise a terminal shows a live display, a
        notebook the curves of the run in its cell, and everything else gets a line for each report.
      devices: the devices of the mesh; all by default.
      max_steps: stop after this many steps of the experiment, as a trial: schedules stay those of the whole run, the
        last step is evaluated and saved, and the same call without it resumes.
      stage_data: a folder on the disk of each node, into which the data are copied once, to be read from there.
      on_step: functions that are called after each step with a `StepInfo`, see `jaxdl.training.run.hooks`.
      on_evaluation: functions that are called after each evaluation with an `EvaluationInfo`.
      on_checkpoint: functions that are called when a checkpoint is complete on disk, with a `CheckpointInfo`.
      init_from: the folder of another run, or an `InitFrom`, with whose parameters a new run begins.
      may_change: fields such as `optimizer.learning_rate` that may have other values than the run in the workdir had.

    Raises:
      ConfigError: for a config that cannot be run here, before its steps are compiled.
      Interrupted: after SIGTERM, SIGINT, SIGHUP or a file `halt` in the workdir, when the state has been saved; or when
        the state at the end could not be saved. It has the run so far as `run`.
      Diverged: when too many consecutive steps are bad and no rollback is possible any more, see `GuardConfig`.
    """
    experiment = as_experiment(experiment)
    _check(devices, max_steps)
    changing = check_changes(may_change, experiment, workdir)
    callbacks = Callbacks.of(on_step=on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)
    folder = check_workdir(workdir)
    callbacks.check(folder)
    init = as_init(init_from, folder)
    with open_session(experiment, folder, quiet=quiet) as session:
        plan = _plan(session, experiment, devices, init, stage_data)
        plan = dataclasses.replace(plan, may_change=changing)
        return _run(session, plan, max_steps, callbacks)


def _plan(
    session: Session,
    experiment: Experiment,
    devices: Sequence[Device] | None,
    init: InitFrom | None,
    stage_folder: str | Path | None,
) -> Plan:
    """The plan of the run in its workdir, made by the stages in `plan/build.py`; a signal raises Interrupted."""
    workdir, start = session.workdir, session.start
    stage = None if stage_folder is None else Stage(stage_folder, session.status.show_staging)

    def make() -> Plan:
        planned, mesh = open_mesh(experiment, devices, start, workdir)
        check_export(experiment, workdir.path)
        session.take_workdir(experiment.report.trackers)  # The lease: once all processes have met.
        data = open_data(planned.experiment, mesh, start, workdir, stage=stage)
        return add_initial(join(planned, mesh, data, start, workdir), init, workdir)

    try:
        return session.stop.run(make)
    except Stop as signal:
        raise Interrupted(signal.signum, "stopped before the run began; there was nothing to save.") from None


def _run(session: Session, plan: Plan, max_steps: int | None, callbacks: Callbacks) -> Run:
    """Runs a plan; the watchdog ends the process if it hangs."""
    experiment, status = plan.experiment, session.status
    session.watch_for_hangs(experiment.cluster.hang_timeout_sec, experiment.report.every_steps)
    # Not inside a merge whose messages are sent beside local steps.
    end = plan.parts.agreement.boundary(end_step(plan.timeline, max_steps), plan.total_steps)
    # With --agreement async the run is a learner: jaxdl's own hook exchanges with the syncer between steps.
    hooks = session.stack.enter_context(as_learner(plan, session.stop, callbacks))
    trainer = Trainer(plan, session, hooks, end=end)
    status.follow(trainer.counter, trainer.rollbacks, end, plan.total_steps)
    run = trainer.run()
    status.ended(trainer.end_asked_by, over=trainer.over)
    return run


def _check(devices: Any, max_steps: Any) -> None:
    check_max_steps(max_steps)
    if devices is None or (isinstance(devices, Iterable) and all(hasattr(device, "platform") for device in devices)):
        return
    raise ConfigError(f"devices: {devices!r} is not a list of devices. Give one, such as jax.devices()[:4].")
