"""Job files for clusters: `python -m jaxdl.launch slurm|kubernetes|ray|skypilot` prints one, ready to be submitted.

Every file starts one process per node, which drives all GPUs of the node, and tells it where the others are in the
environment variables that `jax.distributed` reads: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID` and
`JAX_LOCAL_DEVICE_IDS`. With all four set JAX asks no cluster, so it needs no rights and no packages there. The last
one matters: by JAX's own reading of Slurm a process would take one GPU, the one of its number on the node. A run token
(`JAXDL_RUN_TOKEN`) is made when the job starts, or by the cluster; no file holds one.
"""

from collections.abc import Callable, Mapping

from jaxdl.launch.jobs import kubernetes, ray_job, skypilot, slurm

COMMANDS: Mapping[str, Callable[[list[str]], None]] = {
    "slurm": slurm.main,
    "kubernetes": kubernetes.main,
    "ray": ray_job.main,
    "skypilot": skypilot.main,
}
"""Name of a subcommand of `python -m jaxdl.launch` -> what prints its job file, given the arguments after the name.

Each raises ConfigError for what cannot be run, or exits as command lines do (0 after --help, 2 for a mistake).
"""

__all__ = ["COMMANDS"]
