"""The guard against bad numbers: which steps are skipped, and when a run is rolled back to a checkpoint.

A bad step (a loss or a gradient that is not finite, a loss that leaps) changes nothing but counters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from jaxdl.core.config import Config

Guard = dict[str, jax.Array]
"""What the guard carries from step to step; empty when it is off. int32 counters:

- `bad_steps`: steps of the run without an update because they were bad, or were skipped after a rollback;
- `bad_in_row`: the length of the present streak of bad steps;

and where spikes are looked for, of the losses of good steps: `num_losses` (int32), `mean`, `variance` (float32).
"""


_LARGEST_LOSS = 1e18
"""In the statistics a loss counts as at most this: the square of a larger one may not be finite, nor ever be again."""
_SMALLEST_DEVIATION = 1e-3
"""Of the mean, or of 1 (nat) where that is more: a loss that hardly changes makes no spike of a tiny rise."""


class GuardConfig(Config):
    """Bad steps (numbers that are not finite, spikes) are skipped; a long streak of them rolls the run back."""

    skip_nonfinite: bool = True
    """Skip a step whose loss or gradient is not finite; without this, the first one ends the run."""
    spike_deviations: float | None = pydantic.Field(default=None, gt=0)
    """Skip also a step whose loss is more than this many standard deviations above its running mean."""
    spike_window_steps: int = pydantic.Field(default=128, ge=2)
    """Mean and deviation are over about this many good steps; before there are as many, no step is a spike."""
    rollback_after: int = pydantic.Field(default=8, ge=1)
    """After this many bad steps in a row, roll back to a checkpoint (or the start) and skip their batches."""
    max_rollbacks: int = pydantic.Field(default=2, ge=0)
    """Roll back at most this often in one run; the next time, stop with a report. May be raised to resume."""

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> GuardConfig:
        fields = type(self).model_fields
        if not self.skip_nonfinite:
            for name in ("spike_deviations", "spike_window_steps", "rollback_after", "max_rollbacks"):
                if getattr(self, name) != fields[name].default:
                    raise ValueError(
                        f"guard.{name} = {getattr(self, name)}: without skip_nonfinite no step is skipped, it cannot "
                        f"take effect. Set skip_nonfinite too, or leave {name} out."
                    )
        if self.spike_deviations is None and self.spike_window_steps != fields["spike_window_steps"].default:
            raise ValueError(
                f"guard.spike_window_steps = {self.spike_window_steps}: no spike is looked for, because "
                "spike_deviations is not set. Set it too, or leave spike_window_steps out."
            )
        return self

    def init_guard(self) -> Guard:
        """The guard at the start of a run."""
        if not self.skip_nonfinite:
            return {}
        guard = {"bad_steps": jnp.int32(0), "bad_in_row": jnp.int32(0)}
        if self.spike_deviations is None:
            return guard
        return guard | {"num_losses": jnp.int32(0), "mean": jnp.float32(0), "variance": jnp.float32(0)}

    def is_spike(self, guard: Guard, loss: jax.Array) -> jax.Array:
        """Whether a step's mean loss is a spike: a boolean scalar; never before the statistics are warm."""
        if self.spike_deviations is None:
            return jnp.bool_(False)
        warm = guard["num_losses"] >= self.spike_window_steps
        smallest = _SMALLEST_DEVIATION * jnp.maximum(jnp.abs(guard["mean"]), 1)
        deviation = jnp.maximum(jnp.sqrt(guard["variance"]), smallest)
        return warm & (loss > guard["mean"] + self.spike_deviations * deviation)

    def next_guard(
        self, guard: Guard, loss: jax.Array, *, kept: jax.Array, bad: jax.Array, empty: jax.Array | bool = False
    ) -> Guard:
        """The guard after a step; one that is neither `kept` nor `bad` (float16's overflow) ends a streak too.

        One that is `empty`, because nothing in its batch counts, neither ends a streak nor makes it longer.

        The statistics are those of Finch, "Incremental calculation of weighted mean and variance" (2009), section 9,
        exponential with weight 1 / window, and plain (weight 1 / number) as long as that is larger.
        """
        if not guard:
            return guard
        changed = {
            "bad_steps": guard["bad_steps"] + jnp.where(bad, 1, 0),
            "bad_in_row": jnp.where(bad, guard["bad_in_row"] + 1, jnp.where(empty, guard["bad_in_row"], 0)),
        }
        if self.spike_deviations is None:
            return changed
        number = jnp.minimum(guard["num_losses"] + 1, self.spike_window_steps)
        weight = 1 / number.astype(jnp.float32)
        difference = jnp.clip(loss, -_LARGEST_LOSS, _LARGEST_LOSS) - guard["mean"]
        counted = {
            "num_losses": number,
            "mean": guard["mean"] + weight * difference,
            "variance": (1 - weight) * (guard["variance"] + weight * difference * difference),
        }
        return changed | {name: jnp.where(kept, value, guard[name]) for name, value in counted.items()}


def choose(kept: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the step is `kept`, else `old`, leaf by leaf; nothing of the other one gets into the result."""
    return jax.tree.map(lambda a, b: lax.select(jnp.broadcast_to(kept, jnp.shape(a)), a, b), new, old)


def skipped(guard: Guard) -> Guard:
    """The guard after a step whose batch was skipped: it made no update, and belongs to no streak."""
    return guard | {"bad_steps": guard["bad_steps"] + 1}
