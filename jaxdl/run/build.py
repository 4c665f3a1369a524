"""The plan of a run: its experiment built and checked against the devices; its state and its compiled steps.

Nothing is compiled before everything that can be checked has been.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from jaxdl.cluster import start_devices, wait_for_all
from jaxdl.collectives.select import agree_on_kernels
from jaxdl.config import ConfigError
from jaxdl.data import DataSpec, PhotoSource, Source, Splits, TrainLoader
from jaxdl.exchange import (
    Auto,
    Dense,
    Exchange,
    ExchangeConfig,
    GradientLayout,
    backward_order,
    by_name,
    init_on_mesh,
    leaf_names,
)
from jaxdl.exchange.cost import Gradients
from jaxdl.experiment import LENGTH, Experiment, as_experiment
from jaxdl.kinds import without_source
from jaxdl.mesh import Axis, Device, batch_sharding, batch_ways, make_mesh, platform
from jaxdl.models import Network
from jaxdl.optim import Rates, Trainable, check_average, make_optimizer, make_trainable
from jaxdl.phases import Segment, Timeline, make_timeline
from jaxdl.report import Start
from jaxdl.run.initial import Initial
from jaxdl.run.length import steps_of
from jaxdl.run.overlap import loop_sum_dtype
from jaxdl.run.validate import (
    built_schedule,
    check_batches,
    check_memory,
    check_network,
    check_norms,
    check_phases,
    check_rates,
    check_tensor_dims,
    check_warmup,
    fitted_task,
    idle_exchange,
    idle_tensor,
    read_splits,
    task_inputs,
)
from jaxdl.sharding import STACKED, Layout, LogicalAxes, Params, grad_specs, is_names, named
from jaxdl.state import TrainState, make_state_spec
from jaxdl.step import Parts


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

    def batches(self, segment: Segment, start: int, num_steps: int) -> TrainLoader:
        """The training batches of some steps of a segment, from a position in the stream of examples on."""
        return TrainLoader(
            self.sources(segment)[0],
            batch_size=segment.batch_size,
            seed=self.experiment.seed,
            sharding=batch_sharding(self.parts.layout.mesh),
            start=start,
            num_steps=num_steps,
        )


def make_plan(
    experiment: Experiment,
    devices: Sequence[Device] | None = None,
    *,
    chosen: Callable[[], ExchangeConfig | None] = lambda: None,
    recorded: Callable[[], DataSpec | None] = lambda: None,
    started: Callable[[], None] = lambda: None,
    initial: Callable[[TrainState], tuple[Initial | None, str]] = lambda _: (None, ""),
    start: Start | None = None,
) -> Plan:
    """Starts the devices, reads the data and joins the parts. Raises ConfigError for everything that cannot be run.

    `devices` (default: all) are those of the mesh. All processes call `started` when JAX has started, then `chosen`,
    and `recorded`, which return the exchange that `auto` chose earlier in this workdir and the spec of its data, then
    `initial` (see `beginning`). `start` prints the progress and the findings.
    """
    experiment, start = as_experiment(experiment), start or Start(Console(quiet=True))
    if not any(getattr(experiment, name) for name in LENGTH):
        raise ConfigError("the length of the run is not set. Give --epochs or --steps.")
    with start.doing("starting the devices"):
        mesh = make_devices(experiment, devices)
    start.devices(mesh)
    started()
    before = chosen() if isinstance(experiment.exchange, Auto) else None
    eval_batch_size = experiment.evaluation.batch_size or experiment.batch_size
    check_batches(experiment, batch_ways(mesh), eval_batch_size)
    with start.doing("reading the data"):
        splits = read_splits(experiment.data, recorded())
    start.data(experiment.data, splits)
    check_phases(experiment, splits)
    epochs, phases = experiment.epochs, experiment.phases
    steps = experiment.steps or steps_of(experiment.tokens, experiment.batch_size, experiment.task, splits.train.spec)
    timeline = make_timeline(len(splits.train), experiment.batch_size, epochs=epochs, steps=steps, phases=phases)
    total_steps = timeline.total_steps
    profile_start = experiment.report.profile_start_step
    if profile_start is not None and profile_start >= total_steps:
        raise ConfigError(
            f"--report.profile-start-step {profile_start}: the run has {total_steps} steps, so nothing would be "
            "recorded. Choose a smaller one, or None."
        )
    check_warmup(experiment, total_steps)
    asked = experiment
    with start.doing("choosing the exchange" if isinstance(asked.exchange, Auto) else "tracing the model"):
        experiment, reasons = settled(asked, splits.train.spec, mesh, before)
        parts = make_parts(experiment, splits.train.spec, mesh, timeline)
    check_rates(experiment.schedule, parts.rates, timeline.scheduled_steps)
    check_memory(experiment, parts.state_spec, splits.train.spec)
    check_norms(experiment, mesh.shape[Axis.REPLICA], has_norms=bool(parts.network.norms))
    begin_with, note = initial(parts.state_spec.abstract())
    reasons += experiment.model.remarks(mesh, experiment.precision.dtype)
    reasons += idle_tensor(parts.network, mesh) + ((note,) if note else ())
    plan = Plan(experiment, parts, splits, timeline, eval_batch_size, asked, reasons, begin_with)
    _check_sizes(plan)
    return plan


def make_devices(experiment: Experiment, devices: Sequence[Device] | None = None) -> Mesh:
    """Starts JAX as the experiment asks and returns its mesh. Raises ConfigError when the devices do not suit it."""
    start_devices(experiment.mesh, experiment.cluster, experiment=without_source(experiment.model_dump(mode="json")))
    mesh = make_mesh(experiment.mesh, devices)
    experiment.precision.check(mesh.devices.flat[0].platform)
    experiment.compiler.check(platform(mesh), mesh.shape[Axis.REPLICA])
    experiment.compiler.keep_programs()
    return mesh


def make_parts(experiment: Experiment, spec: DataSpec, mesh: Mesh, timeline: Timeline) -> Parts:
    """All that steps are made of, for data that `spec` describes. Raises ConfigError for parts that do not fit."""
    if not spec.fits(experiment.model.modality):
        raise ConfigError(
            f"data {experiment.data.kind} is {spec.modality} ({spec.described()[1]}), but model "
            f"{experiment.model.kind} reads {experiment.model.modality}. {spec.advice(experiment.model.modality)}"
        )
    network = _network(experiment, spec)
    task = fitted_task(experiment.task, spec, _outputs(experiment, network, spec))
    check_network(experiment, network, spec, mesh.shape[Axis.REPLICA])
    check_tensor_dims(experiment.sharding, network)
    trainable = _trainable(experiment, network)
    optimizer = make_optimizer(experiment.optimizer, *_trained(experiment, network))
    layout = Layout(experiment.sharding, mesh)
    exchange = _make_exchange(experiment, network, spec, layout)
    state_spec = make_state_spec(
        layout,
        network,
        optimizer,
        exchange,
        experiment.precision,
        experiment.guard,
        use_ema=experiment.step.ema_decay is not None,
        trainable=trainable,
    )
    check_average(state_spec.shapes.opt_state, experiment.optimizer, experiment.step.ema_decay)
    return Parts(
        network=network,
        task=task,
        data_spec=spec,
        trainable=trainable,
        optimizer=optimizer,
        rates=make_rates(experiment, timeline),
        exchange=exchange,
        precision=experiment.precision,
        layout=layout,
        state_spec=state_spec,
        guard=experiment.guard,
        config=experiment.step,
        sum_dtype=loop_sum_dtype(experiment, network, mesh),
    )


def make_rates(experiment: Experiment, timeline: Timeline) -> Callable[[jax.typing.ArrayLike], Rates]:
    """The function from the number of updates made so far to the `Rates` of the next one; it can be traced.

    Raises ConfigError when the schedule does not fit the length of the run.
    """
    optimizer = experiment.optimizer
    length = {"total_steps": timeline.scheduled_steps, "steps_per_epoch": timeline.steps_per_epoch}
    learning_rate, cycle = built_schedule(experiment.schedule, peak=optimizer.learning_rate, **length)

    def rates(num_updates: jax.typing.ArrayLike) -> Rates:
        step, size = timeline.scheduled(num_updates)
        return Rates(learning_rate(step) * size, optimizer.momentum_at(cycle(step)))

    return rates


def settled(
    experiment: Experiment, spec: DataSpec, mesh: Mesh, chosen: ExchangeConfig | None = None
) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment with its exchange chosen, if it left that open, and the reasons; all processes call it alike.

    With one replica there is nothing to choose. `chosen` is the earlier choice, and is taken again, also with one
    replica: the state of the exchange must survive until there are several again.
    """
    auto = experiment.exchange
    one_replica = mesh.shape[Axis.REPLICA] == 1
    wanted = chosen or auto
    selects = not isinstance(wanted, ExchangeConfig) or bool(wanted.figures.methods)
    if selects and not one_replica and platform(mesh) == "gpu":
        agree_on_kernels()
    if not isinstance(auto, Auto):
        assert isinstance(auto, ExchangeConfig)
        return experiment, idle_exchange(auto) if one_replica else ()
    if chosen is not None:
        note = f"exchange: {chosen.label}, as chosen when the run began"
        return experiment.replaced({"exchange": chosen}), (note, *(idle_exchange(chosen) if one_replica else ()))
    if one_replica:
        dense = Dense(delay_steps=auto.delay_steps)
        return experiment.replaced({"exchange": dense}), ("exchange: one replica exchanges nothing",)
    gradients = exchanged_gradients(experiment, spec, mesh)
    wait_for_all()  # Gloo gives up when a process measures 30 s after another.
    found = auto.choose(gradients.shapes, gradients.layout, mesh)
    return experiment.replaced({"exchange": found.best}), found.reasons


