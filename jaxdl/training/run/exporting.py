"""The network of a finished run is written for other programs, and for trackers that keep models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import jax

from jaxdl.core.config import ConfigError
from jaxdl.core.files import EXPORTED_FOLDER
from jaxdl.core.kinds import import_object
from jaxdl.parallel.cluster.agree import of_first_process
from jaxdl.report import Reporter, Stopwatch
from jaxdl.report.trackers import TrackedModel
from jaxdl.training.experiment import Experiment
from jaxdl.training.exported import FORMS, USUAL, check_packages


def formats_of(experiment: Experiment) -> tuple[str, ...]:
    """The forms that are written at the end of a run: those that it exports, and those that its trackers keep."""
    asked = () if experiment.export is None else experiment.export or USUAL
    kept = [tracker.model_format for tracker in experiment.report.trackers]
    return tuple(dict.fromkeys([*asked, *filter(None, kept)]))


def check_export(experiment: Experiment, workdir: Path | None) -> None:
    """Raises ConfigError, on all processes, for forms that cannot be written."""
    formats = formats_of(experiment)
    if not formats:
        return
    option = "--export" if experiment.export is not None else "log_model of a tracker"
    if workdir is None:
        raise ConfigError(
            f"{option}: without a workdir there is no checkpoint to write. Give --workdir, or leave it out."
        )

    def check() -> bytes:
        check_packages(formats, option)
        return b""

    of_first_process(check)


class Ended(Protocol):
    """What is read of a `Trainer` that has ended."""

    experiment: Experiment
    workdir: Path | None
    reporter: Reporter
    watch: Stopwatch

    @property
    def step(self) -> int:
        """Steps completed."""
        ...


def models_of(run: Ended, *, ended: bool, changed: bool) -> Callable[[], Mapping[str, TrackedModel]]:
    """What writes the network of a run into the folder `exported` of its workdir; nothing unless it has `ended`.

    Its last checkpoint is complete. What is called gives what is there for trackers, by its form; nothing where it
    could not be written, of which the reporter warns: the run itself is kept. Unless the run has `changed`, what is
    there stays; else it is removed first.
    """
    formats, workdir = formats_of(run.experiment), run.workdir
    if not ended or not formats or workdir is None or jax.process_index() > 0:
        return dict
    folder = workdir / EXPORTED_FOLDER

    def write() -> dict[str, TrackedModel]:
        metrics = run.reporter.history.last("eval/")
        models = {name: TrackedModel(folder / FORMS[name].place, run.step, metrics) for name in formats}
        if changed or not all(model.folder.exists() for model in models.values()):
            run.reporter.show_status("exporting")
            with run.watch("export"):
                failed = _write(workdir, folder, formats)
            if failed is not None:
                run.reporter.warn(failed)
                return {}
        return models

    return write


def _write(workdir: Path, folder: Path, formats: tuple[str, ...]) -> str | None:
    """Writes the network in these forms; why it could not be, else None."""
    try:
        if jax.process_count() == 1:
            export = import_object("jaxdl.inference.export.writing:export", "export")  # It is above the training.
            export(workdir, folder, formats=formats, replace=True)
        else:
            _export_apart(workdir, folder, formats)
    except Exception as error:  # Whatever a network of a user may raise, its run is finished.
        reason = " ".join(str(error).split()) or type(error).__name__
        again = f"python -m jaxdl.export --workdir {workdir} --to FOLDER --format {' '.join(formats)}"
        return f"the network could not be exported: {reason} To try again: {again}"
    return None


def _export_apart(workdir: Path, folder: Path, formats: tuple[str, ...]) -> None:
    """Exports in a process of its own, on a CPU: this one's devices are those of several processes.

    Raises RuntimeError with its message where it fails.
    """
    own = ("JAX_", "JAXDL_", "SLURM_", "OMPI_", "XLA_FLAGS", "TPU_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = [sys.executable, "-m", "jaxdl.export", "--workdir", str(workdir), "--to", str(folder), "--replace"]
    done = subprocess.run(
        [*command, "--format", *formats],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"code {done.returncode}")
