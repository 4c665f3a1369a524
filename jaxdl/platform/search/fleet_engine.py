"""Trials as runs of a fleet: its server decides on which nodes, and when, each trains."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster import HALTED
from jaxdl.platform.fleet.member import CANCELLED, COMPLETED, ENDED, FAILED
from jaxdl.platform.fleet.member import HALTED as HALTED_RUN
from jaxdl.platform.fleet.resources import parse_amounts, why_never
from jaxdl.platform.fleet.store import Store
from jaxdl.platform.fleet.submission import DamagedFile, Submission
from jaxdl.platform.search.engines import STOP_SEC, Engine, Job, Workers

LOST = 75
"""The exit code of a trial whose run somebody has removed from the fleet: it is started again."""
OLD_SEC = 60.0
"""A fleet at which no server has looked for so long is not served now."""
_LOOK_SEC = 1.0


class OnFleet(Engine, kind="fleet"):
    """Each trial is a run of a fleet, submitted when it starts and again when it is promoted."""

    state: str = ""
    """The folder of the fleet, as `python -m jaxdl.fleet serve --state` has it."""
    nodes: int = pydantic.Field(default=1, ge=1)
    """The number of nodes of each trial, or of hosts with `needs`. It is the same for all, so that they compare."""
    needs: str | None = None
    """What each host takes of its node, such as gpus=1,cpus=4, so that trials share nodes. None: a whole node, or with
    --devices-per-trial so many GPUs."""
    weight: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """The fair share of a trial, relative to those of other runs."""
    priority: int = 0
    """Runs of a higher priority take nodes from trials where they need them."""

    def open(self, parallel: int, devices_per_trial: int | None) -> Workers:
        """Workers that have `parallel` runs in the fleet at a time. Raises ConfigError for one that is not served."""
        if not self.state:
            raise ConfigError(
                "--engine fleet: which one is not said. Give --engine.state FOLDER, as `python -m jaxdl.fleet serve "
                "--state FOLDER` has it."
            )
        needs = parse_amounts(self.needs, "--engine.needs") if self.needs else {}
        if not needs and devices_per_trial:
            needs = {"gpus": float(devices_per_trial)}
        store = Store(Path(self.state).absolute())
        view = store.view()
        if (age := time.time() - view["at"]) > OLD_SEC:
            raise ConfigError(
                f"--engine.state {self.state}: no server has looked at this fleet for {age:.0f} s. Start one: "
                f"python -m jaxdl.fleet serve --state {self.state}"
            )
        if needs and not view.get("shares", True):
            given = f"--engine.needs {self.needs}" if self.needs else f"--devices-per-trial {devices_per_trial}"
            raise ConfigError(f"{given}: in the fleet {self.state} a trial has whole nodes. Give --engine.nodes alone.")
        if why := why_never(needs, self.nodes, view.get("has") or {node: {} for node in view["nodes"]}):
            raise ConfigError(f"--engine fleet: no trial could start: {why}. Change --engine.nodes or --engine.needs.")
        return FleetRuns(store, parallel, self.nodes, needs, weight=self.weight, priority=self.priority)


class FleetRuns:
    """`Workers` whose jobs are runs of a fleet. A run outlives the search, and is found again by the next one."""

    outlive = True

    def __init__(self, store: Store, parallel: int, nodes: int, needs: Mapping[str, float], **given: Any) -> None:
        self.capacity = parallel
        self._store, self._nodes, self._needs, self._given = store, nodes, needs, given
        self._running: dict[int, tuple[Job, str]] = {}
        """Number -> the job, and the name of its run."""
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._looked = -_LOOK_SEC

    def start(self, job: Job) -> None:
        """Submits a job, unless the fleet has it from an earlier process of the search. Raises ConfigError."""
        words = (*_environment(job.environment), *job.command)
        workdir = Submission("", words, (self._nodes,), os.getcwd()).workdir
        assert workdir is not None
        earlier = self._store.holder(workdir)
        if earlier is not None and self._is_same(earlier, words):
            self._running[job.number] = job, earlier
            return
        if earlier is not None:  # It has come to its stop, or to another end: its workdir is free for the next one.
            self._store.ask(earlier, "remove" if self._state(earlier) in ENDED else "cancel")
        made = self._store.submit(words, (self._nodes,), needs=self._needs, **self._given)
        self._running[job.number] = job, made.name

    def _is_same(self, name: str, words: tuple[str, ...]) -> bool:
        """Whether a run does what a job is to do, now or in the end."""
        with contextlib.suppress(DamagedFile, FileNotFoundError):
            return self._store.submission(name).command == words and self._state(name) not in _BROKEN
        return False

    def _state(self, name: str) -> str:
        """The state of a run as a server saw it last; empty before."""
        return str(self._look(fresh=True).get(name, {}).get("state", ""))

    def _look(self, *, fresh: bool = False) -> Mapping[str, Mapping[str, Any]]:
        """Name -> the run as the server saw it last; it is read again once a second."""
        now = time.monotonic()
        if fresh or now - self._looked >= _LOOK_SEC:
            self._looked = now
            with contextlib.suppress(ConfigError):  # What it saw before stays.
                self._seen = {run["run"]: run for run in self._store.view()["runs"]}
        return self._seen

    def poll(self) -> Mapping[int, int]:
        """Number -> exit code of the jobs that have ended since the last call."""
        codes: dict[int, int] = {}
        seen = self._look() if self._running else {}
        for number, (job, name) in list(self._running.items()):
            run = seen.get(name, {})
            if run.get("state") in ENDED:
                codes[number] = _CODES.get(run["state"], run.get("code") or 1)
                self._copy_output(job, name)
            elif not run and not self._store.path_of(name).exists():
                codes[number] = LOST
            if number in codes:
                del self._running[number]
        return codes

    def _copy_output(self, job: Job, name: str) -> None:
        """Appends what the last attempt of a run has printed to the log of its trial."""
        output = self._store.path_of(name) / "attempts" / str(self._store.last_attempt(name)) / "output.txt"
        with contextlib.suppress(OSError):
            content = output.read_bytes()
            job.log.parent.mkdir(parents=True, exist_ok=True)
            with job.log.open("ab") as log:
                log.write(content)

    def stop(self) -> None:
        """Cancels all runs, which lets them save, and waits until they have; without a server not for long."""
        for _, name in self._running.values():
            if self._state(name) not in ENDED:
                self._store.ask(name, "cancel")
        until = time.monotonic() + STOP_SEC
        while time.monotonic() < until and any(self._state(name) not in ENDED for _, name in self._running.values()):
            if time.time() - self._view_at() > OLD_SEC:
                return
            time.sleep(_LOOK_SEC)

    def _view_at(self) -> float:
        with contextlib.suppress(ConfigError):
            return float(self._store.view()["at"])
        return 0.0

    def close(self) -> None:
        """Forgets the runs: what goes on in the fleet is found again."""
        self._running.clear()


_BROKEN = (FAILED, HALTED_RUN, CANCELLED)
_CODES = {COMPLETED: 0, HALTED_RUN: HALTED, CANCELLED: HALTED}
"""State -> the exit code of a trial; one that was cancelled in the fleet is not started again by this search."""


def _environment(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Words before a command that set its variables."""
    return ("env", *(f"{name}={value}" for name, value in variables.items())) if variables else ()