def exchanged_gradients(experiment: Experiment, spec: DataSpec, mesh: Mesh) -> Gradients:
    """What the exchange of an experiment on a mesh is about, as the cost model takes it."""
    network = _network(experiment, spec)
    layout = Layout(experiment.sharding, mesh)
    axes, trained = _trained(experiment, network)
    shardings = by_name(named(mesh, grad_specs(layout, axes, trained)))
    shapes = {name: shardings[name].shard_shape(x.shape) for name, x in by_name(trained).items()}
    return Gradients(shapes, mesh.shape[Axis.REPLICA], _gradient_layout(experiment, network, spec, layout))


def _network(experiment: Experiment, spec: DataSpec) -> Network:
    inputs = task_inputs(experiment.task, spec, spec.blank())
    return experiment.model.network(inputs, **spec.sizes(), dtype=experiment.precision.dtype)


def _outputs(experiment: Experiment, network: Network, spec: DataSpec) -> Callable[[Any], Any]:
    """A function from a batch to the shapes of the network's outputs."""

    def forward(params: Any, model_state: Any, batch: Any) -> Any:
        inputs = experiment.task.inputs(batch, spec)
        return network.apply(params, model_state, *inputs, train=False, whole=experiment.task.takes_arrays)[0]

    def outputs(batch: Any) -> Any:
        return jax.eval_shape(forward, *jax.eval_shape(network.init, jax.random.key(0)), batch)

    return outputs


