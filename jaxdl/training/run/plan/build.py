"""The plan of a run: its experiment built and checked against the devices; its state and its compiled steps.

Nothing is compiled before everything that can be checked has been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import without_source
from jaxdl.data import Data, DataSpec, PhotoSource, Source, Splits, TrainLoader
from jaxdl.data.phases import Segment, Timeline, make_timeline
from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.models.stacks import Dims
from jaxdl.optim import Rates, build_schedule, check_average, check_rates, keeps_average, make_optimizer
from jaxdl.parallel.cluster import start_devices, wait_for_all
from jaxdl.parallel.collectives.select import KERNELS
from jaxdl.parallel.mesh import Axis, Device, batch_sharding, batch_ways, make_mesh, platform
from jaxdl.parallel.sharding import Layout
from jaxdl.report import Start
from jaxdl.training.experiment import LENGTH, Experiment, as_experiment
from jaxdl.training.run.plan.exchange import (
    exchanged_gradients,
    fragments_of,
    gradient_layout,
    make_exchange,
    make_network,
    make_tables,
    output_shapes,
    sum_names,
    trainable_of,
    trained_of,
)
from jaxdl.training.run.plan.init_from import Initial
from jaxdl.training.run.plan.layout import with_plan
from jaxdl.training.run.plan.length import steps_of
from jaxdl.training.run.plan.memory import check_memory
from jaxdl.training.run.plan.overlap import loop_sum_dtype
from jaxdl.training.run.plan.remarks import settings_remarks
from jaxdl.training.run.plan.validate import (
    check_agreement,
    check_batches,
    check_candidates,
    check_network,
    check_norms,
    check_phases,
    check_profile,
    check_tensor_dims,
    check_warmup,
    fitted_task,
    idle_axes,
    idle_exchange,
    read_splits,
)
from jaxdl.training.run.tables.cached_tables import Caches, make_caches
from jaxdl.training.run.tables.jagged_batches import in_training, shapes_of
from jaxdl.training.run.workdir.kept_layout import Kept
from jaxdl.training.state import TrainState, init_agreement, make_state_spec
from jaxdl.training.step import Parts


@dataclass(frozen=True)
class Plan:
    """A run, ready to be compiled: every config built and checked against the devices, nothing allocated on them."""

    experiment: Experiment
    parts: Parts
    splits: Splits
    timeline: Timeline
    eval_batch_size: int
    asked: Experiment
    """The experiment as it was given; in `experiment` the exchange has been chosen, where that was left open."""
    reasons: tuple[str, ...] = ()
    """Why this exchange was chosen, or that with one replica it sends nothing; other notes for the user."""
    initial: Initial | None = None
    """What the run takes from another run when it begins at step 0."""
    kept: Kept | None = None
    """The layout that was planned for it."""
    may_change: tuple[str, ...] = ()
    """The fields whose values may be others than those in the workdir, see
    `jaxdl.training.run.plan.changed_settings`."""

    @property
    def exchange(self) -> ExchangeConfig:
        """The exchange, which has been chosen."""
        assert isinstance(self.experiment.exchange, ExchangeConfig)
        return self.experiment.exchange

    @property
    def total_steps(self) -> int:
        """Length of the run."""
        return self.timeline.total_steps

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """How many devices each axis of the mesh has."""
        return {axis.value: self.parts.layout.mesh.shape[axis.value] for axis in Axis}

    def sources(self, segment: Segment) -> tuple[Source, Source]:
        """The training and the held-out examples as a segment of the run sees them."""
        phase = segment.phase
        if phase is None:
            return self.splits.train, self.splits.test
        train, test = self.splits.train, self.splits.test
        assert isinstance(train, PhotoSource)
        assert isinstance(test, PhotoSource)
        return train.at(size=phase.size, min_scale=phase.min_scale), test.at(size=phase.eval_size or phase.size)

    @functools.cached_property
    def caches(self) -> Caches | None:
        """The embedding tables that the host holds. Raises ConfigError for settings that do not fit."""
        return make_caches(self.experiment, self.parts.tables, self.splits.train.spec)

    def open(self, warn: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        """`warn` gets the warnings of the sources; what they open is closed by `stack`."""
        for source in (self.splits.train, self.splits.test):
            source.on_warning(warn)
            stack.callback(source.close)
        if self.caches is not None:
            stack.callback(self.caches.close)

    def swapped(self, state: TrainState, num_batches: int) -> TrainState:
        """The state, which is donated, with the rows of tables that the next batches need."""
        return state if self.caches is None else self.caches.swapped(state, num_batches)

    def batches(self, segment: Segment, start: int, num_steps: int, state: TrainState | None = None) -> TrainLoader:
        """The training batches of some steps of a segment, from a position in the stream of examples on.

        They are for steps from `state` on: see `swapped`.
        """
        source = original = self.sources(segment)[0]
        where = {"batch_size": segment.batch_size, "seed": self.experiment.seed, "start": start}
        if self.caches is not None and state is not None:
            source = self.caches.begin(state, source, **where)
        source = in_training(self.parts.tables, source, original, **where)
        return TrainLoader(source, sharding=batch_sharding(self.parts.layout.mesh), num_steps=num_steps, **where)

    def batch_shapes(self, segment: Segment, *, evaluating: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a batch of a segment; those with jagged features may have more ids."""
        source = self.sources(segment)[evaluating]
        size = self.eval_batch_size if evaluating else segment.batch_size
        return shapes_of(self.parts.tables, source.batch_shapes(size, evaluating=evaluating), evaluating=evaluating)


