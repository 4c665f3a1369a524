"""Why a step was skipped: a bit mask that goes from the device to metrics, events, status and messages."""

from __future__ import annotations

import enum

REASON = "skip_reason"
"""The metric of a step that says why it was skipped: the bits of `Skip`, as a number; 0 if it made its update."""
NONFINITE = "nonfinite"
"""The metric of a step that says which gradients were not finite; see `jaxdl.training.step.make_train_step`."""


class Skip(enum.IntFlag):
    """Why a step was skipped."""

    LOSS = 1
    """The loss is not finite."""
    GRADIENT = 2
    """A gradient, or the norm of all, is not finite."""
    SPIKE = 4
    """The loss is far above its running mean."""
    OVERFLOW = 8
    """float16: scaled gradients left its range, so the loss scale falls. No bad step."""
    EMPTY = 16
    """Nothing in the batch counts. No bad step."""

    @property
    def is_bad(self) -> bool:
        """Whether it counts as a bad step."""
        return bool(self & (Skip.LOSS | Skip.GRADIENT | Skip.SPIKE))

    @property
    def words(self) -> str:
        """The reasons in words."""
        return "; ".join(_WORDS[reason] for reason in Skip if reason in self)


_WORDS = {
    Skip.LOSS: "loss not finite",
    Skip.GRADIENT: "gradient not finite",
    Skip.SPIKE: "loss far above its running mean",
    Skip.OVERFLOW: "overflow in float16",
    Skip.EMPTY: "nothing in the batch counts",
}
