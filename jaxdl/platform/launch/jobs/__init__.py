"""Job files for clusters: `python -m jaxdl.launch slurm|kubernetes|ray|skypilot` prints one, ready to be submitted.

Every file starts one process per node, which drives all GPUs of the node, and names the others in the
environment variables that `jax.distributed` reads: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and
`JAX_LOCAL_DEVICE_IDS`. With all four set JAX does not query the cluster, so it needs no permissions and no packages
there. Without the last one JAX's detection of Slurm would give a process one GPU, the one with its number on the node.
A run token (`JAXDL_RUN_TOKEN`) is made when the job starts, or by the cluster; no file contains one.
"""

from collections.abc import Callable, Mapping
from functools import partial

from jaxdl.platform.launch.jobs import (
    kubernetes,
    ray_job,
    skypilot,
    slurm,
    train_job,  # noqa: F401  (it registers itself)
)
from jaxdl.platform.launch.jobs.description import print_job

COMMANDS: Mapping[str, Callable[[list[str]], None]] = {
    "slurm": partial(print_job, "slurm", slurm.SlurmJob, slurm.batch_script),
    "kubernetes": partial(print_job, "kubernetes", kubernetes.KubernetesJob, kubernetes.write),
    "ray": partial(print_job, "ray", ray_job.RayJob, ray_job.script),
    "skypilot": partial(print_job, "skypilot", skypilot.SkyPilotJob, skypilot.task),
}
"""Subcommand of `python -m jaxdl.launch` -> the function that prints its job file from the arguments after the name.

Each raises ConfigError for a job that cannot run, or exits as command lines do (0 after --help, 2 for a user error).
"""

__all__ = ["COMMANDS"]
