"""Who holds a lease: the record in its file, and whether that process still runs."""

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
"""A record is padded to this size, so that it is replaced in place by one write."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as its file says."""

    token: str
    """Its name, unique to this lease."""
    host: str = "an unknown host"
    pid: int = 0
    place: str | None = None
    """The boot and the process namespace in which `pid` means something; None where the system does not say."""
    started: int = 0
    """When the process started, in the system's ticks since its boot."""
    since: str = "an unknown time"
    """When it took the lease, by its own clock: to be read by people only."""
    command: str = ""
    beat: int = 0
    released: bool = False
    """The lease is being released: nobody holds it any more."""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" if self.pid else "a process that left no name"

    def to_bytes(self) -> bytes:
        """The content of the file, always of `RECORD_BYTES`."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(RECORD_BYTES)

    @classmethod
    def from_bytes(cls, content: bytes) -> Holder:
        """The inverse. A file that is empty or half written gives a holder of which nothing is known."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return cls(token=hashlib.sha256(content).hexdigest()[:16])


def this_process() -> Holder:
    """A new lease of this process."""
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
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc is of another namespace than this process.
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """The start time of a running process; 0 for one that has ended and is not yet reaped; None when unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive(holder: Holder) -> bool | None:
    """Whether the holder's process runs; None when that cannot be known from here."""
    if holder.place is None or holder.place != _place():
        return None
    try:
        os.kill(holder.pid, 0)  # /proc may hide the processes of other users; this does not.
    except ProcessLookupError:
        return False
    except OSError:
        pass
    started = _started(holder.pid)
    return None if started is None else started == holder.started
