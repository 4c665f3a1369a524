"""Module paths of earlier versions: `import jaxdl.mesh` is `jaxdl.parallel.mesh`, the same module, with a warning.

Configs, notebooks and programs that were written for the earlier layout go on working. `find_spec` is asked before
Python looks for files, so that a module below a package of the earlier layout is not loaded a second time.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

KEPT = ("classics", "spark", "testing")
"""Packages that users import by their earlier paths, which stay; so do those of commands. They give no warning."""

_ROOMS = {
    "core": (
        "config errors fields files kinds modules option_values options overview paths patterns reference runs "
        "solver startup user_code"
    ),
    "parallel": "asynchrony cluster collectives compiler embedding lease mesh precision sharding",
    "exchange": "agreement testing",
    "data": "phases",
    "data.arrays": "examples labels readers rows",
    "data.images": (
        "colours damage folder image_values maker memfd parquet photo photos pool private shm store tar_members "
        "tars view worker"
    ),
    "data.tables": "arrow_numbers clicks columns criteo movielens ranks row_groups table_index tabular",
    "data.text": "corpus documents mixture packing pair_files pair_rows shard_worker shards tokenizer tokenizing",
    "report": "compare status trackers",
    "training": "classics command completion evaluation experiment guard plans rounds state step tasks",
    "inference": "convert decoding evaluate export generate lm_eval predict predictor score serve trained translate",
    "platform": "fleet launch search spark",
    "performance": "planner",
}
"""Room -> modules and packages that are in it now, and were in `jaxdl`; for a room of `data`, in `jaxdl.data`."""

MOVED = {
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
    "checkpoint.form": "training.checkpoint.items",
    "checkpoint.quiet": "training.checkpoint.orbax_logs",
    "exchange.idle": "performance.planner.idle_exchange",
    "fleet.mixed": "platform.fleet.shared_nodes_policy",
    "fleet.shown": "platform.fleet.status_view",
    "optim.making": "optim.build",
    "performance.bench.embedding": "performance.planner",
    "performance.bench.embedding.embedding": "performance.planner.table_bytes",
    "performance.bench.scheme": "parallel.compiler.collectives",
    "report.directions": "report.better_direction",
    "report.seen": "report.consumed",
    "report.subject": "report.reported_run",
    "run": "training.run",
    "run.ahead": "training.run.compile",
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
    "run.overlap": "training.run.plan.exchange",
    "run.planning": "training.run.plan.layout",
    "run.relearning": "training.run.learners.replay",
    "run.room": "training.run.plan.memory",
    "run.scoring": "inference.scoring",
    "run.staged": "training.run.plan.data",
    "run.translation": "inference.translation",
    "run.validate": "training.run.plan.validate",
    "run.whole": "training.run.tables.global_ids",
    "run.workdir": "training.run.workdir.workdir",
    "writing": "core.files",
}
"""The module by its earlier path -> by its path now, both below `jaxdl`; modules inside of a package move with it."""
for _room, _names in _ROOMS.items():
    _before = "data." if _room.startswith("data.") else ""
    MOVED |= {f"{_before}{_name}": f"{_room}.{_name}" for _name in _names.split()}


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
        moved = None if name is None else importlib.util.find_spec(name)
        if name is None or moved is None:
            return None
        if not is_kept(fullname):
            _warn(fullname, name)
        loader: Any = _SameModule(name)
        spec = importlib.machinery.ModuleSpec(fullname, loader, origin=moved.origin)
        spec.submodule_search_locations = moved.submodule_search_locations
        return spec


def new_path(name: str) -> str | None:
    """Where the module `jaxdl.a.b` of an earlier version is now; None if it did not move."""
    parts = name.split(".")[1:]
    for number in range(len(parts), 0, -1):
        moved = MOVED.get(".".join(parts[:number]))
        if moved is not None:
            return ".".join(["jaxdl", moved, *parts[number:]])
    return None


def is_kept(name: str) -> bool:
    """Whether the earlier path `jaxdl.a` stays: of a command, `python -m jaxdl.a`, and of what is in `KEPT`."""
    package = name.removesuffix(".__main__")
    path = new_path(package)
    if path is None or package.count(".") != 1:
        return False
    main = os.path.join(os.path.dirname(__file__), os.pardir, *path.split(".")[1:], "__main__.py")
    return package.removeprefix("jaxdl.") in KEPT or os.path.isfile(main)


def _warn(name: str, new: str) -> None:
    """Warns at the line of the import. Of `import jaxdl.run.build`, whose package is imported first, once."""
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
