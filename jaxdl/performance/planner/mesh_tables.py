"""Embedding tables in the search for a mesh: their schemes on each mesh, and what a step costs for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping

from jaxdl.data import Data, Splits, TabularSpec
from jaxdl.exchange.cost import Machine
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.table import selects
from jaxdl.performance.planner.choices import PlanTables, TablesOnMesh
from jaxdl.performance.planner.table_report import measured_workload
from jaxdl.performance.planner.table_search import TableSearch
from jaxdl.performance.planner.tables import Workload, costs_of
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import TABLES
from jaxdl.training.run.plan.data import read_splits


def tables_on_meshes(
    experiment: Experiment,
    sizes: Mapping[str, int],
    machine: Callable[[], Machine],
    keep: Collection[str],
    read: Callable[[Data, None], Splits] = read_splits,
) -> PlanTables | None:
    """Plans an experiment's tables for meshes with as many replicas as `sizes`; None without tables.

    Schemes and places that the config gives stay: those of tables by name, and of all where `embedding.scheme` is not
    the default, or in `keep`, or where the host holds tables. Raises ConfigError for data that cannot be read.
    """
    if experiment.model.modality != TabularSpec.modality:  # No data need be read.
        return None
    workload = measured_workload(experiment, sizes, read)
    if workload is None:
        return None
    base, work = experiment.embedding, with_slots(workload, experiment.embedding)
    fixed = given_schemes(work, base, keep)

    @functools.cache
    def planned(axes: tuple[tuple[str, int], ...], room: float) -> TablesOnMesh:
        here = dataclasses.replace(work, sizes=dict(axes))
        if len(fixed) == len(work.tables) or math.prod(here.sizes.values()) == 1:
            return on_mesh(here, base, machine())

        search = TableSearch(here, machine(), room, base, fixed)

        def others(most: int) -> list[TablesOnMesh]:
            return [on_mesh(here, plan.config(base), machine()) for plan in search.plans(1 + most)[1:]]

        return dataclasses.replace(on_mesh(here, search.plan().config(base), machine()), others=others)

    return lambda sizes, room: planned(tuple(sizes.items()), room)


def given_schemes(work: Workload, base: EmbeddingConfig, keep: Collection[str]) -> dict[str, Scheme]:
    """The schemes that a config gives: to tables by their names or places, or to all of them."""
    whole = base.scheme != EmbeddingConfig().scheme or TABLES in keep or base.cache != CacheConfig()
    placed = {name for name, _ in base.places}
    named = {table.name for table in work.tables if any(selects(pattern, table.name) for pattern, _ in base.schemes)}
    return {table.name: base.scheme_of(table.name) for table in work.tables if whole or table.name in placed | named}


def with_slots(work: Workload, config: EmbeddingConfig) -> Workload:
    """The tables as devices have them: with slots for some rows where the host holds the table."""
    slots = {table.name: config.cache.slots(table.name, table.rows) for table in work.tables}
    tables = tuple(table.replaced({"rows": slots[table.name] or table.rows}) for table in work.tables)
    return dataclasses.replace(work, tables=tables, cached=frozenset(name for name, count in slots.items() if count))


def on_mesh(work: Workload, config: EmbeddingConfig, machine: Machine) -> TablesOnMesh:
    """The tables of a workload under a config, with what a step costs for them."""
    schemes = config.schemes_of([table.name for table in work.tables])
    return TablesOnMesh(config, schemes, costs_of(work, config, machine))
