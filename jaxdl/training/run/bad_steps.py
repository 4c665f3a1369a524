"""Bad steps in words: what was bad, in which parameters, and what may help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdl.report import OWN, metric_here, reasons
from jaxdl.report.skips import NONFINITE, Skip

UNKNOWN = Skip(0)


@dataclass(frozen=True)
class BadStep:
    """A step that was bad."""

    step: int
    loss: float
    learning_rate: float
    reason: Skip = UNKNOWN
    """0 if it is not known."""
    where: str = ""
    """Of which parameters the gradient was not finite, in words; empty if the loss was not finite either."""

    @property
    def text(self) -> str:
        """`step 7: loss nan (loss not finite)`."""
        why = f"{self.reason.words}{self.where}"
        return f"step {self.step}: loss {self.loss:.4g}" + (f" ({why})" if why else "")

    @property
    def of_gradient(self) -> bool:
        """Whether only its gradient was bad."""
        return self.reason == Skip.GRADIENT


def bad_step(step: int, metrics: Mapping[str, Any], names: Sequence[str]) -> BadStep:
    """A step that was bad in some of the replicas that are seen here, of which those alone count.

    `names` are the parameters that have gradients.
    """
    every, reason = reasons(metrics), reason_of(metrics)
    rows = [number for number, flags in enumerate(every) if Skip(int(flags)).is_bad] or slice(None)
    loss, weight, rate = (
        float(how(np.atleast_1d(metric_here(metrics, name))[rows if every.size > 1 else slice(None)]))
        for name, how in (("sums/loss", np.sum), ("sums/weight", np.sum), ("learning_rate", np.mean))
    )
    where = ""
    if Skip.GRADIENT in reason and Skip.LOSS not in reason and not {NONFINITE, OWN + NONFINITE}.isdisjoint(metrics):
        flags = np.atleast_1d(np.atleast_2d(metric_here(metrics, NONFINITE)).any(axis=0))
        where = where_of([name for name, bad in zip(names, flags, strict=False) if bad], len(names))
    return BadStep(step, loss / weight if weight else math.nan, rate, reason, where)


def reason_of(metrics: Mapping[str, Any]) -> Skip:
    """Why the step was skipped, in any of the replicas that are seen here."""
    return Skip(int(np.bitwise_or.reduce(reasons(metrics))))


def list_steps(steps: Sequence[BadStep]) -> str:
    """The first of the steps, in words."""
    more = f" and {len(steps) - 4} more" if len(steps) > 4 else ""
    return "; ".join(step.text for step in steps[:4]) + more


def table(steps: Sequence[BadStep]) -> list[str]:
    """The lines of a table of the steps, in Markdown."""
    return ["| step | loss | learning rate | why |", "|---:|---:|---:|---|"] + [
        f"| {step.step} | {step.loss:.6g} | {step.learning_rate:.4g} | {step.reason.words}{step.where} |"
        for step in steps
    ]


def where_of(names: Sequence[str], total: int) -> str:
    """` in stem/kernel, stem/bias, head/bias and 7 more of 20 parameters`; empty if none is named."""
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    every = f", all {total} parameters" if len(names) == total else f" of {total} parameters"
    return f" in {', '.join(names[:3])}{more}{every}"


def in_words(steps: Sequence[BadStep]) -> str:
    """The reasons of steps, in words, and where the first gradient was not finite."""
    every = UNKNOWN
    for step in steps:
        every |= step.reason
    return every.words + next((step.where for step in steps if step.where), "")


def what_is_bad(steps: Sequence[BadStep]) -> str:
    """What is bad, as the beginning of a sentence that goes on with `at step`."""
    first = steps[0]
    if all(step.of_gradient for step in steps):
        return f"the training loss is finite ({first.loss:.4g}), but its gradient{first.where} is not finite"
    bad = Skip.LOSS | Skip.GRADIENT
    if all(step.reason == Skip.SPIKE for step in steps):
        return "the training loss is far above its running mean"
    if all(step.reason and step.reason & bad == step.reason for step in steps):
        loss = all(Skip.LOSS in step.reason for step in steps)
        return f"the training loss{'' if loss else ' or its gradient'} is not finite"
    spike = "is far above its running mean, " * any(Skip.SPIKE in step.reason for step in steps)
    return f"the training loss {spike}or its gradient is not finite"


def advice(steps: Sequence[BadStep], lowest_scale: float | None) -> str:
    """What may help, in sentences; `lowest_scale` is that of the precision."""
    first = steps[0]
    if first.reason and not math.isfinite(first.learning_rate):
        return "The learning rate is not a number: mend the schedule."
    if all(step.of_gradient for step in steps):
        float16 = ""
        if lowest_scale is not None:
            float16 = (
                f"The loss scale cannot fall below {lowest_scale:g}, and gradients leave the range of float16 there: "
                "take --precision bfloat16, or a lower --precision.min-scale. If that does not help: "
            )
        return float16 + (
            "No learning rate mends that: an operation of the loss or the network has no finite derivative there, such "
            "as the root or the norm of 0, or a division, a logarithm or a root in the branch that jnp.where does not "
            "take. Look at what uses these parameters, and at the batches of these steps."
        )
    if first.reason and first.step == 1 and not math.isfinite(first.loss):
        return "The loss was so before any update: look for such numbers in the data, the model and the loss."
    return "A lower --optimizer.learning-rate, a longer warm-up or --step.clip-norm 1 usually help."