def make_plan(
    experiment: Experiment,
    devices: Sequence[Device] | None = None,
    *,
    chosen: Callable[[], ExchangeConfig | None] = lambda: None,
    recorded: Callable[[], DataSpec | None] = lambda: None,
    stacks: Callable[[], Mapping[str, Dims] | None] = lambda: None,
    started: Callable[[], None] = lambda: None,
    initial: Callable[[TrainState], tuple[Initial | None, str]] = lambda _: (None, ""),
    start: Start | None = None,
    stored: Callable[[], Kept | None] | None = None,
    read: Callable[[Data, DataSpec | None], Splits] = read_splits,
    most_rows: int | None = None,
) -> Plan:
    """Starts the devices, reads the data and joins the parts. Raises ConfigError for everything that cannot be run.

    `devices` (default: all) are those of the mesh. All processes call `stored` (see `with_plan`), `started` when JAX
    has started, `chosen`, `recorded` and `stacks`, which return what this workdir has: the exchange that `auto` chose,
    the spec of its data, its network's stacks; then `initial` (see `beginning`). `start` prints progress and findings;
    `read` reads. Embedding tables with more than `most_rows` have so many, for steps that are compiled or timed alone.
    """
    experiment, start = as_experiment(experiment), start or Start(Console(quiet=True))
    if not any(getattr(experiment, name) for name in LENGTH):
        raise ConfigError("the length of the run is not set. Give --epochs or --steps.")
    asked, (experiment, notes, kept) = experiment, with_plan(experiment, devices, chosen, stored, start)
    with start.doing("starting the devices"):
        mesh = make_devices(experiment, devices)
    start.devices(mesh)
    started()
    before = chosen() if isinstance(experiment.exchange, Auto) else None
    eval_batch_size = experiment.evaluation.batch_size or experiment.batch_size
    check_batches(experiment, batch_ways(mesh), eval_batch_size)
    with start.doing("reading the data"):
        splits = read(experiment.data, recorded())
    start.data(experiment.data, splits)
    check_phases(experiment, splits)
    steps = experiment.steps or steps_of(experiment.tokens, experiment.batch_size, experiment.task, splits.train.spec)
    length: dict[str, Any] = {"epochs": experiment.epochs, "steps": steps, "phases": experiment.phases}
    timeline = make_timeline(len(splits.train), experiment.batch_size, **length)
    total_steps = timeline.total_steps
    check_profile(experiment, total_steps)
    check_warmup(experiment, total_steps)
    with start.doing("choosing the exchange" if isinstance(experiment.exchange, Auto) else "tracing the model"):
        experiment, reasons = settled(experiment, splits.train.spec, mesh, before)
        parts = make_parts(experiment, splits.train.spec, mesh, timeline, most_rows, stacks())
    check_rates(experiment.schedule, parts.rates, timeline.scheduled_steps)
    check_memory(experiment, parts.state_spec, splits.train.spec, parts.tables)
    num_replicas = mesh.shape[Axis.REPLICA]
    check_norms(experiment, num_replicas, has_norms=bool(parts.network.norms))
    check_agreement(experiment, num_replicas, total_steps, averages=keeps_average(parts.state_spec.opt_shapes))
    begin_with, note = initial(parts.state_spec.abstract())
    reasons += experiment.model.remarks(mesh, experiment.precision.dtype)
    reasons += experiment.agreement.remarks(total_steps, num_replicas) + notes
    reasons += settings_remarks(experiment, parts, num_replicas)
    reasons += idle_axes(parts.network, mesh) + ((note,) if note else ())
    return _checked(Plan(experiment, parts, splits, timeline, eval_batch_size, asked, reasons, begin_with, kept))


