"""From an experiment to the plan of its run: its devices, its data, its network, and the parts of its steps.

The run's steps are compiled, and its state is allocated, after everything that can be checked has been. Before that the
devices run only what `auto` measures, to choose a layout or an exchange, and tests of kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import without_source
from jaxdl.data import EXAMPLE_WEIGHT, DataSpec, PhotoSource, Splits, Stage
from jaxdl.data.phases import Timeline
from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.models.stacks import Dims
from jaxdl.optim import Rates, build_schedule, check_average, check_rates, keeps_average, make_optimizer
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import Axis, Device, batch_ways, make_mesh, platform
from jaxdl.parallel.sharding import Layout
from jaxdl.report import Start
from jaxdl.training.experiment import SETS_LENGTH, Experiment, as_experiment
from jaxdl.training.run.plan.data import RunData, copy_data, read_data
from jaxdl.training.run.plan.exchange import choose_exchange, loop_sum_dtype, make_exchange
from jaxdl.training.run.plan.fp8 import fp8_remarks
from jaxdl.training.run.plan.init_from import InitFrom, beginning
from jaxdl.training.run.plan.init_images import colour_remark
from jaxdl.training.run.plan.layout import ChosenLayout, choose_layout
from jaxdl.training.run.plan.length import timeline_of
from jaxdl.training.run.plan.memory import check_memory
from jaxdl.training.run.plan.network import TaskNetwork, in_stages, make_network
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.plan.remarks import settings_remarks
from jaxdl.training.run.plan.tables import make_tables
from jaxdl.training.run.plan.validate import (
    check_agreement,
    check_axes,
    check_batches,
    check_length,
    check_network,
    check_norms,
    check_phases,
    check_profile,
    check_shapes,
    check_table_settings,
    check_tensor_dims,
    check_warmup,
    fit_task,
    idle_axes,
)
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.state import TrainState, init_agreement, make_state_spec
from jaxdl.training.step import Parts


def make_plan(
    experiment: Experiment,
    devices: Sequence[Device] | None = None,
    *,
    workdir: Workdir | None = None,
    start: Start | None = None,
    splits: Splits | None = None,
    most_rows: int | None = None,
) -> Plan:
    """Starts the devices, reads the data and makes the parts. Raises ConfigError for everything that cannot be run.

    It is for programs that need a plan without a run; `train` calls `open_mesh`, `open_data` and `join` itself.

    Args:
      experiment: what would be trained.
      devices: the devices of the mesh; all by default.
      workdir: the run's folder, with its earlier choices (layout, exchange, data), which are used again. `Workdir()`: a
        run without a folder. None: no run, so `--plan auto` is an error.
      start: prints progress, and facts about the run.
      splits: the data, instead of those that the experiment would read.
      most_rows: upper limit for the rows of each embedding table, for steps that are compiled or timed alone; larger
        tables are cut.
    """
    start = start or Start(Console(quiet=True))
    planned, mesh = open_mesh(as_experiment(experiment), devices, start, workdir)
    workdir = workdir or Workdir()
    data = open_data(planned.experiment, mesh, start, workdir, splits=splits)
    return join(planned, mesh, data, start, workdir, most_rows)


def open_mesh(
    experiment: Experiment, devices: Sequence[Device] | None, start: Start, workdir: Workdir | None
) -> tuple[ChosenLayout, Mesh]:
    """The experiment in its layout, planned if it has `--plan auto`, and its mesh. It starts JAX.

    `workdir` is None for a program that trains no run. Raises ConfigError when the devices do not suit the experiment.
    """
    if not any(getattr(experiment, name) for name in SETS_LENGTH):
        raise ConfigError("the length of the run is not set. Give --epochs or --steps.")
    planned = choose_layout(experiment, devices, start, workdir)
    with start.doing("starting the devices"):
        mesh = start_mesh(planned.experiment, devices)
    start.devices(mesh)
    return planned, mesh


def open_data(
    experiment: Experiment,
    mesh: Mesh,
    start: Start,
    workdir: Workdir,
    *,
    splits: Splits | None = None,
    stage: Stage | None = None,
) -> RunData:
    """The examples, copied to the disk of this node first if there is a `stage`, and the length of the run on them.

    Raises ConfigError for data that cannot be read, and for batches, phases and lengths that do not fit them.
    """
    eval_batch_size = experiment.evaluation.batch_size or experiment.batch_size
    check_axes(experiment, mesh.shape)
    check_batches(experiment, batch_ways(mesh), eval_batch_size)
    with start.doing("reading the data"):
        data = experiment.data
        if stage is not None:
            data = copy_data(data, stage)
            start.fact("data", f"read from copies in {stage.given}")
        splits = splits or read_data(data, workdir)
    start.data(experiment.data, splits)
    check_length(splits.train.spec, mesh.shape)
    check_phases(experiment, splits)
    check_shapes(experiment, splits)
    timeline = timeline_of(experiment, len(splits.train), splits.train.spec)
    check_profile(experiment, timeline.total_steps)
    check_warmup(experiment, timeline.total_steps)
    return RunData(splits, timeline, eval_batch_size)


def join(
    planned: ChosenLayout,
    mesh: Mesh,
    data: RunData,
    start: Start,
    workdir: Workdir,
    most_rows: int | None = None,
) -> Plan:
    """The plan: the exchange, the network, and the parts of the steps, checked together.

    Raises ConfigError for everything that cannot be run.
    """
    experiment, timeline, num_replicas = planned.experiment, data.timeline, mesh.shape[Axis.REPLICA]
    spec = data.splits.train.spec
    left_open = isinstance(experiment.exchange, Auto)  # --exchange auto.
    earlier = workdir.read_exchange() if left_open else None
    with start.doing("choosing the exchange" if left_open else "tracing the model"):
        exchange, reasons = choose_exchange(experiment, spec, mesh, earlier)
        experiment = experiment.replaced({"exchange": exchange}) if left_open else experiment
        parts = make_parts(experiment, spec, mesh, timeline, most_rows, workdir.read_stacks())
    check_rates(experiment.schedule, parts.rates, timeline.scheduled_steps)
    largest = max(segment.batch_size for segment in timeline.segments)
    check_memory(experiment.model, parts.state_spec, spec, largest, parts.tables)
    check_norms(experiment, num_replicas, has_norms=bool(parts.network.norms))
    averages = keeps_average(parts.state_spec.opt_shapes)  # As schedule-free optimizers do.
    check_agreement(experiment, num_replicas, timeline.total_steps, averages=averages)
    if EXAMPLE_WEIGHT in spec.blank() and experiment.agreement.keeps_replicas:
        # A replica with heavy rows has moved further already, and would count more in the average of replicas too.
        raise ConfigError(
            f"--data.weight with --agreement {experiment.agreement.kind}: averages of replicas do not take weights. "
            "Take --agreement every_step, or leave the weights out."
        )
    # Lines that the run prints when it starts.
    reasons += experiment.model.remarks(mesh, experiment.precision.dtype) + fp8_remarks(parts)
    reasons += experiment.agreement.remarks(timeline.total_steps, num_replicas) + planned.notes
    start_over = experiment.checkpoint.start_over
    reasons += settings_remarks(parts, experiment.optimizer, timeline, start_over=start_over)
    reasons += idle_axes(parts.network, mesh)
    plan = Plan(experiment, parts, **vars(data), asked=planned.asked, reasons=reasons, kept=planned.kept)
    _check_sources(plan)
    return plan


def add_initial(plan: Plan, init: InitFrom | None, workdir: Workdir) -> Plan:
    """The plan with what its run takes from another run when it begins; in a workdir as it did when it began there.

    Raises ConfigError for what cannot be taken, on all processes.
    """
    abstract, start_over = plan.parts.state_spec.filled(), plan.experiment.checkpoint.start_over
    spec, model = plan.parts.data_spec, plan.experiment.model
    initial, note = beginning(workdir.path, init, start_over, abstract, model=model, spec=spec)
    notes = [note, "" if initial is None else colour_remark(initial.workdir, spec)]
    if plan.parts.task.needs_reference and initial is None:
        notes.append("the reference is a network of random numbers; give --init-from, the workdir of a trained one")
    return dataclasses.replace(plan, initial=initial, reasons=(*plan.reasons, *filter(None, notes)))


def start_mesh(experiment: Experiment, devices: Sequence[Device] | None = None) -> Mesh:
    """Starts JAX as the experiment asks and returns its mesh. Raises ConfigError when the devices do not suit it."""
    start_devices(experiment.mesh, experiment.cluster, experiment=without_source(experiment.model_dump(mode="json")))
    mesh = make_mesh(experiment.mesh, devices)
    experiment.precision.check(mesh.devices.flat[0])
    experiment.compiler.check(platform(mesh), mesh.shape)
    experiment.compiler.keep_programs()  # JAX's cache of compiled programs.
    return mesh


def make_parts(
    experiment: Experiment,
    spec: DataSpec,
    mesh: Mesh,
    timeline: Timeline,
    most_rows: int | None = None,
    stacks: Mapping[str, Dims] | None = None,
) -> Parts:
    """What steps are made of, for data that `spec` describes. Raises ConfigError for parts that do not fit.

    `Parts` says what each is for. Embedding tables have at most `most_rows` rows; `stacks`, the parameters stacked over
    layers, are those recorded in the workdir, see `make_network`.
    """
    num_replicas, agreement, step = mesh.shape[Axis.REPLICA], experiment.agreement, experiment.step
    room, fitted = in_stages(fit_network(experiment, spec, num_replicas, stacks), experiment, mesh)
    optimizer = make_optimizer(experiment.optimizer, *fitted.trained)
    layout = Layout(experiment.sharding, mesh, stage_layers=room)
    gradients = fitted.gradient_layout(layout, agreement)
    fragments = fitted.fragments(agreement, gradients)  # What is merged in turn; None if replicas agree in every step.
    assert isinstance(experiment.exchange, ExchangeConfig), "it has been chosen"
    exchange = make_exchange(experiment.exchange, fitted.trained_shapes, gradients, fragments, num_replicas)
    check_table_settings(experiment, spec, mesh.size, has_tables=bool(fitted.tables))
    tables = make_tables(fitted.tables, experiment.embedding, spec, mesh, most_rows)
    state_spec = make_state_spec(
        layout,
        fitted.network,
        optimizer,
        exchange,
        precision=experiment.precision,
        guard=experiment.guard,
        agreement=agreement,
        use_ema=step.ema_decay is not None,
        trainable=fitted.trainable,
        fragments=fragments,
        sums=() if fragments is None else fitted.sum_names(),
        tables=tables,
    )
    if fitted.task.needs_reference:
        state_spec = state_spec.with_reference(fitted.trainable, mesh)
    check_average(state_spec.opt_shapes, experiment.optimizer, step.ema_decay)
    return Parts(
        network=fitted.network,
        task=fitted.task,
        data_spec=spec,
        trainable=fitted.trainable,
        optimizer=optimizer,
        rates=make_rates(experiment, timeline),
        exchange=exchange,
        precision=experiment.precision,
        guard=experiment.guard,
        agreement=agreement,
        layout=layout,
        state_spec=state_spec,
        config=step,
        fragments=fragments,
        joint_exchange=None if fragments is None else Dense().build(gradients),
        tables=tables,
        sum_dtype=loop_sum_dtype(experiment, fitted.network, mesh),
    )


def fit_network(
    experiment: Experiment, spec: DataSpec, num_replicas: int, stacks: Mapping[str, Dims] | None = None
) -> TaskNetwork:
    """The network of an experiment, and its task, for data that `spec` describes.

    Raises ConfigError for a model, a task or a setting that does not fit them.
    """
    model = experiment.model
    if not spec.fits(model.modality):
        raise ConfigError(
            f"data {experiment.data.kind} is {spec.modality} ({spec.described()[1]}), but model {model.kind} reads "
            f"{model.modality}. {spec.advice(model.modality)}"
        )
    if experiment.precision.fp8_size is not None and not model.has_fp8:
        raise ConfigError(
            f"--precision {experiment.precision.kind}: it is for stacked layers of model transformer (scan_layers), "
            f"and model {model.kind} has none here. Take --precision bfloat16."
        )
    network = make_network(
        model,
        experiment.task,
        spec,
        dtype=experiment.precision.dtype,
        freeze=experiment.step.freeze,
        embedding=experiment.embedding,
        stacks=stacks,
    )
    task = fit_task(experiment.task.of_members(model.trained_members), spec, network.output_shapes)
    if model.adds_to_loss and (task.takes_arrays or task.users_name):
        raise ConfigError(
            f"model {model.kind} has a loss for its router, which the task {task.kind} would leave out. Take jaxdl's "
            "language_modelling, or --model.balance bias without --model.router-z-loss."
        )
    check_network(experiment, network.network, spec, num_replicas)
    check_tensor_dims(experiment.sharding, network.network)
    return dataclasses.replace(network, task=task)


def make_rates(experiment: Experiment, timeline: Timeline) -> Callable[[jax.typing.ArrayLike], Rates]:
    """The function from the number of updates made so far to the `Rates` of the next one; it can be traced.

    Raises ConfigError when the schedule does not fit the length of the run.
    """
    optimizer = experiment.optimizer
    length = {"total_steps": timeline.scheduled_steps, "steps_per_epoch": timeline.steps_per_epoch}
    learning_rate, cycle = build_schedule(experiment.schedule, peak=optimizer.learning_rate, **length)

    def rates(num_updates: jax.typing.ArrayLike) -> Rates:
        # `step` counts steps of the run's own batch size. Where phases change the batch size, the learning rate grows
        # with it (Goyal et al. 2017): by `batch_ratio`, that of the next step's batch size to the run's own.
        step, batch_ratio = timeline.scheduled(num_updates)
        return Rates(learning_rate(step) * batch_ratio, optimizer.momentum_at(cycle(step)))

    return rates


def _check_sources(plan: Plan) -> None:
    """Raises ConfigError when the model does not take the images of a phase, or of the evaluation.

    Without this check the run would fail hours later, when that phase begins.
    """
    if plan.caches is not None:  # Raises for settings that do not fit.
        plan.caches.check_evaluation(plan.splits.test, plan.eval_batch_size)
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


def make_initial_state(plan: Plan, make: Callable[[int], TrainState] | None = None) -> TrainState:
    """The fresh train state of a plan, allocated already sharded; equal on every mesh.

    It has the parameters that the plan takes from another run. `make` is the `StateSpec.make` of an equal plan.
    """
    spec = plan.parts.state_spec
    if plan.caches is not None:  # The rows of embedding tables in host memory.
        plan.caches.store.init(jax.random.key(plan.experiment.seed))
    state = (make or spec.make)(plan.experiment.seed)
    if plan.initial is None:
        return state
    state = plan.initial.apply(state, spec.abstract(), spec.filled_shapes)
    if state.reference:
        state = state.replace(reference=jax.tree.map(jnp.copy, plan.parts.trainable.of(state.params)))
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
    replica = jax.tree.map(lambda x: x[0], state.own)
    trained = parts.trainable.of(state.params)
    start = dataclasses.replace(
        replica, params=trained, model_state=state.model_state, opt_state=parts.optimizer.init(trained)
    )
    num_replicas = parts.layout.mesh.shape[Axis.REPLICA]
    sums = tuple(replica.since["sums"])  # The names of the task's sums since the last merge.
    return state.replace(agreement_state=init_agreement(parts.agreement, start, num_replicas, sums))


def make_exchange_state(plan: Plan) -> Any:
    """The fresh state of a plan's gradient exchange alone."""
    spec = plan.parts.state_spec
    return jax.jit(spec.init_exchange, out_shardings=spec.shardings.exchange_state)()
