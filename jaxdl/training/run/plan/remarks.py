"""Lines for the user, before the first step, about settings that are valid and seldom meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxdl.core.files import STACKS_FILE
from jaxdl.data.phases import Timeline
from jaxdl.models import Network
from jaxdl.models.mode_check import idle_dropout
from jaxdl.models.norm_rows import row_norms
from jaxdl.optim import Optimizer, decay_mask
from jaxdl.parallel.mesh import FILLING_AXIS, Axis
from jaxdl.parallel.sharding import LogicalAxes
from jaxdl.report.better_direction import mode_of
from jaxdl.training.run.plan.network import with_vectors
from jaxdl.training.run.plan.validate import task_inputs
from jaxdl.training.step import Parts, num_stages
from jaxdl.training.step.turns import idle_share
from jaxdl.training.tasks import Task

_NAMED = 3
_MOST_IDLE = 0.25
"""Of a step."""


def settings_remarks(parts: Parts, optimizer: Optimizer, timeline: Timeline, *, start_over: bool) -> tuple[str, ...]:
    """The lines about the parts of a run, and the settings that they were made from."""
    num_replicas = parts.layout.mesh.shape[Axis.REPLICA]
    sizes = [segment.batch_size for segment in timeline.segments]
    network, trained_axes = parts.network, parts.trainable.of(parts.network.axes)
    return (
        *idle_stages(parts),
        *unusual_mode(parts.task),
        *dropout_off(parts, sizes[0] // num_replicas),
        *norms_of_rows(parts, min(sizes), num_replicas),
        *decayed_biases(optimizer, network, trained_axes),
        *earlier_stacks(network, start_over=start_over),
        *unclear_stacks(network),
    )


def idle_stages(parts: Parts) -> tuple[str, ...]:
    """A line on how long stages of a pipeline wait for each other (arXiv 2104.04473, section 2.2)."""
    stages, parts_of_batch = num_stages(parts.layout), parts.config.microbatches
    if stages == 1:
        return ()
    idle = idle_share(stages, parts_of_batch)
    advice = "" if idle < _MOST_IDLE else f"; --step.microbatches {4 * stages} or more makes it less"
    network, room = parts.network, parts.layout.stage_layers
    each = (
        f" of {room} layers"
        if not network.empty_layers
        else f" of {room} layers, the last of {(room or 0) - network.empty_layers},"
    )
    return (
        f"pipeline: {stages} stages{each} and {parts_of_batch} micro-batches, so a stage waits {idle:.0%} of a step"
        f"{advice}",
    )


def dropout_off(parts: Parts, rows_of_replica: int) -> tuple[str, ...]:
    """A line when a user's network has dropout that drops nothing in training."""
    if parts.network.what is None:
        return ()
    rows = max(1, rows_of_replica // parts.config.microbatches)
    names, advice = idle_dropout(parts.network.filled, _input_shapes(parts, rows))
    if not names and advice:
        called, key = parts.network.called.__qualname__, parts.network.key_argument
        return (
            f"{called} takes a random key ({key}), but in training its outputs do not depend on it: nothing is random, "
            f"and nothing is dropped. {advice} If nothing random is meant, leave the argument {key} out.",
        )
    if not names:
        return ()
    return (
        f"dropout in {_list(names)}: in training the outputs do not depend on a random key, so nothing is dropped. "
        f"{advice} If no dropout is meant, set its rate to 0.",
    )


def earlier_stacks(network: Network, *, start_over: bool = False) -> tuple[str, ...]:
    """Lines when a run goes on with other stacks of layers than its network has: those that it began with."""
    unknown = [name for name, (begun, _) in network.restacked.items() if not begun]
    others = [name for name, (begun, _) in network.restacked.items() if begun]
    goes_on = "goes on as it began" + (", also where it starts over" if start_over else "")
    anew = "begin a new run with its parameters: --init-from this --workdir, and another --workdir."
    lines = []
    if unknown:
        lines.append(
            f"this run began when {_list(unknown)} were not known to stack layers, so its optimizer's state is for "
            f"arrays without layers, and it {goes_on}: weight decay, trust ratios, Muon and --precision take each of "
            f"them as a whole. To take their layers one by one, {anew}"
        )
    if others:
        lines.append(
            f"this run began when {_list(others)} stacked layers along other dimensions ({STACKS_FILE} says which) "
            f"than they do now, or when they do not now, and it {goes_on}: weight decay, trust ratios, Muon and "
            f"--precision take the dimensions that it began with. To take them as they are now, {anew}"
        )
    return tuple(lines)


def unclear_stacks(network: Network) -> tuple[str, ...]:
    """A line when the shapes of stacked parameters leave open which dimension counts their layers."""
    if not network.unclear_stacks:
        return ()
    return (
        f"{_list(network.unclear_stacks)} stack layers, and several dimensions have as many elements as there are "
        "layers: weight decay, trust ratios, Muon and --precision take the layers to be along those in brackets. If "
        "this is not so, stack them along dimension 0 (out_axes=0 of nnx.vmap, "
        'variable_axes={"params": 0} of nn.scan), or name the dimensions.',
    )


def unusual_mode(task: Task) -> tuple[str, ...]:
    """A line when the best value of a metric is the one that its name calls the worst."""
    known = mode_of(task.best_metric)
    if known is None or known == task.resolved_mode:
        return ()
    kept = {"min": "lowest", "max": "highest"}[task.resolved_mode]
    return (
        f"--task.best-mode {task.resolved_mode}: the best checkpoint is the one of the {kept} {task.best_metric}. If "
        f"this is not meant, give {known}.",
    )


def norms_of_rows(parts: Parts, batch_size: int, num_replicas: int) -> tuple[str, ...]:
    """A line when batch norm has statistics of one row: then little of the input, or nothing, is left after it."""
    microbatches = parts.config.microbatches
    if batch_size // num_replicas // microbatches > 1:
        return ()
    norms = row_norms(parts.network, _input_shapes(parts, 1), num_replicas=num_replicas)
    if not norms:
        return ()
    single = [name for name, values in norms.items() if values == 1]
    what = (
        f"{_list(single)}: each value is normalized by itself alone, so nothing of the input is left and the network "
        "learns nothing from it"
        if single
        else f"{_list(list(norms))}: each row is normalized by its own values alone, in evaluation by those of all"
    )
    return (
        f"batch norm over one row of the batch, in {what}. A replica has one row at a time (--batch-size "
        f"{batch_size:,}, {num_replicas} replica{'s' if num_replicas > 1 else ''}, {microbatches} "
        f"micro-batch{'es' if microbatches > 1 else ''}). Take a larger --batch-size"
        + (", fewer --step.microbatches" if microbatches > 1 else "")
        + (f", or --mesh.{FILLING_AXIS} in place of --mesh.replica" if num_replicas > 1 else "")
        + _span(parts.network, num_replicas)
        + ", or a norm over features, such as nnx.LayerNorm or nnx.GroupNorm.",
    )


def decayed_biases(optimizer: Optimizer, network: Network, trained_axes: LogicalAxes) -> tuple[str, ...]:
    """A line when weight decay takes parameters of a user's network that are called bias or scale.

    jaxdl's own optimizers know them by their dimensions; of others nothing is known.
    """
    if (
        network.what is None
        or not getattr(optimizer, "weight_decay", 0)
        or not getattr(optimizer, "exclude_vectors", True)
    ):
        return ()
    flat = jax.tree_util.tree_flatten_with_path(decay_mask(trained_axes))[0]
    paths = [tuple(str(getattr(part, "key", part)) for part in path) for path, decayed in flat if decayed]
    names = ["/".join(path) for path in paths if path[-1] in ("bias", "scale")]
    if not names:
        return ()
    return (
        f"weight decay takes {_list(names)}: by their dimensions they are no biases or scales (--explain shows all "
        "that is decayed). To exclude them, give them one dimension in the network, or leave them out (use_bias=False "
        "of the layer), or set --optimizer.weight-decay 0.",
    )


def _input_shapes(parts: Parts, num_rows: int) -> tuple[Any, ...]:
    """The shapes of the network's inputs of `num_rows` rows."""
    spec = parts.data_spec
    batch = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in spec.blank().items()}
    tables = () if parts.tables is None else parts.tables.tables
    return with_vectors(tables, spec, task_inputs(parts.task, spec, batch))


def _span(network: Network, num_replicas: int) -> str:
    return ", or --model.norm-span mesh" if network.what is None and num_replicas > 1 else ""


def _list(names: Sequence[str]) -> str:
    """The first few of these names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
