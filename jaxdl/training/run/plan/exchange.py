"""What the exchange of an experiment is about: its gradients, or what replicas merge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.exchange import (
    Exchange,
    ExchangeConfig,
    GradientLayout,
    backward_order,
    by_name,
    leaf_names,
)
from jaxdl.exchange.agreement import Fragments, make_fragments
from jaxdl.exchange.cost import Gradients
from jaxdl.models import Network
from jaxdl.models.stacks import Dims, as_recorded, named_stacks
from jaxdl.optim import Trainable, make_trainable
from jaxdl.parallel.embedding import EmbeddingConfig, Table, Tables
from jaxdl.parallel.embedding.jagged import is_jagged
from jaxdl.parallel.embedding.table import check_tables
from jaxdl.parallel.embedding.update import agree_on_kernels
from jaxdl.parallel.mesh import Axis, inner_sizes, platform
from jaxdl.parallel.sharding import STACKED, Layout, LogicalAxes, Params, grad_specs, is_names, named
from jaxdl.report.explanation import readable_bytes
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.validate import check_with_tables, task_inputs
from jaxdl.training.tasks import Task


def exchanged_gradients(experiment: Experiment, spec: DataSpec, mesh: Mesh) -> Gradients:
    """What the exchange of an experiment on a mesh is about, as the cost model takes it."""
    network = make_network(experiment, spec)
    layout = Layout(experiment.sharding, mesh)
    axes, trained = trained_of(experiment, network)
    shardings = by_name(named(mesh, grad_specs(layout, axes, trained)))
    shapes = {name: shardings[name].shard_shape(x.shape) for name, x in by_name(trained).items()}
    return Gradients(shapes, mesh.shape[Axis.REPLICA], gradient_layout(experiment, network, spec, layout))


def describe_traffic(experiment: Experiment, spec: DataSpec, mesh: Mesh) -> str:
    """What crosses `replica` in an average step, in a sentence; empty where nothing does, or a syncer decides."""
    exchange, agreement = experiment.exchange, experiment.agreement
    assert isinstance(exchange, ExchangeConfig), "it has been chosen"
    average, most = agreement.traffic(exchange, exchanged_gradients(experiment, spec, mesh))
    if not most:
        return ""
    how = f"{agreement.label}, {exchange.label}" if agreement.uses_exchange else agreement.label
    first = "; more while gradients are averaged in each step" if agreement.joint(0) else ""
    at_once = f", {readable_bytes(most)} at once at most" if most > average else ""
    return (
        f"over {Axis.REPLICA.value} a device sends {readable_bytes(average)} in an average step{at_once} ({how}){first}"
    )


def make_network(experiment: Experiment, spec: DataSpec, stacks: Mapping[str, Dims] | None = None) -> Network:
    """The network of an experiment for data that `spec` describes.

    `stacks` are the stacks of a user's network that it has had so far in its run, see `read_stacks`.
    """
    inputs = task_inputs(experiment.task, spec, spec.blank())
    network = experiment.model.network(inputs, **spec.sizes(), dtype=experiment.precision.dtype)
    if stacks is not None and (now := named_stacks(network.axes)) != stacks:
        pairs = {name: (stacks.get(name, ()), now.get(name, ())) for name in {**now, **stacks}}
        network.restacked = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        network.axes = as_recorded(network.axes, stacks)
        network.unclear_stacks = tuple(
            text for text in network.unclear_stacks if text.partition(" (")[0] not in network.restacked
        )
    return network


def with_vectors(experiment: Experiment, spec: DataSpec, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of an experiment's network: for one with embedding tables also vectors of each feature, zeros."""
    columns = {one: table.columns for table in checked_tables(experiment, spec) for one in table.features}
    if not columns:
        return tuple(inputs)
    rows = inputs[0].shape[0]
    return (*inputs, {one.name: jnp.zeros((rows, columns[one.name])) for one in spec.id_features()})


def checked_tables(experiment: Experiment, spec: DataSpec) -> tuple[Table, ...]:
    """The tables of an experiment's model. Raises ConfigError for those that do not fit the data or the settings."""
    features = spec.id_features()
    tables = tuple(experiment.model.tables(features))
    if not tables:
        return tables
    check_tables(tables, [one.name for one in features], experiment.embedding)
    owner = {feature: table for table in tables for feature in table.features}
    for one in features:
        if (table := owner[one.name]).rows < one.rows:
            raise ConfigError(
                f"table {table.name}: it has {table.rows:,} rows, and feature {one.name} has {one.rows:,} ids. Give "
                "it as many rows."
            )
    return tables


