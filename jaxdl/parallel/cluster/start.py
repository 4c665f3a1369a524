"""Starts JAX on the requested devices and together with the other processes of the run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.startup import check_cpu_devices
from jaxdl.parallel.cluster.address import (
    BIND_VARIABLE,
    ClusterSpec,
    find_cluster_spec,
    host_name,
    local_bind,
    several_processes,
    unused_note,
)
from jaxdl.parallel.cluster.consistency import describe_process, difference, unequal_counts
from jaxdl.parallel.cluster.heartbeat import heartbeat
from jaxdl.parallel.cluster.machine import (
    check_xla_flags,
    enlarge_thread_pool,
    keep_freed_memory,
    open_devices,
)
from jaxdl.parallel.cluster.meeting import ClusterError
from jaxdl.parallel.cluster.membership import current
from jaxdl.parallel.cluster.rendezvous import meet
from jaxdl.parallel.cluster.roles import begin
from jaxdl.parallel.cluster.shutdown import report_and_exit
from jaxdl.parallel.cluster.token import run_token

if TYPE_CHECKING:
    from jaxdl.parallel.mesh import MeshConfig

_SHUTDOWN_SEC = 24 * 3600
"""How long JAX waits in a normal shutdown for the other processes, before it aborts all: longer than process 0 may
export the network, or upload it. One that is lost meanwhile is noticed by its heartbeats."""


class ClusterConfig(Config):
    """Timeouts for missing, lost and stuck processes. They do not affect results."""

    start_timeout_sec: float = pydantic.Field(default=300, gt=0)
    """Seconds to wait for all processes at the start; after that, the start fails and names the missing processes."""
    silence_timeout_sec: float = pydantic.Field(default=30, gt=0)
    """Seconds without a message from a process until it counts as lost and all processes exit (code 75)."""
    hang_timeout_sec: float | None = pydantic.Field(default=600, gt=0)
    """Seconds without progress (step, evaluated batch or phase) until the run dumps all stacks and exits (code 75).

    Compilation does not count. Must be longer than a save and a restore of a checkpoint. None turns this off.
    """


def launched_cpu_devices() -> int | None:
    """The number of virtual CPU devices that jaxdl's launcher gives this process; None without launcher or number."""
    count = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(count) if "JAXDL_HOST" in os.environ and count.isdecimal() and int(count) > 0 else None


def start_devices(
    config: MeshConfig, cluster: ClusterConfig | None = None, *, experiment: Mapping[str, Any] | None = None
) -> None:
    """Starts JAX on the devices of the config, once per process, and joins the other processes if there are any.

    A run has several processes if `JAX_COORDINATOR_ADDRESS` is set (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`), in
    a multi-task Slurm or Open MPI job, or, on other clusters that JAX detects, with `JAXDL_DISTRIBUTED=1`. All need the
    same `experiment`, and the same `JAXDL_RUN_TOKEN` or none. jaxdl's launcher overrides the number of devices of the
    config.

    Raises:
      ConfigError: JAX cannot start, or already runs on other devices; the variables of the processes are incomplete;
        or the processes differ in what must be equal. Raised in all of them.
      ClusterError: not all processes joined within the timeout. Raised in all that did.
    """
    import jax

    launched = launched_cpu_devices()
    count = config.cpu_devices if launched is None else launched
    check_xla_flags()
    if count is not None:
        check_cpu_devices(count, "--mesh.cpu-devices" if launched is None else "--devices-per-host")
        if launched is None and experiment is not None:
            _note_unused_platforms(count)
        enlarge_thread_pool(count)
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # JAX has already started; whether on these devices is checked below.
    # Not in a process that only predicts: it may belong to a user's server. Threads keep the arena that they have.
    if experiment is not None and (count is not None or _on_cpus()):
        keep_freed_memory()
    if not jax.distributed.is_initialized() and several_processes():
        _join(cluster or ClusterConfig(), describe_process(experiment, count), on_cpu=count is not None)
    elif experiment is not None and not jax.distributed.is_initialized() and (note := unused_note()):
        print(f"note: {note}", file=sys.stderr)
    open_devices()
    if count is not None and (jax.default_backend(), jax.local_device_count()) != ("cpu", count):
        raise ConfigError(
            f"{count} virtual CPU devices: in this process JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} devices. Set the environment variable JAX_NUM_CPU_DEVICES={count} before the "
            "first use of JAX, or restart."
        )


