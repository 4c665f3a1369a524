"""What is checked of an experiment before anything is compiled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import user_code
from jaxdl.data import DataSpec, PhotoSource, Splits, TextSpec
from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.exchange.agreement import Agreement, check_exchange
from jaxdl.models import Network
from jaxdl.models.mode_check import check_evaluation
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.embedding.jagged import is_jagged
from jaxdl.parallel.mesh import BATCH_AXES, LENGTH_AXES, MODEL_AXES, RARE_AXES, Axis
from jaxdl.parallel.sharding import STACKED, UNNAMED, UNNAMED_STACK, ShardingConfig, has_names, is_names
from jaxdl.parallel.zigzag import length_unit
from jaxdl.training.experiment import Experiment
from jaxdl.training.step.turns import room_for_layers
from jaxdl.training.tasks import Task, check_task


def task_inputs(task: Task, spec: DataSpec, batch: Any) -> Any:
    """The shapes of the network's inputs of a batch. Raises ConfigError when the task's `inputs` fails."""
    with user_code(task.users_name, of=task.inputs):
        return jax.eval_shape(lambda batch: task.inputs(batch, spec), batch)


def fit_task(task: Task, spec: DataSpec, outputs: Callable[[Any], Any]) -> Task:
    """The task as it is used with this data and a network. Raises ConfigError for one that fails.

    `outputs(batch)` gives the shapes of the network's outputs.
    """
    with user_code(task.users_name):
        fitted = task.fitted(spec, outputs)
    assert fitted.resolved_mode, "raises where it is not known"
    if fitted.users_name is not None:
        check_task(fitted, spec, outputs)
    return fitted


def check_table_settings(experiment: Experiment, spec: DataSpec, num_devices: int, *, has_tables: bool) -> None:
    """Raises ConfigError for settings that do not work with embedding tables, or have no effect without them."""
    if not has_tables:
        _check_without_tables(experiment)
        return
    if experiment.agreement.keeps_replicas or experiment.agreement.num_past:
        raise ConfigError(
            f"--agreement {experiment.agreement.kind}: embedding tables are updated in each step, so replicas cannot "
            "differ. Take --agreement every_step; --embedding.scheme replicated sends touched rows alone."
        )
    if experiment.evaluation.norm_batches is not None:
        raise ConfigError(
            "--evaluation.norm-batches: statistics are not estimated for a network with embedding tables. Remove it."
        )
    sizes = {"--batch-size": experiment.batch_size}
    if experiment.evaluation.batch_size is not None:
        sizes["--evaluation.batch-size"] = experiment.evaluation.batch_size
    for name, size in sizes.items():
        if size % num_devices:
            raise ConfigError(
                f"{name} {size}: with embedding tables it is spread over all {num_devices} devices. Choose a multiple."
            )
    if experiment.embedding.jagged and not any(is_jagged(feature) for feature in spec.id_features()):
        raise ConfigError(
            f"--embedding.jagged: in data {experiment.data.kind} every feature has as many ids in each example, as "
            "far as its Feature.mean_ids says. Remove this option."
        )


def _check_without_tables(experiment: Experiment) -> None:
    model, every = experiment.model, experiment.checkpoint.differential_tables
    if experiment.embedding != EmbeddingConfig():
        raise ConfigError(f"--embedding: model {model.kind} has no embedding tables. Remove these options.")
    if every is not None:
        raise ConfigError(
            f"--checkpoint.differential-tables {every}: model {model.kind} has no embedding tables. Remove this option."
        )


def check_profile(experiment: Experiment, total_steps: int) -> None:
    """Raises ConfigError for a profile that would start after the end of the run."""
    first = experiment.report.profile_start_step
    if first is not None and first >= total_steps:
        raise ConfigError(
            f"--report.profile-start-step {first}: the run has {total_steps} steps. Choose fewer, or None."
        )


def check_warmup(experiment: Experiment, total_steps: int) -> None:
    """Raises ConfigError for an exchange that would still be warming up at the end of the run."""
    config = experiment.exchange
    if config.delay_steps >= total_steps:
        raise ConfigError(
            f"--exchange.delay-steps {config.delay_steps}: the run has {total_steps} steps, so no gradient would be "
            "applied. Set it to 0, or make the run longer."
        )
    warmups = {name: steps for name, steps in config if name.endswith("warmup_steps")}
    if sum(warmups.values()) >= total_steps:
        flags = " or ".join(f"--exchange.{name.replace('_', '-')}" for name, steps in warmups.items() if steps)
        raise ConfigError(
            f"the warm-up of exchange {config.kind} ({sum(warmups.values())} steps) is not shorter than the run "
            f"({total_steps} steps), so its final setting would never be reached. Lower {flags}, or make the run "
            "longer."
        )


_CAN = {
    "splits_length": (
        "reads texts that are split over devices",
        "only jaxdl's attention looks at several tokens at once",
    ),
    "splits_layers": (
        "is a pipeline of stages",
        "its module has the methods enter, inside and leave of jaxdl.models.decoder.TransformerModule",
    ),
}


def check_axes(experiment: Experiment, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError for a mesh axis of several devices over which the model cannot be split, or not here."""
    model, agreement = experiment.model, experiment.agreement
    if experiment.task.needs_reference and agreement.keeps_replicas:
        raise ConfigError(
            f"--agreement {agreement.kind}: task {experiment.task.kind} compares the network with what it was, and has "
            "no replicas with parameters of their own. Take --agreement every_step."
        )
    for axis in (axis for axis in Axis if axis in RARE_AXES and sizes[axis] > 1):
        if (axis.splits_layers and not model.splits_layers) or (axis.splits_length and not model.splits_length):
            what = "spread its layers" if axis.splits_layers else "split its input"
            raise ConfigError(
                f"--mesh.{axis} {sizes[axis]}: {model.users_name or f'model {model.kind}'} cannot {what} over devices. "
                f"Choose --mesh.{axis} 1."
            )
        # What a user has written may look at other tokens than those it has, or at other layers.
        name = "splits_length" if axis.splits_length else "splits_layers"
        if model.users_name and name not in vars(type(model)):
            raise ConfigError(
                f"--mesh.{axis} {sizes[axis]}: {model.users_name} does not say whether it {_CAN[name][0]}. Choose "
                f"--mesh.{axis} 1, or set {name} = True in the class, if {_CAN[name][1]}."
            )
        if axis.splits_layers:
            _check_stages(experiment, f"--mesh.{axis} {sizes[axis]}", sizes[axis])