def make_tables(experiment: Experiment, spec: DataSpec, mesh: Mesh, most_rows: int | None = None) -> Tables | None:
    """The embedding tables of an experiment on a mesh, with at most so many rows each; None for a model without any.

    Raises ConfigError for tables that do not fit the data, and for settings that do not work with them.
    """
    features, config = spec.id_features(), experiment.embedding
    tables = checked_tables(experiment, spec)
    if not tables:
        if config != EmbeddingConfig():
            raise ConfigError(
                f"--embedding: model {experiment.model.kind} has no embedding tables. Remove these options."
            )
        if (every := experiment.checkpoint.differential_tables) is not None:
            raise ConfigError(
                f"--checkpoint.differential-tables {every}: model {experiment.model.kind} has no embedding tables. "
                "Remove this option."
            )
        return None
    check_with_tables(experiment, mesh.size)
    num_ids = {one.name: one.num_ids for one in features}
    # The devices have slots for some rows of tables with a cache.
    slots = {one.name: config.cache.slots(one.name, one.rows) for one in tables}
    rows = {one.name: min(slots[one.name] or one.rows, most_rows or one.rows) for one in tables}
    on_devices = [one.model_copy(update={"rows": rows[one.name]}) for one in tables]
    if config.jagged and not any(is_jagged(one) for one in features):
        raise ConfigError(
            f"--embedding.jagged: in data {experiment.data.kind} every feature has as many ids in each example, as "
            "far as its Feature.mean_ids says. Remove this option."
        )
    if platform(mesh) == "gpu":
        agree_on_kernels(table.optimizer or config.optimizer for table in tables)
    return Tables(on_devices, num_ids, config, mesh, features if config.jagged else ())


def output_shapes(experiment: Experiment, network: Network, spec: DataSpec) -> Callable[[Any], Any]:
    """A function from a batch to the shapes of the network's outputs."""

    def forward(params: Any, model_state: Any, batch: Any) -> Any:
        inputs = with_vectors(experiment, spec, experiment.task.inputs(batch, spec))
        return network.apply(params, model_state, *inputs, train=False, whole=experiment.task.takes_arrays)[0]

    def outputs(batch: Any) -> Any:
        return jax.eval_shape(forward, *jax.eval_shape(network.init, jax.random.key(0)), batch)

    return outputs


def sum_names(task: Task, spec: DataSpec, outputs: Callable[[Any], Any]) -> tuple[str, ...]:
    """The names of a task's sums in training; `outputs(batch)` gives the shapes of the network's outputs."""
    batch = spec.blank()
    return tuple(jax.eval_shape(functools.partial(task.sums, train=True), outputs(batch), batch))


def make_exchange(
    experiment: Experiment,
    network: Network,
    layout: GradientLayout,
    fragments: Fragments | None,
    num_replicas: int,
) -> Exchange:
    """The exchange over the mesh's replicas, of gradients or of fragments; a single one has nobody to talk to."""
    config = experiment.exchange
    assert isinstance(config, ExchangeConfig), "it has been chosen"
    shapes = by_name(trained_of(experiment, network)[1])
    if fragments is not None:
        shapes = fragments.shapes(shapes)
        layout = fragments.layout(layout)
    config.check({name: x.shape for name, x in shapes.items()}, layout, num_replicas)
    return config.build_single_replica(layout) if num_replicas == 1 else config.build(layout)


def fragments_of(experiment: Experiment, network: Network, layout: GradientLayout) -> Fragments | None:
    """What merges are about; None for replicas that agree in every step."""
    agreement = experiment.agreement
    if not agreement.keeps_replicas:
        return None
    found = make_fragments(by_name(trained_of(experiment, network)[1]), layout.stacked, agreement.num_fragments)
    if not all(found.pieces):
        raise ConfigError(
            f"--agreement.fragments {agreement.num_fragments}: the model's parameters and layers can be divided into "
            f"{sum(map(bool, found.pieces))} at most. Choose fewer."
        )
    return found


def trainable_of(experiment: Experiment, network: Network) -> Trainable:
    """Which parameters of an experiment's network are trained."""
    return make_trainable(experiment.step.freeze, network.param_shapes, experiment.model.trained)


def trained_of(experiment: Experiment, network: Network) -> tuple[LogicalAxes, Params]:
    """The logical axes and the shapes of the parameters that have gradients."""
    trainable = trainable_of(experiment, network)
    return trainable.of(network.axes), trainable.of(network.param_shapes)


def gradient_layout(experiment: Experiment, network: Network, spec: DataSpec, layout: Layout) -> GradientLayout:
    """What the exchange may know of the gradients of an experiment's network."""

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs = with_vectors(experiment, spec, experiment.task.inputs(batch, spec))
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), network.state_shapes)
        outputs = network.apply(params, blank, *inputs, train=True)[0]
        return functools.reduce(jnp.add, [jnp.sum(x) for x in jax.tree.leaves(outputs)])

    # One replica sends nothing, in whatever order; merges come when no backward pass runs.
    several = layout.mesh.shape[Axis.REPLICA] > 1 and not experiment.agreement.keeps_replicas
    trained_axes, trained = trained_of(experiment, network)
    names = leaf_names(trained)
    axes = jax.tree.leaves(trained_axes, is_leaf=is_names)
    order = backward_order(loss, network.param_shapes, spec.blank()) if several else ()
    return GradientLayout(
        specs=by_name(grad_specs(layout, trained_axes, trained)),
        inner=inner_sizes(layout.mesh.shape),
        order=tuple(name for name in order if name in names),
        stacked=frozenset(name for name, one in zip(names, axes, strict=True) if STACKED in one),
    )
