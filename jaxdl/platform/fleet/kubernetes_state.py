"""What objects of Kubernetes, Kueue, JobSet and Kubeflow Trainer say, as JSON: pure functions of them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdl.platform.launch.jobs.kubernetes import CONTAINER, KubernetesJob
from jaxdl.platform.launch.jobs.train_job import NODE

Read = Mapping[str, Any]
LOCAL_QUEUE = ("kueue.x-k8s.io", "v1beta2", "localqueues")
CLUSTER_QUEUE = ("kueue.x-k8s.io", "v1beta2", "clusterqueues")
WORKLOADS = ("kueue.x-k8s.io", "v1beta2", "workloads")
JOB_UID = "kueue.x-k8s.io/job-uid"
"""Kueue's label of a Workload: the uid of its job."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Kind:
    """A kind of objects, and where their status says what."""

    name: str
    group: str
    version: str
    plural: str
    install: str
    """What to do where the cluster has no such kind."""
    ends: tuple[str, ...] = ()
    """The conditions of which one is true when it has ended."""
    jobs: str = ""
    """The field of the status with the numbers of pods."""

    @property
    def path(self) -> tuple[str, str, str]:
        """Its group, version and plural."""
        return self.group, self.version, self.plural

    def has_ended(self, found: Read) -> bool:
        """Whether all is over: it is complete or has failed."""
        return any(_condition(found, name) for name in self.ends)

    def num_pods(self, found: Read) -> int:
        """How many pods it has while it runs; 0 when it has ended."""
        if self.has_ended(found):
            return 0
        spec = found["spec"]
        if "trainer" in spec:
            return int(spec["trainer"].get("numNodes", 1))
        return sum(one["template"]["spec"].get("parallelism", 1) for one in spec["replicatedJobs"])

    def runs(self, found: Read) -> bool:
        """Whether all pods run, or have begun to end."""
        jobs = found.get("status", {}).get(self.jobs, [])
        begun = sum(one.get(field, 0) for one in jobs for field in ("ready", "succeeded", "failed"))
        # A status counts jobs, of which there is one: it is ready when all its pods are.
        return not is_suspended(found) and begun > 0


_JOB_SET = Kind(
    "JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", "Install it: https://jobset.sigs.k8s.io.",
    ("Completed", "Failed"), "replicatedJobsStatus",
)  # fmt: skip
_TRAINER = ("trainer.kubeflow.org", "v1alpha1")
_GET_TRAINER = "Install Kubeflow Trainer 2.2 or newer: https://www.kubeflow.org/docs/components/trainer."
KINDS: Mapping[str, tuple[Kind, ...]] = {
    "jobset": (_JOB_SET,),
    "trainjob": (
        Kind("TrainJob", *_TRAINER, "trainjobs", _GET_TRAINER, ("Complete", "Failed"), "jobsStatus"),
        Kind("TrainingRuntime", *_TRAINER, "trainingruntimes", _GET_TRAINER),
    ),
}
"""Value of `--api` -> the kinds of its objects, first that which is the attempt."""


def with_quota(jobs: Sequence[Read], workloads: Sequence[Read]) -> list[Read]:
    """The jobs for which Kueue has reserved what they take, by its Workloads."""
    reserved = {one["metadata"].get("labels", {}).get(JOB_UID) for one in workloads if _condition(one, "QuotaReserved")}
    return [job for job in jobs if job["metadata"]["uid"] in reserved]


def labelled(made: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """An object with labels, also in the template of its pods if it has one."""
    metadata = made["metadata"] | {"labels": {**made["metadata"].get("labels", {}), **labels}}
    spec = made["spec"]
    jobs = spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
    for job in jobs:
        template = job["template"]["spec"]["template"]
        template["metadata"] = {"labels": dict(labels)}
    return made | {"metadata": metadata}


def is_deleted(found: Read) -> bool:
    """Whether it goes when all that belongs to it has gone."""
    return "deletionTimestamp" in found["metadata"]


def is_suspended(found: Read) -> bool:
    """Whether it is kept from having pods, as by Kueue until they fit."""
    return bool(found["spec"].get("suspend"))


def _condition(found: Read, name: str, status: str = "True") -> Read | None:
    conditions = found.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == name and one["status"] == status), None)


