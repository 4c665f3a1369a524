"""Where a run ends: at its full length, which may change when it resumes, or earlier because of `max_steps`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.data.order import ENDLESS
from jaxdl.data.phases import Phase, Timeline, make_timeline
from jaxdl.report import Report
from jaxdl.training.experiment import LENGTH, Experiment
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.tasks import Task


def end_step(timeline: Timeline, max_steps: int | None) -> int:
    """The step that a run ends at: `max_steps`, counted from the start of the experiment, if that comes first.

    All processes call it. Raises ConfigError, on all of them, for a number that is not the same on all.
    """
    end = min(timeline.total_steps, max_steps or timeline.total_steps)
    if jax.process_count() > 1:
        every = np.ravel(multihost_utils.process_allgather(np.int32(end)))
        if len(set(every.tolist())) > 1:
            raise ConfigError(
                f"--max-steps: the processes were given different numbers and would end at steps "
                f"{', '.join(str(number) for number in sorted(set(every.tolist())))}. Start all with the same one."
            )
    return end


def check_max_steps(max_steps: int | None) -> None:
    """Raises ConfigError for a number of steps that is not a whole number of 1 or more, nor None."""
    if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
        raise ConfigError(f"--max-steps {max_steps}: give a whole number of steps, 1 or more, or leave it out.")


def check_not_past(step: int, end: int, timeline: Timeline) -> None:
    """Raises ConfigError when a resumed run has done more steps than `max_steps` lets it do."""
    if step > end and end < timeline.total_steps:
        raise ConfigError(
            f"--max-steps {end}: the run in this --workdir has done {step} steps already. Give a larger number, or "
            "leave it out to train to the end."
        )


def early_end_note(step: int, timeline: Timeline, asked_by: str, *, kept: bool, over: bool) -> str:
    """The message of a run that stopped early as asked; `kept` says whether a checkpoint of the step was written.

    `over` says that who asked has ended the run for good.
    """
    if over:
        return f"ended at step {step} of {timeline.total_steps}: {asked_by} says that the run is over"
    resume = (
        "the same command without it resumes from there"
        if kept
        else "no checkpoint of this step was written, so the same command without it trains these steps again"
    )
    return f"stopped at step {step} of {timeline.total_steps}, as {asked_by} asks; {resume}"


def checked_report(plan: Plan, report: Report | None, *, kept: bool) -> Report | None:
    """The report of a run that is `kept` in a workdir, or not. Raises ConfigError if by it the model ends the run."""
    if report is None:
        return None
    last = report.first_step + len(report.metrics) - 1
    why = plan.experiment.model.reason_to_end(report.together, last, plan.total_steps)
    if why is not None:
        goes_on = "; the same command with the change goes on from the last checkpoint" if kept else ""
        raise ConfigError(f"step {last}: {why}{goes_on}.")
    return report


def timeline_of(experiment: Experiment, num_examples: int, spec: DataSpec) -> Timeline:
    """The steps of an experiment on `num_examples` examples, by phase. Raises ConfigError for an impossible length."""
    if num_examples == ENDLESS:
        check_endless(experiment)
    steps = experiment.steps or steps_of(experiment.tokens, experiment.batch_size, experiment.task, spec)
    return make_timeline(
        num_examples,
        experiment.batch_size,
        epochs=experiment.epochs,
        steps=steps,
        within=experiment.steps_within,
        phases=experiment.phases,
    )


def check_endless(experiment: Experiment) -> None:
    """Raises ConfigError for settings in epochs, whose length is not known of a stream."""
    settings = experiment.model_dump(mode="json", exclude={"data", "model", "task"})
    if experiment.steps is None and experiment.tokens is None:
        raise ConfigError(
            f"--data {experiment.data.kind}: it is read while the run trains, so the length of an epoch is not known. "
            "Give the length of the run as --steps or, of a language model, --tokens."
        )
    for path, value in _in_epochs(settings, ()):
        raise ConfigError(
            f"--{'.'.join(path).replace('_', '-')} {value}: data {experiment.data.kind} are read while the run trains, "
            "so the length of an epoch is not known. Give it in steps."
        )


def _in_epochs(settings: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The settings that are in epochs, with their paths."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _in_epochs(value, (*path, name))
        elif name.endswith("_epochs") and value:
            yield (*path, name), value


def steps_of(tokens: int | None, batch_size: int, task: Task, spec: DataSpec) -> int | None:
    """The steps in which a task sees `tokens` tokens; None for None. Raises ConfigError for one that has no tokens."""
    if tokens is None:
        return None
    if task.unit != "tokens" or not spec.fits(task.modality):
        raise ConfigError(
            f"--tokens {tokens}: task {task.kind} with data that are {spec.modality} counts {task.unit}. Give --epochs "
            "or --steps instead."
        )
    return math.ceil(tokens / (batch_size * task.units_per_example(spec)))


def change_of_length(
    earlier: Mapping[str, Any], asked: Experiment, timeline: Timeline, done: int, spec: DataSpec | None = None
) -> str | None:
    """What to say when a run resumes with another length; None when it comes to the same steps.

    `earlier` holds the fields `LENGTH` of the config before, `timeline` is that of `asked`, and `done` steps have been
    trained. Those must have seen what they would see in a run of the new length: so the position in the data remains a
    function of the step, and going back to an earlier checkpoint remains possible. Exchange warm-ups and the moving
    average are counted from the start and do not depend on the length. `spec` is that of the data, for a length in
    tokens. Raises ConfigError.
    """
    try:
        steps = earlier["steps"]
        if earlier.get("tokens") is not None and spec is not None:
            steps = steps_of(earlier["tokens"], asked.batch_size, asked.task, spec)
        before = make_timeline(
            timeline.num_examples,
            asked.batch_size,
            epochs=earlier["epochs"],
            steps=steps,
            within=earlier.get("steps_within"),
            phases=[Phase(**phase) for phase in earlier["phases"] or ()],
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"config.json in the --workdir has no length that can be read ({error}). Restore it, or choose another "
            "--workdir."
        ) from None
    if before.segments == timeline.segments:
        return None
    now = asked.model_dump(mode="json", include=set(LENGTH))
    if timeline.total_steps < done:
        raise ConfigError(
            f"{_describe(now)}: the run in this --workdir has done {done} steps, and this is a length of "
            f"{timeline.total_steps}. Give {done} steps or more, or choose another --workdir."
        )
    if _examples_of(before, done) != _examples_of(timeline, done):
        raise ConfigError(
            f"phases: the run in this --workdir has done {done} steps, which in these phases would have been of other "
            "examples, batch sizes or image sizes. Change only what comes after them (before: "
            f"{_describe(earlier)}), or choose another --workdir."
        )
    note = asked.schedule.on_another_length(
        int(np.asarray(before.scheduled(done)[0])), before.scheduled_steps, before.steps_per_epoch
    )
    return (
        f"the length changed from {before.total_steps} steps ({_describe(earlier)}) to {timeline.total_steps} "
        f"({_describe(now)}); from here on the learning rate follows the schedule of the new length"
        + (f"; {note}" if note else "")
    )


def _describe(length: Mapping[str, Any]) -> str:
    """How a length was given: `--steps 40`, `--epochs 2`, or the phases as JSON."""
    if length["phases"]:
        return f"phases {json.dumps(length['phases'])}"
    name = next((field for field in ("steps", "tokens") if length.get(field) is not None), "epochs")
    if name != "epochs":
        return f"--{name} {length[name]}"
    within = length.get("steps_within")
    limits = f" --steps-within {within[0]} {within[1]}" if within else ""
    return f"--epochs {length['epochs']:g}{limits}"


def _examples_of(timeline: Timeline, done: int) -> list[tuple[Any, ...]]:
    """All that decides which images the first `done` steps have seen."""
    return [
        (
            segment.first,
            min(segment.num_steps, done - segment.first),
            segment.start,
            segment.batch_size,
            segment.phase and segment.phase.model_dump(exclude={"epochs"}),
        )
        for segment in timeline.segments
        if segment.first < done
    ]
