"""`jaxdl.train`: what surrounds a run (signals, the lease of its workdir, the watchdog), its plan, and its loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import survive_readers, without_frames
from jaxdl.core.files import hang_file
from jaxdl.parallel.cluster import Watchdog, heartbeat
from jaxdl.parallel.mesh import Device
from jaxdl.report import Start, Stopwatch
from jaxdl.training.experiment import Experiment, as_experiment
from jaxdl.training.run.hooks import Callbacks, OnCheckpoint, OnEvaluation, OnStep
from jaxdl.training.run.learners.learning import as_learner
from jaxdl.training.run.plan.build import Plan, make_plan
from jaxdl.training.run.plan.changed_settings import checked_changes
from jaxdl.training.run.plan.init_from import InitFrom, as_init, beginning
from jaxdl.training.run.plan.length import check_max_steps, end_step
from jaxdl.training.run.plan.staged_data import as_begun, make_reader
from jaxdl.training.run.result import Interrupted, Run
from jaxdl.training.run.signals import Stop, StopSignals
from jaxdl.training.run.status import RunStatus
from jaxdl.training.run.trainer import Trainer
from jaxdl.training.run.workdir.workdir import (
    check_trackers,
    check_workdir,
    read_choice,
    read_plan,
    read_spec,
    read_stacks,
)


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
      ConfigError: for a config that cannot be run here, before anything is compiled.
      Interrupted: after SIGTERM, SIGINT, SIGHUP or a halt file in the workdir, when the state has been saved; or when
        its end could not be saved. It has the run so far as `run`.
      Diverged: when too many consecutive steps are bad and no rollback is possible any more, see `GuardConfig`.
    """
    experiment = as_experiment(experiment)
    _check(devices, max_steps)
    changing = checked_changes(may_change, experiment, workdir)
    callbacks = Callbacks.of(on_step=on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)
    watch = Stopwatch(on_change=heartbeat.enter)
    workdir = check_workdir(workdir)
    callbacks.check(workdir)
    init, start = as_init(init_from, workdir), Start(quiet=quiet)
    with StopSignals() as stop, survive_readers(stop.unread), contextlib.ExitStack() as stack:
        status = RunStatus(workdir, experiment, stop, start)
        stack.callback(status.release)  # After everything that writes there is closed.
        stack.enter_context(status)
        stack.callback(start.close)
        plan = _made(experiment, devices, workdir, init, stop, start, status, stage_data)
        plan = dataclasses.replace(plan, may_change=changing)
        return _trained(plan, workdir, max_steps, stop, watch, stack, start, status, callbacks)


def _trained(
    plan: Plan,
    workdir: Path | None,
    max_steps: int | None,
    stop: StopSignals,
    watch: Stopwatch,
    stack: contextlib.ExitStack,
    start: Start,
    status: RunStatus,
    callbacks: Callbacks,
) -> Run:
    """The run of a plan, watched."""
    if jax.process_count() > 1:
        stop.share(every_polls=plan.experiment.report.every_steps)
    log = functools.partial(open, workdir / hang_file(jax.process_index()), "a", encoding="utf-8") if workdir else None
    stack.enter_context(Watchdog(plan.experiment.cluster.hang_timeout_sec, log))
    end = plan.parts.agreement.boundary(end_step(plan.timeline, max_steps), plan.total_steps)
    hooks = stack.enter_context(as_learner(plan, stop, callbacks))
    trainer = Trainer(plan, workdir, stop, watch, stack, start, end=end, lease=status.lease, callbacks=hooks)
    status.follow(trainer)
    run = trainer.run()
    status.ended(trainer)
    return run


def _made(
    experiment: Experiment,
    devices: Sequence[Device] | None,
    workdir: Path | None,
    init: InitFrom | None,
    stop: StopSignals,
    start: Start,
    status: RunStatus,
    stage_data: str | Path | None,
) -> Plan:
    """The plan of the run; a signal is noticed meanwhile."""
    chosen, recorded = functools.partial(read_choice, workdir), functools.partial(read_spec, workdir)
    begin = functools.partial(beginning, workdir, init, experiment.checkpoint.start_over, model=experiment.model)
    make = functools.partial(make_plan, experiment, devices, chosen=chosen, recorded=recorded)
    make = functools.partial(make, stacks=functools.partial(read_stacks, workdir))
    read = as_begun(workdir, make_reader(stage_data, status.stages, start))
    make = functools.partial(
        make, started=functools.partial(_started, experiment, workdir, status), initial=begin, start=start, read=read
    )
    try:
        return stop.run(lambda: make(stored=lambda: read_plan(workdir)))
    except Stop as signal:
        raise Interrupted(signal.signum, "stopped before the run began; there was nothing to save.") from None


def _started(experiment: Experiment, workdir: Path | None, status: RunStatus) -> None:
    """What comes first when the processes of the run have met."""
    check_trackers(experiment.report.trackers, workdir)
    status.begin()


def _check(devices: Any, max_steps: Any) -> None:
    check_max_steps(max_steps)
    if devices is None or (isinstance(devices, Iterable) and all(hasattr(one, "platform") for one in devices)):
        return
    raise ConfigError(f"devices: {devices!r} is no list of devices. Give one, such as jax.devices()[:4].")
