"""`python -m jaxdl.launch kubernetes`: a JobSet with one pod per node, optionally in a queue of Kueue."""

from __future__ import annotations

import shlex
from typing import Annotated

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.token import VARIABLE
from jaxdl.platform.launch.jobs.description import (
    COORDINATOR_PORT,
    IMAGE,
    NEVER_RESTARTED,
    VOLUME,
    WORD,
    Command,
    Job,
    comment,
    matches,
)
from jaxdl.platform.launch.jobs.yaml_text import quote

CONTAINER = "train"
WORKERS = "workers"
"""Name of the one replicated job, a part of the pods' names."""


class KubernetesJob(Job):
    """Prints a Kubernetes JobSet for kubectl create."""

    image: Annotated[str, IMAGE]
    """The container image; it contains jaxdl, the config file and their dependencies."""
    namespace: Annotated[str | None, WORD] = None
    """The namespace; the one of the current context otherwise."""
    queue: Annotated[str | None, WORD] = None
    """The LocalQueue of Kueue in which the job waits."""
    volume: Annotated[str | None, VOLUME] = None
    """CLAIM:/PATH, a persistent volume claim (ReadWriteMany) that all pods mount there, for workdir and data."""
    directory: Annotated[str | None, matches(r"/.*", "an absolute path")] = None
    """The folder of the image that the command runs in."""


def job_set(job: KubernetesJob, command: Command) -> str:
    """The text of the YAML file.

    A failed pod fails its Job, and the JobSet restarts all pods, `restarts` times, but not after exit codes that a
    restart would repeat. Raises ConfigError when the workdir would be lost with the pods.
    """
    mount = None if job.volume is None else job.volume.split(":", 1)[1]
    if job.restarts and command.workdir is not None and (mount is None or not command.workdir.is_relative_to(mount)):
        raise ConfigError(
            f"--restarts {job.restarts} with --workdir {command.workdir}: that folder is in the pod, and lost with it. "
            "Give --volume CLAIM:/PATH and a workdir below /PATH."
        )
    about = [
        "Start it:  kubectl create -f FILE    (the JobSet controller must be installed)",
        f"Follow it:  kubectl logs -f -l batch.kubernetes.io/job-completion-index=0,"
        f"jobset.sigs.k8s.io/jobset-name={job.name}",
        f"Stop it (it saves first):  kubectl delete jobset {job.name}",
        *command.notes,
    ]
    return comment(about) + _metadata(job) + _policies(job, command) + _pod(job, command, mount)


def _metadata(job: KubernetesJob) -> str:
    text = f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata:\n  name: {quote(job.name)}\n"
    if job.namespace is not None:
        text += f"  namespace: {quote(job.namespace)}\n"
    if job.queue is not None:
        text += "  labels:\n"
        text += comment(["Kueue suspends the JobSet, and starts it when all its pods fit."], indent=" " * 4)
        text += f"    kueue.x-k8s.io/queue-name: {quote(job.queue)}\n"
    return text


def _policies(job: KubernetesJob, command: Command) -> str:
    codes = ", ".join(str(code) for code in NEVER_RESTARTED)
    # A learner is started again alone, and what a restart would not mend ends that learner alone.
    alone = f"backoffLimitPerIndex: {job.restarts}  # Each pod is started again by itself."
    together = "backoffLimit: 0  # One pod cannot continue alone: the first failure ends the Job."
    limit, action = (alone, "FailIndex") if command.has_learners else (together, "FailJob")
    return f"""\
spec:
  network:
    enableDNSHostnames: true  # A headless service, so that pods find each other by name,
    publishNotReadyAddresses: true  # also before they are ready.
  failurePolicy:
    maxRestarts: {job.restarts}
    restartStrategy: BlockingRecreate  # All old pods are deleted before new ones write to the workdir.
    rules:
      - name: mistake
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: {WORKERS}
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {job.nodes}
          parallelism: {job.nodes}
          {limit}
          podFailurePolicy:
            rules:
              - action: {action}  # A user error, or training that diverged: a restart would repeat it.
                onExitCodes:
                  containerName: {CONTAINER}
                  operator: In
                  values: [{codes}]
"""


def _pod(job: KubernetesJob, command: Command, mount: str | None) -> str:
    # Indented below as a pod's spec in the file.
    lines = [
        "template:",
        "  spec:",
        "    restartPolicy: Never",
        f"    terminationGracePeriodSeconds: {job.save_sec}  # Time to save in after SIGTERM.",
    ]
    if job.nodes > 1:
        lines += [
            "    affinity:",
            "      podAntiAffinity:  # One pod per node.",
            "        requiredDuringSchedulingIgnoredDuringExecution:",
            "          - topologyKey: kubernetes.io/hostname",
            "            labelSelector:",
            f"              matchLabels: {{jobset.sigs.k8s.io/jobset-name: {quote(job.name)}}}",
        ]
    lines += [
        "    containers:",
        f"      - name: {CONTAINER}",
        f"        image: {quote(job.image)}",
        *([f"        workingDir: {quote(job.directory)}"] if job.directory else []),
        f"        command: [{', '.join(map(quote, _container_command(job, command)))}]",
        "        ports:",
        f"          - containerPort: {COORDINATOR_PORT}",
        "        env:",
        *("          " + line for line in _environment(job)),
        *("        " + line for line in _resources(job)),
        "        volumeMounts:",
        "          - {name: shared-memory, mountPath: /dev/shm}",
        *([f"          - {{name: files, mountPath: {quote(mount)}}}"] if mount else []),
        "    volumes:",
        "      - name: shared-memory  # NCCL needs more than a container's 64 MB.",
        "        emptyDir: {medium: Memory}",
    ]
    if job.volume is not None:
        claim = quote(job.volume.split(":", 1)[0])
        lines += ["      - name: files", f"        persistentVolumeClaim: {{claimName: {claim}}}"]
    return "".join(f"{' ' * 10}{line}\n" for line in lines)


def _container_command(job: KubernetesJob, command: Command) -> list[str]:
    words = list(command.words)
    if job.preparation():
        # `exec`, so that the pod's SIGTERM reaches Python itself.
        words = ["bash", "-c", job.preparation() + f"exec {shlex.join(words)}"]
    return [word.replace("$", "$$") for word in words]  # Kubernetes would expand $(NAME), and takes $$ for $.


def _environment(job: KubernetesJob) -> list[str]:
    coordinator = f"{job.name}-{WORKERS}-0-0.{job.name}:{COORDINATOR_PORT}"
    values = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(job.nodes), **job.environment()}
    fields = {
        "JAX_PROCESS_ID": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "JAXDL_RESTART": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']",
        "JAXDL_HOST": "spec.nodeName",
        # The random uid of the Job: equal in all its pods, different after a restart, and readable only with access to
        # pods, jobs or events. So this file needs no secret.
        VARIABLE: "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
    lines = [_entry(name, value) for name, value in values.items()]
    lines += [f'- {{name: {name}, valueFrom: {{fieldRef: {{fieldPath: "{path}"}}}}}}' for name, path in fields.items()]
    return lines + comment(job.network_hints(_entry)).splitlines()


def _entry(name: str, value: str) -> str:
    return f"- {{name: {name}, value: {quote(value)}}}"


def _resources(job: KubernetesJob) -> list[str]:
    lines = []
    if job.cpus_per_node is not None:
        lines += ["  requests:", f'    cpu: "{job.cpus_per_node}"']
    if job.gpus_per_node:
        lines += ["  limits:", f"    nvidia.com/gpu: {job.gpus_per_node}"]
    return ["resources:", *lines] if lines else []
