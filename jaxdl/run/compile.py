"""The compiled steps of a run's segments: the next ones are compiled while the current ones train."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax

from jaxdl.compiler import Options, compiled
from jaxdl.evaluate import make_eval_step, make_norm_step
from jaxdl.mesh import Axis, platform
from jaxdl.phases import Segment
from jaxdl.run.build import Plan
from jaxdl.state import replicated
from jaxdl.step import TrainStep, make_train_step


class StepFunctions(NamedTuple):
    """The compiled functions of a segment; calls with other shapes are errors."""

    train: TrainStep
    """`jaxdl.step.make_train_step`."""
    evaluate: Any
    """`jaxdl.evaluate.make_eval_step`."""
    norm: Any
    """`jaxdl.evaluate.make_norm_step`, where batch norm's statistics are estimated for each evaluation; else None."""


def compile_steps(plan: Plan, segment: Segment | None = None) -> StepFunctions:
    """The compiled steps of a segment (the first)."""
    segment = segment or plan.timeline.segments[0]
    state, (train, test) = plan.parts.state_spec.abstract(), plan.sources(segment)
    evaluating = make_eval_step(plan.parts).lower(
        state.eval_params, state.model_state, test.batch_shapes(plan.eval_batch_size, evaluating=True)
    )
    norm = None
    if plan.experiment.evaluation.norm_batches is not None:
        batch = train.batch_shapes(segment.batch_size, evaluating=False)
        norm = make_norm_step(plan.parts).lower(state.eval_params, state.model_state, _key(plan), batch).compile()
    return StepFunctions(compile_train_step(plan, segment), evaluating.compile(), norm)


def _key(plan: Plan) -> jax.ShapeDtypeStruct:
    """A random key, as a shape."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(plan.parts.layout))


def compile_train_step(plan: Plan, segment: Segment | None = None) -> Any:
    """The compiled train step of a segment of a plan (the first).

    Raises ConfigError for a compiler option that XLA does not know.
    """
    segment = segment or plan.timeline.segments[0]
    batch = plan.sources(segment)[0].batch_shapes(segment.batch_size, evaluating=False)
    lowered = make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch)
    mesh = plan.parts.layout.mesh
    return compiled(lowered, compiler_options(plan), mesh.shape, plan.experiment.compiler.links)


def compiler_options(plan: Plan) -> Options:
    """XLA's options for the train step of a plan."""
    experiment, mesh = plan.experiment, plan.parts.layout.mesh
    return experiment.compiler.resolved(
        platform(mesh),
        num_replicas=mesh.shape[Axis.REPLICA],
        num_inner=mesh.shape[Axis.FSDP],
        bucket_elements=plan.exchange.bucket_elements,
    )


class CompiledSteps:
    """The steps of each segment of a plan, compiled once for each size of batch and image."""

    def __init__(self, plan: Plan, end: int) -> None:
        """Stretches that begin at the step `end`, where the run ends, or later are not compiled ahead."""
        self._plan, self._end = plan, end
        self._futures: dict[tuple[Any, ...], Future[Any]] = {}

    def ready(self, segment: Segment) -> bool:
        """Whether the steps of a segment are compiled already, or are known not to compile."""
        future = self._futures.get(_shape(segment))
        return future is not None and future.done()

    def of(self, segment: Segment) -> StepFunctions:
        """The steps of a segment; starts to compile those of the next. Raises what compiling raises."""
        future = self._futures.get(_shape(segment))
        if future is None:
            future = self._futures[_shape(segment)] = Future()
            self._compile(segment, future)
        steps = future.result()
        later = self._plan.timeline.segments[segment.index + 1 :]
        if later and later[0].first < self._end and _shape(later[0]) not in self._futures:
            self._futures[_shape(later[0])] = Future()
            # A daemon: a run that is stopped does not wait for what it will not need.
            args = (later[0], self._futures[_shape(later[0])])
            threading.Thread(target=self._compile, args=args, name="jaxdl-compile", daemon=True).start()
        return steps

    def _compile(self, segment: Segment, future: Future[Any]) -> None:
        try:
            future.set_result(compile_steps(self._plan, segment))
        except BaseException as error:
            future.set_exception(error)


def _shape(segment: Segment) -> tuple[Any, ...]:
    """What compiled steps depend on."""
    phase = segment.phase
    return (segment.batch_size, phase and phase.size, phase and (phase.eval_size or phase.size))