def why_queued(workloads: Sequence[Read]) -> str:
    """Why a suspended job does not run, by its Workload."""
    if not workloads:
        return "suspended, and Kueue says nothing of it: is the namespace one that Kueue manages?"
    (workload,) = workloads
    evicted, waits = _condition(workload, "Evicted"), _condition(workload, "QuotaReserved", "False")
    admitted = _condition(workload, "Admitted", "False")
    if evicted is not None:
        return f"Kueue has taken its nodes: {_said(evicted)}"
    for condition in (waits, admitted):
        if condition is not None:
            return f"in the queue of Kueue: {_said(condition)}"
    return "in the queue of Kueue"


def _said(condition: Read) -> str:
    return " ".join((condition.get("message") or condition.get("reason") or "it does not say why").split())[:300]


def why_pending(pods: Sequence[Read]) -> str:
    """Why pods do not run; "" if all do."""
    for pod in pods:
        status = pod.get("status", {})
        if status.get("phase") not in (None, "Pending"):
            continue
        placed = _condition(pod, "PodScheduled", "False")
        if placed is not None:
            return f"a pod has no node: {_said(placed)}"
        for container in status.get("containerStatuses") or []:
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return f"a pod cannot begin: {waiting['reason']} {waiting.get('message', '')}".strip()[:300]
        return "its pods are being made"
    return "" if pods else "its pods are being made"


def lives(pod: Read) -> bool:
    """Whether something of a pod may run; also of one on a node that does not answer."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def exit_codes(pods: Sequence[Read]) -> dict[int, int]:
    """Process -> the exit code of its pod, of those that have ended and are still there."""
    codes = {}
    for pod in pods:
        rank = pod["metadata"].get("annotations", {}).get(_INDEX, "0")
        for container in pod.get("status", {}).get("containerStatuses") or []:
            ended = container.get("state", {}).get("terminated")
            if ended is not None and container["name"] in (CONTAINER, NODE):
                codes[int(rank)] = int(ended["exitCode"])
    return codes


def were_taken(pods: Sequence[Read]) -> bool:
    """Whether Kubernetes has ended one: for a more important pod, to empty its node, or since its node is gone."""
    return any(_condition(pod, "DisruptionTarget") is not None for pod in pods)


def _amount(text: object) -> float:
    """The number of a quantity such as 4, 500m or 16Gi."""
    return float(importlib.import_module("kubernetes.utils.quantity").parse_quantity(text))


def has_room(node: Read, job: KubernetesJob) -> bool:
    """Whether a node is ready for pods and has what one of them takes, if no other takes it."""
    spec = node.get("spec", {})
    # Kubernetes lets pods that ask for GPUs onto nodes that are kept for them.
    taints = [one for one in spec.get("taints") or [] if one["effect"] != "PreferNoSchedule" and one["key"] != _GPU]
    has = node.get("status", {}).get("allocatable", {})
    needs = {_GPU: job.gpus_per_node, "cpu": job.cpus_per_node or 0}
    enough = all(_amount(has.get(name, 0)) >= need for name, need in needs.items())
    return _condition(node, "Ready") is not None and not spec.get("unschedulable") and not taints and enough


def nodes_of_queue(queue: Read, job: KubernetesJob, num_mine: int) -> int | None:
    """How many nodes a ClusterQueue has for a fleet: its own quota, but for what others have of it.

    `num_mine`: the pods for which the fleet has quota. None if the quota is of nothing that the pods are known to take.
    """
    takes = {_GPU: job.gpus_per_node, "cpu": job.cpus_per_node or 0, "pods": 1}
    quota: dict[str, float] = {}
    for group in queue.get("spec", {}).get("resourceGroups") or []:
        for resource in (one for flavor in group["flavors"] for one in flavor["resources"]):
            quota[resource["name"]] = quota.get(resource["name"], 0.0) + _amount(resource["nominalQuota"])
    used: dict[str, float] = {}
    for flavor in queue.get("status", {}).get("flavorsReservation") or []:
        for resource in flavor["resources"]:
            used[resource["name"]] = used.get(resource["name"], 0.0) + _amount(resource.get("total", 0))
    known = {name: each for name, each in takes.items() if each and name in quota}
    if not known:
        return None
    others = {name: max(0.0, used.get(name, 0.0) - num_mine * each) for name, each in known.items()}
    return max(0, min(math.floor((quota[name] - others[name]) / each + 1e-9) for name, each in known.items()))
