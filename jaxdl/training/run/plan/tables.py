"""The embedding tables of a run on its mesh."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxdl.data import DataSpec
from jaxdl.parallel.embedding import EmbeddingConfig, Table, Tables
from jaxdl.parallel.embedding.update import agree_on_kernels
from jaxdl.parallel.mesh import platform


def make_tables(
    tables: tuple[Table, ...], config: EmbeddingConfig, spec: DataSpec, mesh: Mesh, most_rows: int | None = None
) -> Tables | None:
    """The tables of a network on a mesh, with at most `most_rows` rows each; None without any."""
    if not tables:
        return None
    features = spec.id_features()
    # The devices have slots for some rows of tables with a cache.
    slots = {table.name: config.cache.slots(table.name, table.rows) for table in tables}
    rows = {table.name: min(slots[table.name] or table.rows, most_rows or table.rows) for table in tables}
    on_devices = [table.model_copy(update={"rows": rows[table.name]}) for table in tables]
    if platform(mesh) == "gpu":
        agree_on_kernels(table.optimizer or config.optimizer for table in tables)
    return Tables(on_devices, {x.name: x.num_ids for x in features}, config, mesh, features if config.jagged else ())
