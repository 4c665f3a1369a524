"""Many processes as one run: they meet before JAX starts, monitor each other, and exit together."""

from jaxdl.parallel.cluster.exits import BROKEN, DIVERGED, HALTED, MISTAKE
from jaxdl.parallel.cluster.heartbeat import heartbeat
from jaxdl.parallel.cluster.machine import host_memory_bytes
from jaxdl.parallel.cluster.meeting import ClusterError
from jaxdl.parallel.cluster.membership import Membership, current, wait_for_all
from jaxdl.parallel.cluster.shutdown import end_together, leave_and_exit
from jaxdl.parallel.cluster.start import ClusterConfig, launched_cpu_devices, start_devices
from jaxdl.parallel.cluster.watchdog import Watchdog

__all__ = [
    "BROKEN",
    "DIVERGED",
    "HALTED",
    "MISTAKE",
    "ClusterConfig",
    "ClusterError",
    "Membership",
    "Watchdog",
    "current",
    "end_together",
    "heartbeat",
    "host_memory_bytes",
    "launched_cpu_devices",
    "leave_and_exit",
    "start_devices",
    "wait_for_all",
]
