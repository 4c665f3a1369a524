"""This process's number, the number of processes, and the address of process 0: from the environment or from JAX."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.messages import MAX_NAME, MAX_PROCESSES, printable

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""The environment variable with the address that process 0 listens on, if not on all of its addresses."""
SYNCER_VARIABLE = "JAXDL_SYNCER"
"""`host:port` of a syncer. Where it is set, a run is a learner (`jaxdl.parallel.asynchrony`): a run of one process."""
_NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_UNUSED = (
    ("WORLD_SIZE", "RANK", "torchrun"),
    ("PMI_SIZE", "PMI_RANK", "MPI"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MPI"),
)
"""Variables of starters that JAX does not read: (number of processes, number of this one, who sets them)."""
ALONE = "To train alone, set JAX_NUM_PROCESSES=1 JAX_PROCESS_ID=0"


@dataclass(frozen=True)
class ClusterSpec:
    """The number of this process, the number of processes, and the coordinator's address."""

    address: str
    """`host:port` of process 0, where JAX's coordinator listens after the rendezvous."""
    num_processes: int
    process: int
    told_by: str = field(default="", compare=False)
    """What says that there are several processes, as VARIABLE=VALUE; "" where a launcher of jaxdl does."""

    @property
    def host(self) -> str:
        """The host part of the address."""
        return self.address.rsplit(":", 1)[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self.address.rsplit(":", 1)[1])


def several_processes() -> bool:
    """Whether this process is one of several, by the variables of a launcher, Slurm, Open MPI or the user.

    JAX_NUM_PROCESSES above 1 or JAX_PROCESS_ID above 0 says so even without an address: then `find_cluster_spec` asks
    the cluster for the rest, or refuses, rather than let each process train alone. Raises ConfigError for a value that
    is not a number.
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ or os.environ.get("JAXDL_DISTRIBUTED") == "1":
        return True
    count, process = (_process_number(name) for name in _NUMBERS)
    if (count, process) == (1, 0):
        return False
    if (count, process) != (None, None) and (count, process or 0) != (1, 0):
        return True
    if SYNCER_VARIABLE in os.environ:  # The tasks of a step of Slurm are learners then, not one run.
        return False
    return _tasks().count > 1


class _Tasks(NamedTuple):
    """Processes that a cluster has started together; `process` is None where JAX reads it."""

    count: int
    process: int | None
    told_by: str


def _tasks() -> _Tasks:
    """The processes that mpirun or a step of Slurm has started.

    A job of Slurm is no step: in a batch script, and in the shell of `salloc`, one process may run alone.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        name, process = "OMPI_COMM_WORLD_SIZE", _process_number("OMPI_COMM_WORLD_RANK")
    elif "SLURM_STEP_NODELIST" in os.environ:
        name, process = "SLURM_STEP_NUM_TASKS" if os.environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", None
    else:
        return _Tasks(1, None, "")
    count = _process_number(name) if os.environ.get(name) else 1
    return _Tasks(count or 1, process, f"{name}={count}")


def unused_note() -> str | None:
    """About variables of torchrun or MPI that name several processes, which each train alone; None without any."""
    for size, rank, starter in _UNUSED:
        count, number = os.environ.get(size, ""), os.environ.get(rank, "")
        if count.isdecimal() and number.isdecimal() and int(count) > 1:
            return (
                f"{size}={count} {rank}={number}, of {starter}: not used, this process trains alone. For one run of "
                "all set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each of them."
            )
    return None


def find_cluster_spec(timeout_sec: float) -> ClusterSpec | None:
    """This process's `ClusterSpec`; None where only `jax.distributed.initialize` itself can find it.

    Raises ConfigError for variables that are missing or invalid.
    """
    given = (
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        _process_number(_NUMBERS[0]),
        _process_number(_NUMBERS[1]),
    )
    told_by = "" if given[1] is None or "JAXDL_HOST" in os.environ else f"{_NUMBERS[0]}={given[1]}"
    if None in given:
        if given[1] is None and (tasks := _tasks()).count > 1:
            given, told_by = (given[0], tasks.count, tasks.process if given[2] is None else given[2]), tasks.told_by
        detected = _detected(given, timeout_sec)
        if detected is None:
            return None
        given = detected
    address, num_processes, process = given
    if address is None or num_processes is None or process is None:
        names = ("the coordinator's address", "the number of processes", "the number of this process")
        missing = " and ".join(name for name, value in zip(names, given, strict=True) if value is None)
        numbers = " ".join(f"{name}={os.environ[name]}" for name in _NUMBERS if name in os.environ) or told_by
        beginning = f"{numbers}: the" if numbers else "the"
        raise ConfigError(
            f"{beginning} processes of the run cannot find each other: {missing} is not known. Set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each of them, or none (nor "
            "JAXDL_DISTRIBUTED) for one process." + (f" {ALONE}." if told_by else "")
        )
    if not _is_host_and_port(address):
        shown = printable(address[:MAX_NAME])
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={shown}: not of the form host:port. Set it to that of process 0.")
    if not 0 < num_processes <= MAX_PROCESSES:
        raise ConfigError(
            f"JAX_NUM_PROCESSES={num_processes}: a run has 1 to {MAX_PROCESSES} processes. Set it to their number."
        )
    if not 0 <= process < num_processes:
        raise ConfigError(
            f"JAX_PROCESS_ID={process}: {num_processes} processes have the numbers 0 to {num_processes - 1}. Set it to "
            "one of them, or JAX_NUM_PROCESSES to their number."
        )
    return ClusterSpec(address, num_processes, process, told_by)


def _detected(given: tuple[str | None, int | None, int | None], timeout_sec: float) -> Any:
    """`given`, completed by JAX's detection (Slurm, Open MPI, Kubernetes, TPUs); None if this JAX lacks it."""
    try:
        from jax._src.clusters import ClusterEnv  # JAX has no public function for it.

        detect = ClusterEnv.auto_detect_unset_distributed_params
        return detect(*given, None, None, int(timeout_sec))[:3]
    except (ImportError, AttributeError, TypeError):
        return None


def _process_number(name: str) -> int | None:
    """The number in an environment variable; None if unset, so that JAX asks the cluster."""
    value = os.environ.get(name)
    if value is not None and (not value.isdecimal() or len(value) > 18):
        shown = printable(value[:MAX_NAME])
        raise ConfigError(f"{name}={shown}: not a number. Set it to one, or unset it if JAX can ask the cluster.")
    return None if value is None else int(value)


def bind_address(given: str) -> tuple[str, int]:
    """The (host, port) of a `JAX_COORDINATOR_BIND_ADDRESS`. Raises ConfigError."""
    if not _is_host_and_port(given):
        shown = printable(given[:MAX_NAME])
        raise ConfigError(
            f"{BIND_VARIABLE}={shown}: not of the form host:port. Set it to an address of process 0's host and a port, "
            "such as 0.0.0.0:8476, or unset it."
        )
    host, _, port = given.rpartition(":")
    return host.strip("[]"), int(port)


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return _can_be_looked_up(host) and port.isdecimal() and 0 < int(port) < 2**16


def _can_be_looked_up(host: str) -> bool:
    """Whether a text can be a host name or address: not empty, overlong or unprintable."""
    try:
        return bool(host) and host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        return False


def host_name() -> str:
    """The name of this host in messages."""
    return printable((os.environ.get("JAXDL_HOST") or socket.gethostname())[:MAX_NAME]) or "?"


def resolved(host: str) -> list[str]:
    """The addresses that a host name resolves to on this machine; empty if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def local_bind(host: str) -> str | None:
    """The address to listen on where a coordinator's address leads every machine to itself; None where it does not.

    A host's own name may lead that host to a loopback address, and others to it: it counts as one that does not.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None


def loopback(host: str) -> str | None:
    """The loopback address that a name resolves to on this machine; None if it also resolves to another address."""
    addresses = resolved(host)
    inner = [address for address in addresses if ipaddress.ip_address(address.split("%")[0]).is_loopback]
    return inner[0] if inner and len(inner) == len(addresses) else None


def network_address() -> str | None:
    """An address where others may reach this machine; None without a network. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def is_own_address(host: str) -> bool:
    """Whether a name resolves to an address of this machine."""
    for address in resolved(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return True
    return False
