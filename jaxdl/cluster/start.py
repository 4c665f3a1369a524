"""Starting JAX: on the devices that are wanted, and together with the other processes of the run."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pydantic

from jaxdl.cluster.address import ClusterSpec, find_cluster_spec, host_name, several_processes
from jaxdl.cluster.consistency import describe_process, difference, unequal_counts
from jaxdl.cluster.heartbeat import heartbeat
from jaxdl.cluster.machine import check_xla_flags, open_devices
from jaxdl.cluster.meeting import ClusterError
from jaxdl.cluster.membership import current
from jaxdl.cluster.rendezvous import meet
from jaxdl.cluster.roles import begin
from jaxdl.cluster.shutdown import report_and_exit
from jaxdl.cluster.token import run_token
from jaxdl.config import Config, ConfigError
from jaxdl.startup import check_cpu_devices

if TYPE_CHECKING:
    from jaxdl.mesh import MeshConfig

_SHUTDOWN_SEC = 120
"""How long JAX, in an orderly end, waits for the other processes, which may still be drawing curves."""


class ClusterConfig(Config):
    """What a run of several processes does about one that is missing, lost or stuck. No part of what it computes."""

    start_timeout_sec: float = pydantic.Field(default=300, gt=0)
    """Seconds in which all processes must have come together; then the start fails, with the missing ones named."""
    silence_timeout_sec: float = pydantic.Field(default=30, gt=0)
    """Seconds without a word from a process until all end (code 75): it is stopped, or its network is cut."""
    hang_timeout_sec: float | None = pydantic.Field(default=600, gt=0)
    """Seconds without a finished step, evaluated batch or new phase until the run writes its stacks and ends (code 75).

    Compiling may take any time. Must be longer than a save and a restore take. None never ends a run.
    """


def launched_cpu_devices() -> int | None:
    """The virtual CPU devices that jaxdl's launcher gives this process; None if it did not start it or gives none."""
    count = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(count) if "JAXDL_HOST" in os.environ and count.isdecimal() and int(count) > 0 else None


def start_devices(
    config: MeshConfig, cluster: ClusterConfig | None = None, *, experiment: Mapping[str, Any] | None = None
) -> None:
    """Starts JAX on the devices that the config asks for, once per process; joins the other processes if there are any.

    Several processes are recognised by `JAX_COORDINATOR_ADDRESS` (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), by a
    multi-task Slurm or Open MPI job, or, where JAX detects the cluster otherwise, by `JAXDL_DISTRIBUTED=1`. All must
    have been given the same `experiment`, and the same `JAXDL_RUN_TOKEN` or none. Under jaxdl's launcher its number of
    devices counts, not the config's.

    Raises:
      ConfigError: when JAX cannot start, or already runs on other devices, when it is not said which processes there
        are, or when they differ in what must be the same; on all of them.
      ClusterError: when not all have come within the time-out; on all that have.
    """
    import jax

    launched = launched_cpu_devices()
    count = config.cpu_devices if launched is None else launched
    check_xla_flags()
    if count is not None:
        check_cpu_devices(count, "--mesh.cpu-devices" if launched is None else "--devices-per-host")
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # JAX has started already, which is fine as long as it has these devices: seen below.
    if not jax.distributed.is_initialized() and several_processes():
        _join(cluster or ClusterConfig(), describe_process(experiment, count), on_cpu=count is not None)
    open_devices()
    if count is not None and (jax.default_backend(), jax.local_device_count()) != ("cpu", count):
        raise ConfigError(
            f"{count} virtual CPU devices: in this process JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} devices. Set the environment variable JAX_NUM_CPU_DEVICES={count} before the "
            "first use of JAX, or restart."
        )


def _join(cluster: ClusterConfig, description: Mapping[str, Any], *, on_cpu: bool) -> None:
    import jax

    # Its preemption service would take SIGTERM away from `jaxdl.run.signals`.
    jax.config.update("jax_enable_preemption_service", False)
    spec = find_cluster_spec(cluster.start_timeout_sec)
    if spec is not None and spec.num_processes > 1:
        on_cpu = on_cpu or getattr(jax.config, "jax_platforms", None) == "cpu"
        meeting = meet(spec, description, timeout_sec=cluster.start_timeout_sec, uses_gloo=on_cpu, token=run_token())
        if meeting.note:
            print(f"note: {meeting.note}", file=sys.stderr)
        begin(spec.process, meeting, silence_sec=cluster.silence_timeout_sec, heartbeat=heartbeat)
        sys.excepthook = lambda kind, error, trace: report_and_exit(error)  # For programs without `end_together`.
    _initialize(cluster, spec)
    if spec is None:
        _compare(description)
    _check_counts()


def _initialize(cluster: ClusterConfig, spec: ClusterSpec | None) -> None:
    import jax

    known = {}
    if spec is not None:
        known = {"coordinator_address": spec.address, "num_processes": spec.num_processes}
        known |= {"process_id": spec.process}
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=max(1, round(cluster.start_timeout_sec)),
            # Our own membership is to notice first, and to say what it noticed.
            heartbeat_timeout_seconds=max(100, round(4 * cluster.silence_timeout_sec)),
            shutdown_timeout_seconds=_SHUTDOWN_SEC,
        )
    except ValueError as error:  # Something is not given, and no cluster knows it.
        raise ConfigError(
            f"the processes of the run cannot find each other: {error} Set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID in each of them, or none (nor JAXDL_DISTRIBUTED) for one process."
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(f"JAX could not join the processes: {' '.join(str(error).split())}") from None


def _compare(description: Mapping[str, Any]) -> None:
    """The comparison of processes that could not meet before JAX started; nobody watches over them then."""
    import json

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        print("note: the processes met through JAX alone; a lost one is noticed late.", file=sys.stderr)
    own = np.frombuffer(json.dumps({"host": host_name(), "description": description}).encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(own))))
    texts = multihost_utils.process_allgather(np.pad(own, (0, int(lengths.max()) - len(own))))
    every = [json.loads(bytes(text[:length])) for text, length in zip(np.atleast_2d(texts), lengths, strict=True)]
    unequal = difference([one["description"] for one in every], [one["host"] for one in every])
    if unequal is not None:
        raise ConfigError(unequal)


def _check_counts() -> None:
    """Raises ConfigError, in all processes alike, when one of them turns out to have more devices than another."""
    import jax

    found = Counter(device.process_index for device in jax.devices())
    member = current()
    names = member.hosts if member is not None else ["host ?"] * len(found)
    unequal = unequal_counts([found[process] for process in sorted(found)], names)
    if unequal is not None:
        raise ConfigError(unequal)
