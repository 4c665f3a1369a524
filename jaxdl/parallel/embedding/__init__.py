"""Embedding tables, spread over the devices of a mesh, updated in place where a batch touches them."""

from jaxdl.parallel.embedding.layout import Buffer, make_buffers
from jaxdl.parallel.embedding.optimizers import RowAdaGrad, RowAdam, RowOptimizer, RowSGD, RowUpdate, RowWiseAdaGrad
from jaxdl.parallel.embedding.schemes import (
    ColumnWise,
    DataParallel,
    Replicated,
    RowWise,
    Scheme,
    Spread,
    TableRowWise,
    TableWise,
)
from jaxdl.parallel.embedding.table import EmbeddingConfig, Table
from jaxdl.parallel.embedding.tables import ROWS, LocatedIds, Tables, TableState

__all__ = [
    "ROWS",
    "Buffer",
    "ColumnWise",
    "DataParallel",
    "EmbeddingConfig",
    "LocatedIds",
    "Replicated",
    "RowAdaGrad",
    "RowAdam",
    "RowOptimizer",
    "RowSGD",
    "RowUpdate",
    "RowWise",
    "RowWiseAdaGrad",
    "Scheme",
    "Spread",
    "Table",
    "TableRowWise",
    "TableState",
    "TableWise",
    "Tables",
    "make_buffers",
]
