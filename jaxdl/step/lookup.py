"""Embedding tables in a step: pooled vectors join the batch, and touched rows are updated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.embedding import ROWS, TableState
from jaxdl.mesh import Axis
from jaxdl.optim import num_updates
from jaxdl.state import TrainState
from jaxdl.step.parts import IDS, VECTORS, Batch, Metrics, Parts
from jaxdl.step.update import clip_factor


def looked_up(parts: Parts, tables: TableState, batch: Batch) -> tuple[Batch, Any]:
    """The batch with its pooled vectors, `VECTORS`, and where its ids are; as it is for a network without tables."""
    if parts.tables is None:
        return batch, None
    vectors, places = parts.tables.lookup({name: one[ROWS] for name, one in tables.items()}, batch[IDS])
    return {**batch, VECTORS: vectors}, places


def touched_rows(
    parts: Parts, places: Any, batch: Batch, of_vectors: jax.Array | None, scale: jax.Array
) -> tuple[Any, jax.Array | None]:
    """The touched rows with the sums of their gradients, and the sum of squares of all of these; None without tables.

    `of_vectors` are the gradients of the pooled vectors as `local_gradients` returns them, times `scale`.
    """
    if parts.tables is None:
        return None, None
    assert of_vectors is not None
    # Those of a replica are of the mean over replicas.
    return parts.tables.gradients(places, batch[IDS], of_vectors / (scale * parts.layout.mesh.shape[Axis.REPLICA]))


def updated_tables(parts: Parts, tables: TableState, touched: Any, state: TrainState, metrics: Metrics) -> TableState:
    """The tables after the update of the touched rows; `metrics` are those of the step, and `state` the one before it.

    A step whose `grad_norm` is NaN is skipped, if such steps are. A choice between old and new tables would copy them.
    """
    if parts.tables is None:
        return tables
    kept = jnp.isfinite(metrics["grad_norm"]) if state.loss_scale or state.guard else jnp.bool_(True)
    return parts.tables.updated(
        tables,
        touched,
        kept=kept,
        factor=clip_factor(parts.config, metrics["grad_norm"]),
        learning_rate=metrics["learning_rate"],
        count=num_updates(state.opt_state) + 1,
    )
