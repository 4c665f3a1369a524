"""Hooks of the training loop: functions of a user (or a test, or a benchmark) that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jaxdl.state import TrainState


@dataclass(frozen=True)
class StepInfo:
    """What a hook gets to know of a step that was just handed to the devices, and may ask of the run.

    The devices may still compute the step. Nothing here waits for them but `metrics()`, and what reads `state`.
    """

    step: int
    """Steps completed, this one included."""
    state: TrainState
    """The state after the step. For the time of the call only: the next step reuses its memory."""
    skipped: bool
    """Whether the batch was skipped after a rollback, so that there was no update."""
    _measured: Mapping[str, jax.Array]
    _readable: Callable[[Mapping[str, jax.Array]], dict[str, float]]
    _stop: Callable[[], None]

    def metrics(self) -> dict[str, float]:
        """The metrics of this step, named as in `metrics.jsonl` without "train/"; empty if it was skipped.

        Waits for the devices, which then wait for the host: call it at the steps that need it, not at every one.
        """
        return self._readable(self._measured) if self._measured else {}

    def stop(self) -> None:
        """Ends the run after this step, as `max_steps` would: it is evaluated and saved, and can be resumed.

        With several processes, all of them must ask for it at the same step.
        """
        self._stop()


OnStep = Callable[[StepInfo], None]
"""Called on the host, on every process, after each step and before the evaluation and the checkpoint due then.

Its time is the phase `hooks`, and lowers the reported throughput. What it raises ends the run.
"""
