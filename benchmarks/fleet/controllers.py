"""What a Kubernetes cluster does with jobs, played on one machine: pods are processes here.

Stands for the controllers of JobSet and Kubeflow Trainer, for Kueue, the scheduler, the garbage collector, and the
kubelets of some nodes that hold one pod each, over the objects of benchmarks/fleet/api_server.py. It plays what a fleet
meets: jobs wait in a queue, are evicted from it, end and fail; pods get SIGTERM, and SIGKILL after their time; nodes
are lost with their pods. No process of a cluster is started, and nothing is said of how a real one does this.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fleet.api_server import ApiServer, Read

_CLUSTER = re.compile("JAX_|JAXDL_|SLURM|OMPI|KUBERNETES|KUBECONFIG|JOB_COMPLETION")
QUEUE = "kueue.x-k8s.io/queue-name"
_INDEX, _UID = "batch.kubernetes.io/job-completion-index", "batch.kubernetes.io/controller-uid"
_NAME, _RESTART = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/restart-attempt"


class Cluster:
    """The cluster of an API server, until `close`."""

    def __init__(
        self, server: ApiServer, num_nodes: int, logs: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """`logs`: a folder for what pods print; `variables`: of the environment of all pods."""
        self.server, self.objects, self._logs = server, server.objects, logs
        self._variables = dict(variables or {})
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        """uid of a pod -> its process."""
        self._kill_at: dict[str, float] = {}
        self._over = threading.Event()
        server.delete_pods = self._delete_pods
        self.objects.admit.append(self._suspend)
        with self.objects.lock:
            for number in range(num_nodes):
                made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"worker{number}"}, "spec": {}}
                self.objects.create("Node", "", made)
                self.set_ready(f"worker{number}", ready=True)
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all pods."""
        self._over.set()
        self._thread.join()
        for process in self._running.values():
            _signal(process, signal.SIGKILL)
            process.wait()

    # What is done to it.

    def make_queue(self, num_pods: int, name: str = "team", namespace: str = "default") -> None:
        """A LocalQueue, and its ClusterQueue of the same name with a quota of so many pods."""
        flavor = {"name": "default", "resources": [{"name": "pods", "nominalQuota": num_pods}]}
        groups = [{"coveredResources": ["pods"], "flavors": [flavor]}]
        version = "kueue.x-k8s.io/v1beta2"
        with self.objects.lock:
            spec: Read = {"namespaceSelector": {}, "resourceGroups": groups}
            made = {"apiVersion": version, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}
            self.objects.create("ClusterQueue", "", made)
            made = {
                "apiVersion": version,
                "kind": "LocalQueue",
                "metadata": {"name": name},
                "spec": {"clusterQueue": name},
            }
            self.objects.create("LocalQueue", namespace, made)

    def use_quota(self, num_pods: int, name: str = "team") -> None:
        """Pods of others in a queue: jobs of a fleet are evicted until they fit beside them."""
        with self.objects.lock:
            self.objects.get("ClusterQueue", "", name)["metadata"].setdefault("annotations", {})["others"] = str(
                num_pods
            )

    def set_ready(self, node: str, *, ready: bool) -> None:
        """A node is ready or has gone with its pods: they are killed, and marked as Kubernetes does."""
        with self.objects.lock:
            condition = {"type": "Ready", "status": "True" if ready else "Unknown"}
            status = {"conditions": [condition], "allocatable": {"cpu": "1", "pods": "1"}}
            self.objects.replace("Node", "", node, {"status": status}, status=True)
            for pod in () if ready else self.objects.of("Pod"):
                if pod["spec"].get("nodeName") == node:
                    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
                    pod["status"].setdefault("conditions", []).append(gone)
                    self.kill(pod)

    def pods(self) -> list[Read]:
        """The pods that run."""
        with self.objects.lock:
            return [copy.deepcopy(pod) for pod in self.objects.of("Pod") if pod["status"]["phase"] == "Running"]

    def kill(self, pod: Mapping[str, Any]) -> None:
        """Kills the processes of a pod that runs, as for want of memory."""
        _signal(self._running.get(pod["metadata"]["uid"]), signal.SIGKILL)

    # The loop.

    def _loop(self) -> None:
        while not self._over.wait(0.05):
            self._turn()

    def _turn(self) -> None:
        with self.objects.lock:
            for job in self.objects.of("TrainJob"):
                self._train_job(job)
            for queue in self.objects.of("ClusterQueue"):
                self._queue(queue)
            for job_set in self.objects.of("JobSet"):
                self._job_set(job_set)
            for pod in self.objects.of("Pod"):
                self._pod(pod)
            self._collect()

    def _suspend(self, made: Read) -> None:
        """Kueue's webhook: what names a queue waits in it."""
        if QUEUE in made["metadata"].get("labels", {}) and made["kind"] in ("JobSet", "TrainJob"):
            made["spec"]["suspend"] = True

    def _train_job(self, job: Read) -> None:
        """Makes the JobSet of a TrainJob, and copies its status."""
        name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
        job_set = self.objects.all.get(("JobSet", namespace, name))
        if job_set is None and "deletionTimestamp" not in job["metadata"]:
            runtime = self.objects.get("TrainingRuntime", namespace, job["spec"]["runtimeRef"]["name"])
            spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
            trainer, inner = job["spec"]["trainer"], spec["replicatedJobs"][0]["template"]["spec"]
            inner |= dict.fromkeys(("completions", "parallelism"), trainer["numNodes"])
            container = inner["template"]["spec"]["containers"][0]
            container |= {key: trainer[key] for key in ("image", "command") if key in trainer}
            place = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
            container["env"] = [
                *trainer.get("env", ()),
                {"name": "JAX_NUM_PROCESSES", "value": str(trainer["numNodes"])},
                {"name": "JAX_PROCESS_ID", "valueFrom": place},
                {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{name}-node-0-0.{name}:6666"},
            ]
            made = {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": {"name": name},
                "spec": spec,
            }
            made["metadata"]["ownerReferences"] = [{"uid": job["metadata"]["uid"]}]
            job_set = self.objects.create("JobSet", namespace, made)
        if job_set is None:
            return
        job_set["spec"]["suspend"] = job["spec"].get("suspend", False)
        status = copy.deepcopy(job_set.get("status", {}))
        for condition in status.get("conditions", ()):
            condition["type"] = condition["type"].replace("Completed", "Complete")
        read = {"conditions": status.get("conditions", []), "jobsStatus": status.get("replicatedJobsStatus", [])}
        self._write_status(job, read)

    def _queue(self, queue: Read) -> None:
        """Kueue: a Workload for each job of the queue, admitted in the order in which they came, if they fit."""
        name = queue["metadata"]["name"]
        others = int(queue["metadata"].get("annotations", {}).get("others", 0))
        quota, used = queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"], others
        jobs = [one for kind in ("JobSet", "TrainJob") for one in self.objects.of(kind, {QUEUE: name})]
        jobs = [one for one in jobs if not _over(one) and "deletionTimestamp" not in one["metadata"]]
        for job in sorted(jobs, key=lambda one: one["spec"]["suspend"]):
            size, evicted = _size(job), False
            fits = used + size <= quota
            if fits and job["spec"]["suspend"] and not self._pods_of(job):
                job["spec"]["suspend"] = False
                self.objects._touch(job)
            elif not fits and not job["spec"]["suspend"]:
                job["spec"]["suspend"], evicted = True, True
                self.objects._touch(job)
            used += 0 if job["spec"]["suspend"] else size
            self._workload(job, evicted=evicted, needed=used + size - quota)
        total = {"name": "pods", "total": used, "borrowed": 0}
        self._write_status(queue, {"flavorsReservation": [{"name": "default", "resources": [total]}]})

    def _workload(self, job: Read, *, evicted: bool, needed: int) -> None:
        metadata = job["metadata"]
        key = ("Workload", metadata["namespace"], f"workload-{metadata['name']}")
        if key not in self.objects.all:
            labels = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
            owner = [{"uid": metadata["uid"]}]
            template = {"spec": {"containers": [{"name": "train"}]}}
            made = {
                "apiVersion": "kueue.x-k8s.io/v1beta2",
                "kind": "Workload",
                "metadata": {"name": key[2], "labels": labels, "ownerReferences": owner},
                "spec": {"queueName": job["metadata"]["labels"][QUEUE], "podSets": [
                    {"name": "workers", "count": _size(job), "template": template}
                ]},
            }  # fmt: skip
            self.objects.create("Workload", metadata["namespace"], made)
        waits, was = job["spec"]["suspend"], self.objects.all[key].get("status", {}).get("conditions", [])
        message = f"insufficient unused quota for pods in flavor default, {needed} more needed" if waits else "reserved"
        conditions = [_condition("QuotaReserved", not waits, "Pending" if waits else "QuotaReserved", message)]
        if evicted or (waits and any(one["type"] == "Evicted" for one in was)):
            conditions.append(_condition("Evicted", True, "Preempted", "Preempted to accommodate a workload of others"))
        self._write_status(self.objects.all[key], {"conditions": conditions})

    def _job_set(self, job_set: Read) -> None:
        """JobSet and Job: makes pods, and says whether they are complete or have failed."""
        if _over(job_set) or "deletionTimestamp" in job_set["metadata"]:
            return
        spec = job_set["spec"]["replicatedJobs"][0]
        size, pods = spec["template"]["spec"]["parallelism"], self._pods_of(job_set)
        phases = [pod["status"]["phase"] for pod in pods]
        failed, conditions = "Failed" in phases, []
        if job_set["spec"].get("suspend") or failed:
            for pod in pods:
                if pod["status"]["phase"] in ("Pending", "Running"):
                    self._delete_pod(pod)
            if failed and not {"Pending", "Running"} & set(phases):
                conditions.append(_condition("Failed", True, "FailedJobs", "jobset failed due to job failures"))
        elif not pods:
            self._make_pods(job_set, spec, size)
        elif phases.count("Succeeded") == size:
            conditions.append(_condition("Completed", True, "AllJobsCompleted", "jobset completed successfully"))
        ready = int(phases.count("Running") + phases.count("Succeeded") == size)
        counts = {"ready": ready, "succeeded": int(phases.count("Succeeded") == size), "failed": int(failed)}
        counts |= {"active": int("Running" in phases), "suspended": int(bool(job_set["spec"].get("suspend")))}
        self._write_status(
            job_set, {"conditions": conditions, "replicatedJobsStatus": [{"name": spec["name"], **counts}]}
        )

    def _make_pods(self, job_set: Read, spec: Read, size: int) -> None:
        metadata, template = job_set["metadata"], spec["template"]["spec"]["template"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port, job_uid = probe.getsockname()[1], str(uuid.uuid4())
        for rank in range(size):
            labels = {**template.get("metadata", {}).get("labels", {}), _NAME: metadata["name"], _UID: job_uid}
            about = {"name": f"{metadata['name']}-{spec['name']}-0-{rank}-{uuid.uuid4().hex[:5]}", "labels": labels}
            about["annotations"] = {_INDEX: str(rank), _RESTART: "0", "port": str(port)}
            about["ownerReferences"] = [{"uid": metadata["uid"]}]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": copy.deepcopy(template["spec"])}
            self.objects.create("Pod", metadata["namespace"], {**pod, "status": {"phase": "Pending"}})

    # Kubelets.

    def _pod(self, pod: Read) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        if status["phase"] == "Pending":
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            elif (node := self._free_node()) is not None:
                pod["spec"]["nodeName"] = node
                self._running[uid] = self._start(pod)
                self._set_phase(pod, "Running", {"running": {}})
            else:
                message = "0 nodes are available: all have a pod."
                status["conditions"] = [_condition("PodScheduled", False, "Unschedulable", message)]
            return
        process = self._running.get(uid)
        if process is None:
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            return
        if time.monotonic() > self._kill_at.get(uid, float("inf")):
            _signal(process, signal.SIGKILL)
        if (code := process.poll()) is not None:
            _signal(process, signal.SIGKILL)  # What it has started ends with its container.
            del self._running[uid]
            code = code if code >= 0 else 128 - code
            self._set_phase(pod, "Failed" if code else "Succeeded", {"terminated": {"exitCode": code}})
            if "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)

    def _free_node(self) -> str | None:
        taken = {
            pod["spec"].get("nodeName") for pod in self.objects.of("Pod") if pod["metadata"]["uid"] in self._running
        }
        for node in self.objects.of("Node"):
            ready = node["status"]["conditions"][0]["status"] == "True" and not node["spec"].get("unschedulable")
            if ready and node["metadata"]["name"] not in taken:
                return node["metadata"]["name"]
        return None

    def _start(self, pod: Read) -> subprocess.Popen[bytes]:
        container, metadata = pod["spec"]["containers"][0], pod["metadata"]
        fields = {f"metadata.annotations['{key}']": value for key, value in metadata["annotations"].items()} | {
            f"metadata.labels['{key}']": value for key, value in metadata["labels"].items()
        }
        fields["spec.nodeName"] = pod["spec"]["nodeName"]
        given = {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        # Names of pods are not known here; all are on this machine.
        given["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{metadata['annotations']['port']}"
        words = [word.replace("$$", "$") for word in container["command"]]
        words = [sys.executable if word == "python" else word for word in words]
        clean = {name: value for name, value in os.environ.items() if not _CLUSTER.match(name)}
        with (self._logs / f"{metadata['name']}.txt").open("wb") as log:
            return subprocess.Popen(
                words,
                cwd=container.get("workingDir"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean | self._variables | given,
                start_new_session=True,
            )

    def _set_phase(self, pod: Read, phase: str, state: Read) -> None:
        container = pod["spec"]["containers"][0]
        one = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        pod["status"] |= {"phase": phase, "containerStatuses": [one | {"ready": phase == "Running", "state": state}]}
        self.objects._touch(pod)

    def _delete_pods(self, namespace: str, labels: Mapping[str, str], grace: int) -> None:
        for pod in self.objects.of("Pod", labels, namespace):
            self._delete_pod(pod, grace)

    def _delete_pod(self, pod: Read, grace: int | None = None) -> None:
        """SIGTERM, and SIGKILL after its time; it is gone when it has ended."""
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        if "deletionTimestamp" not in metadata:
            metadata["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            if uid in self._running:  # The container's first process alone gets it.
                self._running[uid].send_signal(signal.SIGTERM)
        self._kill_at[uid] = min(self._kill_at.get(uid, float("inf")), time.monotonic() + seconds)

    def _remove(self, pod: Read) -> None:
        self.objects.delete("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])

    # The garbage collector.

    def _collect(self) -> None:
        """Deletes what belongs to nothing, and what belongs to a thing that goes when all of that has gone."""
        objects = self.objects
        alive = {one["metadata"]["uid"]: one for one in objects.all.values()}
        owned: set[str] = set()
        for (kind, namespace, name), one in list(objects.all.items()):
            for owner in one["metadata"].get("ownerReferences", ()):
                above = alive.get(owner["uid"])
                if above is not None and "deletionTimestamp" not in above["metadata"]:
                    continue
                if kind == "Pod":
                    self._delete_pod(one)
                elif "deletionTimestamp" not in one["metadata"]:
                    objects.delete(kind, namespace, name, "Background" if above is None else "Foreground")
                owned.add(owner["uid"])
        for (kind, namespace, name), one in list(objects.all.items()):
            metadata = one["metadata"]
            if kind != "Pod" and "deletionTimestamp" in metadata and metadata["uid"] not in owned:
                objects.delete(kind, namespace, name)

    def _pods_of(self, job: Read) -> list[Read]:
        """The pods of a job, which all have the name of its JobSet."""
        return self.objects.of("Pod", {_NAME: job["metadata"]["name"]}, job["metadata"]["namespace"])

    def _write_status(self, one: Read, status: Read) -> None:
        if one.get("status") != status:
            metadata = one["metadata"]
            self.objects.replace(
                one["kind"], metadata.get("namespace", ""), metadata["name"], {"status": status}, status=True
            )


def _size(job: Read) -> int:
    if "trainer" in job["spec"]:
        return job["spec"]["trainer"]["numNodes"]
    return job["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]


def _over(job: Read) -> bool:
    conditions = job.get("status", {}).get("conditions", ())
    return any(one["type"] in ("Completed", "Complete", "Failed") and one["status"] == "True" for one in conditions)


def _condition(name: str, true: bool, reason: str, message: str) -> Read:
    told = {"type": name, "status": "True" if true else "False", "reason": reason, "message": message}
    return told | {"lastTransitionTime": "2026-01-01T00:00:00Z"}


def _signal(process: subprocess.Popen[bytes] | None, number: int) -> None:
    """Sends a signal to the session of a process; nothing if it is gone."""
    if process is not None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
