"""Embedding tables in a step: pooled vectors join the batch, and touched rows are updated."""

from __future__ import annotations

from typing import Any

import jax

from jaxdl.optim import num_updates
from jaxdl.parallel.embedding import ROWS, LocatedIds, TableState
from jaxdl.parallel.mesh import Axis
from jaxdl.training.state import TrainState
from jaxdl.training.step.parts import IDS, LENGTHS, VECTORS, Batch, Metrics, Parts
from jaxdl.training.step.update import clip_factor

_FORWARD, _BACKWARD = 4, 5
"""Folded into the key of a step, from which other parts of the step fold smaller numbers."""


def look_up(
    parts: Parts, tables: TableState, batch: Batch, key: jax.Array, located: LocatedIds | None = None
) -> tuple[Batch, LocatedIds | None]:
    """The batch with its pooled vectors, `VECTORS`, and where its ids are; as it is for a network without tables.

    `key` is that of the step; `located` says where the ids are if that is known.
    """
    if parts.tables is None:
        return batch, None
    rows = {name: table[ROWS] for name, table in tables.items()}
    located = located or locate_ids(parts, batch)
    return {**batch, VECTORS: parts.tables.lookup(rows, located, jax.random.fold_in(key, _FORWARD))}, located


def locate_ids(parts: Parts, batch: Batch) -> LocatedIds:
    """Where the ids of a batch are, of a network with tables."""
    assert parts.tables is not None
    return parts.tables.locate(batch[IDS], batch.get(LENGTHS))


def touched_rows(
    parts: Parts, located: LocatedIds | None, pooled_grads: jax.Array | None, scale: jax.Array, key: jax.Array
) -> tuple[Any, jax.Array | None]:
    """The touched rows with the sums of their gradients, and the sum of squares of all of these; None without tables.

    `pooled_grads` are the gradients of the pooled vectors as `local_gradients` returns them, times `scale`; `key` is
    that of the step.
    """
    if parts.tables is None:
        return None, None
    assert pooled_grads is not None
    assert located is not None
    # Those of a replica are of the mean over replicas.
    grads = pooled_grads / (scale * parts.layout.mesh.shape[Axis.REPLICA])
    return parts.tables.gradients(located, grads, jax.random.fold_in(key, _BACKWARD))


def update_tables(
    parts: Parts, tables: TableState, touched: Any, state: TrainState, metrics: Metrics, kept: jax.Array
) -> TableState:
    """The tables after the update of the touched rows; `metrics` are those of the update, `state` the one before it.

    A step that is not `kept` changes nothing. A choice between old and new tables would copy them.
    """
    if parts.tables is None:
        return tables
    return parts.tables.update(
        tables,
        touched,
        kept=kept,
        factor=clip_factor(parts.config, metrics["grad_norm"]),
        learning_rate=metrics["learning_rate"],
        count=num_updates(state.opt_state) + 1,
    )