def make_devices(experiment: Experiment, devices: Sequence[Device] | None = None) -> Mesh:
    """Starts JAX as the experiment asks and returns its mesh. Raises ConfigError when the devices do not suit it."""
    start_devices(experiment.mesh, experiment.cluster, experiment=without_source(experiment.model_dump(mode="json")))
    mesh = make_mesh(experiment.mesh, devices)
    experiment.precision.check(mesh.devices.flat[0].platform)
    experiment.compiler.check(platform(mesh), mesh.shape[Axis.REPLICA])
    experiment.compiler.keep_programs()
    return mesh


def make_parts(
    experiment: Experiment,
    spec: DataSpec,
    mesh: Mesh,
    timeline: Timeline,
    most_rows: int | None = None,
    stacks: Mapping[str, Dims] | None = None,
) -> Parts:
    """All that steps are made of, for data that `spec` describes. Raises ConfigError for parts that do not fit.

    `most_rows`: see `make_plan`; `stacks`: see `make_network`.
    """
    if not spec.fits(experiment.model.modality):
        raise ConfigError(
            f"data {experiment.data.kind} is {spec.modality} ({spec.described()[1]}), but model "
            f"{experiment.model.kind} reads {experiment.model.modality}. {spec.advice(experiment.model.modality)}"
        )
    network = make_network(experiment, spec, stacks)
    settings: dict[str, Any] = {name: getattr(experiment, name) for name in ("precision", "guard", "agreement")}
    task = fitted_task(experiment.task, spec, output_shapes(experiment, network, spec))
    check_network(experiment, network, spec, mesh.shape[Axis.REPLICA])
    check_tensor_dims(experiment.sharding, network)
    trainable = trainable_of(experiment, network)
    optimizer = make_optimizer(experiment.optimizer, *trained_of(experiment, network))
    layout = Layout(experiment.sharding, mesh)
    gradients = gradient_layout(experiment, network, spec, layout)
    fragments = fragments_of(experiment, network, gradients)
    exchange = make_exchange(experiment, network, gradients, fragments, mesh.shape[Axis.REPLICA])
    tables = make_tables(experiment, spec, mesh, most_rows)
    state_spec = make_state_spec(
        layout,
        network,
        optimizer,
        exchange,
        **settings,
        use_ema=experiment.step.ema_decay is not None,
        trainable=trainable,
        fragments=fragments,
        sums=() if fragments is None else sum_names(task, spec, output_shapes(experiment, network, spec)),
        tables=tables,
    )
    check_average(state_spec.opt_shapes, experiment.optimizer, experiment.step.ema_decay)
    return Parts(
        network=network,
        task=task,
        data_spec=spec,
        trainable=trainable,
        optimizer=optimizer,
        rates=make_rates(experiment, timeline),
        exchange=exchange,
        **settings,
        layout=layout,
        state_spec=state_spec,
        config=experiment.step,
        fragments=fragments,
        joint_exchange=None if fragments is None else Dense().build(gradients),
        tables=tables,
        sum_dtype=loop_sum_dtype(experiment, network, mesh),
    )


def make_rates(experiment: Experiment, timeline: Timeline) -> Callable[[jax.typing.ArrayLike], Rates]:
    """The function from the number of updates made so far to the `Rates` of the next one; it can be traced.

    Raises ConfigError when the schedule does not fit the length of the run.
    """
    optimizer = experiment.optimizer
    length = {"total_steps": timeline.scheduled_steps, "steps_per_epoch": timeline.steps_per_epoch}
    learning_rate, cycle = build_schedule(experiment.schedule, peak=optimizer.learning_rate, **length)

    def rates(num_updates: jax.typing.ArrayLike) -> Rates:
        step, size = timeline.scheduled(num_updates)
        return Rates(learning_rate(step) * size, optimizer.momentum_at(cycle(step)))

    return rates


