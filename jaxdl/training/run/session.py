"""What surrounds a run from its start to its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdl.core.errors import survive_readers
from jaxdl.core.files import hang_file
from jaxdl.parallel.cluster import Watchdog, heartbeat
from jaxdl.report import Start, Stopwatch
from jaxdl.report.trackers import Tracker
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.signals import StopSignals
from jaxdl.training.run.status import RunStatus
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.run.workdir.workdir import check_trackers


@dataclass(frozen=True)
class Session:
    """The workdir of a run, the signals that stop it, its clock and its output, and what is closed when it ends."""

    workdir: Workdir
    stop: StopSignals
    watch: Stopwatch
    """Counts the time of each phase of the run."""
    start: Start
    """Prints what is known before the first step."""
    status: RunStatus
    """Holds the lease of the workdir."""
    stack: contextlib.ExitStack
    """Closes, at the end, what the run opens."""

    def take_workdir(self, trackers: Sequence[Tracker]) -> None:
        """Takes the workdir; called when the processes of the run have met, on all of them. Raises ConfigError."""
        check_trackers(trackers, self.workdir.path)
        self.status.take_workdir()

    def watch_for_hangs(self, hang_timeout_sec: float | None, polls_between: int) -> None:
        """From here on a hang ends the process, and a signal to one process stops all at the same poll."""
        if jax.process_count() > 1:
            self.stop.share(every_polls=polls_between)
        log, path = None, self.workdir.path
        if path is not None:
            log = functools.partial(open, path / hang_file(jax.process_index()), "a", encoding="utf-8")
        self.stack.enter_context(Watchdog(hang_timeout_sec, log))

    def check_lease(self) -> None:
        """Ends the process when another run has taken the workdir."""
        if self.status.lease is not None:
            self.status.lease.check()


@contextlib.contextmanager
def open_session(experiment: Experiment, workdir: Path | None, *, quiet: bool) -> Iterator[Session]:
    """Context of a run of the experiment in a workdir; without a workdir nothing is written."""
    watch, start = Stopwatch(on_change=heartbeat.enter), Start(quiet=quiet)
    with StopSignals() as stop, survive_readers(stop.unread), contextlib.ExitStack() as stack:
        status = RunStatus(workdir, experiment, stop, start)
        stack.callback(status.release)  # After everything that writes there is closed.
        stack.enter_context(status)
        stack.callback(start.close)
        yield Session(Workdir(workdir), stop, watch, start, status, stack)
