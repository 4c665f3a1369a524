"""Module paths of earlier versions: `import jaxdl.mesh` is `jaxdl.parallel.mesh`, the same module, with a warning.

Configs, notebooks and programs that were written for the earlier layout go on working. `find_spec` is asked before
Python looks for files, so that a module below a package of the earlier layout is not loaded a second time.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

COMMANDS = (
    "bench", "compare", "convert", "evaluate", "export", "fleet", "generate", "launch", "planner", "score", "search",
    "status", "translate",
)  # fmt: skip
"""What runs as `python -m jaxdl.NAME`."""

SHORT = {*COMMANDS, *(f"{name}.__main__" for name in COMMANDS), "classics", "spark", "testing"}
"""Names that stay: those of commands, and of packages that users import. They give no warning."""

MOVED = {
    "agreement": "exchange.agreement",
    "asynchrony": "parallel.asynchrony",
    "bench": "performance.bench",
    "bench.balance": "performance.bench.balance.balance",
    "bench.balance_check": "performance.bench.balance.balance_check",
    "bench.balance_report": "performance.bench.balance.balance_report",
    "bench.balance_run": "performance.bench.balance.balance_run",
    "bench.balance_thresholds": "performance.bench.balance.balance_thresholds",
    "bench.balance_work": "performance.bench.balance.balance_work",
    "bench.cluster": "performance.bench.cluster.cluster",
    "bench.cluster_hosts": "performance.bench.cluster.cluster_hosts",
    "bench.cluster_report": "performance.bench.cluster.cluster_report",
    "bench.cluster_variants": "performance.bench.cluster.cluster_variants",
    "bench.cluster_worker": "performance.bench.cluster.cluster_worker",
    "bench.embedding": "performance.planner.table_bytes",
    "bench.scheme": "parallel.compiler.collectives",
    "bench.wire": "parallel.compiler.wire_bytes",
    "checkpoint": "training.checkpoint",
    "checkpoint.earlier": "training.checkpoint.earlier_runs",
    "checkpoint.quiet": "training.checkpoint.orbax_logs",
    "classics": "training.classics",
    "cluster": "parallel.cluster",
    "collectives": "parallel.collectives",
    "command": "training.command",
    "compare": "report.compare",
    "compiler": "parallel.compiler",
    "completion": "training.completion",
    "config": "core.config",
    "convert": "inference.convert",
    "data.arrow_numbers": "data.tables.arrow_numbers",
    "data.clicks": "data.tables.clicks",
    "data.colours": "data.images.colours",
    "data.columns": "data.tables.columns",
    "data.corpus": "data.text.corpus",
    "data.criteo": "data.tables.criteo",
    "data.damage": "data.images.damage",
    "data.documents": "data.text.documents",
    "data.examples": "data.arrays.examples",
    "data.folder": "data.images.folder",
    "data.image_values": "data.images.image_values",
    "data.labels": "data.arrays.labels",
    "data.maker": "data.images.maker",
    "data.memfd": "data.images.memfd",
    "data.mixture": "data.text.mixture",
    "data.movielens": "data.tables.movielens",
    "data.packing": "data.text.packing",
    "data.pair_files": "data.text.pair_files",
    "data.pair_rows": "data.text.pair_rows",
    "data.parquet": "data.images.parquet",
    "data.photo": "data.images.photo",
    "data.photos": "data.images.photos",
    "data.pool": "data.images.pool",
    "data.private": "data.images.private",
    "data.ranks": "data.tables.ranks",
    "data.readers": "data.arrays.readers",
    "data.row_groups": "data.tables.row_groups",
    "data.rows": "data.arrays.rows",
    "data.shard_worker": "data.text.shard_worker",
    "data.shards": "data.text.shards",
    "data.shm": "data.images.shm",
    "data.store": "data.images.store",
    "data.table_index": "data.tables.table_index",
    "data.tabular": "data.tables.tabular",
    "data.tar_members": "data.images.tar_members",
    "data.tars": "data.images.tars",
    "data.tokenizer": "data.text.tokenizer",
    "data.tokenizing": "data.text.tokenizing",
    "data.view": "data.images.view",
    "data.worker": "data.images.worker",
    "decoding": "inference.decoding",
    "embedding": "parallel.embedding",
    "errors": "core.errors",
    "evaluate": "inference.evaluate",
    "evaluation": "training.evaluation",
    "exchange.idle": "performance.planner.idle_exchange",
    "experiment": "training.experiment",
    "export": "inference.export",
    "fields": "core.fields",
    "files": "core.files",
    "fleet": "platform.fleet",
    "fleet.mixed": "platform.fleet.shared_nodes_policy",
    "fleet.shown": "platform.fleet.status_view",
    "generate": "inference.generate",
    "guard": "training.guard",
    "kinds": "core.kinds",
    "launch": "platform.launch",
    "lease": "parallel.lease",
    "mesh": "parallel.mesh",
    "modules": "core.modules",
    "optim.making": "optim.build",
    "option_values": "core.option_values",
    "options": "core.options",
    "overview": "core.overview",
    "paths": "core.paths",
    "patterns": "core.patterns",
    "phases": "data.phases",
    "planner": "performance.planner",
    "plans": "training.plans",
    "precision": "parallel.precision",
    "predictor": "inference.predictor",
    "reference": "core.reference",
    "report.directions": "report.better_direction",
    "report.seen": "report.consumed",
    "report.subject": "report.reported_run",
    "rounds": "training.rounds",
    "run": "training.run",
    "run.ahead": "training.run.tables.ids_ahead",
    "run.build": "training.run.plan.build",
    "run.cached": "training.run.tables.cached_tables",
    "run.changes": "training.run.plan.changed_settings",
    "run.codec": "training.run.workdir.tokenizer",
    "run.entry": "training.run.train",
    "run.exchanged": "training.run.plan.exchange",
    "run.generation": "inference.generation",
    "run.initial": "training.run.plan.init_from",
    "run.jagged": "training.run.tables.jagged_batches",
    "run.learning": "training.run.learners.learning",
    "run.length": "training.run.plan.length",
    "run.overlap": "training.run.plan.overlap",
    "run.planning": "training.run.plan.layout",
    "run.relearning": "training.run.learners.replay",
    "run.room": "training.run.plan.memory",
    "run.scoring": "inference.scoring",
    "run.staged": "training.run.plan.staged_data",
    "run.translation": "inference.translation",
    "run.validate": "training.run.plan.validate",
    "run.whole": "training.run.tables.global_ids",
    "run.workdir": "training.run.workdir.workdir",
    "runs": "core.runs",
    "score": "inference.score",
    "search": "platform.search",
    "sharding": "parallel.sharding",
    "solver": "core.solver",
    "spark": "platform.spark",
    "startup": "core.startup",
    "state": "training.state",
    "status": "report.status",
    "step": "training.step",
    "tasks": "training.tasks",
    "testing": "exchange.testing",
    "trackers": "report.trackers",
    "trained": "inference.trained",
    "translate": "inference.translate",
    "user_code": "core.user_code",
    "writing": "core.writing",
}
"""The module by its earlier path -> by its path now, both below `jaxdl`; modules inside of a package move with it."""


class _SameModule:
    """Gives the module of another name: nothing is run again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has written the spec of the earlier name into the module.
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> types.CodeType | None:
        """The code that `python -m` runs, of the module where it is now."""
        spec = importlib.util.find_spec(self._name)
        loader: Any = spec and spec.loader
        return loader.get_code(self._name)

    def get_source(self, fullname: str) -> str | None:
        """The source of the module where it is now."""
        spec = importlib.util.find_spec(self._name)
        loader: Any = spec and spec.loader
        return loader.get_source(self._name)


