"""The bytes of a training step by mesh axis: those in its StableHLO, and those of the formulas that predict them.

The StableHLO has each loop's body once: one layer, one micro-batch. A pipeline has two loops: a turn with both passes,
and one of its end with a backward pass, which computes the forward pass again. It has the collectives that jaxdl writes
itself. Those that XLA's partitioner adds, to gather parameters over `fsdp` and to sum activations over `tensor`, are
only in the compiled program. What is sent between stages is not yet split inside a stage, so its bytes are those of all
devices of a stage together; all other ones are those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered

from jaxdl.exchange import ExchangeConfig
from jaxdl.exchange.cost import Link, Machine, predict
from jaxdl.models import MixtureOfExperts
from jaxdl.parallel.collectives import experts
from jaxdl.parallel.compiler import wire_bytes
from jaxdl.parallel.mesh import AXES, BATCH_AXES, GATHER_AXES, INNER_AXES, LENGTH_AXES, MODEL_AXES, STAGE_AXES, Axis
from jaxdl.parallel.mesh import ways as ways_of
from jaxdl.parallel.sharding import STACKED, is_names
from jaxdl.performance.planner.context_cost import pass_bytes
from jaxdl.performance.planner.decoder import Decoder, decoder_of
from jaxdl.performance.planner.pipeline import activation_bytes, table_bytes
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.run.plan.plan import Plan

_FLOAT_BYTES = 4
_AHEAD, _BACK = 1, 2
"""Loops of a pipeline that have a forward pass, and that have a backward pass."""
(_STAGE,), (_CONTEXT,), (_TENSOR,), _FSDP = STAGE_AXES, LENGTH_AXES, MODEL_AXES, GATHER_AXES[0]


def in_program(program: Lowered, mesh: Mesh) -> dict[str, float]:
    """Axis -> the bytes in the StableHLO of a step; several axes at once, as metrics cross, joined by "+"."""
    return {axes: sent for axes, sent in wire_bytes.sent_bytes(program, mesh).items() if sent}


def by_formulas(plan: Plan, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Axis -> the same bytes, predicted. Without the sums of metrics and of the load of experts, a few hundred bytes.

    What the exchange gathers inside a replica are the `metrics` of a step, which are closed forms too.
    """
    decoder = decoder_of(plan)
    assert decoder is not None
    sizes = plan.parts.layout.mesh.shape
    sent = {axis: float(metrics.get(f"exchange/bytes_sent/{axis}", 0.0)) for axis in INNER_AXES}
    sent[Axis.REPLICA.value] = exchanged_bytes(plan)
    sent[_STAGE] += _between_stages(plan, decoder)
    texts = plan.experiment.batch_size / plan.experiment.step.microbatches / ways_of(sizes, BATCH_AXES)
    tokens = int(texts * decoder.length) // sizes[_CONTEXT]
    ahead, back = (_AHEAD, _BACK) if sizes[_STAGE] > 1 else (0, 1)
    if sizes[_CONTEXT] > 1:
        keys = decoder.key_width / sizes[_TENSOR]
        both, more = (
            pass_bytes(decoder.length, sizes[_CONTEXT], keys, decoder.itemsize, again=again) for again in (False, True)
        )
        sent[_CONTEXT] += texts * (ahead * (more - both) + back * both)
        # The loss is computed by each device for its own tokens: see `jaxdl.parallel.collectives.cross_entropy`.
        sent[_TENSOR] += back * _all_reduce(tokens * (4 + decoder.width) * _FLOAT_BYTES, sizes[_TENSOR])
    for axis, num_bytes in _of_experts(plan, tokens, ahead, back).items():
        sent[axis] += num_bytes
    return {axis: sent[axis] for axis in AXES if sent[axis]}


def exchanged_bytes(plan: Plan) -> float:
    """Those over `replica`, by the cost model of the exchange."""
    sizes, exchange = plan.parts.layout.mesh.shape, plan.experiment.exchange
    assert isinstance(exchange, ExchangeConfig), "it has been chosen"
    gradients = exchanged_gradients(plan.experiment, plan.parts.data_spec, plan.parts.layout.mesh)
    machine = Machine({axis: Link(0.0, 1.0) for axis in AXES})
    return predict(exchange, gradients, machine).sent_bytes if sizes[Axis.REPLICA] > 1 else 0.0


def _between_stages(plan: Plan, decoder: Decoder) -> float:
    """Activations and their gradients of a micro-batch, and once the sum of what all stages have."""
    sizes, network, trainable = plan.parts.layout.mesh.shape, plan.parts.network, plan.parts.trainable
    if sizes[_STAGE] == 1:
        return 0.0
    rows = plan.experiment.batch_size / sizes[Axis.REPLICA] / plan.experiment.step.microbatches
    axes = jax.tree.leaves(trainable.of(network.axes), is_leaf=is_names)
    shapes = [x.shape for x in jax.tree.leaves(trainable.of(network.param_shapes))]
    rest = sum(math.prod(shape) for names, shape in zip(axes, shapes, strict=True) if STACKED not in names)
    activations = activation_bytes(decoder.tokens(rows), decoder.width, decoder.itemsize)
    return (_AHEAD + _BACK) / 2 * activations + table_bytes(sizes[_STAGE], rest * _FLOAT_BYTES)


def _of_experts(plan: Plan, tokens: int, ahead: int, back: int) -> dict[str, float]:
    """Axis -> bytes of the experts of a layer, for so many tokens of a device, of so many passes, see `_AHEAD`."""
    model, sizes = plan.experiment.model, plan.parts.layout.mesh.shape
    if not isinstance(model, MixtureOfExperts):
        return {}
    size = sizes[_FSDP]
    # All devices that split a text compute with all kernels of a device, whose gradients are summed over them.
    kernels = 3 * model.num_experts // size * model.embed_dim * model.mlp_dim * _FLOAT_BYTES
    sent = {_CONTEXT: back * _all_reduce(kernels, sizes[_CONTEXT])}
    per_token, width = model.experts_per_token, model.embed_dim * _FLOAT_BYTES
    how = (size, tokens, per_token, width, model.row_buffer)
    way, choices = experts.way_of_fewer_bytes(*how), tokens * per_token
    rows = choices if way == "gather" else experts.rows_of_pair(size, choices, model.row_buffer)
    forward, numbers = experts.sent_bytes(way, *how), 4 * (size - 1) * rows
    return sent | {_FSDP: float((ahead + 2 * back) * forward - back * numbers)}


def _all_reduce(num_bytes: float, size: int) -> float:
    return 2 * (size - 1) / size * num_bytes
