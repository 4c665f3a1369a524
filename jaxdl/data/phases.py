"""Which step of a run sees which examples, at which size: phases of images of growing size (progressive resizing)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import Config, ConfigError, Periodic
from jaxdl.data.order import ENDLESS

_MOST_STEPS = 2**31 - 1
"""The counter of the steps is an int32."""
_PERIODS = 10
"""Evaluations and checkpoints of a run on a stream, without another period."""


class Phase(Config):
    """A part of a run with images of one size, as in the DAWNBench recipes."""

    epochs: float = pydantic.Field(gt=0)
    """Its length in passes over the training data, rounded up to whole steps."""
    size: int = pydantic.Field(ge=8)
    """Height and width in training."""
    batch_size: int | None = pydantic.Field(default=None, ge=1)
    """Examples in a step; None takes the run's. The learning rate is in proportion to it: the schedule's is that of the
    run's batch size."""
    min_scale: float | None = pydantic.Field(default=None, gt=0, le=1)
    """The smallest share of the area that a random crop has; None takes that of the data."""
    eval_size: int | None = pydantic.Field(default=None, ge=8)
    """Height and width in evaluation; None takes `size`."""


class Segment(NamedTuple):
    """Steps of one batch size and one image size: those after `first` steps, `num_steps` of them.

    `start` is the position of its first example in the stream of all epochs; `phase` None is the whole of a run without
    phases.
    """

    index: int
    first: int
    num_steps: int
    start: int
    batch_size: int
    phase: Phase | None


class Timeline:
    """The segments of a run over `num_examples` examples; `batch_size` is the one that the schedule goes by."""

    def __init__(self, segments: Sequence[Segment], num_examples: int, batch_size: int) -> None:
        self.segments, self.num_examples, self._batch_size = tuple(segments), num_examples, batch_size
        last = self.segments[-1]
        self.total_steps = last.first + last.num_steps
        self.total_examples = last.start + last.num_steps * last.batch_size
        self._firsts = [segment.first for segment in self.segments]

    def segment(self, step: int) -> Segment:
        """The segment of the step that follows `step` steps; after the end, the last one."""
        return self.segments[int(np.searchsorted(self._firsts, step, side="right")) - 1]

    def position(self, step: int) -> int:
        """How many examples have been seen after `step` steps."""
        segment = self.segment(step)
        return segment.start + (step - segment.first) * segment.batch_size

    def epoch(self, step: int) -> float:
        """How many epochs have been seen after `step` steps; 0 of a stream, whose epochs have no known length."""
        return 0.0 if self.is_endless else self.position(step) / self.num_examples

    @property
    def is_endless(self) -> bool:
        """Whether the examples are a stream."""
        return self.num_examples == ENDLESS

    def due(self, step: int, period: Periodic, num_steps: int = 1) -> bool:
        """Whether the last `num_steps` steps up to `step` cross a multiple of the period, or end the run.

        The period is an epoch by default, and of a stream a tenth of the run.
        """
        if step == 0 or step == self.total_steps:
            return step > 0
        before = max(0, step - num_steps)
        every_steps = period.every_steps
        if every_steps is None and self.is_endless:
            every_steps = -(-self.total_steps // _PERIODS)
        if every_steps:
            return step // every_steps > before // every_steps
        # In examples: an epoch need not be a whole number of steps.
        examples = (period.every_epochs or 1.0) * self.num_examples
        return self.position(step) // examples > self.position(before) // examples

    @property
    def steps_per_epoch(self) -> float:
        """Of steps of the run's own batch size, which schedules count."""
        return self.num_examples / self._batch_size

    @property
    def scheduled_steps(self) -> int:
        """Length of the run in such steps."""
        return math.ceil(self.total_examples / self._batch_size)

    def scheduled(self, step: jax.typing.ArrayLike) -> tuple[jax.typing.ArrayLike, jax.typing.ArrayLike]:
        """How many steps of the run's own batch size `step` steps are worth, and how many the next one is worth.

        Schedules count such steps; the learning rate is also times the latter (Goyal et al. 2017, section 2.1).
        """
        if all(segment.batch_size == self._batch_size for segment in self.segments):
            return step, 1
        firsts = np.array(self._firsts, np.float32)
        lengths = np.array([segment.num_steps for segment in self.segments], np.float32)
        lengths[-1] = np.inf
        factors = np.array([segment.batch_size / self._batch_size for segment in self.segments], np.float32)
        since = jnp.asarray(step, jnp.float32) - firsts
        return jnp.sum(jnp.clip(since, 0, lengths) * factors), jnp.asarray(factors)[jnp.sum(since >= 0) - 1]


def make_timeline(
    num_examples: int,
    batch_size: int,
    *,
    epochs: float | None,
    steps: int | None,
    within: tuple[int, int] | None = None,
    phases: Sequence[Phase] = (),
) -> Timeline:
    """The timeline of a run; one of `epochs` has steps `within` limits, if there are some, and any batch size.

    Raises ConfigError when it has too many steps, or batches larger than the data.
    """
    if epochs is None:
        within = None
    for size in {batch_size, *(phase.batch_size or batch_size for phase in phases)}:
        if size > num_examples and (within is None or not num_examples):
            raise ConfigError(
                f"--batch-size {size}: there are only {num_examples} training examples. Choose a smaller one."
            )
    segments, first, start, end = [], 0, 0, 0.0
    for phase in phases or (None,):
        size = (phase.batch_size if phase else None) or batch_size
        if phase is None and steps is not None:
            length, given = float(steps), f"--steps {steps}"
        else:
            passes = phase.epochs if phase else epochs
            assert passes is not None
            end += passes * num_examples
            # A rounding error must not add a step.
            length, given = (end - start) / size - 1e-9, f"--epochs {passes:g}"
            length = length if within is None else min(max(length, within[0]), within[1])
        if first + length > _MOST_STEPS:
            raise ConfigError(
                f"{given}: the run would have more than {_MOST_STEPS:,} steps, the most that can be counted. "
                "Choose a smaller number."
            )
        segments.append(Segment(len(segments), first, max(1, math.ceil(length)), start, size, phase))
        first += segments[-1].num_steps
        start += segments[-1].num_steps * size
    return Timeline(segments, num_examples, batch_size)