class Finder:
    """Finds modules of jaxdl by the paths that they had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that moved; None for all others."""
        if not fullname.startswith("jaxdl."):
            return None
        name = new_path(fullname)
        found = None if name is None else importlib.util.find_spec(name)
        if name is None or found is None:
            return None
        _warn(fullname, name)
        loader: Any = _SameModule(name)
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec


def new_path(name: str) -> str | None:
    """Where the module `jaxdl.a.b` of an earlier version is now; None if it did not move."""
    parts = name.split(".")[1:]
    for number in range(len(parts), 0, -1):
        moved = MOVED.get(".".join(parts[:number]))
        if moved is not None:
            return ".".join(["jaxdl", moved, *parts[number:]])
    return None


def _warn(name: str, new: str) -> None:
    """Warns at the line of the import. Of `import jaxdl.run.build`, whose package is imported first, once."""
    if name.removeprefix("jaxdl.") in SHORT:
        return
    frame, whole = sys._getframe(2), name
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "_find_and_load":
            whole = frame.f_locals.get("name", whole)
        frame = frame.f_back
    if not whole.startswith(f"{name}."):
        # The frames of the import system do not count as levels.
        warnings.warn(f"{name} is {new} now. The earlier name still works.", FutureWarning, stacklevel=3)


def install() -> None:
    """Lets Python find modules by their earlier paths."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        finder: Any = Finder()
        sys.meta_path.insert(0, finder)
