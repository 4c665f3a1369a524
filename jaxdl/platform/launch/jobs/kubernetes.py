"""`python -m jaxdl.launch kubernetes`: one pod per node, as a JobSet or another API, optionally in a queue of Kueue."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import pydantic

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
apis: dict[str, Callable[[KubernetesJob, Command], str]] = {}
"""Value of `--api` -> the function that writes the YAML file."""


def _known(name: str) -> str:
    if name not in apis:
        raise ValueError(f"there is no API {name!r}; choose one of {', '.join(sorted(apis))}.")
    return name


class KubernetesJob(Job):
    """Prints a job for kubectl create: a JobSet, or with --api trainjob a TrainJob of Kubeflow Trainer."""

    api: Annotated[str, pydantic.AfterValidator(_known)] = "jobset"
    """`jobset`, or `trainjob` (Kubeflow Trainer 2.2 or newer)."""
    image: Annotated[str, IMAGE]
    """The container image; it contains jaxdl, the config file and their dependencies."""
    namespace: Annotated[str | None, WORD] = None
    """The namespace; the one of the current context otherwise."""
    queue: Annotated[str | None, WORD] = None
    """The LocalQueue of Kueue in which the job waits."""
    priority_class: Annotated[str | None, WORD] = None
    """The WorkloadPriorityClass of Kueue that the job has in its queue."""
    runtime: Annotated[str | None, WORD] = None
    """Of trainjob: a ClusterTrainingRuntime of the cluster, such as jax-distributed; by default a TrainingRuntime is
    in the file too."""
    node_selector: Annotated[str | None, matches(r"[^\s=,'\"]+=[^\s=,'\"]*", "a label, LABEL=VALUE")] = None
    """LABEL=VALUE: only nodes with this label."""
    volume: Annotated[str | None, VOLUME] = None
    """CLAIM:/PATH, a persistent volume claim (ReadWriteMany) that all pods mount there, for workdir and data."""
    directory: Annotated[str | None, matches(r"/.*", "an absolute path")] = None
    """The folder of the image that the command runs in."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> KubernetesJob:
        if self.runtime is not None and self.api != "trainjob":
            raise ValueError(f"--runtime {self.runtime}: it is for --api trainjob.")
        for option, value in (("restarts", self.restarts), ("directory", self.directory)):
            if self.runtime is not None and value:
                raise ValueError(
                    f"--runtime {self.runtime} with --{option} {value}: a runtime of the cluster says that itself. "
                    "Leave one of them out."
                )
        if self.priority_class is not None and self.queue is None:
            raise ValueError(f"--priority-class {self.priority_class}: it is for jobs in a queue. Give --queue too.")
        return self

    @property
    def mount(self) -> str | None:
        """Where the volume is in the pods."""
        return None if self.volume is None else self.volume.split(":", 1)[1]


def write(job: KubernetesJob, command: Command) -> str:
    """The text of the YAML file, of the job's API.

    Raises ConfigError when the workdir would be lost with the pods.
    """
    mount = job.mount
    if job.restarts and command.workdir is not None and (mount is None or not command.workdir.is_relative_to(mount)):
        raise ConfigError(
            f"--restarts {job.restarts} with --workdir {command.workdir}: that folder is in the pod, and lost with it. "
            "Give --volume CLAIM:/PATH and a workdir below /PATH."
        )
    return apis[job.api](job, command)


def job_set(job: KubernetesJob, command: Command) -> str:
    """A JobSet.

    A failed pod fails its Job, and the JobSet restarts all pods, `restarts` times, but not after exit codes that a
    restart would repeat.
    """
    about = [
        "Start it:  kubectl create -f FILE    (the JobSet controller must be installed)",
        *follow(job),
        f"Stop it (it saves first):  kubectl delete jobset {job.name}",
        *command.notes,
    ]
    coordinator = f"{job.name}-{WORKERS}-0-0.{job.name}:{COORDINATOR_PORT}"
    place = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": str(job.nodes)}
    container = [
        f"image: {quote(job.image)}",
        *directory(job),
        f"command: {words_in_container(job, command)}",
        "ports:",
        f"  - containerPort: {COORDINATOR_PORT}",
        "env:",
        *indented(environment(job, place, {"JAX_PROCESS_ID": INDEX})),
        *resources(job, "resources"),
    ]
    counts = [f"completions: {job.nodes}", f"parallelism: {job.nodes}"]
    text = comment(about) + head(job, "jobset.x-k8s.io/v1alpha2", "JobSet") + "spec:\n"
    return text + as_text(job_set_spec(job, command, WORKERS, CONTAINER, counts, container), 2)


