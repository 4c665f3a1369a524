"""The exchange of an experiment: which one, of which gradients, and what it sends."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl.data import DataSpec
from jaxdl.exchange import Auto, Dense, Exchange, ExchangeConfig, GradientLayout, by_name
from jaxdl.exchange.agreement import Agreement, Fragments
from jaxdl.exchange.cost import Gradients
from jaxdl.models import Network
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.collectives.select import KERNELS
from jaxdl.parallel.mesh import STAGE_AXES, Axis, platform, ways
from jaxdl.parallel.sharding import STACKED, Layout, grad_specs, is_names, named
from jaxdl.report.explanation import readable_bytes
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.network import in_stages, make_network
from jaxdl.training.run.plan.validate import check_candidates, idle_exchange


def choose_exchange(
    experiment: Experiment, spec: DataSpec, mesh: Mesh, earlier: ExchangeConfig | None = None
) -> tuple[ExchangeConfig, tuple[str, ...]]:
    """The exchange of an experiment on a mesh, and lines for the user about it; all processes call it alike.

    `auto` measures the links and chooses. With one replica there is nothing to choose, but the `earlier` choice of the
    run is taken again: the state of the exchange must survive until there are several replicas again.
    """
    asked = experiment.exchange
    one_replica = mesh.shape[Axis.REPLICA] == 1
    wanted = earlier or asked
    selects = not isinstance(wanted, ExchangeConfig) or bool(wanted.figures.methods)
    if selects and not one_replica and platform(mesh) == "gpu":
        KERNELS.agree()
    if not isinstance(asked, Auto):
        assert isinstance(asked, ExchangeConfig)
        return asked, idle_exchange(asked) if one_replica else ()
    if earlier is not None:
        note = f"exchange: {earlier.label}, as chosen when the run began"
        return earlier, (note, *(idle_exchange(earlier) if one_replica else ()))
    if one_replica:
        return Dense(delay_steps=asked.delay_steps), ("exchange: one replica exchanges nothing",)
    check_candidates(asked, experiment.agreement, mesh.shape[Axis.REPLICA])
    gradients = exchanged_gradients(experiment, spec, mesh)
    wait_for_all()  # Gloo gives up when a process measures 30 s after another.
    choice = asked.choose(gradients.shapes, gradients.layout, mesh, experiment.agreement)
    return choice.best, choice.reasons


def exchanged_gradients(experiment: Experiment, spec: DataSpec, mesh: Mesh) -> Gradients:
    """The gradients of an experiment on a mesh, as the cost model takes them: what its exchange is about."""
    network = make_network(
        experiment.model,
        experiment.task,
        spec,
        dtype=experiment.precision.dtype,
        freeze=experiment.step.freeze,
        embedding=experiment.embedding,
    )
    room, network = in_stages(network, experiment, mesh)
    layout = Layout(experiment.sharding, mesh, stage_layers=room)
    shardings = by_name(named(mesh, grad_specs(layout, *network.trained)))
    shapes = {name: shardings[name].shard_shape(x.shape) for name, x in network.trained_shapes.items()}
    return Gradients(shapes, mesh.shape[Axis.REPLICA], network.gradient_layout(layout, experiment.agreement))


def describe_traffic(exchange: ExchangeConfig, agreement: Agreement, gradients: Gradients) -> str:
    """What crosses `replica` in an average step, in a sentence; empty where nothing does, or a syncer decides."""
    average, most = agreement.traffic(exchange, gradients)
    if not most:
        return ""
    how = f"{agreement.label}, {exchange.label}" if agreement.uses_exchange else agreement.label
    first = "; more while gradients are averaged in each step" if agreement.joint(0) else ""
    at_once = f", {readable_bytes(most)} at once at most" if most > average else ""
    return (
        f"over {Axis.REPLICA.value} a device sends {readable_bytes(average)} in an average step{at_once} ({how}){first}"
    )


def make_exchange(
    config: ExchangeConfig,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    layout: GradientLayout,
    fragments: Fragments | None,
    num_replicas: int,
) -> Exchange:
    """The exchange over the replicas, of gradients of these shapes or of `fragments`; a single one sends nothing."""
    if fragments is not None:
        shapes = fragments.shapes(shapes)
        layout = fragments.layout(layout)
    config.check({name: x.shape for name, x in shapes.items()}, layout, num_replicas)
    return config.build_single_replica(layout) if num_replicas == 1 else config.build(layout)


def loop_sum_dtype(experiment: Experiment, network: Network, mesh: Mesh) -> DTypeLike | None:
    """The dtype in which the loop over layers sums their gradients over replicas; None where the exchange does it all.

    On GPUs, since programs of other platforms do not overlap messages with compute, and where the exchange is a plain
    sum of each gradient as the backward pass yields it: not of micro-batches, of stages or of a scaled loss.
    `jaxdl.models.loop` has the loop.
    """
    exchange, precision, agreement = experiment.exchange, experiment.precision, experiment.agreement
    assert isinstance(exchange, ExchangeConfig), "it has been chosen"
    pairs = zip(jax.tree.leaves(network.axes, is_leaf=is_names), jax.tree.leaves(network.param_shapes), strict=True)
    looped = max((x.shape[0] for names, x in pairs if STACKED in names), default=0) > 1
    written_by_user = network.what is not None or experiment.task.has_user_code
    all_trained = not experiment.step.freeze and not experiment.model.trained
    every_step = not agreement.keeps_replicas and not agreement.num_past
    plain = experiment.step.microbatches == 1 and not precision.init_loss_scale()
    plain = plain and precision.weight_dtype == jnp.float32
    # With FP8 the first and the last layer are others; and what layers keep besides parameters has no gradient.
    plain = plain and precision.fp8_size is None and not network.state_shapes
    several = mesh.shape[Axis.REPLICA] > 1 and platform(mesh) == "gpu" and ways(mesh.shape, STAGE_AXES) == 1
    sums = looped and several and plain and all_trained and every_step and not written_by_user
    return exchange.sum_dtype if sums else None
