"""Learning-rate schedules: linear warm-up to the peak, then a decay. The peak itself belongs to the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import Choice

LearningRate = Callable[[jax.typing.ArrayLike], jax.Array]
"""The float32 learning rate of a step (0 = first update); can be traced."""

Cycle = Callable[[jax.typing.ArrayLike], jax.Array]
"""How near a step is to the end of the warm-up, from 0 to 1; see `Schedule.cycle`."""


class Schedule(Choice):
    """What all schedules share: the warm-up, linear from `warmup_start_fraction` of the peak to the peak.

    Step s of W warm-up steps is at the fraction (s + 1) / W of the way, so that the first update is not lost to a rate
    of zero and the last warm-up step, W - 1, has exactly the peak. Decays start at step W, at the peak again.
    """

    warmup_epochs: float | None = pydantic.Field(default=None, ge=0, allow_inf_nan=False)
    """Length of the warm-up in epochs, rounded to whole steps (at least one); or give `warmup_steps`."""
    warmup_steps: int | None = pydantic.Field(default=None, ge=0)
    """Length of the warm-up in steps; or give `warmup_epochs`."""
    warmup_start_fraction: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Where the warm-up starts, as a fraction of the peak learning rate."""

    @pydantic.model_validator(mode="after")
    def _one_warmup(self) -> Schedule:
        if self.warmup_epochs is not None and self.warmup_steps is not None:
            raise ValueError(
                f"warmup_epochs = {self.warmup_epochs} and warmup_steps = {self.warmup_steps} both set the length of "
                "the warm-up. Give one of them."
            )
        if self.warmup_start_fraction and not (self.warmup_epochs or self.warmup_steps):
            raise ValueError(
                f"warmup_start_fraction = {self.warmup_start_fraction} has no effect without a warm-up. "
                "Give warmup_epochs or warmup_steps."
            )
        return self

    def num_warmup_steps(self, total_steps: int, steps_per_epoch: float) -> int:
        """Length of the warm-up in steps. Raises ConfigError when it is longer than `total_steps`."""
        if self.warmup_epochs:
            num_steps = max(1, round(self.warmup_epochs * steps_per_epoch))
        else:
            num_steps = self.warmup_steps or 0
        if num_steps > total_steps:
            given = (
                f"--schedule.warmup-epochs {self.warmup_epochs:g}: warm-up of {num_steps} steps"
                if self.warmup_epochs
                else f"--schedule.warmup-steps {num_steps}"
            )
            raise ConfigError(
                f"{given}: more warm-up than steps, the run has {total_steps}. Train longer, or shorten the warm-up. "
                "For a trial of a few steps, keep the length of the run and give --max-steps N."
            )
        return num_steps

    def build(self, *, peak: float, total_steps: int, steps_per_epoch: float) -> LearningRate:
        """The learning rate as a function of the step, at most `peak`; after the end it keeps its end value.

        Raises ConfigError when the warm-up is longer than `total_steps`.
        """
        num_warmup = self.num_warmup_steps(total_steps, steps_per_epoch)
        first, num_decay = self._decay(num_warmup, total_steps, steps_per_epoch)
        start, end = self.warmup_start_fraction, self._end_fraction()

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            now = jnp.asarray(step, jnp.float32)
            warmup = start + (1 - start) * (now + 1) / max(1, num_warmup)
            remaining = jnp.clip((first + num_decay - now) / max(1, num_decay), 0, 1)
            # XLA divides by a constant as it multiplies by its inverse, and n * (1 / n) need not be 1: the peak is set.
            # A warm-up that takes the whole run leaves no decay: what follows is at the end value at once.
            shape = self._shape(jnp.where(now < first + min(1, num_decay), 1, remaining))
            # Written so that shape 1 gives the peak and shape 0 the end value to the last bit.
            decay = shape + end * (1 - shape)
            return jnp.float32(peak) * jnp.where(now + 1 < num_warmup, warmup, decay)

        return learning_rate

    def cycle(self, *, total_steps: int, steps_per_epoch: float) -> Cycle:
        """A line from 0 before the first step to 1 at the last warm-up step, and back to 0 after the last step.

        Without a warm-up it begins at 1. For momentum that is cycled against the learning rate, as in the DAWNBench
        recipes of Alibaba and Huawei.
        """
        num_warmup = self.num_warmup_steps(total_steps, steps_per_epoch)
        num_left = total_steps - num_warmup

        def cycle(step: jax.typing.ArrayLike) -> jax.Array:
            now = jnp.asarray(step, jnp.float32)
            up, down = (now + 1) / max(1, num_warmup), (total_steps - now) / max(1, num_left)
            return jnp.clip(jnp.where(now + 1 <= num_warmup, up, down), 0, 1)

        return cycle

    def on_another_length(self, num_done: int, total_steps: int, steps_per_epoch: float) -> str | None:
        """What to say when a run that was `total_steps` long goes on with another length after `num_done` steps."""
        del num_done, total_steps, steps_per_epoch
        return None

    def _decay(self, num_warmup: int, total_steps: int, steps_per_epoch: float) -> tuple[int, int]:
        """(first step, length) of the decay, in steps."""
        return num_warmup, self._num_decay_steps(total_steps - num_warmup, steps_per_epoch)

    def _num_decay_steps(self, num_left: int, steps_per_epoch: float) -> int:
        """Length of the decay, when `num_left` steps follow the warm-up."""
        del steps_per_epoch
        return num_left

    def _end_fraction(self) -> float:
        """Where the decay ends, as a fraction of the peak."""
        return 1.0

    def _shape(self, remaining: jax.Array) -> jax.Array:
        """The course of the decay from 1 to 0, by the fraction of it that remains (1 to 0); always 1 without one."""
        return jnp.ones_like(remaining)