apis["jobset"] = job_set


def follow(job: KubernetesJob) -> list[str]:
    """How to read what the first pod prints; the JobSet has the job's name."""
    labels = f"batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/jobset-name={job.name}"
    return [f"Follow it:  kubectl logs -f -l {labels}"]


def head(job: KubernetesJob, version: str, kind: str, *, queued: bool = True) -> str:
    """The beginning of an object; with the labels for Kueue if it is one that waits in a queue."""
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata:\n  name: {quote(job.name)}\n"
    if job.namespace is not None:
        text += f"  namespace: {quote(job.namespace)}\n"
    if job.queue is not None and queued:
        text += "  labels:\n"
        text += comment([f"Kueue suspends the {kind}, and starts it when all its pods fit."], indent=" " * 4)
        text += f"    kueue.x-k8s.io/queue-name: {quote(job.queue)}\n"
        if job.priority_class is not None:
            text += f"    kueue.x-k8s.io/priority-class: {quote(job.priority_class)}\n"
    return text


def job_set_spec(
    job: KubernetesJob,
    command: Command,
    name: str,
    container_name: str,
    counts: Sequence[str],
    container: Sequence[str],
    labels: Mapping[str, str] | None = None,
) -> list[str]:
    """The lines of the `spec` of a JobSet with one replicated job of a name.

    `counts`: how many pods it has; `container`: the fields of its container, without name and mounts; `labels` of the
    job.
    """
    return [
        "network:",
        "  enableDNSHostnames: true  # A headless service, so that pods find each other by name,",
        "  publishNotReadyAddresses: true  # also before they are ready.",
        "failurePolicy:",
        f"  maxRestarts: {job.restarts}",
        "  restartStrategy: BlockingRecreate  # All old pods are deleted before new ones write to the workdir.",
        "  rules:",
        "    - name: mistake",
        "      action: FailJobSet",
        "      onJobFailureReasons: [PodFailurePolicy]",
        "replicatedJobs:",
        f"  - name: {name}",
        "    replicas: 1",
        "    template:",
        *(["      metadata:", "        labels:"] if labels else []),
        *(f"          {key}: {quote(value)}" for key, value in (labels or {}).items()),
        "      spec:",
        "        completionMode: Indexed",
        *indented(counts, 8),
        *indented(_ends(job, command, container_name), 8),
        "        template:",
        "          spec:",
        "            restartPolicy: Never",
        *indented(pod(job), 12),
        "            containers:",
        f"              - name: {container_name}",
        *indented(container, 16),
        *indented(mounts(job), 16),
        *indented(volumes(job), 12),
    ]


def _ends(job: KubernetesJob, command: Command, container_name: str) -> list[str]:
    """The lines of a Job on pods that fail."""
    codes = ", ".join(str(code) for code in NEVER_RESTARTED)
    # A learner is started again alone, and what a restart would not mend ends that learner alone.
    alone = f"backoffLimitPerIndex: {job.restarts}  # Each pod is started again by itself."
    together = "backoffLimit: 0  # One pod cannot continue alone: the first failure ends the Job."
    limit, action = (alone, "FailIndex") if command.has_learners else (together, "FailJob")
    return [
        limit,
        "podFailurePolicy:",
        "  rules:",
        f"    - action: {action}  # A user error, or training that diverged: a restart would repeat it.",
        "      onExitCodes:",
        f"        containerName: {container_name}",
        "        operator: In",
        f"        values: [{codes}]",
    ]


