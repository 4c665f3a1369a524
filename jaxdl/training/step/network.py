"""The network applied to a batch, in the precision and the sharding of a step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.models.network import Call
from jaxdl.parallel.gathering import Gathered, gather_params, whole_numbers
from jaxdl.parallel.mesh import STAGE_AXES
from jaxdl.parallel.precision import cast_weights
from jaxdl.parallel.sharding import Layout, Params, is_names, use_layout
from jaxdl.training.state import REFERENCE, TABLES, ModelState
from jaxdl.training.step.parts import IDS, LENGTHS, Batch, Parts


def apply_network(
    parts: Parts,
    layout: Layout,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    call: Call,
    vectors: jax.Array | None = None,
) -> tuple[Any, ModelState]:
    """`(outputs, model_state)` of the network on a batch, in the precision's dtype, sharded by `layout`.

    A network with embedding tables has the pooled vectors of each feature as its last input: `vectors`, or else what is
    looked up in the tables that `model_state` then has (`TrainState.eval_state`).
    """
    if parts.tables is not None and vectors is None:
        model_state = dict(model_state)
        located = parts.tables.locate(batch[IDS], batch.get(LENGTHS))
        vectors = parts.tables.lookup(model_state.pop(TABLES), located)
    with _precise(parts, layout):
        inputs = parts.task.inputs(batch, parts.data_spec)
        if parts.network.reads_padding:
            inputs = (*inputs, *parts.data_spec.segments(batch))
        if parts.tables is not None and vectors is not None:
            inputs = (*inputs, parts.tables.by_feature(vectors))
    if call.rows is not None and (each := parts.task.rows_per_example(parts.data_spec)) > 1:
        rows = (each * call.rows[:, None] + jnp.arange(each)).ravel()
        call = dataclasses.replace(call, rows=rows)
    return run_network(parts, layout, params, model_state, call, *inputs)


def run_network(
    parts: Parts, layout: Layout, params: Params, model_state: ModelState, call: Call, *inputs: Any
) -> tuple[Any, ModelState]:
    """`apply_network` on the network's own inputs."""
    # What is evaluated, or served, is in 16 bits.
    layout = dataclasses.replace(layout, fp8_size=parts.precision.fp8_size if call.train else None)
    model_state = {name: x for name, x in model_state.items() if name != REFERENCE}
    network = parts.network
    if network.empty_layers and layout.manual.isdisjoint(STAGE_AXES):  # Outside of a pipeline, as text is written.
        (params, model_state), network = network.without_empty(params, model_state), network.filled
    with _precise(parts, layout):
        used = cast_weights(params, network.axes, parts.precision.weight_dtype)
        used = gather_params(used, network.axes)
        return network.call(call, used, model_state, *inputs)


def gathered_params(parts: Parts, layout: Layout, params: Params) -> Params:
    """For each parameter that `run_network` would gather, the same gathered once, to be given to `with_gathered`."""
    with _precise(parts, layout):
        return jax.tree.map(lambda names, x: whole_numbers(x, names), parts.network.axes, params, is_leaf=is_names)


def with_gathered(params: Params, gathered: Params) -> Params:
    """Parameters for `run_network`, with what `gathered_params` has made of them."""
    return jax.tree.map(
        lambda x, whole: x if whole is None else Gathered(whole, x), params, gathered, is_leaf=lambda node: node is None
    )


@contextlib.contextmanager
def _precise(parts: Parts, layout: Layout) -> Iterator[None]:
    """Context of what a network computes: the layout, and the precision of products."""
    layout = dataclasses.replace(layout, wire_dtype=parts.precision.dtype)
    matmul = (
        jax.default_matmul_precision(parts.precision.matmul) if parts.precision.matmul else jax.named_scope("model")
    )
    with use_layout(layout), matmul:
        yield
