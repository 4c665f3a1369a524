"""Sessions of processes: lists and kills their members, even after the launcher itself has been killed.

Each host's process leads its own session, which also holds the processes that it starts. When the launcher is killed,
the kernel kills the leaders (`jaxdl.launch.die_with_parent`) but not the processes that they started. The reaper kills
those: a small process beside the launcher that runs this file with the standard library alone.
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


def session_members(session: int) -> list[int]:
    """The living processes of a session (a number: the pid of its leader). Without /proc, of its process group."""
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
                # After the name, which may hold anything, in brackets: state, parent, group, session.
                fields = (_PROC / entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    members.append(int(entry))
    return members


def kill_session(session: int) -> None:
    """SIGKILL to all processes of a session, stopped ones too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Reaper:
    """A process that kills the sessions it was told of if this process ends before it calls `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[bytes] = self._process.stdin

    def watch(self, session: int) -> None:
        """From now on the session is to be killed with this process."""
        self._say(f"watch {session}")

    def forget(self, session: int) -> None:
        """The session is empty; its number may be given to another."""
        self._say(f"forget {session}")

    def close(self) -> None:
        """Ends the reaper: nothing is killed any more."""
        self._say("close")
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        # Without a reaper (somebody killed it) the run still continues.
        with contextlib.suppress(OSError, ValueError):
            self._pipe.write(f"{line}\n".encode())
            self._pipe.flush()


def main() -> None:
    """Reads what to watch from stdin until its end, which comes with the end of the launcher."""
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
