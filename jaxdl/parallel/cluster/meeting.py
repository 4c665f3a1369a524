"""The result of a rendezvous: the hosts and their connections, or an error."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdl.parallel.cluster.wire import Line


class ClusterError(RuntimeError):
    """The run cannot start or continue because of another process, the network or a hang. A restart may help."""


@dataclass
class Meeting:
    """The host of each process, and the open connections by process: those of process 0 to all, of others to it."""

    hosts: list[str]
    lines: dict[int, Line]
    note: str = ""
    """What process 0 reports of strangers on its port; empty if there were none, and in other processes."""
