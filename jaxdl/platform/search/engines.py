"""Where the trials of a search run: processes on this machine. `ray_engine` has another place."""

from __future__ import annotations

import abc
import contextlib
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.parallel.mesh import gpus_visible
from jaxdl.platform.launch import die_with_parent
from jaxdl.platform.launch.reaper import Reaper, kill_session

GPUS = "CUDA_VISIBLE_DEVICES"
STOP_SEC = 120.0
"""How long a trial may take to save after SIGTERM, before it is killed."""


@dataclass(frozen=True)
class Job:
    """A command that trains a trial to its next stop; what it prints is appended to `log`."""

    number: int
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Workers(Protocol):
    """Trials that run. At most `capacity` at a time are started."""

    capacity: int
    outlive: bool
    """Whether jobs go on without the search: `start` of a later one finds them again."""

    def start(self, job: Job) -> None:
        """Starts a job."""
        ...

    def poll(self) -> Mapping[int, int]:
        """Number -> exit code of the jobs that have ended since the last call; negative after a signal."""
        ...

    def stop(self) -> None:
        """Sends SIGTERM to all that run and waits until they have saved and ended."""
        ...

    def close(self) -> None:
        """Ends what is left."""
        ...


class Engine(Choice):
    """Where trials run."""

    @abc.abstractmethod
    def open(self, parallel: int, devices_per_trial: int | None) -> Workers:
        """Raises ConfigError when `parallel` trials cannot run at a time."""


class Local(Engine, kind="local"):
    """Processes on this machine, each with GPUs of its own if there are some."""

    def open(self, parallel: int, devices_per_trial: int | None) -> Workers:
        """Workers for `parallel` trials at a time. Raises ConfigError for too few GPUs."""
        return Processes(shares(visible_gpus(), parallel, devices_per_trial))


def visible_gpus() -> list[str]:
    """The GPUs of this process as `CUDA_VISIBLE_DEVICES` names them; none without GPUs."""
    if not gpus_visible():
        return []
    given = os.environ.get(GPUS)
    return given.split(",") if given else [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def shares(gpus: Sequence[str], parallel: int, devices_per_trial: int | None) -> list[dict[str, str]]:
    """The environment of each of `parallel` trials that run at a time. Raises ConfigError for too few GPUs."""
    if not gpus:
        if devices_per_trial is not None:
            raise ConfigError(
                f"--devices-per-trial {devices_per_trial}: there are no GPUs here. Leave it out; "
                "--mesh.cpu-devices sets the virtual CPU devices of each trial."
            )
        return [{} for _ in range(parallel)]
    each = devices_per_trial or len(gpus) // parallel
    if not 1 <= each * parallel <= len(gpus):
        given = f" --devices-per-trial {devices_per_trial}" if devices_per_trial else ""
        raise ConfigError(f"--parallel {parallel}{given}: there are {len(gpus)} GPUs. Run fewer trials at a time.")
    return [{GPUS: ",".join(gpus[place * each : (place + 1) * each])} for place in range(parallel)]


class Processes:
    """`Workers` on this machine: they, and what they start, are killed when this process ends for any reason."""

    outlive = False

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self.capacity = len(environments)
        self._free, self._running = list(environments), dict[int, tuple[subprocess.Popen[bytes], Mapping[str, str]]]()
        self._reaper: Reaper | None = None

    def start(self, job: Job) -> None:
        """Starts a job. Called from the main thread alone: with the thread that started it a process ends too."""
        self._reaper, environment = self._reaper or Reaper(), self._free.pop()
        self._running[job.number] = (start_process(job, environment, self._reaper), environment)

    def poll(self) -> Mapping[int, int]:
        """Number -> exit code of the jobs that have ended since the last call."""
        codes = {}
        for number, (process, environment) in list(self._running.items()):
            if (code := process.poll()) is not None:
                codes[number] = code
                self._free.append(environment)
                self._end(number)
        return codes

    def stop(self) -> None:
        """Sends SIGTERM to all that run and waits until they have ended."""
        end_processes([process for process, _ in self._running.values()])

    def close(self) -> None:
        """Kills what is left."""
        for number in list(self._running):
            self._end(number)
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def _end(self, number: int) -> None:
        assert self._reaper is not None
        end_session(self._running.pop(number)[0], self._reaper)


def start_process(job: Job, environment: Mapping[str, str], reaper: Reaper) -> subprocess.Popen[bytes]:
    """Starts a job as a process, in a session of its own, that is killed when this one ends."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, die_with_parent.__file__, str(os.getpid()), *job.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **job.environment, **environment},
            start_new_session=True,  # Ctrl-C in a terminal comes to the search alone, which stops its trials.
        )
    reaper.watch(process.pid)
    return process


def end_session(process: subprocess.Popen[bytes], reaper: Reaper) -> None:
    """Kills a job's process, if it still runs, and what it has started: workers that read data, say."""
    kill_session(process.pid)
    process.wait()
    reaper.forget(process.pid)


def end_processes(processes: Sequence[subprocess.Popen[bytes]], grace_sec: float = STOP_SEC) -> None:
    """Sends SIGTERM to processes and waits until they have ended; kills them after `grace_sec`."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + grace_sec
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
