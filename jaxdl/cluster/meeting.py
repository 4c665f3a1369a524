"""What comes of a meeting: the processes with their connections, or an error."""

from __future__ import annotations

from dataclasses import dataclass

from jaxdl.cluster.wire import Line


class ClusterError(RuntimeError):
    """The run cannot begin or continue because of another process, the network or a hang. A new start may help."""


@dataclass
class Meeting:
    """Who has met: the name of each process's host, and the open connections by process (of others than 0, to 0)."""

    hosts: list[str]
    lines: dict[int, Line]
    note: str = ""
    """What process 0 saw of strangers on its port; empty if there were none, and in the other processes."""
