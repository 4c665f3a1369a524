"""trackio: a database on this machine, which its dashboard reads and `trackio sync` uploads."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from typing import Any

import pydantic

from jaxdl.report.trackers.base import State, TrackedRun, Tracker, Writer


class Trackio(Tracker, kind="trackio"):
    """trackio. Its database is where all its programs look: in TRACKIO_DIR, or the cache of Hugging Face."""

    package = "trackio"

    project: str = pydantic.Field(default="jaxdl", min_length=1)
    """The project that the run belongs to."""

    def open(self, run: TrackedRun) -> Writer:
        """Begins the run there, or opens it again."""
        return _Run(self.project, run, self.tags)


class _Run(Writer):
    """One run of trackio, written to its database at once: `trackio.Run` reports no failure and prints lines."""

    def __init__(self, project: str, run: TrackedRun, words: tuple[str, ...]) -> None:
        storage = importlib.import_module("trackio").SQLiteStorage
        self._storage, self._project, self._name = storage, project, run.name
        storage.validate_project_name(project)
        self.run_id = run.run_id or uuid.uuid4().hex
        if run.rows_changed:
            storage.delete_run(project, run.name, run_id=self.run_id)
        self.num_rows = self._written = storage.get_log_count(project, run_id=self.run_id)
        self._rows: list[dict[str, Any]] = []
        self._config = {**run.config, **({"tags": list(words)} if words else {})}
        self._last: tuple[dict[str, Any], int, str] | None = None
        self.tag(run.tags)

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes a row."""
        self._rows.append(dict(row))

    def flush(self) -> None:
        """Writes the rows that wait. trackio takes config and tags with rows alone, and skips a row whose id it has."""
        rows, self._rows = self._rows, []
        made = [
            ({name: value for name, value in row.items() if name != "step"}, row["step"], f"{self.run_id}-{number}")
            for number, row in enumerate(rows, self._written)
        ]
        self._written += len(rows)
        if not made and self._changed and self._last is not None:
            made = [self._last]
        if not made:
            return
        metrics, steps, ids = map(list, zip(*made, strict=True))
        config = self._config if self._changed else None
        self._storage.bulk_log(
            self._project, self._name, metrics, steps=steps, log_ids=ids, config=config, run_id=self.run_id
        )
        self._last, self._changed = made[-1], False

    def tag(self, tags: Mapping[str, str]) -> None:
        """Notes texts of the run by their names."""
        self._config |= {f"tags.{name}": value for name, value in tags.items()}
        self._changed = True

    def close(self, state: State | None = None) -> None:
        """Writes what is kept back, and ends."""
        if state is not None:
            self.tag({"state": state})
        self.flush()
