"""Runs as jobs of a Kubernetes cluster, which decides where their pods are and, with a queue of Kueue, when they begin.

An attempt is a JobSet or a TrainJob with the name of its run, so that a run has one at a time, whatever server asks.
It cannot be resized: a run that gets another number of nodes saves, and another attempt follows. Nothing is known of a
cluster whose API server does not answer: its runs are taken for alive, and what was asked is asked again later.

The folder of the fleet, and those of the runs, are on a volume that all pods mount where the server has it. A pod says
there how it ended (`jaxdl.platform.fleet.pod`); of one that could not, Kubernetes does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.parallel.cluster import exits
from jaxdl.platform.fleet import kubernetes_state as state
from jaxdl.platform.fleet.engine import LOST, Ending, Engine, exit_code, exit_reason
from jaxdl.platform.fleet.journal import sync_folder
from jaxdl.platform.fleet.keeper import EXIT_FILE, OUTPUT_FILE
from jaxdl.platform.fleet.pod import BEGUN_FILE, code_of, codes_in
from jaxdl.platform.fleet.resources import Amounts
from jaxdl.platform.fleet.store import Store, Submission
from jaxdl.platform.launch.jobs.description import Command
from jaxdl.platform.launch.jobs.kubernetes import KubernetesJob, write
from jaxdl.platform.launch.kubernetes_cluster import Cluster, Refused, Taken, Unreachable

FLEET, RUN, ATTEMPT = "jaxdl.fleet/id", "jaxdl.fleet/run", "jaxdl.fleet/attempt"
"""Labels of the objects and of their pods."""
ID_FILE = "kubernetes-id"
_FRESH_SEC, _SETTLED_SEC = 1.0, 5.0
"""How long the number of nodes is kept (a turn of the server asks for it several times); how long there must be fewer,
since the parts of what a queue says are not of one moment."""
_LEAST_GRACE_SEC, _TERMINATED = 10.0, 128 + signal.SIGTERM
_TAKEN = "taken"
"""Why an attempt has ended, in its file: the cluster took its nodes, or never gave it any."""
_SPARE_SEC = 30
"""What pods may take longer than the server waits, which then says that they did."""


class OnKubernetes(Engine):
    """A run has one pod on each of its nodes."""

    name = "kubernetes"
    options = (
        "image", "gpus_per_node", "cpus_per_node", "volume", "namespace", "context", "api", "queue", "priority_class",
        "node_selector",
    )  # fmt: skip
    names_nodes: ClassVar[bool] = False
    shares_nodes: ClassVar[bool] = False

    def __init__(self, store: Store, num_nodes: int, **given: Any) -> None:
        super().__init__(store, num_nodes)
        for option in ("image", "gpus_per_node", "volume"):
            if given.get(option) is None:
                raise ConfigError(f"--engine kubernetes: give --{option.replace('_', '-')} too.")
        context, namespace = given.pop("context", None), given.pop("namespace", None)
        self._given = {option: value for option, value in given.items() if value is not None}
        self._job = KubernetesJob(nodes=1, **self._given)
        self._folder = store.folder.absolute()
        self._below_mount(self._folder, "--state")
        self._cluster = Cluster(namespace, context)
        self._id = _id_in(self._folder)
        self._kinds = state.KINDS[self._job.api]
        """Of the object that is the attempt, and of what comes with it."""
        self._starting: dict[tuple[str, int], list[dict[str, Any]]] = {}
        """Attempts that are still to be made: the API server did not answer."""
        self._waits: dict[str, str] = {}
        self._told: dict[str, float] = {}
        """Run -> when its object was first known to be deleted."""
        self._counted: list[tuple[float, int]] = []
        """When nodes were counted lately, and how many there were."""
        self._check()

    def _below_mount(self, folder: Path, what: str) -> None:
        if not folder.is_relative_to(self._job.mount or "/"):
            raise ConfigError(
                f"{what} {folder}: it is not below {self._job.mount}, where --volume is in the pods: they would not "
                "see it, or lose what they write there. Mount the volume here at the same path, and use folders on it."
            )

    def _check(self) -> None:
        """Raises ConfigError where the cluster cannot be used."""
        try:
            for kind in self._kinds:
                if not self._cluster.has(*kind.path):
                    raise ConfigError(f"--api {self._job.api}: the cluster has no {kind.name}. {kind.install}")
            self._counted = [(time.monotonic(), self._count_nodes())]
        except Refused as error:
            raise ConfigError(f"--engine kubernetes: {error}. Give the server's account this right.") from None
        except Unreachable as error:
            raise ConfigError(f"--engine kubernetes: the API server does not answer ({error}).") from None

    # What there is.

    def nodes(self) -> list[str]:
        """node0, node1, ...: a number only. With a queue its quota, but for what others use; else the ready nodes."""
        now = time.monotonic()
        if now - self._counted[-1][0] > _FRESH_SEC:
            number = self._counted[-1][1]
            with contextlib.suppress(Unreachable, Refused, ConfigError):  # Else those that it had.
                number = self._count_nodes()
            recent = [one for one in self._counted if now - one[0] <= _SETTLED_SEC]
            self._counted = [*recent, (now, number)]
        most, lost = max(number for _, number in self._counted), self.store.lost_nodes()
        return [name for name in (f"node{index}" for index in range(most)) if name not in lost]

    def resources(self) -> Mapping[str, Amounts]:
        """The GPUs of each node."""
        has = {"gpus": float(self._job.gpus_per_node)} if self._job.gpus_per_node else {}
        return dict.fromkeys(self.nodes(), has)

    def _count_nodes(self) -> int:
        job, number = self._job, None
        if job.queue is not None:
            queue = self._cluster.get(*state.LOCAL_QUEUE, job.queue)
            if queue is None:
                kind, namespace = "/".join(state.LOCAL_QUEUE), self._cluster.namespace
                raise ConfigError(f"--queue {job.queue}: there is no such {kind} in namespace {namespace}.")
            cluster_queue = self._cluster.get(*state.CLUSTER_QUEUE, queue["spec"]["clusterQueue"], namespaced=False)
            kind = self._kinds[0]
            mine = self._cluster.find(*kind.path, {FLEET: self._id})
            mine = state.with_quota(mine, self._cluster.find(*state.WORKLOADS, {}) if mine else [])
            number = state.nodes_of_queue(cluster_queue or {}, job, sum(map(kind.num_pods, mine)))
        if number is None:
            number = sum(state.has_room(node, job) for node in self._cluster.nodes(job.node_selector))
        return min(number, self.num_nodes)

    def problems(self) -> list[str]:
        """Whether the API server does not answer, and since when."""
        if self._cluster.silence is None:
            return []
        since, why = self._cluster.silence
        at = time.strftime("%H:%M:%S", time.localtime(since))
        return [f"the API server of Kubernetes has not answered since {at}: no run is started or stopped ({why})"]

    # Attempts.

    def start(self, run: Submission, attempt: int, nodes: Sequence[str]) -> bool:
        """Makes the objects of an attempt; False if those of another are there.

        Where the API server does not answer, `poll` makes them later. What it refuses ends with a code.
        """
        folder = self._attempt_folder(run, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        try:
            objects = self._objects(run, attempt, len(nodes))
        except ConfigError as error:
            self._end(folder, exits.MISTAKE, str(error))
            return True
        self._starting[run.name, attempt] = objects
        self._told.pop(run.name, None)
        return self._create(run, attempt)

    def _objects(self, run: Submission, attempt: int, num_hosts: int) -> list[dict[str, Any]]:
        """What is made of a run, in this order."""
        import yaml  # pyright: ignore[reportMissingModuleSource]  (the package kubernetes needs it)

        if run.needs:
            raise ConfigError("--needs: the engine kubernetes gives a host a whole node, of --gpus-per-node GPUs.")
        self._below_mount(Path(run.folder), "the folder of the submission")
        if run.workdir is not None:
            self._below_mount(run.workdir, "--workdir")
        grace = math.ceil(self.grace_sec) + _SPARE_SEC
        values = {"nodes": num_hosts, "name": self._name(run), "save_sec": grace, "directory": run.folder}
        job = KubernetesJob(**{**self._given, "namespace": self._cluster.namespace, **values})
        pod = ["python", "-m", "jaxdl.platform.fleet.pod", str(self._attempt_folder(run, attempt))]
        command = Command((*pod, *run.words(num_hosts)), PurePosixPath(run.folder), ())
        labels = {**self._labels(run), ATTEMPT: str(attempt)}
        return [state.labelled(made, labels) for made in yaml.safe_load_all(write(job, command))]

    def _create(self, run: Submission, attempt: int) -> bool:
        """Makes what is not there yet. Whether nothing of another attempt is in the way."""
        folder = self._attempt_folder(run, attempt)
        kinds = {kind.name: kind for kind in self._kinds}
        try:
            for made in self._starting[run.name, attempt]:
                kind = kinds[made["kind"]]
                try:
                    self._cluster.create(kind.plural, made)
                except Taken:
                    found = self._cluster.get(*kind.path, self._name(run))
                    if found is None:  # It has gone meanwhile.
                        return True
                    if _attempt_of(found) != attempt:
                        self._cluster.delete(*kind.path, self._name(run))
                        del self._starting[run.name, attempt]
                        return False
        except Unreachable:
            return True
        except Refused as error:
            self._end(folder, exits.MISTAKE, f"Kubernetes refuses the job: {error}")
        del self._starting[run.name, attempt]
        return True

    def stop(self, run: Submission, attempt: int) -> None:
        """Deletes the object when its pods have ended, which get SIGTERM."""
        with contextlib.suppress(Unreachable):
            found = self._cluster.get(*self._kinds[0].path, self._name(run))
            if found is not None and _attempt_of(found) != attempt:
                return
            self._starting.pop((run.name, attempt), None)
            if found is not None and not state.is_deleted(found):
                self._cluster.delete(*self._kinds[0].path, self._name(run))
            self._told.setdefault(run.name, time.monotonic())

    def kill(self, run: Submission, attempt: int) -> None:
        """Deletes the pods at once, also those on a node that does not answer."""
        told = self._told.get(run.name, math.inf)
        self.stop(run, attempt)
        # While the API server did not answer, the run could not be asked.
        if time.monotonic() - told >= min(self.grace_sec, _LEAST_GRACE_SEC):
            with contextlib.suppress(Unreachable):
                self._cluster.kill_pods({**self._labels(run), ATTEMPT: str(attempt)})

    def poll(self, run: Submission, attempt: int) -> int | None:
        """The exit code of an attempt, `LOST` without one; None while anything of it is there."""
        if (run.name, attempt) in self._starting:
            self._create(run, attempt)
        if (run.name, attempt) in self._starting:
            return None
        try:
            return self._poll(run, attempt)
        except Unreachable:
            return None

    def _poll(self, run: Submission, attempt: int) -> int | None:
        folder, kind = self._attempt_folder(run, attempt), self._kinds[0]
        found = self._cluster.get(*kind.path, self._name(run))
        if found is not None and _attempt_of(found) == attempt:
            ended = kind.has_ended(found)
            if not ended or state.is_deleted(found):
                self._waits[run.name] = self._why_waiting(run, found)
                return None
            self._conclude(run, attempt)
            for one in self._kinds:
                self._cluster.delete(*one.path, self._name(run))
            return None  # Until it is gone: the next attempt has the same name.
        self._waits.pop(run.name, None)
        if not (folder / EXIT_FILE).exists():
            # Somebody has deleted the object alone, say, and its pods still save.
            pods = self._cluster.pods({**self._labels(run), ATTEMPT: str(attempt)})
            if any(state.lives(pod) for pod in pods):
                return None
            self._conclude(run, attempt, gone=True)
        if found is None:
            for one in self._kinds[1:]:
                self._cluster.delete(*one.path, self._name(run))
        return exit_code(folder / EXIT_FILE)

    def explain_end(self, run: Submission, attempt: int) -> Ending:
        """That the cluster took the nodes of an attempt, or never gave it any."""
        taken = exit_reason(self._attempt_folder(run, attempt) / EXIT_FILE) == _TAKEN
        return Ending("the cluster took its nodes", taken=True) if taken else Ending()

    def waits(self, run: Submission, attempt: int) -> str:
        """What Kueue, or else Kubernetes, says of an attempt whose pods do not run."""
        if (run.name, attempt) in self._starting:
            return "it is started when the API server answers"
        if run.name not in self._waits:  # A server that only says what it would decide does not poll.
            with contextlib.suppress(Unreachable):
                found = self._cluster.get(*self._kinds[0].path, self._name(run))
                if found is not None and _attempt_of(found) == attempt:
                    self._waits[run.name] = self._why_waiting(run, found)
        return self._waits.get(run.name, "")

    def _why_waiting(self, run: Submission, found: Mapping[str, Any]) -> str:
        if state.is_deleted(found) or self._kinds[0].runs(found):
            return ""
        if state.is_suspended(found):
            mine = {state.JOB_UID: found["metadata"]["uid"]}
            return state.why_queued(self._cluster.find(*state.WORKLOADS, mine)[:1])
        return state.why_pending(self._cluster.pods(self._labels(run)))

    def _conclude(self, run: Submission, attempt: int, *, gone: bool = False) -> None:
        """Writes the exit code of an attempt whose pods have ended, so that its objects are no longer needed.

        `gone`: its object is not there. If this server has not deleted it, somebody else has.
        """
        folder = self._attempt_folder(run, attempt)
        pods = self._cluster.pods({**self._labels(run), ATTEMPT: str(attempt)})
        codes, size = codes_in(folder)
        by_kubernetes = state.exit_codes(pods)
        codes |= {rank: code for rank, code in by_kubernetes.items() if rank not in codes}
        code = code_of(codes, range(max(size, len(by_kubernetes), 1)), LOST)
        begun = (folder / BEGUN_FILE).exists() or bool(by_kubernetes)
        others = gone and code == _TERMINATED and run.name not in self._told
        taken = code and (state.were_taken(pods) or not begun or others)
        self._end(folder, code, "", why=_TAKEN if taken else "")

    def _end(self, folder: Path, code: int, said: str, why: str = "") -> None:
        if said:
            with (folder / OUTPUT_FILE).open("a", encoding="utf-8", errors="backslashreplace") as output:
                output.write(f"fleet: {said}\n")
        replace_file(folder / EXIT_FILE, json.dumps({"code": code, "at": time.time(), "why": why}).encode())

    def _name(self, run: Submission) -> str:
        return f"jaxdl-{self._id}-{run.name}"

    def _labels(self, run: Submission) -> dict[str, str]:
        return {FLEET: self._id, RUN: run.name}

    def _attempt_folder(self, run: Submission, attempt: int) -> Path:
        return self.store.path_of(run.name).absolute() / "attempts" / str(attempt)


def _id_in(folder: Path) -> str:
    """What the names of a fleet's objects have in them: random, so that no other fleet takes them for its own."""
    path = folder / ID_FILE
    if not path.exists():  # Whole or not at all, also after a crash; of two servers that make one, the first counts.
        aside = path.with_name(f"{ID_FILE}.{os.getpid()}")
        replace_file(aside, secrets.token_hex(4).encode())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        aside.unlink()
        sync_folder(folder)
    made = path.read_text(encoding="utf-8").strip()
    if len(made) != 8 or not set(made) <= set("0123456789abcdef"):
        raise ConfigError(
            f"{path}: this is no id of a fleet. Restore it: it is in the names of the fleet's objects, jaxdl-ID-NUMBER."
        )
    return made


def _attempt_of(found: Mapping[str, Any]) -> int | None:
    """The attempt of an object; None of one that is none of ours."""
    label = found["metadata"].get("labels", {}).get(ATTEMPT, "")
    return int(label) if label.isdecimal() else None