def _note_unused_platforms(count: int) -> None:
    """Says that virtual CPU devices were asked for, and other devices as well."""
    from jaxdl.parallel.mesh import asked_platforms

    if (platforms := asked_platforms()) is not None:
        print(
            f"WARNING: this run trains on CPUs: its config, or --devices, asks for {count} virtual CPU devices, and "
            f"JAX_PLATFORMS={platforms} is not used. Give --mesh.cpu-devices None for {platforms.split(',')[0]}.",
            file=sys.stderr,
            flush=True,
        )


def _on_cpus() -> bool:
    """Whether JAX will run on CPUs, as far as can be told before it starts."""
    import jax

    from jaxdl.parallel.mesh import gpus_visible

    wanted = getattr(jax.config, "jax_platforms", None)
    others = gpus_visible() or importlib.util.find_spec("libtpu") is not None or os.path.exists("/dev/kfd")
    return wanted == "cpu" or not (wanted or others)


def _join(cluster: ClusterConfig, description: Mapping[str, Any], *, on_cpu: bool) -> None:
    import jax

    # JAX's preemption service would intercept SIGTERM, which `jaxdl.training.run.signals` handles.
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

    known: dict[str, Any] = {}
    if spec is not None:
        known = {"coordinator_address": spec.address, "num_processes": spec.num_processes}
        known |= {"process_id": spec.process}
        if BIND_VARIABLE not in os.environ and (here := local_bind(spec.host)) is not None:
            known |= {"coordinator_bind_address": f"[{here}]:{spec.port}" if ":" in here else f"{here}:{spec.port}"}
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=max(1, round(cluster.start_timeout_sec)),
            # Longer than our own timeouts, so that the membership notices first and names the lost process.
            heartbeat_timeout_seconds=max(100, round(4 * cluster.silence_timeout_sec)),
            shutdown_timeout_seconds=_SHUTDOWN_SEC,
        )
    except ValueError as error:  # A variable is missing, and JAX detects no cluster.
        raise ConfigError(
            f"the processes of the run cannot find each other: {error} Set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID in each of them, or none (nor JAXDL_DISTRIBUTED) for one process."
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise ClusterError(f"JAX could not join the processes: {' '.join(str(error).split())}") from None


def _compare(description: Mapping[str, Any]) -> None:
    """Compares processes that could not meet before JAX started, and so have no membership."""
    import json

    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        print("note: the processes are connected by JAX alone: it notices a lost one late.", file=sys.stderr)
    encoded = np.frombuffer(json.dumps({"host": host_name(), "description": description}).encode(), np.uint8)
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(encoded))))
    texts = multihost_utils.process_allgather(np.pad(encoded, (0, int(lengths.max()) - len(encoded))))
    every = [json.loads(bytes(text[:length])) for text, length in zip(np.atleast_2d(texts), lengths, strict=True)]
    unequal = difference([answer["description"] for answer in every], [answer["host"] for answer in every])
    if unequal is not None:
        raise ConfigError(unequal)


def _check_counts() -> None:
    """Raises ConfigError, in all processes alike, when one has more devices than another."""
    import jax

    device_counts = Counter(device.process_index for device in jax.devices())
    member = current()
    names = member.hosts if member is not None else ["host ?"] * len(device_counts)
    unequal = unequal_counts([device_counts[process] for process in sorted(device_counts)], names)
    if unequal is not None:
        raise ConfigError(unequal)