def _make_exchange(experiment: Experiment, network: Network, spec: DataSpec, layout: Layout) -> Exchange:
    """The exchange over the mesh's replicas; a single one has nobody to talk to."""
    config, num_replicas = experiment.exchange, layout.mesh.shape[Axis.REPLICA]
    assert isinstance(config, ExchangeConfig), "it has been chosen"
    gradients = _gradient_layout(experiment, network, spec, layout)
    _, trained = _trained(experiment, network)
    config.check({name: x.shape for name, x in by_name(trained).items()}, gradients, num_replicas)
    return config.build_single_replica(gradients) if num_replicas == 1 else config.build(gradients)


def _trainable(experiment: Experiment, network: Network) -> Trainable:
    return make_trainable(experiment.step.freeze, network.param_shapes, experiment.model.trained)


def _trained(experiment: Experiment, network: Network) -> tuple[LogicalAxes, Params]:
    """The logical axes and the shapes of the parameters that have gradients."""
    trainable = _trainable(experiment, network)
    return trainable.of(network.axes), trainable.of(network.param_shapes)


def _gradient_layout(experiment: Experiment, network: Network, spec: DataSpec, layout: Layout) -> GradientLayout:
    def loss(params: Any, batch: Any) -> jax.Array:
        inputs = experiment.task.inputs(batch, spec)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), network.state_shapes)
        outputs = network.apply(params, blank, *inputs, train=True)[0]
        return functools.reduce(jnp.add, [jnp.sum(x) for x in jax.tree.leaves(outputs)])

    several = layout.mesh.shape[Axis.REPLICA] > 1  # One replica sends nothing, in whatever order.
    trained_axes, trained = _trained(experiment, network)
    names = leaf_names(trained)
    axes = jax.tree.leaves(trained_axes, is_leaf=is_names)
    order = backward_order(loss, network.param_shapes, spec.blank()) if several else ()
    return GradientLayout(
        specs=by_name(grad_specs(layout, trained_axes, trained)),
        inner={axis: size for axis, size in layout.mesh.shape.items() if axis != Axis.REPLICA and size > 1},
        order=tuple(name for name in order if name in names),
        stacked=frozenset(name for name, one in zip(names, axes, strict=True) if STACKED in one),
    )


def _check_sizes(plan: Plan) -> None:
    """Raises ConfigError when the model does not take the images of a phase, or of the evaluation.

    Otherwise that would be seen when they come, hours later.
    """
    if not isinstance(plan.splits.train, PhotoSource):
        return
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


def make_initial_state(plan: Plan) -> TrainState:
    """The fresh train state of a plan, allocated already sharded; equal on every mesh.

    It has the parameters that the plan takes from another run.
    """
    spec, seed = plan.parts.state_spec, plan.experiment.seed
    # It runs once: on a CPU, compiling it with all optimizations takes many times longer than running it without.
    flag, given = "xla_backend_optimization_level", os.environ.get("XLA_FLAGS", "")
    options = {flag: 1} if jax.default_backend() == "cpu" and flag not in given else None
    make = jax.jit(lambda: spec.init(jax.random.key(seed)), out_shardings=spec.shardings, compiler_options=options)
    if plan.initial is None:
        return make()
    state = plan.initial.apply(make(), spec.abstract())
    if not plan.experiment.optimizer.checked:
        return state
    # An optimizer that jaxdl does not know may keep a copy of the initial parameters.
    trained, optimizer = plan.parts.trainable.of(state.params), plan.parts.optimizer
    return state.replace(opt_state=jax.jit(optimizer.init, out_shardings=spec.shardings.opt_state)(trained))


def make_exchange_state(plan: Plan) -> Any:
    """The fresh state of a plan's gradient exchange alone."""
    parts = plan.parts
    return jax.jit(
        lambda: init_on_mesh(
            parts.exchange,
            parts.trainable.of(parts.network.param_shapes),
            parts.state_spec.grads,
            parts.layout.mesh,
        ),
        out_shardings=parts.state_spec.shardings.exchange_state,
    )()
