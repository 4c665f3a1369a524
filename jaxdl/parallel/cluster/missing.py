"""Messages for a start that timed out: which processes are missing, and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdl.parallel.cluster.address import (
    ALONE,
    ClusterSpec,
    host_name,
    is_own_address,
    loopback,
    network_address,
    resolved,
)
from jaxdl.parallel.cluster.consistency import process_names


def unreachable_message(spec: ClusterSpec, why: str, timeout_sec: float) -> str:
    """The message of a process that could not reach process 0."""
    addresses = resolved(spec.host)
    at = f"{spec.address} ({', '.join(addresses)})" if addresses and addresses != [spec.host] else spec.address
    message = (
        f"process {spec.process} on {host_name()} could not reach process 0 at {at} within {timeout_sec:g} s: {why}."
    )
    if not addresses:
        return f"{message} Set JAX_COORDINATOR_ADDRESS to a name that every host can resolve, or to an IP address."
    if loopback(spec.host):
        return (
            f"{message} This is a loopback address: it leads {host_name()} only to itself. If process 0 is on another "
            "host, set JAX_COORDINATOR_ADDRESS to its network address, as HOST:PORT, or remove its name from the line "
            "of 127.0.0.1 or 127.0.1.1 in /etc/hosts."
        )
    return f"{message} Check whether process 0 was started there, how it ended, and whether a firewall blocks the port."


def missing_message(spec: ClusterSpec, here: Mapping[int, str], timeout_sec: float) -> str:
    """The message about the processes that did not join; `here` maps those that did to their hosts."""
    absent = [process for process in range(spec.num_processes) if process not in here]
    shown = ", ".join(str(process) for process in absent[:8]) + (f" and {len(absent) - 8} more" * (len(absent) > 8))
    who = f"process {shown} of {spec.num_processes}" if len(absent) == 1 else f"processes {shown}"
    message = f"{who} did not join within {timeout_sec:g} s; joined: {process_names(sorted(here), here)}."
    if spec.told_by:
        message += f" {spec.told_by} says that there are {spec.num_processes}. {ALONE}."
    if spec.process != 0:
        return f"{message} Check whether the missing ones were started, and how they ended."
    inner = loopback(spec.host)
    port = spec.port
    if inner is not None:
        better = network_address()
        advice = f"{better}:{port}" if better else f"a network address of {host_name()}"
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={spec.address} resolves to {inner} here, a loopback address, which "
            f"other hosts cannot reach. If they are on other hosts, set it to {advice} in all processes."
        )
    if not is_own_address(spec.host):
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={spec.address} is not an address of {host_name()}, where process 0 "
            "runs: set it to one, or start process 0 there."
        )
    return f"{message} Check whether they were started, how they ended, and whether they can reach {spec.address}."