def _check_stages(experiment: Experiment, option: str, num_stages: int) -> None:
    """Raises ConfigError for what does not go with a pipeline of this many stages."""
    model, agreement = experiment.model, experiment.agreement
    layers = model.num_stacked_layers
    if layers is None:
        advice = "Take --model.scan-layers, or" if "scan_layers" in type(model).model_fields else "Choose"
        raise ConfigError(f"{option}: stages need stacked layers. {advice} {option.split()[0]} 1.")
    every = experiment.optimizer.checked  # It may take means over stacks, in which no layer may be empty.
    fits = [size for size in range(1, layers + 1) if (layers % size == 0 if every else room_for_layers(layers, size))]
    if num_stages not in fits:
        why = f", as --optimizer {experiment.optimizer.kind} needs it" if every else ""
        raise ConfigError(
            f"{option}: {layers} layers cannot be divided among {num_stages} stages, of which all"
            f"{'' if every else ' but the last'} have equally many{why}. Choose one of {', '.join(map(str, fits))}."
        )
    if experiment.task.network_modality is not None:
        raise ConfigError(f"{option}: task {experiment.task.kind} has no stages. Choose 1, and --mesh.fsdp instead.")
    if experiment.task.takes_arrays or experiment.task.users_name:
        raise ConfigError(f"{option}: task {experiment.task.kind} reads the network's outputs whole. Choose 1.")
    if experiment.precision.fp8_size is not None:
        raise ConfigError(
            f"{option}: --precision {experiment.precision.kind} has no stages. Take --precision bfloat16."
        )
    if agreement.keeps_replicas or agreement.num_past:
        raise ConfigError(f"{option}: --agreement {agreement.kind} has no stages. Take --agreement every_step.")


