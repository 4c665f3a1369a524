"""What a planner compiles and times in place of an experiment: its data are read once, its tables may be short.

A step touches few rows of an embedding table, so that one of a short table takes as long. That of the table itself may
not run at all on the devices that a trial has: whole tables may need all devices of the run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.data import Data, DataSpec, Splits, TabularSpec
from jaxdl.data.order import Order
from jaxdl.data.tables.tabular import TabularSource
from jaxdl.exchange import Dense
from jaxdl.parallel.embedding import Tables, TableWise
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.mesh import Device, MeshConfig
from jaxdl.performance.planner.memory import sharding_of
from jaxdl.performance.planner.trial import Setting, stand_in, trial_exchange
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import Plan, make_plan
from jaxdl.training.run.plan.data import read_splits
from jaxdl.training.step.parts import IDS

_TABLE_BYTES, _LEAST_ROWS = 2**27, 1024
"""All tables of a trial together have about so many bytes with the state of their rows, more than a cache of a
processor holds; but each has so many rows, if it has as many."""


_OPTIMIZATIONS = "xla_backend_optimization_level"


class Trials:
    """Plans of steps of an experiment on data of its shapes."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self._given = stand_in(experiment), experiment
        self._read: dict[tuple[type[Data], Any], Splits] = {}

    def splits(self, data: Data, recorded: DataSpec | None = None) -> Splits:
        """Data of the experiment, or made-up ones in their place, read once. See `read_splits`."""
        # Trials differ in the number of made-up examples alone.
        key = type(data), getattr(data, "num_train", None)
        if key not in self._read:
            self._read[key] = read_splits(data, recorded)
        return self._read[key]

    def plan(self, changes: Mapping[str, Any], devices: Sequence[Device], *, whole: bool = False) -> Plan:
        """The plan of the experiment with these changes. Raises ConfigError if it cannot be run.

        Its tables are short, and all on the devices, each on one of them, but `whole` ones are as the experiment has
        them. In its batches ids are folded into the rows that are on the devices.
        """
        changes = dict(changes)
        if isinstance(number := getattr(self.experiment.data, "num_train", None), int):
            changes["data.num_train"] = max(number, changes.get("batch_size", self.experiment.batch_size))
        if not whole:  # Places are of the whole mesh, and other schemes may need more memory than all the rest.
            of_tables = {"cache": CacheConfig(), "places": (), "schemes": (), "scheme": TableWise()}
            changes |= {f"embedding.{name}": value for name, value in of_tables.items()}
        rows = None if whole else self._most_rows
        experiment = self.experiment.replaced(changes)
        plan = make_plan(experiment, devices, splits=self.splits(experiment.data), most_rows=rows)
        train, tables = plan.splits.train, plan.parts.tables
        if tables is None or not isinstance(train, TabularSource):
            return plan
        return dataclasses.replace(plan, splits=Splits(_Folded(train, tables), plan.splits.test))

    @property
    def lengths(self) -> dict[str, Any]:
        """The fields of the experiment that give its length and its schedule, for steps that it may have itself.

        None of them where trials have other data, or the run has phases: its steps are then other programs in any case.
        """
        if self._given.phases or self.experiment.data != self._given.data:
            return {}
        return {name: getattr(self._given, name) for name in ("epochs", "tokens", "steps", "schedule")}

    @functools.cached_property
    def _most_rows(self) -> int | None:
        """The most rows of a table; None without tables."""
        if self.experiment.model.modality != TabularSpec.modality:
            return None
        features = self.splits(self.experiment.data).train.spec.id_features()
        width = sum(table.columns for table in self.experiment.model.tables(features))
        return max(_LEAST_ROWS, _TABLE_BYTES // (2 * 4 * width)) if width else None


def trial_plan(trials: Trials, setting: Setting, devices: Sequence[Any]) -> Plan:
    """The plan of a step of this setting, on the devices that it needs. Raises ConfigError if it cannot be run."""
    experiment = trials.experiment
    changes: dict[str, Any] = {
        "mesh": MeshConfig(replica=setting.replica, fsdp=setting.fsdp, tensor=setting.tensor),
        "batch_size": setting.examples * setting.fsdp * setting.replica,
        "step.microbatches": 1,
        "sharding": sharding_of(experiment.sharding, setting.param_sharding),
        "exchange": trial_exchange(experiment) if setting.replica > 1 else Dense(),
    }
    if setting.remat is not None:
        changes["model.remat"] = setting.remat
    if getattr(devices[0], "platform", "") == "cpu" and _OPTIMIZATIONS not in " ".join(experiment.compiler.options):
        # It is looked at and not run; the module and its memory are the same, made in little more than half the time.
        changes["compiler.options"] = (*experiment.compiler.options, f"{_OPTIMIZATIONS}=0")
    return trials.plan(changes, devices[: setting.replica * setting.fsdp * setting.tensor])


class _Folded(TabularSource):
    """Examples whose ids are those of another source, modulo the rows that their tables have on the devices."""

    def __init__(self, source: TabularSource, tables: Tables) -> None:
        rows = {feature: table.rows for table in tables.tables for feature in table.features}
        self.spec, self._source = source.spec, source
        self._rows = np.concatenate([np.full(count, rows[name], np.int32) for name, count in self.spec.num_ids.items()])

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Source.batch`."""
        batch = self._source.batch(indices)
        return {**batch, IDS: np.where(batch[IDS] < 0, batch[IDS], batch[IDS] % self._rows)}

    def id_counts(self, indices: np.ndarray) -> np.ndarray:
        """Those of the source."""
        return self._source.id_counts(indices)

    def order(self, seed: int) -> Order:
        """That of the source."""
        return self._source.order(seed)


def first_batch(plan: Plan, shapes: Mapping[str, Any], most: int = 16) -> dict[str, Any] | None:
    """A training batch of these shapes, which jagged ones need not have: of the first ones; None if there is none."""
    segment = plan.timeline.segments[0]
    with plan.batches(segment, 0, most) as batches:
        for batch in batches:
            if {name: x.shape for name, x in batch.items()} == {name: x.shape for name, x in shapes.items()}:
                return batch
    return None
