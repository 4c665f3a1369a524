"""The holder of a lease: the record in the lease's file, and whether that process still runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 2048
"""Records are padded to this size, so that one write replaces a record in place."""

_LETTER_BYTES = 12
"""The most that a letter takes as JSON: one beyond U+FFFF is two escapes."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lease, as recorded in its file."""

    token: str
    """The unique name of this lease."""
    host: str = "an unknown host"
    pid: int = 0
    place: str | None = None
    """The boot and the process namespace in which `pid` is valid; None if the system does not report them."""
    started: int = 0
    """When the process started, in system ticks since the boot."""
    since: str = "an unknown time"
    """When it took the lease, by the clock of its host; for messages only."""
    command: str = ""
    beat: int = 0
    released: bool = False
    """The lease is being released and has no holder any more."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" if self.pid else "a process that left no name"

    def to_bytes(self) -> bytes:
        """The content of the file, `RECORD_BYTES` long; a command of which the letters take more is cut."""
        content = json.dumps(dataclasses.asdict(self)).encode()
        if self.command and (excess := len(content) - RECORD_BYTES) > 0:
            letters = -(-excess // _LETTER_BYTES)  # Too few where they take less: then it is cut again.
            content = dataclasses.replace(self, command=self.command[:-letters]).to_bytes()
        return content.ljust(RECORD_BYTES)

    @classmethod
    def from_bytes(cls, content: bytes) -> Holder:
        """The inverse of `to_bytes`. An empty or partially written file gives a holder with unknown fields."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return cls(token=hashlib.sha256(content).hexdigest()[:16])


def this_process() -> Holder:
    """The record of a new lease of this process."""
    place, started = _place(), _started(os.getpid())
    return Holder(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        place=place if started else None,
        started=started or 0,
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        command=" ".join(sys.argv)[:300],
    )


def _place() -> str | None:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is of another namespace.
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """The start time of a process in ticks; 0 for a zombie; None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(holder: Holder) -> bool | None:
    """Whether the holder's process runs; None if this process cannot find out."""
    if holder.place is None or holder.place != _place():
        return None
    try:
        os.kill(holder.pid, 0)  # Unlike /proc, this sees the processes of all users.
    except ProcessLookupError:
        return False
    except OSError:
        pass
    started = _started(holder.pid)
    return None if started is None else started == holder.started
