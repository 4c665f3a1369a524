"""The compiled steps of a run's segments: the next ones are compiled while the current ones train."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax

from jaxdl.core.config import Config
from jaxdl.core.user_code import user_code
from jaxdl.data.phases import Segment
from jaxdl.optim import Constant
from jaxdl.parallel.compiler import Links, Options, compiled
from jaxdl.parallel.embedding import LocatedIds
from jaxdl.parallel.mesh import platform
from jaxdl.training.evaluation import EvalStep, NormStep, make_eval_step, make_norm_step
from jaxdl.training.rounds import RoundSteps, lowered_programs, make_local_step, make_own_eval_step
from jaxdl.training.run.plan.build import make_initial_state
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.state import TrainState, replicated
from jaxdl.training.step import Batch, Metrics, Parts, make_ahead_step, make_train_step
from jaxdl.training.step.lookup import locate_ids
from jaxdl.training.step.parts import IDS, NEXT

Shapes = Mapping[str, Any]
"""Names of the arrays of a batch -> their shapes and types."""


class Steps(Protocol):
    """The steps of a run: of replicas that are equal, `EachStep`; else `jaxdl.training.rounds.RoundSteps`."""

    def num_batches(self, step: int) -> int:
        """How many steps the next call takes, after `step` steps."""
        ...

    def restart(self) -> Steps:
        """The same, without a memory of earlier batches."""
        ...

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, Sequence[Metrics]]:
        """The state after a step on each batch, and the metrics of each; `step` steps have been taken before."""
        ...

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state with the parameters to evaluate, and to save; and what that shows of the replicas."""
        ...

    def apart(self, step: int) -> bool:
        """Whether replicas have other parameters than those to evaluate, after `step` steps."""
        ...


