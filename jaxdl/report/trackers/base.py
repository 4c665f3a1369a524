"""What takes the rows of a run: the interface of metrics.jsonl, of TensorBoard and of every tracker."""

from __future__ import annotations

import abc
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import Choice

State = Literal["finished", "stopped", "interrupted", "failed"]
"""How a run ended: at its full length; earlier, as asked for; by a signal, to be resumed; by an error."""


class Writer(abc.ABC):
    """Takes the rows of one run, in their order. What it cannot write it raises; who calls it decides what follows."""

    run_id: str | None = None
    """By what the same run is opened again by a later process; kept in the workdir."""
    num_rows: int = 0
    """How many rows of the run it has when it is opened: those of an earlier process. The others are written to it."""

    @abc.abstractmethod
    def write(self, row: Mapping[str, Any]) -> None:
        """Takes a row, `{"step": 20, "epoch": 1.0, "train/loss": 0.7, ...}`; values are numbers, strings or None.

        It may keep the row back until `flush`.
        """

    def flush(self) -> None:  # noqa: B027
        """Returns when every row that was taken is where it belongs; those before an exception are taken again.

        Called first when the run is open and its `run_id` is kept: what can fail once the run is made belongs here,
        not in `Tracker.open`, for that would make another run when it is tried again.
        """

    def tag(self, tags: Mapping[str, str]) -> None:  # noqa: B027
        """Notes texts of the run by their names; one of the same name is replaced."""

    def keep(self, path: Path) -> None:  # noqa: B027
        """Keeps a file of the run, such as its curves; an earlier one of the same name is replaced."""

    def keep_model(self, model: TrackedModel) -> None:  # noqa: B027
        """Keeps the network of the finished run, if the tracker has asked for one (`Tracker.model_format`)."""

    def close(self, state: State | None = None) -> None:  # noqa: B027
        """Writes what is kept back, and ends. `state` is None if the run is still going on, and opened again."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run."""

    name: str
    """What people call the run: the name of its workdir (of a trial `SEARCH/0003`), unless the tracker has another."""
    run_id: str | None
    """`Writer.run_id` of the earlier process in the same workdir; None for a new run."""
    rows_changed: bool
    """Whether rows that the tracker may have are not those of the run any more.

    So it is after a rollback, or a resume from an earlier step: the tracker is to forget its rows (`num_rows` 0), and
    gets all that are left.
    """
    folder: Path | None
    """A folder for its files, in the workdir, which may not exist yet; None if the run has no workdir."""
    config: Mapping[str, Any]
    """The config of the run, resolved: dotted field -> a value as in JSON."""
    tags: Mapping[str, str]
    """Commit, versions, devices, the number of hosts and its changes."""


@dataclass(frozen=True)
class TrackedModel:
    """The network of a finished run."""

    folder: Path
    """What `jaxdl.training.exported` has written in the form that the tracker asked for."""
    step: int
    """The step of its checkpoint."""
    metrics: Mapping[str, float | None]
    """Those of the last evaluation."""


class Tracker(Choice):
    """Where the rows of a run go besides metrics.jsonl. Written in a thread of its own; no failure ends a run."""

    package: ClassVar[str | None] = None
    """The package that it needs, and the extra of jaxdl that has it."""

    name: str | None = None
    """The name of the run there; that of its workdir by default, and of the trial of a search `SEARCH/0003`."""
    tags: tuple[str, ...] = ()
    """Words by which the run is found there."""
    wait_sec: float = pydantic.Field(default=20.0, ge=0)
    """At the end of a run, wait at most so long for what is not yet written."""

    @property
    def model_format(self) -> str | None:
        """In which form it gets the network of a finished run, see `jaxdl.training.exported`; None: not at all."""
        return None

    def check(self, workdir: Path | None) -> None:
        """Raises ConfigError, before anything is trained, if the run cannot be tracked: here, for a missing package.

        That is imported here, in the thread of the run: before Python 3.11.8, classes that are made in several threads
        at once could fail in any of them (CPython issue 106905).
        """
        del workdir
        if self.package is None:
            return
        option, advice = f"--report.trackers {self.kind}", f"pip install 'jaxdl[{self.package}]', or leave it out"
        if importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"{option}: it needs the package {self.package}, which is not installed. Install it with {advice}."
            )
        try:
            importlib.import_module(self.package)
        except Exception as error:
            raise ConfigError(
                f"{option}: the package {self.package} cannot be imported: {type(error).__name__}: {error}. Install it "
                f"again with {advice}."
            ) from None

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Begins the run there, or opens it again. Called in the thread, and again after a failure."""


def finite(value: Any) -> float | None:
    """A number as metrics.jsonl has it: NaN for one that is not finite, and for None; None for what is no number."""
    if value is None:
        return float("nan")
    if not isinstance(value, bool | int | float):
        return None
    number = float(value)
    return number if number - number == 0 else float("nan")
