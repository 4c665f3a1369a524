"""Trials on the nodes of a Ray cluster. Their folder, and the config file, must be the same on all nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.platform.launch.ray_cluster import connect
from jaxdl.platform.launch.reaper import Reaper
from jaxdl.platform.search.engines import Engine, Job, Workers, end_processes, end_session, start_process

LOST = 75
"""The exit code of a trial whose node was lost: it is started again, like a run that broke off."""


class OnRay(Engine, kind="ray"):
    """An actor for each trial, on any node with a free place."""

    address: str | None = None
    """The cluster, as `ray.init` takes it: `auto`, `ray://HOST:10001`; None: RAY_ADDRESS, or a new one here."""
    cpus_per_trial: float = 1.0
    """CPUs that Ray keeps for a trial."""

    def open(self, parallel: int, devices_per_trial: int | None) -> Workers:
        """Workers for `parallel` trials at a time. Raises ConfigError when the cluster is too small."""
        ray = connect(self.address, "--engine.address", include_dashboard=False)
        total = ray.cluster_resources()
        for name, each in (("CPU", self.cpus_per_trial), ("GPU", devices_per_trial or 0)):
            if each * parallel > total.get(name, 0):
                raise ConfigError(
                    f"--parallel {parallel}: {each * parallel:g} {name}s are needed at a time, and the Ray cluster has "
                    f"{total.get(name, 0):g}. Run fewer trials at a time."
                )
        return RayActors(ray, parallel, {"num_cpus": self.cpus_per_trial, "num_gpus": devices_per_trial or 0})


class _Actor:
    """Runs one command on a node; it ends with the actor, and so does what it has started."""

    def __init__(self, job: Job, folder: str, path: str) -> None:
        os.chdir(folder)
        self._reaper = Reaper(detached=True)
        self._process = start_process(job, {"PYTHONPATH": path}, self._reaper)

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        running, code = self._process.returncode is None, self._process.poll()
        if running and code is not None:
            end_session(self._process, self._reaper)
        return code

    def stop(self) -> None:
        """SIGTERM, then waits for the end."""
        end_processes([self._process])


class RayActors:
    """`Workers` on a Ray cluster."""

    outlive = False

    def __init__(self, ray: Any, parallel: int, resources: Mapping[str, float]) -> None:
        self.capacity, self._ray, self._actors = parallel, ray, dict[int, Any]()
        self._class = ray.remote(max_restarts=0, **resources)(_Actor)

    def start(self, job: Job) -> None:
        """Starts a job as an actor."""
        self._actors[job.number] = self._class.remote(job, os.getcwd(), os.environ.get("PYTHONPATH", ""))

    def poll(self) -> Mapping[int, int]:
        """Number -> exit code of the jobs that have ended since the last call."""
        asked = {actor.code.remote(): number for number, actor in self._actors.items()}
        if not asked:
            return {}
        codes = {}
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=1.0)
        for reference in ready:
            try:
                code = self._ray.get(reference)
            except self._ray.exceptions.RayError:
                code = LOST
            if code is not None:
                codes[asked[reference]] = code
                self._ray.kill(self._actors.pop(asked[reference]))
        return codes

    def stop(self) -> None:
        """Sends SIGTERM to all that run and waits until they have ended."""
        stopping = [actor.stop.remote() for actor in self._actors.values()]
        self._ray.wait(stopping, num_returns=len(stopping)) if stopping else None

    def close(self) -> None:
        """Ends the actors, with what they run."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
