"""The network of a run: built for its data and its task, with what its training differentiates."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.exchange import GradientLayout, backward_order, by_name, leaf_names
from jaxdl.exchange.agreement import Agreement, Fragments, make_fragments
from jaxdl.models import Model, Network
from jaxdl.models.network import Call
from jaxdl.models.stacks import Dims, as_recorded, named_stacks
from jaxdl.optim import Trainable, make_trainable
from jaxdl.parallel.embedding import EmbeddingConfig, Table
from jaxdl.parallel.embedding.table import check_tables
from jaxdl.parallel.mesh import STAGE_AXES, Axis, inner_sizes, ways
from jaxdl.parallel.sharding import STACKED, Layout, LogicalAxes, Params, grad_specs, is_names
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.validate import task_inputs
from jaxdl.training.step.turns import room_for_layers
from jaxdl.training.tasks import Task


@dataclass(frozen=True)
class TaskNetwork:
    """A network with the task that trains it and the data that it reads."""

    network: Network
    task: Task
    spec: DataSpec
    trainable: Trainable
    """Which parameters are trained."""
    tables: tuple[Table, ...] = ()
    """The embedding tables beside it."""

    @property
    def trained(self) -> tuple[LogicalAxes, Params]:
        """The logical axes and the shapes of the parameters that have gradients."""
        return self.trainable.of(self.network.axes), self.trainable.of(self.network.param_shapes)

    @property
    def trained_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of the parameters that have gradients, by name."""
        return by_name(self.trained[1])

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The network's inputs of a batch; pooled vectors of its tables are zeros."""
        return with_vectors(self.tables, self.spec, self.task.inputs(batch, self.spec))

    def output_shapes(self, batch: Any, *, train: bool = False) -> Any:
        """The shapes of the network's outputs of a batch, as the task takes them."""

        def forward(params: Any, model_state: Any, batch: Any) -> Any:
            call = Call(train=train, materialize_logits=self.task.takes_arrays)
            return network.call(call, params, model_state, *self.inputs(batch))[0]

        network = self.network.filled
        return jax.eval_shape(forward, *jax.eval_shape(network.init, jax.random.key(0)), batch)

    def sum_names(self) -> tuple[str, ...]:
        """The names of the task's sums in training that are scalars."""
        batch = self.spec.blank()
        sums = jax.eval_shape(
            functools.partial(self.task.sums, train=True), self.output_shapes(batch, train=True), batch
        )
        return tuple(name for name, x in sums.items() if not x.shape)

    def gradient_layout(self, layout: Layout, agreement: Agreement) -> GradientLayout:
        """What the exchange may know of the gradients: how they are sharded, stacked, and in which order they come."""

        def loss(params: Any, batch: Any) -> jax.Array:
            blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), network.state_shapes)
            outputs = network.apply(params, blank, *self.inputs(batch), train=True)[0]
            return functools.reduce(jnp.add, [jnp.sum(x) for x in jax.tree.leaves(outputs)])

        # One replica sends nothing, in whatever order; merges come when no backward pass runs.
        network = self.network.filled
        ordered = layout.mesh.shape[Axis.REPLICA] > 1 and not agreement.keeps_replicas
        trained_axes, trained = self.trained
        names = leaf_names(trained)
        axes = jax.tree.leaves(trained_axes, is_leaf=is_names)
        order = backward_order(loss, network.param_shapes, self.spec.blank()) if ordered else ()
        return GradientLayout(
            specs=by_name(grad_specs(layout, trained_axes, trained)),
            inner=inner_sizes(layout.mesh.shape),
            order=tuple(name for name in order if name in names),
            stacked=frozenset(name for name, dims in zip(names, axes, strict=True) if STACKED in dims),
        )

    def fragments(self, agreement: Agreement, gradients: GradientLayout) -> Fragments | None:
        """What merges are about; None for replicas that agree in every step. Raises ConfigError for too many."""
        if not agreement.keeps_replicas:
            return None
        fragments = make_fragments(self.trained_shapes, gradients.stacked, agreement.num_fragments)
        if not all(fragments.pieces):
            raise ConfigError(
                f"--agreement.fragments {agreement.num_fragments}: the model's parameters and layers can be divided "
                f"into {sum(map(bool, fragments.pieces))} at most. Choose fewer."
            )
        return fragments


def make_network(
    model: Model,
    task: Task,
    spec: DataSpec,
    *,
    dtype: DTypeLike,
    freeze: Sequence[str],
    embedding: EmbeddingConfig,
    stacks: Mapping[str, Dims] | None = None,
) -> TaskNetwork:
    """The network of a model for data that `spec` describes, computing in `dtype`; `freeze` as in `StepConfig`.

    `stacks` are the stacked dimensions that the parameters of a user's network have had so far in its run. Raises
    ConfigError for a model that does not read such data, and for tables that do not fit them.
    """
    inputs = task_inputs(task, spec, spec.blank())
    network = model.network(inputs, **spec.sizes(), dtype=dtype)
    if stacks is not None and (now := named_stacks(network.axes)) != stacks:
        pairs = {name: (stacks.get(name, ()), now.get(name, ())) for name in {**now, **stacks}}
        network.restacked = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        network.axes = as_recorded(network.axes, stacks)
        network.unclear_stacks = tuple(
            text for text in network.unclear_stacks if text.partition(" (")[0] not in network.restacked
        )
    trainable = make_trainable(freeze, network.param_shapes, model.trained)
    return TaskNetwork(network, task, spec, trainable, tables_of(model, embedding, spec))


def in_stages(fitted: TaskNetwork, experiment: Experiment, mesh: Mesh | AbstractMesh) -> tuple[int | None, TaskNetwork]:
    """(for how many layers each stage of the mesh has room, the network with so many); None for one stage.

    An optimizer that jaxdl does not know may take means over whole stacks, in which empty layers would count: for it
    there are none.
    """
    model, stages = experiment.model, ways(mesh.shape, STAGE_AXES)
    layers = model.num_stacked_layers
    if stages == 1 or layers is None:
        return None, fitted
    room = room_for_layers(layers, stages, model.output_layers(**fitted.spec.sizes()))
    room = layers // stages if experiment.optimizer.checked else room
    assert room is not None, "validated before"
    if empty := room * stages - layers:
        fitted = replace(fitted, network=fitted.network.with_empty_layers(empty))
    return room, fitted


def tables_of(model: Model, embedding: EmbeddingConfig, spec: DataSpec) -> tuple[Table, ...]:
    """The tables of a model. Raises ConfigError for those that do not fit the data or the settings."""
    features = spec.id_features()
    tables = tuple(model.tables(features))
    if not tables:
        return tables
    check_tables(tables, [feature.name for feature in features], embedding)
    owner = {feature: table for table in tables for feature in table.features}
    for feature in features:
        if (table := owner[feature.name]).rows < feature.rows:
            raise ConfigError(
                f"table {table.name}: it has {table.rows:,} rows, and feature {feature.name} has {feature.rows:,} ids. "
                "Give it as many rows."
            )
    return tables


def with_vectors(tables: Sequence[Table], spec: DataSpec, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a network: for one with embedding tables also vectors of each feature, zeros."""
    columns = {feature: table.columns for table in tables for feature in table.features}
    if not columns:
        return tuple(inputs)
    rows = inputs[0].shape[0]
    return (*inputs, {feature.name: jnp.zeros((rows, columns[feature.name])) for feature in spec.id_features()})
