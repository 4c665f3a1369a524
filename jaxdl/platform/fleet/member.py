"""A run as the server of a fleet knows it, and the states that it can have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxdl.platform.fleet.store import Submission

RUNNING, STOPPING, WAITING, HELD = "running", "stopping", "waiting", "held"
COMPLETED, FAILED, CANCELLED, HALTED = "completed", "failed", "cancelled", "halted"
ENDED = (COMPLETED, FAILED, CANCELLED, HALTED)
RESIZING = "resizing"
"""Shown in place of stopping and waiting, of a run that is stopped to go on with other nodes."""
QUEUED = "queued"
"""Shown in place of running, of a run that waits in the queue of its cluster."""
RESUMABLE = (FAILED, HALTED)
"""States from which `resume` lets a run run again."""


@dataclass
class Member:
    """A run as the server knows it."""

    submission: Submission
    state: str = WAITING
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    """The node of each host of the current attempt; empty without one."""
    placed: bool = True
    """Whether these are the nodes where it runs; False: it waits in the queue of a cluster for as many."""
    changed: float = 0.0
    """When it got these nodes."""
    begun: float = 0.0
    """When the server first saw a report of a step of the current attempt; 0 before."""
    size: int = 0
    """The hosts of the current attempt, or of the last one."""
    ended: float = 0.0
    """When it ended last; 0 before."""
    from_step: int = 0
    """The last step that was reported before the current attempt."""
    stopping: float = 0.0
    """When the current attempt was asked to save and end."""
    failures: int = 0
    not_before: float = 0.0
    reason: str = "submitted"
    resized: int = 0
    resizing: bool = False
    """Whether it was stopped to have other nodes, and has not been started on them."""
    killed: int = 0
    """Attempts that did not save and end in time."""
    code: int | None = None
    order_number: int = 0
    """What the user had asked by the time it ended, see `Store.order_number`."""
    problem: str = ""
    """What of its files is damaged, so that it does not start."""
    waits: str = field(default="", compare=False)
    """Why its attempt has no nodes yet, where the engine says so."""
    decided: str = field(default="", compare=False)
    """What the last decision said of it."""

    @property
    def alive(self) -> bool:
        """Whether an attempt may be running."""
        return self.state in (RUNNING, STOPPING)

    @property
    def here(self) -> tuple[str, ...]:
        """The node of each host, where that is known."""
        return self.nodes if self.placed else ()

    @property
    def queued(self) -> bool:
        """Whether its attempt waits in a queue of its cluster, and so makes no steps."""
        return self.state == RUNNING and (not self.placed or bool(self.waits))

    @property
    def told(self) -> str:
        """Why it is as it is."""
        return self.problem or (f"{self.reason}; {self.waits}" if self.waits and self.alive else self.reason)

    def _shown(self) -> str:
        if self.queued:
            return QUEUED
        return RESIZING if self.resizing and self.state in (STOPPING, WAITING) else self.state

    def view(self) -> dict[str, Any]:
        """What is shown of it, as JSON."""
        submission = self.submission
        return {
            "run": submission.name,
            "state": self._shown(),
            "nodes": list(self.here),
            "sizes": list(submission.sizes),
            "left_out": dict(submission.left_out),
            "needs": dict(submission.needs),
            "weight": submission.weight,
            "priority": submission.priority,
            "attempt": self.attempt,
            "resized": self.resized,
            "killed": self.killed,
            "since": self.changed or submission.submitted,
            "ended": self.ended,
            "code": self.code,
            "reason": self.told,
            "decided": self.decided,
            "workdir": str(submission.workdir or ""),
        }
