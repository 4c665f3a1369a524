"""The compiled steps of a run's stretches: the next ones are compiled while the current ones train."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from jaxdl.plan import Plan, StepFunctions, compile_steps
from jaxdl.timeline import Stretch


class CompiledSteps:
    """The steps of each stretch of a plan, compiled once for each size of batch and image."""

    def __init__(self, plan: Plan, end: int) -> None:
        """Stretches that begin at the step `end`, where the run ends, or later are not compiled ahead."""
        self._plan, self._end = plan, end
        self._futures: dict[tuple[Any, ...], Future[Any]] = {}

    def ready(self, stretch: Stretch) -> bool:
        """Whether the steps of a stretch are compiled already, or are known not to compile."""
        future = self._futures.get(_shape(stretch))
        return future is not None and future.done()

    def of(self, stretch: Stretch) -> StepFunctions:
        """The steps of a stretch; starts to compile those of the next. Raises what compiling raises."""
        future = self._futures.get(_shape(stretch))
        if future is None:
            future = self._futures[_shape(stretch)] = Future()
            self._compile(stretch, future)
        steps = future.result()
        later = self._plan.timeline.stretches[stretch.index + 1 :]
        if later and later[0].first < self._end and _shape(later[0]) not in self._futures:
            self._futures[_shape(later[0])] = Future()
            # A daemon: a run that is stopped does not wait for what it will not need.
            args = (later[0], self._futures[_shape(later[0])])
            threading.Thread(target=self._compile, args=args, name="jaxdl-compile", daemon=True).start()
        return steps

    def _compile(self, stretch: Stretch, future: Future[Any]) -> None:
        try:
            future.set_result(compile_steps(self._plan, stretch))
        except BaseException as error:
            future.set_exception(error)


def _shape(stretch: Stretch) -> tuple[Any, ...]:
    """What compiled steps depend on."""
    phase = stretch.phase
    return (stretch.batch_size, phase and phase.size, phase and (phase.eval_size or phase.size))
