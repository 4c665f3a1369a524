"""What is reported of a run, and what a report holds."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from jaxdl.core.config import Config
from jaxdl.data import DataSpec, Source
from jaxdl.data.phases import Timeline
from jaxdl.report.progress import StepCounter


class ReportedTask(Protocol):
    """What is read of a `jaxdl.training.tasks.Task`."""

    unit: ClassVar[str]
    best_metric: ClassVar[str]

    @property
    def resolved_mode(self) -> Literal["max", "min"]:
        """Whether a higher or a lower `best_metric` is better."""
        ...

    @property
    def objective(self) -> str:
        """How the training loss differs from that of the evaluation."""
        ...

    def reads(self, spec: DataSpec) -> tuple[str, ...]:
        """The arrays of a batch that the network reads."""
        ...

    def units_per_example(self, spec: DataSpec) -> float:
        """How many of `unit` one training example has."""
        ...

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """From sums over examples to metrics."""
        ...


@dataclass(frozen=True)
class Subject:
    """The run that is reported: its steps, task, training data, the seed of their order, its config, and its size."""

    timeline: Timeline
    counter: StepCounter
    task: ReportedTask
    source: Source
    seed: int
    config: Config
    num_params: int | None = None


class Report(NamedTuple):
    """Steps that have been reported: the first one (1 is the first of a run), and the metrics of each, on the host."""

    first_step: int
    metrics: Sequence[Mapping[str, np.ndarray]]
    together: Mapping[str, float] = types.MappingProxyType({})
    """The metrics of all of them, as reports name them."""


def is_displayed(name: str, value: Any) -> bool:
    """Whether a metric is for the display too. Of an exchange only its compression and its residual are, if it has any.

    And of the input the share of the time that the step waited for it, when that is worth a look, and of the images
    that came from the cache.
    """
    if name.startswith("input/"):
        return (name == "input/wait" and value >= 0.05) or (
            name.startswith("input/hits/") and name != "input/hits/origin" and value > 0
        )
    if name.startswith("train/exchange/") and math.isnan(value):  # The gradients of a bad step are not exchanged.
        return False
    if name.endswith("skip_reason"):  # Bits; the message that comes with it has words.
        return False
    neutral = {"train/exchange/compression": 1.0, "train/exchange/residual_ratio": 0.0, "train/bad_steps": 0.0}
    if name in neutral:
        return not math.isclose(value, neutral[name], rel_tol=1e-5)
    return not name.startswith(("train/exchange/", "seconds/", "train/experts/largest_load/"))