def pod(job: KubernetesJob) -> list[str]:
    """The lines of a pod's spec on where it is, and how long it may take to end."""
    lines = [f"terminationGracePeriodSeconds: {job.save_sec}  # Time to save in after SIGTERM."]
    if job.node_selector is not None:
        label, value = job.node_selector.split("=", 1)
        lines += ["nodeSelector:", f"  {quote(label)}: {quote(value)}"]
    if job.nodes > 1:
        lines += [
            "affinity:",
            "  podAntiAffinity:  # One pod per node.",
            "    requiredDuringSchedulingIgnoredDuringExecution:",
            "      - topologyKey: kubernetes.io/hostname",
            "        labelSelector:",
            f"          matchLabels: {{jobset.sigs.k8s.io/jobset-name: {quote(job.name)}}}",
        ]
    return lines


def mounts(job: KubernetesJob) -> list[str]:
    """The lines of a container on its volumes."""
    mine = [f"  - {{name: files, mountPath: {quote(job.mount)}}}"] if job.mount else []
    return ["volumeMounts:", "  - {name: shared-memory, mountPath: /dev/shm}", *mine]


def volumes(job: KubernetesJob) -> list[str]:
    """The lines of a pod's spec on its volumes."""
    lines = [
        "volumes:",
        "  - name: shared-memory  # NCCL needs more than a container's 64 MB.",
        "    emptyDir: {medium: Memory}",
    ]
    if job.volume is not None:
        claim = quote(job.volume.split(":", 1)[0])
        lines += ["  - name: files", f"    persistentVolumeClaim: {{claimName: {claim}}}"]
    return lines


def directory(job: KubernetesJob) -> list[str]:
    """The line of a container on the folder that its command runs in, if one is given."""
    return [f"workingDir: {quote(job.directory)}"] if job.directory else []


def words_in_container(job: KubernetesJob, command: Command) -> str:
    """The command as a list of YAML."""
    words = list(command.words)
    if job.preparation():
        # `exec`, so that the pod's SIGTERM reaches Python itself.
        words = ["bash", "-c", job.preparation() + f"exec {shlex.join(words)}"]
    # Kubernetes would expand $(NAME), and takes $$ for $.
    return f"[{', '.join(quote(word.replace('$', '$$')) for word in words)}]"


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""The field of a pod with its number in its job."""


def environment(job: KubernetesJob, place: Mapping[str, str], place_fields: Mapping[str, str]) -> list[str]:
    """The lines of the environment; `place` and `place_fields`: variables, by value and by field of the pod, that say
    which process this is."""
    fields = {
        **place_fields,
        "JAXDL_RESTART": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']",
        "JAXDL_HOST": "spec.nodeName",
        # The random uid of the Job: equal in all its pods, different after a restart, and readable only with access to
        # pods, jobs or events. So this file needs no secret.
        VARIABLE: "metadata.labels['batch.kubernetes.io/controller-uid']",
    }
    lines = [_entry(name, value) for name, value in {**place, **job.environment()}.items()]
    lines += [f'- {{name: {name}, valueFrom: {{fieldRef: {{fieldPath: "{path}"}}}}}}' for name, path in fields.items()]
    return lines + comment(job.network_hints(_entry)).splitlines()


def _entry(name: str, value: str) -> str:
    return f"- {{name: {name}, value: {quote(value)}}}"


def resources(job: KubernetesJob, key: str) -> list[str]:
    """The lines of what a pod takes of its node, under a key."""
    lines = []
    if job.cpus_per_node is not None:
        lines += ["  requests:", f'    cpu: "{job.cpus_per_node}"']
    if job.gpus_per_node:
        lines += ["  limits:", f"    nvidia.com/gpu: {job.gpus_per_node}"]
    return [f"{key}:", *lines] if lines else []


def indented(lines: Sequence[str], by: int = 2) -> list[str]:
    """The lines further to the right."""
    return [" " * by + line for line in lines]


def as_text(lines: Sequence[str], by: int = 0) -> str:
    """The lines as a part of a file."""
    return "".join(f"{line}\n" for line in indented(lines, by))