class EachStep:
    """The steps of replicas that agree in every step: one program, `make_train_step` of `jaxdl.training.step`.

    Where the ids of the next batch are sent ahead it is `make_ahead_step`, and where they are is kept between the
    steps. Nothing gets stale: that depends on no row.
    """

    def __init__(self, program: Callable[..., Any], parts: Parts) -> None:
        """`program` is compiled."""
        self._program, self._parts = program, parts
        self._locate: Callable[[Any], LocatedIds] = jax.jit(functools.partial(locate_ids, parts))
        self._located: tuple[int, LocatedIds] | None = None

    def restart(self) -> EachStep:
        """The same, without the ids of earlier batches."""
        return EachStep(self._program, self._parts)

    def num_batches(self, step: int) -> int:
        """One."""
        del step
        return 1

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, Sequence[Metrics]]:
        """The state after a step on the one batch, and the metrics of the step."""
        (batch,) = batches
        if not self._parts.sends_ids_ahead:
            state, metrics = self._program(state, batch)
            return state, [metrics]
        if self._located is None or self._located[0] != step:  # The first step, or one after steps that were skipped.
            self._located = step, self._locate(dict(batch))
        state, metrics, following = self._program(state, self._located[1], batch)
        self._located = step + 1, following
        return state, [metrics]

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state: it always has them."""
        return state, {}

    def apart(self, step: int) -> bool:
        """Never."""
        del step
        return False


class ForShapes:
    """A program that is compiled again when the first batch with other shapes of ids or tokens comes; it is last."""

    def __init__(self, compile: Callable[[Shapes], Any], first: Shapes) -> None:
        """`compile` makes the program for the shapes of a batch; that for the `first` is made now."""
        self._make, self._programs = compile, {_shapes(first): compile(first)}

    def __call__(self, *args: Any) -> Any:
        """Calls the program for these arguments."""
        key = _shapes(args[-1])
        if key not in self._programs:
            self._programs[key] = self._make({name: jax.typeof(x) for name, x in args[-1].items()})
        return self._programs[key](*args)


def _shapes(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(x.shape for name, x in sorted(batch.items()) if name.removeprefix(NEXT) in (IDS, "tokens"))


class StepFunctions(NamedTuple):
    """The compiled functions of a segment; calls with other shapes are errors."""

    train: Steps
    """The steps of the run."""
    evaluate: EvalStep
    """`jaxdl.training.evaluation.make_eval_step`."""
    evaluate_own: EvalStep | None
    """`jaxdl.training.rounds.make_own_eval_step`, if replicas have parameters of their own; else None."""
    norm: NormStep | None
    """`jaxdl.training.evaluation.make_norm_step`, where batch norm's statistics are estimated for each evaluation; else
    None."""
    notes: tuple[str, ...] = ()
    """What is to be said about the compiled programs."""

    def restart(self) -> StepFunctions:
        """The same for batches that do not follow those before, of this run or of another one with the same steps."""
        return self._replace(train=self.train.restart())


def compile_steps(plan: Plan, segment: Segment | None = None) -> StepFunctions:
    """The compiled steps of a segment (the first)."""
    token = _notes.set([])
    try:
        return _compile_steps(plan, segment or plan.timeline.segments[0])._replace(
            notes=tuple(dict.fromkeys(_notes.get()))
        )
    finally:
        _notes.reset(token)


_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("jaxdl_notes")
"""Notes on the programs that `compile_steps` compiles."""


def _compile_steps(plan: Plan, segment: Segment) -> StepFunctions:
    state = plan.parts.state_spec.abstract()

    def compile_evaluation(batch: Shapes) -> Any:
        return make_eval_step(plan.parts).lower(state.eval_params, state.eval_state, batch).compile()

    evaluating = ForShapes(compile_evaluation, plan.batch_shapes(segment, evaluating=True))
    norm = None
    if plan.experiment.evaluation.norm_batches is not None:
        batch = plan.batch_shapes(segment, evaluating=False)
        norm = make_norm_step(plan.parts).lower(state.eval_params, state.model_state, _key(plan), batch).compile()
    if not plan.parts.agreement.keeps_replicas:
        return StepFunctions(make_steps(plan, segment), evaluating, None, norm)
    replicas, trainable = state.own, plan.parts.trainable
    batch = plan.batch_shapes(segment, evaluating=True)
    evaluating_own = (
        make_own_eval_step(plan.parts)
        .lower(trainable.merged(replicas.params, state.params), replicas.model_state, batch)
        .compile()
    )
    return StepFunctions(compile_rounds(plan, segment), evaluating, evaluating_own, norm)


def _key(plan: Plan) -> jax.ShapeDtypeStruct:
    """A random key, as a shape."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(plan.parts.layout))


def make_steps(plan: Plan, segment: Segment | None = None) -> Steps:
    """The steps of replicas that agree in every step, compiled for a segment (the first)."""
    segment = segment or plan.timeline.segments[0]
    program = ForShapes(
        functools.partial(compile_train_step, plan, segment), plan.batch_shapes(segment, evaluating=False)
    )
    return EachStep(program, plan.parts)


def compile_train_step(plan: Plan, segment: Segment | None = None, batch: Shapes | None = None) -> jax.stages.Compiled:
    """The compiled train step of a segment of a plan (the first); of replicas that may differ, the local step.

    Its batches have the shapes `batch`: by default those of the first bucket, if features are jagged. Raises
    ConfigError for a compiler option that XLA does not know.
    """
    segment, parts = segment or plan.timeline.segments[0], plan.parts
    batch = batch or plan.batch_shapes(segment, evaluating=False)
    before: list[Any] = [parts.state_spec.abstract()]
    make = make_local_step if parts.agreement.keeps_replicas else make_train_step
    if parts.sends_ids_ahead:
        make = make_ahead_step
        before.append(jax.eval_shape(functools.partial(locate_ids, parts), batch))
    with user_code(plan.exchange.users_name):  # All else has been traced before.
        lowered = make(parts).lower(*before, batch)
    return _compile_lowered(plan, lowered)