class Constant(Schedule, kind="constant"):
    """The peak to the end, after the warm-up."""


class Decay(Schedule, kind=None):
    """A schedule that decays to a fraction of the peak."""

    end_fraction: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Where the decay ends, as a fraction of the peak learning rate."""

    def _end_fraction(self) -> float:
        return self.end_fraction


class Linear(Decay, kind="linear"):
    """A straight line from the peak to the end value, reached after the last step."""

    def _shape(self, remaining: jax.Array) -> jax.Array:
        return remaining


class Cosine(Decay, kind="cosine"):
    """Half a cosine from the peak to the end value, reached after the last step (arXiv 1608.03983, no restarts)."""

    def _shape(self, remaining: jax.Array) -> jax.Array:
        return _half_cosine(remaining)


class WSD(Decay, kind="wsd"):
    """Warm-up, stable, decay: the peak until the decay at the end of the run (Hu et al., arXiv 2404.06395, section 4).

    Until the decay the rate does not depend on the length of the run, so any checkpoint before it can be trained
    longer, or cooled down: a copy of the workdir that resumes with another length has the rates of a run that was so
    long from the start.
    """

    decay_fraction: float | None = pydantic.Field(default=None, gt=0, le=1)
    """Length of the decay as a fraction of the run, 0.1 by default; or give `decay_steps` or `decay_epochs`."""
    decay_steps: int | None = pydantic.Field(default=None, ge=1)
    """Length of the decay in steps."""
    decay_epochs: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """Length of the decay in epochs, rounded to whole steps (at least one)."""
    decay: Literal["linear", "sqrt", "cosine"] = "linear"
    """Its course: a straight line, `1 - sqrt(progress)` (Hägele et al., arXiv 2405.18392), or half a cosine."""

    @pydantic.model_validator(mode="after")
    def _one_decay(self) -> WSD:
        names = "decay_fraction", "decay_steps", "decay_epochs"
        given = [f"{name} = {getattr(self, name)}" for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the length of the decay. Give one of them.")
        return self

    def on_another_length(self, num_done: int, total_steps: int, steps_per_epoch: float) -> str | None:
        """A warning for a checkpoint of the decay."""
        first, _ = self._decay(self.num_warmup_steps(total_steps, steps_per_epoch), total_steps, steps_per_epoch)
        if num_done <= first:
            return None
        return (
            f"the decay of the earlier length had begun at step {first}, so this is no cool-down from the peak: for "
            "that, resume a copy of the workdir with an earlier checkpoint"
        )

    def _decay(self, num_warmup: int, total_steps: int, steps_per_epoch: float) -> tuple[int, int]:
        if self.decay_epochs is not None:
            length = max(1, round(self.decay_epochs * steps_per_epoch))
        elif self.decay_steps is not None:
            length = self.decay_steps
        else:
            length = max(1, round((self.decay_fraction or 0.1) * total_steps))
        if num_warmup + length > total_steps:
            raise ConfigError(
                f"--schedule wsd: a warm-up of {num_warmup} steps and a decay of {length} are more than the run has, "
                f"{total_steps}. Train longer, or shorten one of them (--schedule.decay-steps, -epochs or -fraction)."
            )
        return total_steps - length, length

    def _shape(self, remaining: jax.Array) -> jax.Array:
        if self.decay == "cosine":
            return _half_cosine(remaining)
        return 1 - jnp.sqrt(1 - remaining) if self.decay == "sqrt" else remaining


class Steps(Schedule, kind="steps"):
    """The peak, multiplied by `factor` at each milestone (Goyal et al., arXiv 1706.02677: 0.1 at epochs 30, 60, 80)."""

    milestones_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    """When the rate falls, in epochs since the start of the run."""
    factor: float = pydantic.Field(default=0.1, gt=0, lt=1)
    """The factor at each milestone."""

    @pydantic.model_validator(mode="after")
    def _milestones_rise(self) -> Steps:
        if not self.milestones_epochs or list(self.milestones_epochs) != sorted({*self.milestones_epochs}):
            raise ValueError(f"milestones_epochs = {self.milestones_epochs}: give increasing epochs, such as 30 60 80.")
        if self.milestones_epochs[0] <= 0:
            raise ValueError(f"milestones_epochs = {self.milestones_epochs}: give epochs after the start of the run.")
        return self

    def build(self, *, peak: float, total_steps: int, steps_per_epoch: float) -> LearningRate:
        """As of every schedule; a milestone is rounded to a whole step.

        Raises ConfigError as `num_warmup_steps`, and for a milestone in the warm-up or after the end.
        """
        num_warmup = self.num_warmup_steps(total_steps, steps_per_epoch)
        first, last = (round(self.milestones_epochs[place] * steps_per_epoch) for place in (0, -1))
        if first < num_warmup or last >= total_steps:
            raise ConfigError(
                f"--schedule.milestones-epochs {' '.join(map('{:g}'.format, self.milestones_epochs))}: not all are "
                f"between the end of the warm-up, at {num_warmup / steps_per_epoch:g} epochs, and of the run, at "
                f"{total_steps / steps_per_epoch:g}. Give others."
            )
        constant = super().build(peak=peak, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        # Of NumPy: one of JAX would start the devices, and a search checks schedules in a process without them.
        milestones = np.array([round(epoch * steps_per_epoch) for epoch in self.milestones_epochs], np.float32)

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            passed = jnp.sum(jnp.asarray(step, jnp.float32) >= milestones)
            return constant(step) * jnp.float32(self.factor) ** passed

        return learning_rate


class InverseSqrt(Schedule, kind="inverse_sqrt"):
    """The peak times sqrt(W / s) at step s after W warm-up steps, both counted from 1 (Vaswani et al. 2017, 5.3).

    Its length does not depend on that of the run. The paper's rate has the peak (`noam_peak`) of its model and warm-up.
    """

    def build(self, *, peak: float, total_steps: int, steps_per_epoch: float) -> LearningRate:
        """As of every schedule; without a warm-up the first step has the peak."""
        constant = super().build(peak=peak, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        num_warmup = max(1, self.num_warmup_steps(total_steps, steps_per_epoch))

        def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
            number = jnp.asarray(step, jnp.float32) + 1
            return constant(step) * jnp.sqrt(num_warmup / jnp.maximum(number, num_warmup))

        return learning_rate


def _half_cosine(remaining: jax.Array) -> jax.Array:
    """(1 + cos(pi (1 - remaining))) / 2, without its loss of digits near the end."""
    return jnp.square(jnp.sin(jnp.pi / 2 * remaining))


def noam_peak(embed_dim: int, warmup_steps: int) -> float:
    """The largest learning rate of Vaswani et al. 2017, equation 3: embed_dim^-0.5 warmup_steps^-0.5."""
    return (embed_dim * warmup_steps) ** -0.5


class Polynomial(Decay, kind="polynomial"):
    """A power of the remaining decay: with t steps since the warm-up, end + (peak - end) (1 - t / decay_steps) ^ power.

    MLPerf's ResNet-50 reference is power 2, `end_fraction` 1e-4 / peak, and `decay_steps` as published with each batch
    size (all steps - warm-up steps + 1): the decay is then the same step by step. Its warm-up begins with a rate of
    zero, so each of its warm-up steps has the rate that is here one step earlier.
    """

    power: float = pydantic.Field(default=2.0, gt=0, allow_inf_nan=False)
    """The exponent; 1 is a straight line."""
    decay_steps: int | None = pydantic.Field(default=None, ge=1)
    """Length of the decay in steps, counted from the end of the warm-up, also when the run is shorter or longer; by
    default all steps after the warm-up."""
    decay_epochs: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """The same in epochs, rounded to whole steps (at least one); or give `decay_steps`."""

    @pydantic.model_validator(mode="after")
    def _one_decay(self) -> Polynomial:
        if self.decay_steps is not None and self.decay_epochs is not None:
            raise ValueError(
                f"decay_steps = {self.decay_steps} and decay_epochs = {self.decay_epochs:g} both set the length of "
                "the decay. Give one of them."
            )
        return self

    def _num_decay_steps(self, num_left: int, steps_per_epoch: float) -> int:
        if self.decay_epochs is not None:
            return max(1, round(self.decay_epochs * steps_per_epoch))
        return num_left if self.decay_steps is None else self.decay_steps

    def _shape(self, remaining: jax.Array) -> jax.Array:
        return remaining**self.power
