"""What to say when the processes have not come together in time: who is missing, and what may be the matter."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdl.cluster.address import ClusterSpec, host_name, is_own_address, loopback, network_address, resolved
from jaxdl.cluster.consistency import process_names


def not_reached(spec: ClusterSpec, why: str, timeout_sec: float) -> str:
    """The message of a process that has not reached process 0."""
    found = resolved(spec.host)
    at = f"{spec.address} ({', '.join(found)})" if found and found != [spec.host] else spec.address
    message = (
        f"process {spec.process} on {host_name()} has not reached process 0 at {at} within {timeout_sec:g} s: {why}."
    )
    if not found:
        return f"{message} Set JAX_COORDINATOR_ADDRESS to a name or an address that every host knows."
    if loopback(spec.host):
        return (
            f"{message} This is a loopback address, by which {host_name()} finds only itself. If process 0 is on "
            "another host, set JAX_COORDINATOR_ADDRESS to its address in the network, as HOST:PORT, or take its name "
            "out of the line of 127.0.0.1 or 127.0.1.1 in /etc/hosts."
        )
    return f"{message} See whether process 0 was started there, how it ended, and whether a firewall closes the port."


def missing(spec: ClusterSpec, here: Mapping[int, str], timeout_sec: float) -> str:
    """The message about the processes that have not come, where those of `here` (hosts by number) have."""
    absent = [process for process in range(spec.num_processes) if process not in here]
    shown = ", ".join(str(process) for process in absent[:8]) + (f" and {len(absent) - 8} more" * (len(absent) > 8))
    who = f"process {shown} of {spec.num_processes} has" if len(absent) == 1 else f"processes {shown} have"
    message = f"{who} not come within {timeout_sec:g} s; here are {process_names(sorted(here), here)}."
    if spec.process != 0:
        return f"{message} See whether the missing were started, and how they ended."
    inner = loopback(spec.host)
    port = spec.port
    if inner is not None:
        better = network_address()
        advice = f"{better}:{port}" if better else f"an address of {host_name()} in the network"
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={spec.address} means {inner} here, a loopback address: from other "
            f"hosts it does not lead to this one. If they are on other hosts, set it to {advice} in all processes."
        )
    if not is_own_address(spec.host):
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={spec.address} is no address of {host_name()}, where process 0 runs: "
            "set it to one, or start process 0 there."
        )
    return f"{message} See whether the missing were started, how they ended, and whether they reach {spec.address}."
