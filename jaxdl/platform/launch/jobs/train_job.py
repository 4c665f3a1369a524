"""`python -m jaxdl.launch kubernetes --api trainjob`: a TrainJob of Kubeflow Trainer, which makes a JobSet of it.

The JAX policy of its runtime gives each process JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; the file
gives the other variables. What is started again, where pods run and what they mount is said by a runtime: one in the
same file, or one of the cluster, to which the TrainJob then adds volumes and time to save (`runtimePatches`).
"""

from __future__ import annotations

from jaxdl.platform.launch.jobs.description import Command, comment
from jaxdl.platform.launch.jobs.kubernetes import (
    KubernetesJob,
    apis,
    as_text,
    directory,
    environment,
    follow,
    head,
    indented,
    job_set_spec,
    mounts,
    pod,
    resources,
    volumes,
    words_in_container,
)
from jaxdl.platform.launch.jobs.yaml_text import quote

VERSION = "trainer.kubeflow.org/v1alpha1"
NODE = "node"
"""Kubeflow Trainer's name of the replicated job, and of the container, that train."""
_IS_TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
MANAGER = "jaxdl.launch/kubernetes"
"""Whose the patches of a runtime are: each author of some has a name."""


def train_job(job: KubernetesJob, command: Command) -> str:
    """A TrainJob, after its TrainingRuntime unless the job names a runtime of the cluster."""
    delete = f"kubectl delete trainjob/{job.name}"
    about = [
        "Start it:  kubectl create -f FILE    (Kubeflow Trainer 2.2 or newer must be installed)",
        *follow(job),
        f"Stop it (it saves first):  {delete}" + ("" if job.runtime else f" trainingruntime/{job.name}"),
        *command.notes,
    ]
    text = comment(about)
    if job.runtime is None:
        text += head(job, VERSION, "TrainingRuntime", queued=False) + "spec:\n" + as_text(_runtime(job, command), 2)
        text += "---\n"
    kind, name = ("TrainingRuntime", job.name) if job.runtime is None else ("ClusterTrainingRuntime", job.runtime)
    spec = [
        "runtimeRef:",
        f"  kind: {kind}",
        f"  name: {quote(name)}",
        "trainer:",
        f"  numNodes: {job.nodes}",
        f"  image: {quote(job.image)}",
        f"  command: {words_in_container(job, command)}",
        "  env:",
        *indented(environment(job, {}, {}), 4),
        *indented(resources(job, "resourcesPerNode")),
        *([] if job.runtime is None else _patches(job)),
    ]
    return text + head(job, VERSION, "TrainJob") + "spec:\n" + as_text(spec, 2)


apis["trainjob"] = train_job


def _runtime(job: KubernetesJob, command: Command) -> list[str]:
    container = [f"image: {quote(job.image)}", *directory(job)]
    return [
        "mlPolicy:",
        f"  numNodes: {job.nodes}",
        "  jax: {}  # It sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
        "template:",
        "  spec:",
        *indented(job_set_spec(job, command, NODE, NODE, (), container, _IS_TRAINER), 4),
    ]


def _patches(job: KubernetesJob) -> list[str]:
    return [
        "runtimePatches:",
        f"  - manager: {MANAGER}",
        "    trainingRuntimeSpec:",
        "      template:",
        "        spec:",
        "          replicatedJobs:",
        f"            - name: {NODE}",
        "              template:",
        "                spec:",
        "                  template:",
        "                    spec:",
        *indented(pod(job), 22),
        *indented(["containers:", f"  - name: {NODE}", *indented(mounts(job), 4)], 22),
        *indented(volumes(job), 22),
    ]