def check_length(spec: DataSpec, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError for texts that cannot be split evenly over devices."""
    unit = length_unit(sizes)
    if isinstance(spec, TextSpec) and spec.length % unit:
        below, above = spec.length // unit * unit, math.ceil(spec.length / unit) * unit
        meshes = " ".join(f"--mesh.{axis} {sizes[axis]}" for axis in LENGTH_AXES)
        raise ConfigError(
            f"--data.length {spec.length}: with {meshes} each text is cut into {unit} chunks of one length. Choose a "
            f"multiple of {unit}, such as {f'{below} or {above}' if below else above}."
        )


def check_shapes(experiment: Experiment, splits: Splits) -> None:
    """Raises ConfigError for batches of several shapes where replicas differ between merges, with one program."""
    if experiment.agreement.keeps_replicas and splits.train.num_shapes > 1:
        raise ConfigError(
            f"--agreement {experiment.agreement.kind}: batches of data {experiment.data.kind} have "
            f"{splits.train.num_shapes} lengths, and replicas that differ take one. Give --data.padding fixed."
        )


def check_batches(experiment: Experiment, ways: int, eval_batch_size: int) -> None:
    """Raises ConfigError for batches that cannot be split over `ways` devices."""
    unit, split = ways * experiment.step.microbatches, " x ".join(BATCH_AXES)
    for size in sorted({experiment.batch_size, *(phase.batch_size or unit for phase in experiment.phases)}):
        if size % unit:
            below, above = size // unit * unit, math.ceil(size / unit) * unit
            raise ConfigError(
                f"--batch-size {size}: cannot be split evenly over {split} = {ways} devices"
                + (f" and {experiment.step.microbatches} micro-batches" if experiment.step.microbatches > 1 else "")
                + f". Choose a multiple of {unit}, such as {f'{below} or {above}' if below else above}."
            )
    if eval_batch_size % ways:
        raise ConfigError(
            f"--evaluation.batch-size {eval_batch_size}: cannot be split evenly over {split} = {ways} devices. "
            f"Choose a multiple of {ways}."
        )


def check_norms(experiment: Experiment, num_replicas: int, *, has_norms: bool) -> None:
    """Raises ConfigError for batch norm over groups of examples that batches cannot be divided into, or without it."""
    batches = experiment.evaluation.norm_batches
    if batches is not None and not has_norms:
        raise ConfigError(
            f"--evaluation.norm-batches {batches}: {experiment.model.users_name or f'model {experiment.model.kind}'} "
            "has no batch norm (nnx.BatchNorm), so there is nothing to estimate. Remove it."
        )
    span = getattr(experiment.model, "norm_span", None)
    if not has_norms or not isinstance(span, int):
        return
    for phase in experiment.phases or (None,):
        size = (phase and phase.batch_size) or experiment.batch_size
        local = size // num_replicas // experiment.step.microbatches
        if local % span and (span % local or num_replicas % (span // local)):
            raise ConfigError(
                f"--model.norm-span {span}: a batch of {size} cannot be divided into groups of {span}. A replica has "
                f"{local} of its examples at a time ({num_replicas} replicas, {experiment.step.microbatches} "
                f"micro-batches): choose a divisor of {local}, or {local} times a number of replicas."
            )


def check_agreement(experiment: Experiment, num_replicas: int, total_steps: int, *, averages: bool) -> None:
    """Raises ConfigError for settings that replicas with other parameters than each other's cannot have.

    `averages`: whether the optimizer evaluates an average of its own.
    """
    agreement = experiment.agreement
    assert isinstance(experiment.exchange, ExchangeConfig), "it has been chosen"
    agreement.check(experiment.exchange, num_replicas, total_steps)
    if not agreement.keeps_replicas and not agreement.num_past:
        return
    what = f"--agreement {agreement.kind}"
    span = getattr(experiment.model, "norm_span", None)
    rows = experiment.batch_size // num_replicas // experiment.step.microbatches
    if num_replicas > 1 and (span == "mesh" or (isinstance(span, int) and span > rows)):
        raise ConfigError(
            f"--model.norm-span {span}: with {what} each replica has other parameters, so batch norm has statistics of "
            f"its own {rows} examples at most. Set it to replica, or to fewer examples."
        )
    if not agreement.keeps_replicas:
        return
    if averages:
        raise ConfigError(
            f"--optimizer {experiment.optimizer.kind}: with {what} each replica has an "
            "average of its own to evaluate, which no merge averages. Choose another one, and --step.ema-decay."
        )
    if experiment.step.ema_decay is not None and not agreement.has_anchor:
        raise ConfigError(
            f"--step.ema-decay {experiment.step.ema_decay:g}: with {what} no parameters are common to all replicas "
            "before the end, so there is nothing to average. Remove it."
        )
    if agreement.longest_beside and experiment.phases:
        raise ConfigError(
            "phases: a merge beside local steps (--agreement.overlap-steps) takes batches of one size. Set "
            "overlap_steps to 0, or remove the phases."
        )
    guard = experiment.guard
    for name in ("rollback_after", "max_rollbacks"):
        if getattr(guard, name) != type(guard).model_fields[name].default:
            raise ConfigError(
                f"--guard.{name.replace('_', '-')} {getattr(guard, name)}: with {what} there are no rollbacks: a merge "
                "leaves out replicas with bad numbers and hands them the anchor. Remove it."
            )


def check_candidates(auto: Auto, agreement: Agreement, num_replicas: int) -> None:
    """Raises ConfigError for an exchange that `auto` could choose and the agreement does not take."""
    if not agreement.uses_exchange:
        raise ConfigError(
            f"--exchange auto: with --agreement {agreement.kind} replicas send each other whole parameters, and "
            "the exchange is not used. Leave it out."
        )
    for config in auto.configs(num_replicas) if agreement.keeps_replicas else ():
        check_exchange(agreement, config.model_copy(update={"delay_steps": auto.delay_steps}))


def check_network(experiment: Experiment, network: Network, spec: DataSpec, num_replicas: int) -> None:
    """Raises ConfigError for a network of a user that fails, or whose outputs are not what the task takes.

    And for a reference that would not stay what it was.
    """
    if experiment.task.needs_reference and network.state_shapes:
        biased = network.reads_padding
        what, advice = (" with balance bias", "--model.balance loss, or none") if biased else ("", "another model")
        raise ConfigError(
            f"--model {experiment.model.kind}{what}: task {experiment.task.kind} compares the network with what it "
            f"was, and it keeps numbers besides its parameters, which change. Take {advice}."
        )
    if network.what is None:
        return
    rows = max(1, experiment.batch_size // num_replicas // experiment.step.microbatches)
    batch = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in spec.blank().items()}
    inputs = task_inputs(experiment.task, spec, batch)
    wanted = experiment.task.output_shape(spec)
    for train in (True, False):
        if train:
            apply = functools.partial(network.apply, train=True)
            outputs, _ = jax.eval_shape(apply, network.param_shapes, network.state_shapes, *inputs)
        else:
            outputs = check_evaluation(network, inputs, experiment.evaluation.allows)
        made = [x.shape for x in jax.tree.leaves(outputs)]
        if wanted is not None and (made != [(rows, *wanted)] or not hasattr(outputs, "shape")):
            takes = ", ".join(map(str, ("batch", *wanted)))
            raise ConfigError(
                f"{network.what}: for a batch of {rows} its outputs are {_shapes(outputs)}, but task "
                f"{experiment.task.kind} takes one array [{takes}]. Change the network's last layer, or take a task of "
                "your own."
            )


def _shapes(outputs: Any) -> str:
    """`float32 [8, 10]`; of several outputs also the type that holds them."""
    if outputs is None:
        return "nothing (is there a return?)"
    leaves = [f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(outputs)]
    return leaves[0] if hasattr(outputs, "shape") else f"a {type(outputs).__name__} of {', '.join(leaves) or 'nothing'}"


def idle_axes(network: Network, mesh: Mesh) -> tuple[str, ...]:
    """Lines for the user on mesh axes that split nothing, since no parameter has logical axes."""
    sizes = {axis: mesh.shape[axis] for axis in MODEL_AXES if mesh.shape[axis] > 1}
    return tuple(
        f"--mesh.{axis} {size}: no parameter of {network.what} has logical axes, so nothing is split over {axis}, and "
        f"each group of {size} devices computes the same. Name the axes, or take --mesh.{axis} 1."
        for axis, size in ({} if has_names(network.axes) else sizes).items()
    )


def idle_exchange(config: ExchangeConfig) -> tuple[str, ...]:
    """Lines for the user about an exchange on a mesh of one replica; none for the default exchange.

    No error: a run with several replicas may resume with one, and a small trial on one device is no mistake.
    """
    if config == Dense(delay_steps=config.delay_steps):
        return ()
    fields = {name: getattr(config, name) for name in config.single_replica_options}
    still = [f"--exchange.{name.replace('_', '-')} {value:g}" for name, value in fields.items() if value]
    return (
        f"exchange {config.kind}: this mesh has one replica, so nothing is exchanged; --exchange "
        + (f"has no effect but for {' and '.join(still)}. " if still else "has no effect. ")
        + "It takes effect with --mesh.replica 2 or more.",
    )


def check_tensor_dims(config: ShardingConfig, network: Network) -> None:
    """Raises ConfigError for a name that no dimension has, neither of this model's nor in the default list."""
    axes = jax.tree.leaves(network.axes, is_leaf=is_names)
    names_of_model = {name for names in axes for name in names} - {STACKED, UNNAMED, UNNAMED_STACK}
    for name in config.tensor_dims:
        if name not in names_of_model | set(ShardingConfig().tensor_dims):
            raise ConfigError(
                f"--sharding.tensor-dims {name}: the model has no dimension of this name that can be split. "
                f"Choose from {', '.join(sorted(names_of_model)) or 'none: its parameters have no logical axes'}."
            )


def check_phases(experiment: Experiment, splits: Splits) -> None:
    """Raises ConfigError for phases of images that cannot be made in their sizes."""
    if not experiment.phases:
        return
    if not isinstance(splits.train, PhotoSource):
        raise ConfigError(
            f"phases: the images of data {experiment.data.kind} have one size. Take --data image_folder, image_tars, "
            "or tfds with photos."
        )
    photos = splits.train.pipeline.config
    for number, phase in enumerate(experiment.phases):
        if phase.min_scale is not None and photos.crop == "centre":
            raise ConfigError(
                f"phases.{number}.min_scale = {phase.min_scale}: with photos.crop = centre there are no random crops. "
                "Remove it, or set photos.crop = random."
            )
    cache = photos.cache
    largest = max(max(phase.size, phase.eval_size or phase.size) for phase in experiment.phases)
    if (cache.memory_bytes or cache.disk) and cache.form == "pixels" and cache.short_side < largest:
        raise ConfigError(
            f"phases: images of {largest} pixels would be made from smaller ones, since cache.short_side = "
            f"{cache.short_side}. Raise it, or set cache.form = encoded."
        )
