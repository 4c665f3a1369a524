"""One evaluation of a run: the statistics of batch norm first, where they are estimated, then the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxdl.data.phases import Segment
from jaxdl.report import JOINED, Reporter, Stopwatch
from jaxdl.report.judged import judged
from jaxdl.training.evaluation import estimate_norms
from jaxdl.training.run.compile import StepFunctions
from jaxdl.training.run.inference import evaluate_once
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.tables.jagged_batches import in_evaluation
from jaxdl.training.state import TrainState
from jaxdl.training.step import Metrics


class Evaluation:
    """Evaluates states of a run on all of the held-out data. `poll` is called before each batch and may raise Stop."""

    def __init__(self, plan: Plan, reporter: Reporter, watch: Stopwatch, poll: Callable[[], None]) -> None:
        self._plan, self._reporter, self._watch, self._poll = plan, reporter, watch, poll
        self._of_replicas: Metrics = {}
        self.is_empty = False
        """Whether nothing of the held-out data counted in the last evaluation: then its metrics are NaN."""
        self._told: set[str] = set()
        measures = plan.experiment.evaluation.measures
        self._measures = [(one, one.build(plan.experiment, plan.parts)) for one in measures]

    def _nothing_counts(self, name: str) -> None:
        self.is_empty |= not name
        if name not in self._told:
            self._told.add(name)
            of = f" of {name}" if name else ""
            self._reporter.event(
                "skipped", f"evaluation: nothing{of} in the held-out data counts (the weight is 0): no metrics"
            )

    def prepare(self, state: TrainState, step: int, segment: Segment, steps: StepFunctions) -> TrainState:
        """The state with the parameters to evaluate, and batch norm's statistics over the last training batches.

        The latter only where the plan asks for them.
        """
        state = self.agree(state, steps)
        num = self._plan.experiment.evaluation.norm_batches
        if steps.norm is None or num is None:
            return state
        start = max(0, self._plan.timeline.position(step) - num * segment.batch_size)
        with self._watch("norms"), self._plan.batches(segment, start, num) as batches:
            return estimate_norms(steps.norm, state, batches, poll=self._poll)

    @property
    def changes_state(self) -> bool:
        """Whether an evaluation changes the state, batch norm's statistics."""
        return self._plan.experiment.evaluation.norm_batches is not None

    def agree(self, state: TrainState, steps: StepFunctions) -> TrainState:
        """The state with the parameters to evaluate, or to save; what that shows of the replicas is reported."""
        state, self._of_replicas = steps.train.settle(state)
        self._reporter.report_merge(self._of_replicas)
        return state

    def metrics(self, state: TrainState, step: int, segment: Segment, steps: StepFunctions) -> dict[str, float]:
        """The task's metrics of the state; of replicas that differ also `replicas/loss`, of each its own."""
        source, size = self._plan.sources(segment)[1], self._plan.eval_batch_size
        num_batches = sum(math.ceil(len(part) / size) for part in source.parts.values() or (source,))
        poll = self._reporter.count_batches(self._poll, num_batches)
        self.is_empty = False
        with self._watch("eval"):
            evaluate, read = steps.evaluate, source
            if self._plan.caches is not None:
                evaluate, read = self._plan.caches.evaluating(state, evaluate, source, size)
            read = in_evaluation(self._plan.parts.tables, read, source, size)
            values = evaluate_once(
                self._plan.parts,
                evaluate,
                state.eval_params,
                state.eval_state,
                read,
                size,
                poll=poll,
                empty=self._nothing_counts,
                keep=lambda sums, of_each: self._reporter.keep_judged(judged(sums, of_each, source)),
            )
            values |= {name: float(x) for name, x in self._of_replicas.items() if not name.startswith(JOINED)}
            if steps.evaluate_own is not None and steps.train.apart(step):
                parts, replicas = self._plan.parts, state.own
                params = parts.trainable.merged(replicas.params, state.params)
                evaluate = (steps.evaluate_own, params, replicas.model_state)
                metrics = evaluate_once(parts, *evaluate, source, size, poll=self._poll, empty=lambda _: None)
                values |= {"replicas/loss": metrics["loss"]}
            return values | self._measured(state, step)

    def _measured(self, state: TrainState, step: int) -> dict[str, float]:
        """What is measured besides, where it is due: `KIND/NAME` -> value."""
        period = self._plan.experiment.evaluation
        values: dict[str, float] = {}
        for measure, measurement in self._measures:
            if measure.due(step, self._plan.timeline, period):
                named = measurement(state.eval_params, state.eval_state, self._poll)
                values |= {f"{measure.kind}/{name}": value for name, value in named.items()}
        return values
