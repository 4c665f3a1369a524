"""One evaluation of a run: the statistics of batch norm first, where they are estimated, then the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxdl.evaluation import estimate_norms
from jaxdl.phases import Segment
from jaxdl.report import Reporter, Stopwatch
from jaxdl.run.build import Plan
from jaxdl.run.compile import StepFunctions
from jaxdl.run.inference import evaluate_once
from jaxdl.state import TrainState


class Evaluation:
    """Evaluates states of a run on all of the held-out data. `poll` is called before each batch and may raise Stop."""

    def __init__(self, plan: Plan, reporter: Reporter, watch: Stopwatch, poll: Callable[[], None]) -> None:
        self._plan, self._reporter, self._watch, self._poll = plan, reporter, watch, poll

    def with_norms(self, state: TrainState, step: int, segment: Segment, steps: StepFunctions) -> TrainState:
        """The state with batch norm's statistics over the last training batches, where the plan asks for that."""
        num = self._plan.experiment.evaluation.norm_batches
        if steps.norm is None or num is None:
            return state
        start = max(0, self._plan.timeline.position(step) - num * segment.batch_size)
        with self._watch("norms"), self._plan.batches(segment, start, num) as batches:
            return estimate_norms(steps.norm, state, batches, poll=self._poll)

    def metrics(self, state: TrainState, segment: Segment, steps: StepFunctions) -> dict[str, float]:
        """The task's metrics of the state."""
        source, size = self._plan.sources(segment)[1], self._plan.eval_batch_size
        num_batches = sum(math.ceil(len(one) / size) for one in source.parts.values() or (source,))
        poll = self._reporter.counted(self._poll, num_batches)
        with self._watch("eval"):
            return evaluate_once(
                self._plan.parts, steps.evaluate, state.eval_params, state.model_state, source, size, poll=poll
            )
