"""Sessions of processes: lists and kills their members, even after the launcher itself has been killed.

Each host's process leads its own session, which also holds the processes that it starts. When the launcher is killed,
the kernel kills the leaders (`jaxdl.platform.launch.die_with_parent`) but not the processes that they started. The
reaper kills those: a small process beside the launcher that runs this file with the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

_PROC = Path("/proc")
_DETACHED = "--detached"


def session_members(session: int) -> list[int]:
    """The pids of the running processes of a session (the pid of its leader); without /proc, of the process group."""
    if not (_PROC / "self" / "stat").exists():
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return []
        except PermissionError:
            pass
        return [session]
    members: list[int] = []
    for entry in os.listdir(_PROC):
        if entry.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # After the name in brackets, which may hold anything: state, parent, group, session.
                fields = (
                    (_PROC / entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(entry))
    return members


def kill_session(session: int) -> None:
    """Sends SIGKILL to all processes of a session, including stopped ones."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Reaper:
    """A process that kills the watched sessions if this process ends without calling `close`.

    With `detached` it is no child of this process: when Ray ends a worker, it kills its children, and not theirs.
    """

    def __init__(self, *, detached: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *([_DETACHED] if detached else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin
        if detached:
            self._process.wait()  # Its child is the reaper.

    def watch(self, session: int) -> None:
        """Adds a session to those that are killed with this process."""
        self._say(f"watch {session}")

    def forget(self, session: int) -> None:
        """Removes a session that is empty; its number may be reused."""
        self._say(f"forget {session}")

    def close(self) -> None:
        """Ends the reaper without killing anything."""
        self._say("close")
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        # The run continues even if the reaper was killed.
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()


def main() -> None:
    """Reads commands from stdin until it closes, which it does when the launcher ends."""
    if _DETACHED in sys.argv[1:] and os.fork():
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    watched: set[int] = set()
    for line in sys.stdin:
        word, _, session = line.strip().partition(" ")
        if word == "watch":
            watched.add(int(session))
        elif word == "forget":
            watched.discard(int(session))
        elif word == "close":
            return
    for session in watched:
        kill_session(session)


if __name__ == "__main__":
    main()