def compile_rounds(plan: Plan, segment: Segment | None = None) -> RoundSteps:
    """The compiled steps, and merges, of replicas with parameters of their own, in a segment of a plan (the first).

    Raises ConfigError for a compiler option that XLA does not know.
    """
    with user_code(plan.exchange.users_name):
        return RoundSteps(*_rounds(plan, segment), compile=functools.partial(_compile_lowered, plan))


def programs_of(plan: Plan) -> dict[str, Callable[[], jax.stages.Compiled]]:
    """The programs of the first segment of a plan, by their names: one step, or those of `lowered_programs`.

    Each is compiled when it is called, which raises ConfigError for a compiler option that XLA does not know.
    """
    if not plan.parts.agreement.keeps_replicas:
        return {"step": lambda: compile_train_step(plan)}

    def compile_one(lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        with user_code(plan.exchange.users_name):
            lowered = lower()
        return _compile_lowered(plan, lowered)

    lowered = lowered_programs(*_rounds(plan))
    return {name: functools.partial(compile_one, lower) for name, lower in lowered.items()}


def _rounds(plan: Plan, segment: Segment | None = None) -> tuple[Parts, Any, tuple[int, int], int]:
    """The arguments of `lowered_programs` for a segment of a plan (the first)."""
    segment = segment or plan.timeline.segments[0]
    batch = plan.batch_shapes(segment, evaluating=False)
    return plan.parts, batch, (segment.first, segment.first + segment.num_steps), plan.total_steps


def _compile_lowered(plan: Plan, lowered: jax.stages.Lowered) -> Any:
    """A program of the plan's steps, compiled with the options and for the network of the plan."""
    axes, values = plan.parts.layout.mesh.shape, plan.experiment.compiler.values()
    program = compiled(lowered, values, axes, ordered_for(plan), own=own_options(plan))
    _notes.get([]).extend(program_notes(plan, program))
    return program


def program_notes(plan: Plan, program: jax.stages.Compiled) -> tuple[str, ...]:
    """What is to be said about a compiled program of a plan; raises ConfigError for `Precision.program_notes`."""
    if plan.parts.precision.fp8_size is None or platform(plan.parts.layout.mesh) != "gpu":
        return ()
    return plan.parts.precision.program_notes(program.as_text() or "")


def own_options(plan: Plan) -> Options:
    """XLA's options for the train step of a plan that jaxdl adds to the user's."""
    mesh = plan.parts.layout.mesh
    return plan.experiment.compiler.own(platform(mesh), mesh.shape)


def ordered_for(plan: Plan) -> Links | None:
    """The network for which XLA orders the train step of a plan; None where XLA alone decides on the order."""
    mesh = plan.parts.layout.mesh
    return plan.experiment.compiler.links(platform(mesh), mesh.shape)


class Programs:
    """The compiled steps of plans, one program for all plans and segments that have the same; see `program_key`.

    A run makes its own, unless it is inside `shared_programs`.
    """

    def __init__(self, compile: Callable[[Plan, Segment], StepFunctions] = compile_steps) -> None:
        """`compile` makes the steps of a segment."""
        self._make = compile
        self._futures: dict[str, Future[StepFunctions]] = {}
        self._initializers: dict[str, Callable[[int], TrainState]] = {}
        self._steps: dict[str, jax.stages.Compiled] = {}

    def initial_state(self, plan: Plan) -> TrainState:
        """`make_initial_state` of a plan; equal plans share its program."""
        key = program_key(plan, plan.timeline.segments[0])
        make = self._initializers.setdefault(key, plan.parts.state_spec.initializer())
        return make_initial_state(plan, make)

    def train_step(self, plan: Plan) -> jax.stages.Compiled:
        """`compile_train_step` of a plan; equal plans share it."""
        key = program_key(plan, plan.timeline.segments[0])
        if key not in self._steps:
            self._steps[key] = compile_train_step(plan)
        return self._steps[key]

    def ready(self, plan: Plan, segment: Segment) -> bool:
        """Whether the steps of a segment are compiled already, or are known not to compile."""
        future = self._futures.get(program_key(plan, segment))
        return future is not None and future.done()

    def of(self, plan: Plan, segment: Segment, end: int = 0) -> StepFunctions:
        """The steps of a segment; starts to compile those of the next if it begins before the step `end`.

        Not if several processes have to agree on their order: those are compiled when they are asked for. Raises what
        compiling raises.
        """
        key = program_key(plan, segment)
        future = self._futures.get(key)
        if future is None:
            future = self._futures[key] = Future()
            self._compile(plan, segment, future)
        steps = future.result()
        following = plan.timeline.segments[segment.index + 1 :]
        if following and following[0].first < end:
            self._start(plan, following[0])
        return steps

    def _start(self, plan: Plan, segment: Segment) -> None:
        if jax.process_count() > 1 and ordered_for(plan) is not None:
            return  # The processes agree on the order by collectives, which must not run beside those of the steps.
        key = program_key(plan, segment)
        if key not in self._futures:
            self._futures[key] = Future()
            # A daemon: a run that is stopped does not wait for what it will not need.
            args = (plan, segment, self._futures[key])
            threading.Thread(target=self._compile, args=args, name="jaxdl-compile", daemon=True).start()

    def _compile(self, plan: Plan, segment: Segment, future: Future[StepFunctions]) -> None:
        try:
            future.set_result(self._make(plan, segment))
        except BaseException as error:
            future.set_exception(error)


def program_key(plan: Plan, segment: Segment) -> str:
    """What the compiled steps of a segment depend on. Two runs with equal keys can use the same ones.

    That is all of the experiment but what only the host reads: when to report, save and evaluate, the seed, how many
    rollbacks there may be, and which rows leave a cache. The length counts where the learning rate or the momentum
    depends on it.
    """
    experiment, phase = plan.experiment, segment.phase
    config = experiment.model_dump(mode="json", exclude=_NOT_COMPILED)
    config["norms"] = experiment.evaluation.norm_batches is not None
    shapes = (segment.batch_size, plan.eval_batch_size, phase and phase.size, phase and (phase.eval_size or phase.size))
    constant = isinstance(experiment.schedule, Constant) and len(plan.timeline.segments) == 1
    constant = constant and getattr(experiment.optimizer, "momentum_at_peak", None) is None
    constant = constant and not experiment.agreement.keeps_replicas  # They merge at the end.
    length = plan.timeline.num_examples if constant else (plan.timeline.segments, plan.timeline.num_examples)
    # In a notebook a class or a function may get another body.
    classes = [id(type(part)) for _, part in experiment]
    classes += [id(value) for _, part in experiment if isinstance(part, Config) for _, value in part if callable(value)]
    mesh = plan.parts.layout.mesh
    devices = [device.id for device in mesh.devices.flat]
    return repr((config, classes, shapes, length, plan.parts.data_spec, mesh.shape, devices))


_NOT_COMPILED = {
    **dict.fromkeys(
        ("seed", "epochs", "steps", "phases", "report", "checkpoint", "evaluation", "export", "cluster"), True
    ),
    "guard": {"rollback_after", "max_rollbacks"},
    "embedding": {"cache": {"policy", "window", "folder"}},
}

_shared: list[Programs] = []


@contextlib.contextmanager
def shared_programs(these: Programs | None = None) -> Iterator[Programs]:
    """Context: the runs inside compile each program once, instead of each for itself, such as those of a sweep.

    They take `these`, by default new ones.
    """
    _shared.append(these or Programs())
    try:
        yield _shared[-1]
    finally:
        _shared.pop()


def programs() -> Programs:
    """Those of the innermost `shared_programs`, or new ones."""
    return _shared[-1] if _shared else Programs()
