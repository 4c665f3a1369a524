"""Weights & Biases, offline by default: `wandb sync` uploads what is in the workdir."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.report.trackers.base import State, TrackedModel, TrackedRun, Tracker, Writer

EARLIER = "earlier"
"""The folder with the files of the process before this one, until the next."""
EXIT_CODES = {"finished": 0, "stopped": 0, "interrupted": 130, "failed": 1}


class Wandb(Tracker, kind="wandb"):
    """Weights & Biases. Offline, its files are in the workdir, those of the whole run in the newest folder."""

    package = "wandb"

    project: str = pydantic.Field(default="jaxdl", min_length=1)
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team of the project; that of the login by default."""
    mode: Literal["offline", "online"] = "offline"
    """Write files in the workdir, which `wandb sync` uploads; or upload while the run trains, which takes a login."""
    log_model: bool = False
    """Keep the network of the finished run as an artifact of type `model`, with the aliases `latest` and `step-N`:
    `jaxdl.restore` reads the folder that `artifact.download()` makes."""

    @property
    def model_format(self) -> str | None:
        """The form that jaxdl restores, if models are logged."""
        return "jaxdl" if self.log_model else None

    def check(self, workdir: Path | None) -> None:
        """Raises ConfigError if the run cannot be tracked: without the package, or without a workdir for its files."""
        super().check(workdir)
        if workdir is None:
            raise ConfigError(
                "--report.trackers wandb: without a workdir there is no place for its files. Give --workdir, or leave "
                "wandb out."
            )

    def open(self, run: TrackedRun) -> Writer:
        """Begins the run there, or opens it again."""
        return _Run(self, run)


class _Run(Writer):
    """One run of Weights & Biases.

    Offline a process cannot add to the file of an earlier one: it writes the whole run to a new one, under the same
    id. Online the steps of Weights & Biases, here the numbers of the rows, never go back: if rows were dropped, it is
    a new run.
    """

    def __init__(self, tracker: Wandb, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        assert run.folder is not None
        offline, folder = tracker.mode == "offline", run.folder
        folder.mkdir(parents=True, exist_ok=True)
        if offline:
            _check_writable(folder)
            _set_aside(folder / "wandb")
        self.run_id = run.run_id if run.run_id and (offline or not run.rows_changed) else uuid.uuid4().hex[:12]
        # The console is the display of the run; of a server that is gone the end of the process must not wait.
        settings = wandb.Settings(
            console="off", silent=True, init_timeout=tracker.wait_sec, finish_timeout=max(tracker.wait_sec, 1.0)
        )
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            id=self.run_id,
            name=run.name,
            dir=folder,
            mode=tracker.mode,
            resume=None if offline else "allow",
            reinit="create_new",
            tags=tracker.tags,
            settings=settings,
        )
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.num_rows = 0 if offline else self._run.step
        self._written = self.num_rows
        self.tag(run.tags)

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes a row."""
        self._run.log(dict(row), step=self._written)
        self._written += 1

    def tag(self, tags: Mapping[str, str]) -> None:
        """Notes texts of the run by their names."""
        self._run.config.update({f"tags.{name}": value for name, value in tags.items()}, allow_val_change=True)

    def keep(self, path: Path) -> None:
        """Keeps a file of the run."""
        folder = Path(self._run.dir)
        shutil.copyfile(path, folder / path.name)  # A link would be a warning, and change with the file.
        self._run.save(str(folder / path.name), base_path=str(folder), policy="now")

    def keep_model(self, model: TrackedModel) -> None:
        """Keeps the network as an artifact; one with the content of an earlier one is the same version."""
        wandb = importlib.import_module("wandb")
        metadata = {"step": model.step, **{f"eval/{name}": value for name, value in model.metrics.items()}}
        artifact = wandb.Artifact(f"model-{self.run_id}", type="model", metadata=metadata)
        artifact.add_dir(str(model.folder))
        self._run.log_artifact(artifact, aliases=["latest", f"step-{model.step}"])

    def close(self, state: State | None = None) -> None:
        """Writes what is kept back, and ends."""
        if state is not None:
            self._run.summary["state"] = state
        self._run.finish(exit_code=EXIT_CODES[state or "interrupted"])


def _check_writable(folder: Path) -> None:
    """Raises PermissionError: Weights & Biases itself would write to the temporary folder of the system instead."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _set_aside(folder: Path) -> None:
    """Moves the files of an earlier process to the folder `earlier`, which has those of one process at most."""
    runs = sorted(folder.glob("offline-run-*"))
    if not runs:
        return
    earlier = folder / EARLIER
    shutil.rmtree(earlier, ignore_errors=True)
    earlier.mkdir()
    for run in runs:
        run.rename(earlier / run.name)
