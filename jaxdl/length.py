"""Where a run ends: at its full length, or earlier because `max_steps` asks for a short trial."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.config import ConfigError
from jaxdl.timeline import Timeline


def end_step(timeline: Timeline, max_steps: int | None) -> int:
    """The step that a run ends at: `max_steps`, counted from the start of the experiment, if that comes first.

    All processes call it. Raises ConfigError, on all of them, for a number that is not positive or not the same on all.
    """
    if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
        raise ConfigError(f"--max-steps {max_steps}: give a whole number of steps, 1 or more, or leave it out.")
    end = min(timeline.total_steps, max_steps or timeline.total_steps)
    if jax.process_count() > 1:
        every = np.ravel(multihost_utils.process_allgather(np.int32(end)))
        if len(set(every.tolist())) > 1:
            raise ConfigError(
                f"--max-steps: the processes were given different numbers and would end at steps "
                f"{', '.join(str(one) for one in sorted(set(every.tolist())))}. Start all with the same one."
            )
    return end


def check_not_past(step: int, end: int, timeline: Timeline) -> None:
    """Raises ConfigError when a resumed run has done more steps than `max_steps` lets it do."""
    if step > end and end < timeline.total_steps:
        raise ConfigError(
            f"--max-steps {end}: the run in this --workdir has done {step} steps already. Give a larger number, or "
            "leave it out to train to the end."
        )


def early_end_note(step: int, timeline: Timeline, *, kept: bool) -> str:
    """What to say when a run stopped early as asked; `kept` says whether a checkpoint of the step was written."""
    resume = (
        "the same command without it resumes from there"
        if kept
        else "no checkpoint of this step was written, so the same command without it trains these steps again"
    )
    return f"stopped at step {step} of {timeline.total_steps}, as --max-steps asks; {resume}"