def settled(
    experiment: Experiment, spec: DataSpec, mesh: Mesh, chosen: ExchangeConfig | None = None
) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment with its exchange chosen, if it left that open, and the reasons; all processes call it alike.

    With one replica there is nothing to choose, but `chosen`, the earlier choice, is taken again: the state of the
    exchange must survive until there are several replicas again.
    """
    auto = experiment.exchange
    one_replica = mesh.shape[Axis.REPLICA] == 1
    wanted = chosen or auto
    selects = not isinstance(wanted, ExchangeConfig) or bool(wanted.figures.methods)
    if selects and not one_replica and platform(mesh) == "gpu":
        KERNELS.agree()
    if not isinstance(auto, Auto):
        assert isinstance(auto, ExchangeConfig)
        return experiment, idle_exchange(auto) if one_replica else ()
    if chosen is not None:
        note = f"exchange: {chosen.label}, as chosen when the run began"
        return experiment.replaced({"exchange": chosen}), (note, *(idle_exchange(chosen) if one_replica else ()))
    if one_replica:
        dense = Dense(delay_steps=auto.delay_steps)
        return experiment.replaced({"exchange": dense}), ("exchange: one replica exchanges nothing",)
    check_candidates(auto, experiment.agreement, mesh.shape[Axis.REPLICA])
    gradients = exchanged_gradients(experiment, spec, mesh)
    wait_for_all()  # Gloo gives up when a process measures 30 s after another.
    found = auto.choose(gradients.shapes, gradients.layout, mesh, experiment.agreement)
    return experiment.replaced({"exchange": found.best}), found.reasons


def _checked(plan: Plan) -> Plan:
    """The plan. Raises ConfigError when the model does not take the images of a phase, or of the evaluation.

    Otherwise that would be seen when they come, hours later.
    """
    if plan.caches is not None:  # Raises for settings that do not fit.
        plan.caches.check_evaluation(plan.splits.test, plan.eval_batch_size)
    if not isinstance(plan.splits.train, PhotoSource):
        return plan
    state = plan.parts.state_spec.abstract()
    for segment in plan.timeline.segments:
        for source, evaluating in zip(plan.sources(segment), (False, True), strict=True):
            batch = source.batch_shapes(segment.batch_size, evaluating=evaluating)
            inputs = jax.eval_shape(lambda batch, spec=source.spec: plan.parts.task.inputs(batch, spec), batch)
            apply = functools.partial(plan.parts.network.apply, train=not evaluating)
            try:
                jax.eval_shape(apply, state.params, state.model_state, *inputs)
            except (ConfigError, ValueError, TypeError) as error:
                where = "photos" if segment.phase is None else f"phases.{segment.index}"
                size = batch["image"].shape[1]
                raise ConfigError(
                    f"{where}: the model does not take images of {size} x {size} pixels ({error}). Choose another size."
                ) from None
    return plan


def make_initial_state(plan: Plan) -> TrainState:
    """The fresh train state of a plan, allocated already sharded; equal on every mesh.

    It has the parameters that the plan takes from another run.
    """
    spec = plan.parts.state_spec
    if plan.caches is not None:
        plan.caches.store.init(jax.random.key(plan.experiment.seed))
    state = spec.make(plan.experiment.seed)
    if plan.initial is None:
        return state
    state = plan.initial.apply(state, spec.abstract())
    if plan.parts.agreement.keeps_replicas:
        restart = jax.jit(
            functools.partial(_with_equal_replicas, plan.parts), donate_argnums=0, out_shardings=spec.shardings
        )
        return restart(state)
    if not plan.experiment.optimizer.checked:
        return state
    # An optimizer that jaxdl does not know may keep a copy of the initial parameters.
    trained, optimizer = plan.parts.trainable.of(state.params), plan.parts.optimizer
    return state.replace(opt_state=jax.jit(optimizer.init, out_shardings=spec.shardings.opt_state)(trained))


def _with_equal_replicas(parts: Parts, state: TrainState) -> TrainState:
    """A fresh state whose replicas all begin with its parameters and model state."""
    own = jax.tree.map(lambda x: x[0], state.own)
    trained = parts.trainable.of(state.params)
    start = dataclasses.replace(
        own, params=trained, model_state=state.model_state, opt_state=parts.optimizer.init(trained)
    )
    num_replicas = parts.layout.mesh.shape[Axis.REPLICA]
    sums = tuple(own.since["sums"])
    return state.replace(agreement_state=init_agreement(parts.agreement, start, num_replicas, sums))


def make_exchange_state(plan: Plan) -> Any:
    """The fresh state of a plan's gradient exchange alone."""
    spec = plan.parts.state_spec
    return jax.jit(spec.init_exchange, out_shardings=spec.shardings.exchange_state)()
